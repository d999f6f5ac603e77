//! The targets. This module is part of two programs, the integration tests and the fuzzer of `tests/fuzz/Cargo.toml`,
//! so it uses only the library.

mod document;
mod identity;
mod setting;
mod template;
mod text;
mod webhook;
mod xds;

use std::hash::{DefaultHasher, Hash, Hasher};

/// A function over bytes.
pub(crate) struct Target {
    /// Its name, which is also that of the test and of its corpus folder.
    pub(crate) name: &'static str,
    /// Runs an input. A panic is a failure, even if it is caught. Returns the class of the outcome: an input with a new
    /// class is worth mutating further.
    pub(crate) run: fn(&[u8]) -> u64,
    /// Tokens that the mutator inserts, which random byte changes would hardly find.
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
    template::TEMPLATE,
    webhook::REVIEW,
    webhook::INJECTION,
];

/// Returns the class of an outcome from its text, without numbers and quoted parts.
fn class_of(outcome: &str) -> u64 {
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

/// Splits an input into texts, which are separated by a zero byte.
fn parts<const N: usize>(bytes: &[u8]) -> [&[u8]; N] {
    let mut rest = bytes.splitn(N, |byte| *byte == 0);
    std::array::from_fn(|_| rest.next().unwrap_or_default())
}
