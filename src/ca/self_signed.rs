//! A root that the control plane made itself, and the Secret that keeps it for the next process and for other replicas.

use std::{collections::BTreeMap, time::SystemTime};

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

/// Where a root of our own is kept.
pub const SELF_SIGNED_SECRET: &str = "istio-ca-secret";
/// Where an operator's bundle is; with `USE_CACERTS_FOR_SELF_SIGNED_CA` also a root of our own.
pub const CACERTS_SECRET: &str = "cacerts";
/// How many roots before it a root keeps beside it. They have its name and key, so what they verify it verifies too.
const ADDITIONAL_ROOTS_MAX: usize = 4;
/// A key that only says what others do not.
const LEAF_KEY: &str = "key.pem";

/// The parameters of self-signed roots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootOptions {
    /// `CITADEL_SELF_SIGNED_CA_CERT_TTL`.
    pub lifetime: std::time::Duration,
    /// `CITADEL_SELF_SIGNED_CA_RSA_KEY_SIZE`.
    pub key: KeyKind,
}

/// A root with its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// The certificate, as PEM.
    pub certificate: Bytes,
    /// Its key, as PEM.
    pub key: Sensitive,
    /// What is trusted beside it, as PEM: roots that it follows.
    pub additional_roots: Bytes,
}

impl Root {
    /// Makes a root with a new key. Slow: an RSA key is looked for.
    pub fn new(organization: &str, options: &RootOptions, now: SystemTime) -> Result<Self, KeyError> {
        let key = PrivateKey::generate(options.key)?;
        let der = certificate::root(organization, validity(options, now), &key)?;
        Ok(Self {
            certificate: Bytes::from(key::pem("CERTIFICATE", &der)),
            key: key.pem().clone(),
            additional_roots: Bytes::new(),
        })
    }

    /// Makes a root of the same name and key that holds longer. What was trusted stays trusted while it holds, so that
    /// whoever knows only the old root and whoever knows only the new one trust the same certificates.
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
            .filter(|one| now < one.not_after)
            .take(ADDITIONAL_ROOTS_MAX);
        Ok(Self {
            certificate: Bytes::from(key::pem("CERTIFICATE", &der)),
            key: key.clone(),
            additional_roots: Bytes::from(additional_roots.map(Certificate::pem).collect::<String>()),
        })
    }

    /// What a Secret holds; none if it lacks the certificate or the key.
    pub fn from_secret(secret: &Secret) -> Option<Self> {
        let value = |name: &str| secret.data.get(name).filter(|value| !value.is_empty());
        Some(Self {
            certificate: value(CERTIFICATE)?.reveal().clone(),
            key: value(KEY)?.clone(),
            additional_roots: value(ROOTS).map(|roots| roots.reveal().clone()).unwrap_or_default(),
        })
    }

    /// The Secret that keeps it.
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

    /// What a CA is made of. `files`: those of the folder, whose roots are trusted too.
    pub fn bundle(&self, location: SmolStr, files: &BundleFiles, now: SystemTime) -> CaBundle {
        let folder = files.get(ROOTS).map(|file| file.reveal().clone());
        let additional_roots = std::iter::once(self.additional_roots.clone()).chain(folder);
        // A text that is no certificate adds no trust; the root itself is enough to go on.
        let additional_roots = additional_roots.flat_map(|pem| Certificate::all_from_pem(&pem).unwrap_or_default());
        let holding = additional_roots.filter(|one| one.is_ca && now < one.not_after);
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

    /// The root and others, each once, as PEM.
    fn merged_with(&self, additional_roots: impl IntoIterator<Item = Certificate>) -> Bytes {
        let mut pem = String::from_utf8_lossy(&self.certificate).trim_end().to_owned() + "\n";
        let mut known = Certificate::all_from_pem(&self.certificate).unwrap_or_default();
        for one in additional_roots {
            if !known.contains(&one) {
                pem.push_str(&one.pem());
                known.push(one);
            }
        }
        Bytes::from(pem)
    }
}

fn part(name: &'static str, pem: Bytes) -> BundlePart {
    BundlePart { name: name.into(), pem }
}

/// A time span that begins a little early: the clocks of others may be behind.
fn validity(options: &RootOptions, now: SystemTime) -> Validity {
    Validity {
        not_before: now.checked_sub(super::authority::CLOCK_SKEW).unwrap_or(now),
        not_after: now.checked_add(options.lifetime).unwrap_or(now),
    }
}

/// Where a Secret stands, for messages.
pub fn location(namespace: &str, name: &str) -> SmolStr {
    format_smolstr!("Secret {namespace}/{name}")
}
