//! Self-signed roots, and the Secret that stores them across restarts and replicas.
//!
//! Parity (security/pkg/pki/ca/ca.go): Secret names, type and keys.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use smol_str::{SmolStr, format_smolstr};

use super::{
    bundle::{BundlePart, CaBundle},
    certificate::{self, Certificate, Validity},
    key::{self, KeyError, KeyKind, PrivateKey},
    plugged_in::{BundleFiles, CERTIFICATE, CHAIN, GENERATED_MARKER, KEY, ROOTS},
    secrets::Secret,
};
use crate::base::Sensitive;

/// The Secret with the self-signed root.
pub const SELF_SIGNED_SECRET: &str = "istio-ca-secret";
/// The Secret with a plugged-in bundle; with `USE_CACERTS_FOR_SELF_SIGNED_CA` also a self-signed root.
pub const CACERTS_SECRET: &str = "cacerts";
/// The maximum number of earlier roots that stay trusted after renewals. They have the same name and key.
const ADDITIONAL_ROOTS_MAX: usize = 4;
/// The always empty key for a leaf's private key.
const LEAF_KEY: &str = "key.pem";

/// The parameters of self-signed roots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootOptions {
    /// `CITADEL_SELF_SIGNED_CA_CERT_TTL`.
    pub lifetime: Duration,
    /// `CITADEL_SELF_SIGNED_CA_RSA_KEY_SIZE`.
    pub key: KeyKind,
}

/// A self-signed root with its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// The certificate, as PEM.
    pub certificate: Bytes,
    /// Its key, as PEM.
    pub key: Sensitive,
    /// Earlier roots that stay trusted, as PEM.
    pub additional_roots: Bytes,
}

impl Root {
    /// Creates a root with a new key. Slow for RSA.
    pub fn new(organization: &str, options: &RootOptions, now: SystemTime) -> Result<Self, KeyError> {
        let key = PrivateKey::generate(options.key)?;
        let der = certificate::root(organization, validity(options, now), &key)?;
        Ok(Self {
            certificate: Bytes::from(key::pem("CERTIFICATE", &der)),
            key: key.pem().clone(),
            additional_roots: Bytes::new(),
        })
    }

    /// Creates a root with the same name and key and a new validity. Earlier roots stay trusted until they expire, so
    /// that peers with the old root and peers with the new one trust the same certificates.
    pub fn renewed(
        old: &Certificate,
        key: &Sensitive,
        trusted: &[Certificate],
        options: &RootOptions,
        now: SystemTime,
    ) -> Result<Self, KeyError> {
        let pair = PrivateKey::from_pem(key)?;
        let der = certificate::renewed_root(old, validity(options, now), &pair)?;
        let additional_roots = trusted
            .iter()
            .filter(|root| now < root.not_after)
            .take(ADDITIONAL_ROOTS_MAX);
        Ok(Self {
            certificate: Bytes::from(key::pem("CERTIFICATE", &der)),
            key: key.clone(),
            additional_roots: Bytes::from(additional_roots.map(Certificate::pem).collect::<String>()),
        })
    }

    /// Reads a root from a Secret; none if the certificate or the key is missing.
    pub fn from_secret(secret: &Secret) -> Option<Self> {
        let value = |name: &str| secret.data.get(name).filter(|value| !value.is_empty());
        Some(Self {
            certificate: value(CERTIFICATE)?.reveal().clone(),
            key: value(KEY)?.clone(),
            additional_roots: value(ROOTS).map(|roots| roots.reveal().clone()).unwrap_or_default(),
        })
    }

    /// Converts the root to its Secret.
    pub fn to_secret(&self, name: &str) -> Secret {
        let mut data = BTreeMap::from([
            (CERTIFICATE.into(), Sensitive::new(self.certificate.clone())),
            (KEY.into(), self.key.clone()),
            (
                ROOTS.into(),
                Sensitive::new(self.merged_with(Certificate::all_from_pem(&self.additional_roots).unwrap_or_default())),
            ),
            (CHAIN.into(), Sensitive::default()),
            (LEAF_KEY.into(), Sensitive::default()),
        ]);
        if name == CACERTS_SECRET {
            data.insert(GENERATED_MARKER.into(), Sensitive::default());
        }
        Secret {
            name: name.into(),
            version: String::new(),
            data,
        }
    }

    /// Returns the CA bundle. Roots in `files` (the folder) are trusted too.
    pub fn bundle(&self, location: SmolStr, files: &BundleFiles, now: SystemTime) -> CaBundle {
        let folder = files.get(ROOTS).map(|file| file.reveal().clone());
        let additional_roots = std::iter::once(self.additional_roots.clone()).chain(folder);
        // Invalid additional roots are ignored; the root itself suffices.
        let additional_roots = additional_roots.flat_map(|pem| Certificate::all_from_pem(&pem).unwrap_or_default());
        let holding = additional_roots.filter(|root| root.is_ca && now < root.not_after);
        CaBundle {
            location,
            certificate: part(CERTIFICATE, self.certificate.clone()),
            key_name: KEY.into(),
            key: self.key.clone(),
            chain: part(CHAIN, Bytes::new()),
            roots: part(CERTIFICATE, self.merged_with(holding)),
            crl: None,
        }
    }

    /// Returns the root and others as PEM, without duplicates.
    fn merged_with(&self, additional_roots: impl IntoIterator<Item = Certificate>) -> Bytes {
        let mut pem = String::from_utf8_lossy(&self.certificate).trim_end().to_owned() + "\n";
        let mut known = Certificate::all_from_pem(&self.certificate).unwrap_or_default();
        for root in additional_roots {
            if !known.contains(&root) {
                pem.push_str(&root.pem());
                known.push(root);
            }
        }
        Bytes::from(pem)
    }
}

fn part(name: &'static str, pem: Bytes) -> BundlePart {
    BundlePart { name: name.into(), pem }
}

/// The validity of a root, backdated for clock skew.
fn validity(options: &RootOptions, now: SystemTime) -> Validity {
    Validity {
        not_before: now.checked_sub(super::authority::CLOCK_SKEW).unwrap_or(now),
        not_after: now.checked_add(options.lifetime).unwrap_or(now),
    }
}

/// The location of a Secret, for messages.
pub fn location(namespace: &str, name: &str) -> SmolStr {
    format_smolstr!("Secret {namespace}/{name}")
}
