//! Connections to the server of a config source.

use std::{io, sync::Arc};

use bytes::Bytes;
use futures::future::BoxFuture;
use tonic::transport::{self, Channel, Endpoint as TonicEndpoint};

use super::CONNECTION;
use crate::{
    base::Sensitive,
    fetch::{ClientTls, ClientTlsError, Dialer, Endpoint, ServerNameError, with_causes},
    proto::istio::networking::v1alpha3::{ClientTlsSettings, client_tls_settings::TlSmode},
};

/// A certificate of the mesh for this control plane, as PEM.
#[derive(Clone, Debug)]
pub struct MeshCertificate {
    /// The chain, the leaf first.
    pub chain: Bytes,
    /// The key.
    pub key: Sensitive,
    /// The roots of the mesh.
    pub roots: Bytes,
}

/// Issues certificates of the mesh, for `ISTIO_MUTUAL`.
pub type IssueCertificate = Arc<dyn Fn() -> BoxFuture<'static, Result<MeshCertificate, String>> + Send + Sync>;

/// Reads the roots in the Secret of a `credentialName`, as PEM.
pub type ReadRoots = Arc<dyn Fn(String) -> BoxFuture<'static, Result<Bytes, String>> + Send + Sync>;

/// Reason why the server is not connected. Retryable.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    /// The settings of TLS lack this field.
    #[error("tlsSettings.{0} is required for MUTUAL")]
    Missing(&'static str),
    /// A file that the settings of TLS name cannot be read.
    #[error("cannot read {path}: {error}")]
    File {
        /// The file.
        path: String,
        /// The cause.
        #[source]
        error: io::Error,
    },
    /// [`ReadRoots`] failed, for this reason.
    #[error("{0}")]
    Roots(String),
    /// [`IssueCertificate`] failed, for this reason.
    #[error("{0}")]
    Certificate(String),
    /// The settings of TLS are unusable.
    #[error(transparent)]
    Tls(#[from] ClientTlsError),
    /// The server has no name for TLS.
    #[error(transparent)]
    ServerName(#[from] ServerNameError),
    /// The address is invalid.
    #[error(transparent)]
    Address(transport::Error),
    /// The connection failed.
    #[error("{}", with_causes(.0))]
    Connection(#[source] transport::Error),
}

/// The server of a config source.
#[derive(Clone)]
pub(super) struct Server {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) tls: Option<ClientTlsSettings>,
    pub(super) issue: IssueCertificate,
    pub(super) read_roots: ReadRoots,
}

impl Server {
    /// Connects, with the certificates that are valid now.
    pub(super) async fn connect(&self) -> Result<Channel, ConnectError> {
        let tls = self.tls().await?;
        let tls = match &tls {
            None => None,
            Some(tls) => Some((tls.server_name.as_str(), tls.config()?)),
        };
        let dialer = Dialer::new(Endpoint::Host(self.host.clone(), self.port), tls)?;
        let endpoint = TonicEndpoint::from_shared(format!("http://{}:{}", self.host, self.port));
        let endpoint = endpoint
            .map_err(ConnectError::Address)?
            .http2_keep_alive_interval(CONNECTION.keepalive_interval)
            .keep_alive_timeout(CONNECTION.keepalive_timeout)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(CONNECTION.window_bytes)
            .initial_connection_window_size(CONNECTION.window_bytes);
        let connected = endpoint.connect_with_connector(dialer).await;
        connected.map_err(ConnectError::Connection)
    }

    /// Returns the settings of TLS; `None` for plaintext.
    async fn tls(&self) -> Result<Option<ClientTls>, ConnectError> {
        let Some(settings) = &self.tls else { return Ok(None) };
        let base = ClientTls {
            server_name: settings.sni.clone(),
            subject_alt_names: settings.subject_alt_names.clone(),
            insecure_skip_verify: settings.insecure_skip_verify.unwrap_or_default(),
            revoked: pem(&settings.ca_crl)?.unwrap_or_default(),
            alpn: vec![b"h2".to_vec()],
            ..ClientTls::default()
        };
        let roots = match settings.credential_name.as_str() {
            "" => pem(&settings.ca_certificates)?,
            name => Some((self.read_roots)(name.to_owned()).await.map_err(ConnectError::Roots)?),
        };
        match settings.mode() {
            TlSmode::Disable => Ok(None),
            TlSmode::Simple => Ok(Some(ClientTls { roots, ..base })),
            TlSmode::Mutual => {
                let chain = pem(&settings.client_certificate)?.ok_or(ConnectError::Missing("clientCertificate"))?;
                let key = pem(&settings.private_key)?.ok_or(ConnectError::Missing("privateKey"))?;
                Ok(Some(ClientTls {
                    roots,
                    identity: Some((chain, Sensitive::new(key))),
                    ..base
                }))
            }
            TlSmode::IstioMutual => {
                let certificate = (self.issue)().await.map_err(ConnectError::Certificate)?;
                Ok(Some(ClientTls {
                    roots: Some(roots.unwrap_or(certificate.roots)),
                    identity: Some((certificate.chain, certificate.key)),
                    ..base
                }))
            }
        }
    }
}

/// Returns PEM that is given as text or as the path of a file; `None` if nothing is given.
///
/// Parity (pkg/adsc/adsc.go): `caCertificates` is the text itself. DestinationRules have paths.
fn pem(given: &str) -> Result<Option<Bytes>, ConnectError> {
    match given {
        "" => Ok(None),
        text if text.contains("-----BEGIN ") => Ok(Some(Bytes::from(text.to_owned()))),
        path => match std::fs::read(path) {
            Ok(bytes) => Ok(Some(bytes.into())),
            Err(error) => Err(ConnectError::File {
                path: path.to_owned(),
                error,
            }),
        },
    }
}
