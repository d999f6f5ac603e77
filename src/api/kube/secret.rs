//! core/v1 Secret.

use std::{collections::BTreeMap, fmt};

use bytes::Bytes;
use smol_str::SmolStr;

use crate::{
    api::{Meta, meta::Keyed},
    base::{ObjectKey, Shared},
};

/// A Secret. Its content never prints.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    /// Metadata.
    pub meta: Shared<Meta>,
    /// `type`.
    pub secret_type: SmolStr,
    /// `data` (decoded) with `stringData` laid over it.
    pub data: BTreeMap<SmolStr, Bytes>,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret")
            .field("meta", &self.meta)
            .field("keys", &self.data.keys())
            .finish_non_exhaustive()
    }
}

impl Keyed for Secret {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
