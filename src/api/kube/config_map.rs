//! core/v1 ConfigMap.

use std::collections::BTreeMap;

use bytes::Bytes;
use smol_str::SmolStr;

use crate::{
    api::{Meta, meta::Keyed},
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

impl Keyed for ConfigMap {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
