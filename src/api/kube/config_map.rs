//! core/v1 ConfigMap, reduced to certificate authorities. The mesh config is read another way.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::Value;
use smol_str::SmolStr;

use super::secret::{AUTHORITY_KEYS, bare, other_keys};
use crate::{
    api::{
        FieldError, Meta,
        field::{FieldErrors, Fields},
        meta::Keyed,
    },
    base::{ObjectKey, Shared},
};

/// A ConfigMap, without labels, annotations and all keys that nothing is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigMap {
    /// Metadata without labels and annotations.
    pub meta: Shared<Meta>,
    /// `data`, of the known keys.
    pub data: BTreeMap<SmolStr, Bytes>,
    /// Names of the first keys, for messages about those that are missing; empty where a known key is there.
    pub other_keys: SmolStr,
}

impl ConfigMap {
    /// Parses the object (its whole manifest); every wrong field is an error with its path.
    pub fn parse(meta: Shared<Meta>, object: &Value) -> Result<Self, Vec<FieldError>> {
        let errors = FieldErrors::default();
        let root = Fields::root(object, &errors);
        let is_known = |key: &str| AUTHORITY_KEYS.contains(&key);
        let texts = root.labels("data");
        let other_keys = other_keys([&texts], is_known);
        let known = texts.into_iter().filter(|(key, _)| is_known(key));
        let data = known
            .map(|(key, text)| (key, Bytes::copy_from_slice(text.as_bytes())))
            .collect();
        errors.finish(Self {
            meta: bare(meta),
            data,
            other_keys,
        })
    }
}

impl Keyed for ConfigMap {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
