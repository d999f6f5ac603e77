//! TLS as a server: what is presented, and what a client's certificate says.

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
    accept::{AcceptError, Acceptor, HANDSHAKE_BYTES, HANDSHAKE_PATIENCE, Metered},
    options::{TlsOptions, TlsOptionsError},
};

/// How many names of a certificate are looked at. Workloads have one, gateways and machines a few.
const MAX_NAMES: usize = 64;

/// What the control plane presents to its clients. Swapped as a whole; connections keep what they began with.
#[derive(Clone)]
pub struct ServingCertificate {
    /// The chain and its key.
    pub key: Arc<CertifiedKey>,
    /// What clients verify the chain against, as PEM: published in ConfigMaps and webhooks.
    pub roots: Bytes,
    /// When the leaf expires.
    pub expires_at: SystemTime,
}

/// The certificate of a client, verified when it connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerCertificate {
    /// The URI, DNS and IP names of the leaf, in its order.
    pub identities: Vec<SmolStr>,
    /// When the leaf expires.
    pub expires_at: SystemTime,
}

/// What is wrong with a client's certificate, apart from who signed it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerCertificateError {
    /// It is no certificate.
    #[error("the client certificate cannot be read: {0}")]
    Unreadable(String),
    /// Its names cannot be read, or are too many.
    #[error("the names of the client certificate cannot be used: {0}")]
    Names(&'static str),
    /// A workload's certificate has one SPIFFE id.
    #[error("the client certificate has {0} URI names, want one SPIFFE id")]
    NotOneUri(usize),
}

impl PeerCertificate {
    /// What the leaf of a chain says. It says nothing about whether the chain is to be believed.
    pub fn of_leaf(der: &[u8]) -> Result<Self, PeerCertificateError> {
        let certificate = parse(der)?;
        let expires_at = certificate.validity().not_after.timestamp();
        Ok(Self {
            identities: names(&certificate)?.into_iter().map(|(_, name)| name).collect(),
            expires_at: SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(expires_at).unwrap_or_default()),
        })
    }
}

/// The one URI of a leaf.
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
        Ok(_) => Err(PeerCertificateError::Unreadable("something follows it".into())),
        Err(error) => Err(PeerCertificateError::Unreadable(error.to_string())),
    }
}

/// The names of a certificate that identify somebody, each with whether it is a URI.
fn names(certificate: &X509Certificate<'_>) -> Result<Vec<(bool, SmolStr)>, PeerCertificateError> {
    let extension = certificate
        .subject_alternative_name()
        .map_err(|_| PeerCertificateError::Names("the extension is there twice or cannot be read"))?;
    let names = extension.map_or(&[][..], |extension| &extension.value.general_names);
    if names.len() > MAX_NAMES {
        return Err(PeerCertificateError::Names("there are more than 64"));
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
