//! Server-side TLS: the serving certificate, and the identities in client certificates.

mod accept;
mod options;
mod verify;

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use rustls::sign::CertifiedKey;
use smol_str::SmolStr;
use x509_parser::{certificate::X509Certificate, extensions::GeneralName, parse_x509_certificate};

pub use self::{
    accept::{AcceptError, Acceptor, HANDSHAKE_TIMEOUT, HandshakeReadLimit, MAX_HANDSHAKE_BYTES},
    options::{TlsOptions, TlsOptionsError},
};
use crate::base::spiffe::SCHEME;

/// The maximum number of subject alternative names. Workloads have one, gateways and machines a few.
const MAX_NAMES: usize = 64;

/// The serving certificate of the control plane. Replaced as a whole; open connections keep theirs.
#[derive(Clone)]
pub struct ServingCertificate {
    /// The certificate chain and its private key.
    pub key: Arc<CertifiedKey>,
    /// The roots that clients verify the chain against, as PEM; published in ConfigMaps and webhooks.
    pub roots: Bytes,
    /// The expiry of the leaf.
    pub expires_at: SystemTime,
}

/// A client certificate, verified during the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerCertificate {
    /// The URI, DNS and IP SANs of the leaf, in order.
    pub identities: Vec<SmolStr>,
    /// The expiry of the leaf.
    pub expires_at: SystemTime,
}

/// A client certificate with unusable content.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerCertificateError {
    /// It cannot be parsed.
    #[error("the client certificate cannot be parsed: {0}")]
    Unreadable(String),
    /// The SAN extension is invalid, has too many names, or a DNS name that reads as an identity.
    #[error("the client certificate has an invalid subject alternative name extension: {0}")]
    Names(&'static str),
    /// It does not have exactly one URI SAN.
    #[error("the client certificate has {0} URI SANs, want one SPIFFE id")]
    NotOneUri(usize),
}

impl PeerCertificate {
    /// Parses the leaf of a chain. Does not verify the chain.
    pub fn of_leaf(der: &[u8]) -> Result<Self, PeerCertificateError> {
        let certificate = parse(der)?;
        let expires_at = certificate.validity().not_after.timestamp();
        Ok(Self {
            identities: names(&certificate)?.into_iter().map(|(_, name)| name).collect(),
            expires_at: SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(expires_at).unwrap_or_default()),
        })
    }
}

/// Returns the only URI SAN of a leaf.
fn only_uri(der: &[u8]) -> Result<SmolStr, PeerCertificateError> {
    let mut uris = names(&parse(der)?)?
        .into_iter()
        .filter_map(|(is_uri, name)| is_uri.then_some(name));
    let first = uris.next();
    match (first, uris.count()) {
        (Some(uri), 0) => Ok(uri),
        (first, others) => Err(PeerCertificateError::NotOneUri(usize::from(first.is_some()) + others)),
    }
}

fn parse(der: &[u8]) -> Result<X509Certificate<'_>, PeerCertificateError> {
    match parse_x509_certificate(der) {
        Ok(([], certificate)) => Ok(certificate),
        Ok(_) => Err(PeerCertificateError::Unreadable("trailing bytes".into())),
        Err(error) => Err(PeerCertificateError::Unreadable(error.to_string())),
    }
}

/// Returns the URI, DNS and IP SANs of a certificate, each with a flag for URIs.
fn names(certificate: &X509Certificate<'_>) -> Result<Vec<(bool, SmolStr)>, PeerCertificateError> {
    let extension = certificate
        .subject_alternative_name()
        .map_err(|_| PeerCertificateError::Names("it is duplicate or cannot be parsed"))?;
    let names = extension.map_or(&[][..], |extension| &extension.value.general_names);
    if names.len() > MAX_NAMES {
        return Err(PeerCertificateError::Names("more than 64 names"));
    }
    // The roots are those of the trust domain in the URI, and identities are compared as text. A CA of one trust domain
    // could write an identity of another one as a DNS name.
    let is_forged = |name: &GeneralName<'_>| matches!(name, GeneralName::DNSName(name) if name.starts_with(SCHEME));
    if names.iter().any(is_forged) {
        return Err(PeerCertificateError::Names("a DNS name is a SPIFFE id"));
    }
    Ok(names.iter().filter_map(identity).collect())
}

fn identity(name: &GeneralName<'_>) -> Option<(bool, SmolStr)> {
    match name {
        GeneralName::URI(uri) => Some((true, SmolStr::new(uri))),
        GeneralName::DNSName(name) => Some((false, SmolStr::new(name))),
        GeneralName::IPAddress(bytes) => {
            let v4 = <[u8; 4]>::try_from(*bytes).map(|octets| Ipv4Addr::from(octets).to_string());
            let text = v4.or_else(|_| <[u8; 16]>::try_from(*bytes).map(|octets| Ipv6Addr::from(octets).to_string()));
            text.ok().map(|text| (false, SmolStr::from(text)))
        }
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
mod tests;
