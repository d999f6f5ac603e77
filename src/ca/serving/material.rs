//! Conversion of PEM to a serving certificate, and CSRs for serving certificates.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use rcgen::{CertificateParams, DistinguishedName, KeyPair, PKCS_RSA_SHA256, RsaKeySize};
use rustls::{
    crypto::aws_lc_rs,
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{self, PemObject},
    },
    sign::{CertifiedKey, SigningKey},
};
use smol_str::SmolStr;
use time::OffsetDateTime;
use x509_parser::{
    nom,
    prelude::{FromDer, X509Certificate, X509Error},
};

use crate::{
    auth::tls::ServingCertificate,
    base::{
        Sensitive,
        pem::{PemError, certificates},
    },
};

/// Unusable PEM. Its text never contains key material.
#[derive(Debug, thiserror::Error)]
pub enum MaterialError {
    /// Invalid chain.
    #[error("no certificate chain: {0}")]
    Chain(#[source] ChainError),
    /// The key.
    #[error("no private key: {0}; hint: PKCS#8, PKCS#1 and SEC1 in PEM are understood, without a password")]
    Key(#[source] KeyError),
    /// Key and certificate do not match; during a file update, one of them may still be old.
    #[error("the key does not match the certificate")]
    Mismatch,
    /// The certificate has expired.
    #[error("the certificate expired at {0}")]
    Expired(OffsetDateTime),
    /// Invalid roots.
    #[error("no root certificates: {0}")]
    Roots(#[source] PemError),
}

/// An invalid certificate chain.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// It is not PEM.
    #[error(transparent)]
    Pem(#[from] PemError),
    /// Its leaf is malformed.
    #[error(transparent)]
    Leaf(#[from] nom::Err<X509Error>),
    /// The system clock cannot represent the expiry of its leaf.
    #[error("the expiry is out of range")]
    Expiry,
}

/// An invalid private key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// It is not PEM.
    #[error(transparent)]
    Pem(#[from] pem::Error),
    /// It is malformed, or of an unknown type.
    #[error(transparent)]
    Unusable(#[from] rustls::Error),
}

/// Creates a serving certificate from PEM.
pub fn certificate(
    chain: &[u8],
    key: &Sensitive,
    roots: Bytes,
    now: SystemTime,
) -> Result<ServingCertificate, MaterialError> {
    let chain = certificates(chain).map_err(|error| MaterialError::Chain(error.into()))?;
    let leaf = chain.first().expect("because certificates() returns at least one");
    let expires_at = expiry(leaf).map_err(MaterialError::Chain)?;
    if expires_at <= now {
        return Err(MaterialError::Expired(expires_at.into()));
    }
    certificates(&roots).map_err(MaterialError::Roots)?;
    let key = signing_key(key).map_err(MaterialError::Key)?;
    let key = CertifiedKey::new(chain, key);
    key.keys_match().map_err(|_| MaterialError::Mismatch)?;
    Ok(ServingCertificate {
        key: Arc::new(key),
        roots,
        expires_at,
    })
}

fn signing_key(pem: &Sensitive) -> Result<Arc<dyn SigningKey>, KeyError> {
    let der = PrivateKeyDer::from_pem_slice(pem.reveal())?;
    Ok(aws_lc_rs::default_provider().key_provider.load_private_key(der)?)
}

/// Returns the first certificate of a chain, if there is one.
pub(super) fn leaf(chain: &[u8]) -> Option<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(chain).next()?.ok()
}

fn expiry(leaf: &CertificateDer<'_>) -> Result<SystemTime, ChainError> {
    let (_, parsed) = X509Certificate::from_der(leaf)?;
    let seconds = parsed.validity().not_after.timestamp();
    let since = Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
    SystemTime::UNIX_EPOCH.checked_add(since).ok_or(ChainError::Expiry)
}

/// Generates an RSA key and a CSR with these DNS names, both as PEM.
pub(super) fn request(names: &[SmolStr]) -> Result<(String, Sensitive), rcgen::Error> {
    let key = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048)?;
    let mut params = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    params.distinguished_name = DistinguishedName::new();
    let request = params.serialize_request(&key)?.pem()?;
    Ok((request, Sensitive::new(key.serialize_pem().into())))
}
