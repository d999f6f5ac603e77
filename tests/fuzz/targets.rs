//! The targets. This file and those below it are part of two programs: the integration tests, and the fuzzer of
//! `Cargo.toml` beside it; so they use nothing but the library.

mod document;
mod identity;
mod setting;
mod text;
mod xds;

use std::hash::{DefaultHasher, Hash, Hasher};

/// A function over bytes.
pub(crate) struct Target {
    /// Its name: of the trial, and of the folder of its corpus.
    pub(crate) name: &'static str,
    /// Runs it. A panic, whoever catches it, is a failure. Gives the sort of the outcome: an input with an outcome that was
    /// not seen before is worth changing further.
    pub(crate) run: fn(&[u8]) -> u64,
    /// Words that the mutator puts in: what a change of single bytes would hardly find.
    #[allow(dead_code, reason = "libFuzzer finds words by itself")]
    pub(crate) words: &'static [&'static [u8]],
}

/// Every target.
pub(crate) const ALL: &[Target] = &[
    xds::HTTP2,
    xds::SOTW,
    xds::DELTA,
    xds::NODE,
    identity::TLS,
    identity::CERTIFICATES,
    identity::CREDENTIALS,
    identity::CSR,
    identity::CSR_CALL,
    document::YAML,
    document::OBJECT,
    setting::MESH_CONFIG,
    setting::KUBECONFIG,
    text::REGEX,
    text::NAMES,
];

/// The sort of an outcome, from words that tell of it: numbers and quoted parts do not count.
fn sort_of(outcome: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    let mut quoted = false;
    for byte in outcome.bytes().take(400) {
        match byte {
            b'"' | b'`' => quoted = !quoted,
            _ if quoted => {}
            b'0'..=b'9' => {}
            byte => byte.hash(&mut hasher),
        }
    }
    hasher.finish()
}

/// Splits what a target is made of: texts that are separated by a zero byte.
fn parts<const N: usize>(bytes: &[u8]) -> [&[u8]; N] {
    let mut rest = bytes.splitn(N, |byte| *byte == 0);
    std::array::from_fn(|_| rest.next().unwrap_or_default())
}
