//! core/v1 Namespace.

use serde_json::Value;

use crate::{
    api::{FieldError, Meta, meta::Keyed},
    base::{ObjectKey, Shared},
};

/// A namespace: only its metadata counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Metadata; `key.namespace` is empty, `key.name` is the namespace.
    pub meta: Shared<Meta>,
}

impl Namespace {
    /// Parses the object; only its metadata counts.
    pub fn parse(meta: Shared<Meta>, _object: &Value) -> Result<Self, Vec<FieldError>> {
        Ok(Self { meta })
    }
}

impl Keyed for Namespace {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
