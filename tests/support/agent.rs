//! The client side of istio-agent at the secure port: it creates a key, requests a certificate with a token or with its
//! previous certificate, and opens an ADS stream with it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use istiod::fetch::UnverifiedServer;
use istiod::proto::envoy::config::core::v3;
use istiod::proto::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use istiod::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use istiod::proto::istio::v1::auth::IstioCertificateRequest;
use istiod::proto::istio::v1::auth::istio_certificate_service_client::IstioCertificateServiceClient;
use istiod::proto::json::struct_from_json;
use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_RSA_SHA256};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::io::AsyncBufReadExt;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

use super::envoy::Node;
use super::wait;

/// Time limit of one response on a quiet machine.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Verification of a server's certificate.
#[derive(Clone, Debug)]
pub(crate) enum Trust {
    /// These roots, as PEM.
    Roots(String),
    /// Any certificate is accepted.
    Anything,
}

/// Credentials that an agent sends.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClientCredentials {
    /// A client certificate.
    pub(crate) certificate: Option<Certificate>,
    /// A bearer token.
    pub(crate) token: Option<String>,
    /// The cluster that issued the token.
    pub(crate) cluster: Option<String>,
    /// Other headers.
    pub(crate) headers: Vec<(&'static str, String)>,
}

impl ClientCredentials {
    /// A token of the cluster that it is sent to.
    pub(crate) fn token(token: impl Into<String>) -> ClientCredentials {
        ClientCredentials {
            token: Some(token.into()),
            ..ClientCredentials::default()
        }
    }

    /// A certificate.
    pub(crate) fn certificate(certificate: Certificate) -> ClientCredentials {
        ClientCredentials {
            certificate: Some(certificate),
            ..ClientCredentials::default()
        }
    }

    /// Returns a request with these credentials in its metadata.
    pub(crate) fn request<M>(&self, message: M) -> Request<M> {
        let mut request = Request::new(message);
        let text = |text: &str| MetadataValue::try_from(text).expect("test headers are ASCII");
        if let Some(token) = &self.token {
            let bearer = format!("Bearer {token}");
            request.metadata_mut().insert("authorization", text(&bearer));
        }
        if let Some(cluster) = &self.cluster {
            request.metadata_mut().insert("clusterid", text(cluster));
        }
        for (name, value) in &self.headers {
            request.metadata_mut().append(*name, text(value));
        }
        request
    }
}

/// A certificate with its key.
#[derive(Clone, Debug)]
pub(crate) struct Certificate {
    /// The leaf and the intermediates up to the roots, as PEM.
    pub(crate) chain: String,
    /// PKCS#8, as PEM.
    pub(crate) key: String,
    /// The roots that it was issued with, as PEM; empty if there were none.
    pub(crate) roots: String,
}

/// The kinds of keys that agents create.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KeyKind {
    Ecdsa,
    Rsa,
}

/// Creates a key and the CSR for it, both as PEM.
pub(crate) fn signing_request(kind: KeyKind) -> (String, String) {
    let algorithm = match kind {
        KeyKind::Ecdsa => &PKCS_ECDSA_P256_SHA256,
        KeyKind::Rsa => &PKCS_RSA_SHA256,
    };
    let key = KeyPair::generate_for(algorithm).expect("key generation succeeds");
    let csr = CertificateParams::default()
        .serialize_request(&key)
        .and_then(|request| request.pem())
        .expect("signing succeeds");
    (key.serialize_pem(), csr)
}

/// An agent.
#[derive(Clone, Debug)]
pub(crate) struct Agent {
    /// The secure port.
    pub(crate) address: SocketAddr,
    /// The expected name in the server's certificate.
    pub(crate) server: String,
    /// Verification of the server's certificate.
    pub(crate) trust: Trust,
}

impl Agent {
    /// An agent of the daemon in `istio-system` on this port of 127.0.0.1.
    pub(crate) fn new(port: u16, trust: Trust) -> Agent {
        Agent {
            address: SocketAddr::from(([127, 0, 0, 1], port)),
            server: "istiod.istio-system.svc".to_owned(),
            trust,
        }
    }

