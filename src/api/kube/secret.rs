//! core/v1 Secret, reduced to certificates, private keys and credentials of image registries.

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
/// The key with the credentials in such a Secret.
pub const DOCKER_CONFIG: &str = ".dockerconfigjson";

/// The keys that may contain CA certificates and revocation lists.
pub(super) const AUTHORITY_KEYS: &[&str] = &["ca.crl", "ca.crt", "cacert", "crl"];
/// The other keys that are used.
const KEYS: &[&str] = &[DOCKER_CONFIG, "cert", "key", "tls.crt", "tls.key", "tls.ocsp-staple"];

/// A Secret. `Debug` does not print its content. Labels, annotations and unused keys are dropped: an annotation may
/// repeat the content, and a cluster may have many unused Secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secret {
    /// Metadata without labels and annotations.
    pub meta: Shared<Meta>,
    /// `type`.
    pub secret_type: SmolStr,
    /// The known keys of `data` (decoded), overridden by `stringData`.
    pub data: BTreeMap<SmolStr, Sensitive>,
    /// The names of the first keys, for error messages about missing keys.
    pub keys: SmolStr,
}

impl Secret {
    /// Parses a manifest. Each invalid field is an error with its path.
    pub fn parse(meta: Shared<Meta>, object: &Value) -> Result<Self, Vec<FieldError>> {
        let errors = FieldErrors::default();
        let root = Fields::root(object, &errors);
        let is_known = |key: &str| KEYS.contains(&key) || AUTHORITY_KEYS.contains(&key);
        let (encoded, plain) = (root.labels("data"), root.labels("stringData"));
        let keys = first_keys([&encoded, &plain]);
        let mut data = BTreeMap::new();
        for (key, text) in encoded.into_iter().filter(|(key, _)| is_known(key)) {
            match decoded(&text) {
                Some(bytes) => {
                    data.insert(key, Sensitive::new(bytes));
                }
                // Error messages never contain the content.
                None => root.error(&format!("data.{key}"), "is not base64"),
            }
        }
        let plain = plain.into_iter().filter(|(key, _)| is_known(key));
        data.extend(plain.map(|(key, text)| (key, Sensitive::new(Bytes::copy_from_slice(text.as_bytes())))));
        errors.finish(Self {
            meta: bare(meta),
            secret_type: root.text("type"),
            data,
            keys,
        })
    }
}

fn decoded(text: &str) -> Option<Bytes> {
    // YAML block scalars end in a newline, which the decoder of Kubernetes ignores.
    let compact: String = text.chars().filter(|c| !matches!(c, '\r' | '\n')).collect();
    STANDARD.decode(compact).ok().map(Bytes::from)
}

/// Returns metadata without labels and annotations.
pub(super) fn bare(meta: Shared<Meta>) -> Shared<Meta> {
    if meta.labels.is_empty() && meta.annotations.is_empty() {
        return meta;
    }
    Shared::new(Meta {
        labels: Shared::default(),
        annotations: Labels::new(),
        ..(*meta).clone()
    })
}

/// Returns up to three names of keys, and the number of the rest.
///
/// Parity (pilot/pkg/credentials/kube/secrets.go, `truncatedKeysMessage`): also counts a rest of none.
pub(super) fn first_keys<const N: usize>(maps: [&Labels; N]) -> SmolStr {
    let mut names: Vec<&str> = Vec::new();
    for map in maps {
        names.extend(map.keys().map(SmolStr::as_str));
    }
    names.sort_unstable();
    names.dedup();
    match names.as_slice() {
        [first, second, third, rest @ ..] => {
            SmolStr::new(format!("{first}, {second}, {third}, and {} more...", rest.len()))
        }
        few => SmolStr::new(few.join(", ")),
    }
}

impl Keyed for Secret {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
