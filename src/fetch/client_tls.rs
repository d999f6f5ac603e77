//! TLS of connections to servers that the operator configured: registries and other control planes.

use std::sync::Arc;

use bytes::Bytes;
use rustls::{
    ClientConfig, Error, RootCertStore,
    client::{
        WebPkiServerVerifier,
        danger::{ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor, verify_server_name,
    },
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
    server::ParsedCertificate,
};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use super::tls::{UnverifiedServer, roots};
use crate::base::{Sensitive, handshake::verify_signatures, pem::certificates};

/// Settings of TLS with a server.
#[derive(Clone, Debug, Default)]
pub struct ClientTls {
    /// Trusted roots as PEM; `None` for those of the system.
    pub roots: Option<Bytes>,
    /// Certificate chain and key of this client, as PEM.
    pub identity: Option<(Bytes, Sensitive)>,
    /// The name that the server's certificate must have and that is sent as SNI; empty for the host of the address.
    pub server_name: String,
    /// Names of which the server's certificate must have one, in place of [`Self::server_name`]: DNS names or URIs.
    pub subject_alt_names: Vec<String>,
    /// Revoked certificates as PEM; empty for none.
    pub revoked: Bytes,
    /// True if any server certificate is accepted.
    pub insecure_skip_verify: bool,
    /// The protocols that are offered.
    pub alpn: Vec<Vec<u8>>,
}

/// Unusable TLS settings. Its text contains no key material.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientTlsError {
    /// The roots.
    #[error("no root certificates: {0}")]
    Roots(String),
    /// The client's certificate.
    #[error("no client certificate: {0}")]
    Certificate(String),
    /// The client's key, or one that does not match the certificate.
    #[error("no private key: {0}")]
    Key(String),
    /// The revocation list.
    #[error("no revocation list: {0}")]
    Revoked(String),
}

impl ClientTls {
    /// Returns the configuration.
    pub fn config(&self) -> Result<Arc<ClientConfig>, ClientTlsError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .expect("because the provider supports both versions");
        let verifier: Arc<dyn ServerCertVerifier> = if self.insecure_skip_verify {
            Arc::new(UnverifiedServer(provider))
        } else {
            self.verifier(provider)?
        };
        let builder = builder.dangerous().with_custom_certificate_verifier(verifier);
        let mut config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some((chain, key)) => {
                let chain = certificates(chain).map_err(|error| ClientTlsError::Certificate(error.to_string()))?;
                let key = PrivateKeyDer::from_pem_slice(key.reveal());
                let key = key.map_err(|error| ClientTlsError::Key(error.to_string()))?;
                let config = builder.with_client_auth_cert(chain, key);
                config.map_err(|error| ClientTlsError::Key(error.to_string()))?
            }
        };
        config.alpn_protocols = self.alpn.clone();
        Ok(Arc::new(config))
    }

    fn verifier(&self, provider: Arc<CryptoProvider>) -> Result<Arc<dyn ServerCertVerifier>, ClientTlsError> {
        let roots = match &self.roots {
            None => roots(&[]),
            Some(pem) => {
                let mut store = RootCertStore::empty();
                let roots = certificates(pem).map_err(|error| ClientTlsError::Roots(error.to_string()))?;
                for root in roots {
                    store
                        .add(root)
                        .map_err(|error| ClientTlsError::Roots(error.to_string()))?;
                }
                store
            }
        };
        let roots = Arc::new(roots);
        let lists = CertificateRevocationListDer::pem_slice_iter(&self.revoked)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| ClientTlsError::Revoked(error.to_string()))?;
        if lists.is_empty() && !self.revoked.is_empty() {
            return Err(ClientTlsError::Revoked("no PEM block X509 CRL".to_owned()));
        }
        let mut builder = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone()).with_crls(lists);
        if !self.revoked.is_empty() {
            builder = builder.allow_unknown_revocation_status();
        }
        let by_name = builder
            .build()
            .map_err(|error| ClientTlsError::Roots(error.to_string()))?;
        if self.subject_alt_names.is_empty() {
            return Ok(by_name);
        }
        Ok(Arc::new(AnyName {
            names: self.subject_alt_names.clone(),
            roots,
            provider,
            by_name,
        }))
    }
}

/// A verifier that accepts certificates with one of several names.
#[derive(Debug)]
struct AnyName {
    names: Vec<String>,
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
    by_name: Arc<WebPkiServerVerifier>,
}

impl AnyName {
    /// Returns a name of a host that the certificate has and that is wanted.
    fn host(&self, certificate: &ParsedCertificate<'_>) -> Option<ServerName<'static>> {
        let wanted = self
            .names
            .iter()
            .filter_map(|name| ServerName::try_from(name.clone()).ok());
        let mut wanted = wanted.filter(|name| verify_server_name(certificate, name).is_ok());
        wanted.next()
    }

    /// Returns true if the certificate has a URI that is wanted.
    fn has_uri(&self, certificate: &CertificateDer<'_>) -> bool {
        let Ok((_, parsed)) = X509Certificate::from_der(certificate) else {
            return false;
        };
        let names = parsed.subject_alternative_name().ok().flatten();
        let names = names.into_iter().flat_map(|extension| &extension.value.general_names);
        let mut uris = names.filter_map(|name| match name {
            GeneralName::URI(uri) => Some(*uri),
            _ => None,
        });
        uris.any(|uri| self.names.iter().any(|name| name == uri))
    }
}

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        if let Some(host) = self.host(&parsed) {
            let verifier = &self.by_name;
            return verifier.verify_server_cert(end_entity, intermediates, &host, ocsp_response, now);
        }
        if !self.has_uri(end_entity) {
            let message = format!("the certificate has none of the names {}", self.names.join(", "));
            return Err(Error::General(message));
        }
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, algorithms)?;
        Ok(ServerCertVerified::assertion())
    }

    verify_signatures!(provider);
}
