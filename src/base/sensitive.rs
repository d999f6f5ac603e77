//! Bytes that must not appear in logs or dumps.

use std::fmt;

use bytes::Bytes;

/// Key material. It compares and clones like bytes and never prints.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Sensitive(Bytes);

impl Sensitive {
    /// Wraps bytes.
    pub fn new(bytes: Bytes) -> Self {
        Self(bytes)
    }

    /// Returns the bytes, for the one place that sends them to their owner.
    pub fn reveal(&self) -> &Bytes {
        &self.0
    }

    /// Returns true without bytes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Sensitive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("redacted")
    }
}