    /// Opens a new connection. It is an error if the server refuses the certificate.
    pub(crate) async fn channel(&self, credentials: &ClientCredentials) -> Result<Channel, String> {
        let tls = TlsConnector::from(Arc::new(self.tls(credentials.certificate.as_ref())?));
        let name = ServerName::try_from(self.server.clone()).map_err(|error| error.to_string())?;
        let address = self.address;
        let connector = tower::service_fn(move |_| {
            let (tls, name) = (tls.clone(), name.clone());
            async move {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                let mut stream = tls.connect(name, stream).await?;
                // With TLS 1.3, the client is connected before the server has verified its certificate. If the server
                // then closes the connection just while hyper queues a request, the queue may keep the request for
                // ever. A server of HTTP/2 speaks first, so its first bytes show that it has accepted the client.
                if stream.fill_buf().await?.is_empty() {
                    return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof));
                }
                Ok::<_, std::io::Error>(TokioIo::new(stream))
            }
        });
        Endpoint::from_static("http://istiod")
            .connect_timeout(wait::extended(TIMEOUT))
            .connect_with_connector(connector)
            .await
            .map_err(|error| chain_of(&error))
    }

    /// Creates a key and requests a certificate for it.
    pub(crate) async fn certificate(
        &self,
        credentials: &ClientCredentials,
        kind: KeyKind,
    ) -> Result<Certificate, Status> {
        self.certificate_for(credentials, kind, None).await
    }

    /// Like [`Self::certificate`], for the identity of another workload if one is given.
    pub(crate) async fn certificate_for(
        &self,
        credentials: &ClientCredentials,
        kind: KeyKind,
        impersonated: Option<&str>,
    ) -> Result<Certificate, Status> {
        let (key, csr) = signing_request(kind);
        let metadata = impersonated.map(|identity| json!({ "ImpersonatedIdentity": identity }));
        let request = IstioCertificateRequest {
            csr,
            validity_duration: 3600,
            metadata: metadata.as_ref().and_then(Value::as_object).map(struct_from_json),
        };
        let mut entries = self.sign(credentials, request).await?;
        let roots = entries.pop().unwrap_or_default();
        Ok(Certificate {
            chain: entries.concat(),
            key,
            roots,
        })
    }

    /// Calls `CreateCertificate` once. Returns the entries of the chain.
    pub(crate) async fn sign(
        &self,
        credentials: &ClientCredentials,
        request: IstioCertificateRequest,
    ) -> Result<Vec<String>, Status> {
        let channel = self.channel(credentials).await.map_err(Status::unavailable)?;
        let mut client = IstioCertificateServiceClient::new(channel);
        let mut request = credentials.request(request);
        request.set_timeout(wait::extended(TIMEOUT));
        Ok(client.create_certificate(request).await?.into_inner().cert_chain)
    }

    /// Opens an ADS stream without sending a request.
    pub(crate) async fn ads(&self, credentials: &ClientCredentials, node: &Node) -> Result<Stream, Status> {
        let channel = self.channel(credentials).await.map_err(Status::unavailable)?;
        Stream::open(channel, credentials, node).await
    }

    /// The TLS configuration of a client of the control plane.
    pub(crate) fn tls(&self, certificate: Option<&Certificate>) -> Result<ClientConfig, String> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        let builder = match &self.trust {
            Trust::Anything => builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(UnverifiedServer(provider))),
            Trust::Roots(pem) => {
                let mut roots = RootCertStore::empty();
                for root in certificates(pem)? {
                    roots.add(root).map_err(|error| error.to_string())?;
                }
                builder.with_root_certificates(roots)
            }
        };
        let mut config = match certificate {
            None => builder.with_no_client_auth(),
            Some(certificate) => {
                let key =
                    PrivateKeyDer::from_pem_slice(certificate.key.as_bytes()).map_err(|error| error.to_string())?;
                builder
                    .with_client_auth_cert(certificates(&certificate.chain)?, key)
                    .map_err(|error| error.to_string())?
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }
}

/// Parses the certificates of a PEM text.
pub(crate) fn certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|error| error.to_string())
}

fn chain_of(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}

/// An ADS stream, state of the world.
pub(crate) struct Stream {
    node: v3::Node,
    requests: mpsc::Sender<DiscoveryRequest>,
    responses: Streaming<DiscoveryResponse>,
}

impl Stream {
    /// Opens a stream on a connection.
    pub(crate) async fn open(channel: Channel, credentials: &ClientCredentials, node: &Node) -> Result<Stream, Status> {
        let (requests, outbox) = mpsc::channel(16);
        let request = credentials.request(ReceiverStream::new(outbox));
        let responses = AggregatedDiscoveryServiceClient::new(channel)
            .max_decoding_message_size(64 << 20)
            .stream_aggregated_resources(request)
            .await?;
        Ok(Stream {
            node: v3::Node {
                id: node.id.clone(),
                metadata: node.metadata.as_object().map(struct_from_json),
                ..Default::default()
            },
            requests,
            responses: responses.into_inner(),
        })
    }

    /// Subscribes to resources of a type and waits for a response with that type.
    pub(crate) async fn ask(&mut self, type_url: &str, names: &[&str]) -> Result<DiscoveryResponse, Status> {
        self.exchange(DiscoveryRequest {
            type_url: type_url.to_owned(),
            resource_names: names.iter().map(|name| (*name).to_owned()).collect(),
            ..Default::default()
        })
        .await
    }

    /// Sends a request with the node of the stream.
    pub(crate) async fn send(&mut self, request: DiscoveryRequest) -> Result<(), Status> {
        let request = DiscoveryRequest {
            node: Some(self.node.clone()),
            ..request
        };
        if self.requests.send(request).await.is_err() {
            return Err(self.end().await);
        }
        Ok(())
    }

    /// Sends a request with the node of the stream, and waits for a response with its type.
    pub(crate) async fn exchange(&mut self, request: DiscoveryRequest) -> Result<DiscoveryResponse, Status> {
        let type_url = request.type_url.clone();
        self.send(request).await?;
        loop {
            let response = self.next().await?;
            if response.type_url == type_url {
                return Ok(response);
            }
        }
    }

    /// Returns the next response.
    pub(crate) async fn next(&mut self) -> Result<DiscoveryResponse, Status> {
        let next = tokio::time::timeout(wait::extended(TIMEOUT), self.responses.message()).await;
        next.map_err(|_| Status::deadline_exceeded("no response in time"))??
            .ok_or_else(|| Status::ok("the stream ended"))
    }

    /// Waits until the stream ends and returns its status.
    pub(crate) async fn end(&mut self) -> Status {
        loop {
            if let Err(status) = self.next().await {
                return status;
            }
        }
    }
}
