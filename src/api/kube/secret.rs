//! core/v1 Secret, reduced to certificates, their keys, and the credentials of image registries.

use std::collections::BTreeMap;

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
    base::{Labels, ObjectKey, Sensitive, Shared},
};

/// The type of a Secret with the credentials of image registries.
pub const DOCKER_CONFIG_TYPE: &str = "kubernetes.io/dockerconfigjson";
/// The key under which such a Secret has them.
pub const DOCKER_CONFIG: &str = ".dockerconfigjson";

/// The keys that a certificate authority is looked for under.
pub(super) const AUTHORITY_KEYS: &[&str] = &["ca.crl", "ca.crt", "cacert", "crl"];
/// The further keys of a Secret that something is made of.
const KEYS: &[&str] = &[DOCKER_CONFIG, "cert", "key", "tls.crt", "tls.key", "tls.ocsp-staple"];

/// A Secret. Its content never prints. Labels, annotations and all keys that nothing is made of are left out: an
/// annotation may repeat the content, and there may be a lot of Secrets that are of no use here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secret {
    /// Metadata without labels and annotations.
    pub meta: Shared<Meta>,
    /// `type`.
    pub secret_type: SmolStr,
    /// `data` (decoded) with `stringData` laid over it, of the known keys.
    pub data: BTreeMap<SmolStr, Sensitive>,
    /// Names of the first keys, for messages about those that are missing; empty where a known key is there.
    pub other_keys: SmolStr,
}

impl Secret {
    /// Parses the object (its whole manifest); every wrong field is an error with its path.
    pub fn parse(meta: Shared<Meta>, object: &Value) -> Result<Self, Vec<FieldError>> {
        let errors = FieldErrors::default();
        let root = Fields::root(object, &errors);
        let is_known = |key: &str| KEYS.contains(&key) || AUTHORITY_KEYS.contains(&key);
        let (encoded, plain) = (root.labels("data"), root.labels("stringData"));
        let other_keys = other_keys([&encoded, &plain], is_known);
        let mut data = BTreeMap::new();
        for (key, text) in encoded.into_iter().filter(|(key, _)| is_known(key)) {
            match decoded(&text) {
                Some(bytes) => {
                    data.insert(key, Sensitive::new(bytes));
                }
                // Messages about content never show it.
                None => root.error(&format!("data.{key}"), "is not base64"),
            }
        }
        let plain = plain.into_iter().filter(|(key, _)| is_known(key));
        data.extend(plain.map(|(key, text)| (key, Sensitive::new(Bytes::copy_from_slice(text.as_bytes())))));
        errors.finish(Self {
            meta: bare(meta),
            secret_type: root.text("type"),
            data,
            other_keys,
        })
    }
}

fn decoded(text: &str) -> Option<Bytes> {
    // YAML block texts end in a newline, which Kubernetes' decoder passes over.
    let compact: String = text.chars().filter(|c| !matches!(c, '\r' | '\n')).collect();
    STANDARD.decode(compact).ok().map(Bytes::from)
}

/// Metadata without labels and annotations.
pub(super) fn bare(meta: Shared<Meta>) -> Shared<Meta> {
    if meta.labels.is_empty() && meta.annotations.is_empty() {
        return meta;
    }
    Shared::new(Meta {
        labels: Labels::new(),
        annotations: Labels::new(),
        ..(*meta).clone()
    })
}

/// Up to three names of keys and how many more there are; empty where a known key is among them.
pub(super) fn other_keys<const N: usize>(maps: [&Labels; N], is_known: impl Fn(&str) -> bool) -> SmolStr {
    let mut names: Vec<&str> = Vec::new();
    for map in maps {
        for key in map.keys() {
            if is_known(key) {
                return SmolStr::default();
            }
            names.push(key);
        }
    }
    names.sort_unstable();
    names.dedup();
    match names.len() {
        0..=3 => SmolStr::new(names.join(", ")),
        all => SmolStr::new(format!("{} and {} more", names[..3].join(", "), all - 3)),
    }
}

impl Keyed for Secret {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
