//! core/v1 Namespace.

use crate::{
    api::{Meta, meta::Keyed},
    base::{ObjectKey, Shared},
};

/// A namespace: only its metadata counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Metadata; `key.namespace` is empty, `key.name` is the namespace.
    pub meta: Shared<Meta>,
}

impl Keyed for Namespace {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
