//! Inputs from untrusted peers: every parser that runs before authentication is a function over bytes (`fuzz/targets`),
//! and no input may make it panic, hang or exhaust the stack.
//!
//! The tests run these functions over a kept corpus (`fuzz/corpus`, one folder for each target) and over mutations of
//! it, for five seconds each. `make fuzz` runs the same functions under libFuzzer. An input that makes a target fail is
//! added to its corpus.
//!
//! Variables: `ISTIOD_FUZZ_SECONDS` (time for each target) and `ISTIOD_FUZZ_SEED` (seed of the mutations).

mod mutate;
mod run;
mod targets;

use std::time::Duration;

use libtest_mimic::Trial;

use crate::support::variable;

/// The tests of this module.
pub(crate) fn trials() -> Vec<Trial> {
    let number = |name: &str| variable(name).and_then(|text| text.parse::<u64>().ok());
    let time = Duration::from_secs(number("ISTIOD_FUZZ_SECONDS").unwrap_or(5));
    let seed = number("ISTIOD_FUZZ_SEED").unwrap_or(1);
    let trial = |target: &'static targets::Target| {
        Trial::test(format!("fuzz::{}", target.name), move || run::run(target, seed, time))
    };
    targets::ALL.iter().map(trial).collect()
}
