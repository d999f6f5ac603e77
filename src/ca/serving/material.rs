//! Conversion of PEM to a serving certificate, and CSRs for serving certificates.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use rcgen::{CertificateParams, DistinguishedName, KeyPair, PKCS_RSA_SHA256, RsaKeySize};
use rustls::{
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};
use smol_str::SmolStr;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::{
    auth::tls::ServingCertificate,
    base::{Sensitive, pem::certificates},
};

/// Unusable PEM. Its text never contains key material.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MaterialError {
    /// Invalid chain.
    #[error("no certificate chain: {0}")]
    Chain(String),
    /// The key.
    #[error("no private key: {0}; hint: PKCS#8, PKCS#1 and SEC1 in PEM are understood, without a password")]
    Key(String),
    /// Key and certificate do not match; during a file update, one of them may still be old.
    #[error("the key does not match the certificate")]
    Mismatch,
    /// The certificate has expired.
    #[error("the certificate expired at {0}")]
    Expired(String),
    /// Invalid roots.
    #[error("no root certificates: {0}")]
    Roots(String),
}

/// Creates a serving certificate from PEM.
pub fn certificate(
    chain: &[u8],
    key: &Sensitive,
    roots: Bytes,
    now: SystemTime,
) -> Result<ServingCertificate, MaterialError> {
    let chain = certificates(chain).map_err(|error| MaterialError::Chain(error.to_string()))?;
    let leaf = chain.first().expect("because certificates() returns at least one");
    let expires_at = expiry(leaf).map_err(MaterialError::Chain)?;
    if expires_at <= now {
        return Err(MaterialError::Expired(
            time::OffsetDateTime::from(expires_at).to_string(),
        ));
    }
    certificates(&roots).map_err(|error| MaterialError::Roots(error.to_string()))?;
    let key = PrivateKeyDer::from_pem_slice(key.reveal()).map_err(|error| MaterialError::Key(error.to_string()))?;
    let key = aws_lc_rs::default_provider()
        .key_provider
        .load_private_key(key)
        .map_err(|error| MaterialError::Key(error.to_string()))?;
    let key = CertifiedKey::new(chain, key);
    key.keys_match().map_err(|_| MaterialError::Mismatch)?;
    Ok(ServingCertificate {
        key: Arc::new(key),
        roots,
        expires_at,
    })
}

/// Returns the first certificate of a chain, if there is one.
pub(super) fn leaf(chain: &[u8]) -> Option<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(chain).next()?.ok()
}

fn expiry(leaf: &CertificateDer<'_>) -> Result<SystemTime, String> {
    let (_, parsed) = X509Certificate::from_der(leaf).map_err(|error| error.to_string())?;
    let seconds = parsed.validity().not_after.timestamp();
    let since = Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
    SystemTime::UNIX_EPOCH
        .checked_add(since)
        .ok_or_else(|| "the expiry is out of range".to_owned())
}

/// Generates an RSA key and a CSR with these DNS names, both as PEM.
pub(super) fn request(names: &[SmolStr]) -> Result<(String, Sensitive), rcgen::Error> {
    let key = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048)?;
    let mut params = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    params.distinguished_name = DistinguishedName::new();
    let request = params.serialize_request(&key)?.pem()?;
    Ok((request, Sensitive::new(key.serialize_pem().into())))
}
