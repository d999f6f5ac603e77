//! core/v1 ConfigMap, reduced to CA certificates. The mesh config is read elsewhere.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::Value;
use smol_str::SmolStr;

use super::secret::{AUTHORITY_KEYS, bare, first_keys};
use crate::{
    api::{
        FieldError, Meta,
        field::{FieldErrors, Fields},
        meta::Keyed,
    },
    base::{ObjectKey, Shared},
};

/// A ConfigMap, without labels, annotations and unused keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigMap {
    /// Metadata without labels and annotations.
    pub meta: Shared<Meta>,
    /// The known keys of `data`.
    pub data: BTreeMap<SmolStr, Bytes>,
    /// The names of the first keys, for error messages about missing keys.
    pub keys: SmolStr,
}

impl ConfigMap {
    /// Parses a manifest. Each invalid field is an error with its path.
    pub fn parse(meta: Shared<Meta>, object: &Value) -> Result<Self, Vec<FieldError>> {
        let errors = FieldErrors::default();
        let root = Fields::root(object, &errors);
        let is_known = |key: &str| AUTHORITY_KEYS.contains(&key);
        let texts = root.labels("data");
        let keys = first_keys([&texts]);
        let known = texts.into_iter().filter(|(key, _)| is_known(key));
        let data = known
            .map(|(key, text)| (key, Bytes::copy_from_slice(text.as_bytes())))
            .collect();
        errors.finish(Self {
            meta: bare(meta),
            data,
            keys,
        })
    }
}

impl Keyed for ConfigMap {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
