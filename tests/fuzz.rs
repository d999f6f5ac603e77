//! What strangers may send: every parser that runs before a caller is known is a function over bytes (`fuzz/targets`), and
//! no bytes make it panic, hang or run out of stack.
//!
//! Here the functions run over a kept corpus (`fuzz/corpus`, one folder for each target) and over what a simple mutator
//! makes of it, for ten seconds each. `make fuzz` runs the same functions under libFuzzer, as long as one likes. What makes a
//! target fail becomes a file of its corpus.
//!
//! Variables: `ISTIOD_FUZZ_SECONDS`, and `ISTIOD_FUZZ_SEED` for other inputs than the usual ones.

mod mutate;
mod run;
mod targets;

use std::time::Duration;

use libtest_mimic::Trial;

use crate::support::variable;

/// The trials of this module.
pub(crate) fn trials() -> Vec<Trial> {
    let number = |name: &str| variable(name).and_then(|text| text.parse::<u64>().ok());
    let time = Duration::from_secs(number("ISTIOD_FUZZ_SECONDS").unwrap_or(10));
    let seed = number("ISTIOD_FUZZ_SEED").unwrap_or(1);
    let trial = |target: &'static targets::Target| {
        Trial::test(format!("fuzz::{}", target.name), move || run::run(target, seed, time))
    };
    targets::ALL.iter().map(trial).collect()
}
