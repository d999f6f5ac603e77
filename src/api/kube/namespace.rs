//! core/v1 Namespace.

use serde_json::Value;

use crate::{
    api::{FieldError, Meta, meta::Keyed},
    base::{ObjectKey, Shared},
};

/// A namespace. Only its metadata is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Metadata; `key.namespace` is empty, `key.name` is the namespace.
    pub meta: Shared<Meta>,
}

impl Namespace {
    /// Returns the namespace.
    pub fn parse(meta: Shared<Meta>, _object: &Value) -> Result<Self, Vec<FieldError>> {
        Ok(Self { meta })
    }
}

impl Keyed for Namespace {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
