//! Sidecar injection: Istio's own cases with the templates, values and mesh configs that a cluster holds, as files
//! (`istiod inject`) and as admitted pods.

mod cases;
mod command;
pub(crate) mod compare;
mod gateways;
mod pods;

use libtest_mimic::Trial;

/// The tests of this module.
pub(crate) fn trials() -> Vec<Trial> {
    [cases::trials(), command::trials(), gateways::trials()]
        .into_iter()
        .flatten()
        .collect()
}
