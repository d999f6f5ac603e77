//! Analysis of configuration: Istio's own cases, and `istiod analyze` as a process.

mod cases;
mod command;

use libtest_mimic::Trial;

/// The tests of this module.
pub(crate) fn trials() -> Vec<Trial> {
    [cases::trials(), command::trials()].into_iter().flatten().collect()
}
