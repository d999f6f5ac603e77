//! The targets under libFuzzer.

#![no_main]

mod targets;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use targets::{ALL, Target};

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("ISTIOD_FUZZ_TARGET").unwrap_or_default();
    let names: Vec<&str> = ALL.iter().map(|target| target.name).collect();
    let found = ALL.iter().find(|target| target.name == name);
    found.unwrap_or_else(|| panic!("ISTIOD_FUZZ_TARGET is {name:?}, want one of {}", names.join(", ")))
});

fuzz_target!(|bytes: &[u8]| {
    (TARGET.run)(bytes);
});
