//! core/v1 ConfigMap.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::Value;
use smol_str::SmolStr;

use super::secret::decoded;
use crate::{
    api::{
        FieldError, Meta,
        field::{FieldErrors, Fields},
        meta::Keyed,
    },
    base::{ObjectKey, Shared},
};

/// A ConfigMap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigMap {
    /// Metadata.
    pub meta: Shared<Meta>,
    /// `data` and `binaryData`.
    pub data: BTreeMap<SmolStr, Bytes>,
}

impl ConfigMap {
    /// Parses the object (its whole manifest); every wrong field is an error with its path.
    pub fn parse(meta: Shared<Meta>, object: &Value) -> Result<Self, Vec<FieldError>> {
        let errors = FieldErrors::default();
        let root = Fields::root(object, &errors);
        let mut data: BTreeMap<SmolStr, Bytes> = root
            .labels("data")
            .into_iter()
            .map(|(key, text)| (key, Bytes::copy_from_slice(text.as_bytes())))
            .collect();
        data.extend(decoded(&root, "binaryData"));
        errors.finish(Self { meta, data })
    }
}

impl Keyed for ConfigMap {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
