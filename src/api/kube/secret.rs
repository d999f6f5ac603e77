//! core/v1 Secret.

use std::{collections::BTreeMap, fmt};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use serde_json::Value;
use smol_str::SmolStr;

use crate::{
    api::{
        FieldError, Meta,
        field::{FieldErrors, Fields},
        meta::Keyed,
    },
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

impl Secret {
    /// Parses the object (its whole manifest); every wrong field is an error with its path.
    pub fn parse(meta: Shared<Meta>, object: &Value) -> Result<Self, Vec<FieldError>> {
        let errors = FieldErrors::default();
        let root = Fields::root(object, &errors);
        let mut data = decoded(&root, "data");
        let plain = root.labels("stringData").into_iter();
        data.extend(plain.map(|(key, text)| (key, Bytes::copy_from_slice(text.as_bytes()))));
        errors.finish(Self {
            meta,
            secret_type: root.text("type"),
            data,
        })
    }
}

/// A map of base64 texts, decoded. Messages about it never show content.
pub(super) fn decoded(root: &Fields<'_>, name: &str) -> BTreeMap<SmolStr, Bytes> {
    let mut data = BTreeMap::new();
    for (key, text) in root.labels(name) {
        // YAML block texts end in a newline, which Kubernetes' decoder passes over.
        let compact: String = text.chars().filter(|c| !matches!(c, '\r' | '\n')).collect();
        match STANDARD.decode(compact) {
            Ok(bytes) => {
                data.insert(key, Bytes::from(bytes));
            }
            Err(_) => root.error(&format!("{name}.{key}"), "is not base64"),
        }
    }
    data
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
