//! Node metadata as it was received.

use std::{collections::BTreeMap, fmt};

use serde_json::Value;

use crate::base::Shared;

/// All metadata of a node, for rare keys, `proxy.metadata` of EnvoyFilters and debug pages. Held as JSON text, since
/// every connection has its own: 0.4 KiB for a small node, which needs 2.9 KiB as a tree (heap profile).
#[derive(Clone, PartialEq, Eq)]
pub struct RawMetadata(Shared<Box<str>>);

impl RawMetadata {
    pub(super) fn new(values: &BTreeMap<String, Value>) -> Self {
        let text = serde_json::to_string(values).expect("because the keys of JSON objects are text");
        Self(Shared::new(text.into()))
    }

    /// Returns the size of the text.
    pub fn size_bytes(&self) -> usize {
        self.0.len()
    }

    /// Returns the text of a key; `None` if it is absent or no text. Costs a search if it is absent.
    pub fn text(&self, key: &str) -> Option<String> {
        if !self.0.contains(key) {
            return None;
        }
        self.values().get(key)?.as_str().map(str::to_owned)
    }

    /// Parses the metadata.
    pub fn values(&self) -> BTreeMap<String, Value> {
        serde_json::from_str(&self.0).expect("because the text was written from a map")
    }
}

impl fmt::Debug for RawMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
