//! Connections to other replicas: mutual TLS on the secure port, with a certificate of the mesh for the control plane's
//! own service account. Where this process signs no certificates, the token of the account replaces it. The server must
//! have a name of istiod's Service and a certificate under the roots that proxies trust, so the token reaches no other.

use std::{error::Error, io, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{FutureExt, StreamExt, future::BoxFuture};
use http::uri::PathAndQuery;
use prometheus::{IntCounterVec, Registry};
use tokio::{
    sync::{Mutex, watch},
    time::{Instant, timeout},
};
use tonic::{
    Request, Status,
    client::Grpc,
    metadata::MetadataValue,
    transport::{Channel, Endpoint as TonicEndpoint},
};
use tonic_prost::ProstCodec;

use super::{METHOD, server_names};
use crate::{
    auth::chain::ISTIO_TOKEN_PATH,
    ca::TrustBundle,
    distribution::replicas::{PeerError, Peers, Replica, Replicas, Reports},
    fetch::{ClientTls, Dialer, Endpoint, with_causes},
    ingest::mcp::{IssueCertificate, MeshCertificate},
    metrics,
    model::Installation,
};

/// The time between a certificate and the next one. Certificates of the mesh live longer.
const RENEWAL: Duration = Duration::from_mins(10);
/// The time limit of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// The time after which a silent connection is tested, and that for the answer.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// The largest report, in bytes.
const MAX_REPORT_BYTES: usize = 64 << 20;

/// The inputs of the client.
pub(in crate::app) struct ClientInputs {
    /// The replicas.
    pub(in crate::app) replicas: watch::Receiver<Replicas>,
    /// Issues certificates for the control plane's own identity.
    pub(in crate::app) issue: IssueCertificate,
    /// The roots of the serving certificates, if this process distributes them.
    pub(in crate::app) trust: Option<watch::Receiver<Option<Arc<TrustBundle>>>>,
}

/// The client of the other replicas.
pub(in crate::app) struct PeerClient {
    replicas: watch::Receiver<Replicas>,
    inner: Arc<Inner>,
}

struct Inner {
    issue: IssueCertificate,
    trust: Option<watch::Receiver<Option<Arc<TrustBundle>>>>,
    names: Vec<String>,
    /// The last certificate and its time. Held while one is issued, so that queries share it.
    issued: Mutex<Option<(Instant, MeshCertificate)>>,
    queries: IntCounterVec,
}

/// A proof of the identity of this replica.
enum Credential {
    Certificate(MeshCertificate),
    Token(String),
}

impl PeerClient {
    /// Creates a client. Fails if the name of its metric is in use.
    pub(in crate::app) fn new(
        registry: &Registry,
        installation: &Installation,
        inputs: ClientInputs,
    ) -> Result<Self, prometheus::Error> {
        let queries = metrics::counters(
            registry,
            "istiod_replica_queries_total",
            "Queries to other replicas of the control plane, by result.",
            &["result"],
        )?;
        Ok(Self {
            replicas: inputs.replicas,
            inner: Arc::new(Inner {
                issue: inputs.issue,
                trust: inputs.trust,
                names: server_names(installation),
                issued: Mutex::default(),
                queries,
            }),
        })
    }
}

impl Peers for PeerClient {
    fn replicas(&self) -> watch::Receiver<Replicas> {
        self.replicas.clone()
    }

    fn ask(&self, replica: &Replica, query: String) -> BoxFuture<'static, Result<Reports, PeerError>> {
        let (inner, replica) = (self.inner.clone(), replica.clone());
        async move {
            let asked = inner.ask(&replica, query).await;
            let result = match &asked {
                Ok(_) => "answered",
                Err(PeerError::Closed(_)) => "closed",
                Err(PeerError::Failed(_)) => "failed",
            };
            inner.queries.with_label_values(&[result]).inc();
            // A replica that does not serve yet, or no longer, has a closed port.
            let is_expected = matches!(asked, Err(PeerError::Closed(_))) && !replica.serves;
            if let Some(error) = asked.as_ref().err().filter(|_| !is_expected) {
                let (name, address) = (&replica.name, replica.address());
                tracing::warn!(%name, %address, %error, "replica does not answer");
                // It may be the certificate that is no longer accepted.
                *inner.issued.lock().await = None;
            }
            asked
        }
        .boxed()
    }
}

impl Inner {
    async fn ask(&self, replica: &Replica, query: String) -> Result<Reports, PeerError> {
        let credential = self.credential().await.map_err(PeerError::Failed)?;
        let connecting = timeout(CONNECT_TIMEOUT, self.connect(replica, &credential)).await;
        let no_connection = || PeerError::Failed(format!("no connection within {} s", CONNECT_TIMEOUT.as_secs()));
        let channel = connecting.map_err(|_| no_connection())??;
        let mut client = Grpc::new(channel).max_decoding_message_size(MAX_REPORT_BYTES);
        client
            .ready()
            .await
            .map_err(|error| PeerError::Failed(with_causes(&error)))?;
        let mut request = Request::new(query);
        if let Credential::Token(token) = &credential {
            let header = MetadataValue::try_from(format!("Bearer {token}"));
            let mut header = header.map_err(|error| PeerError::Failed(error.to_string()))?;
            header.set_sensitive(true);
            request.metadata_mut().insert("authorization", header);
        }
        let codec = ProstCodec::<String, Bytes>::default();
        let answering = client.server_streaming(request, PathAndQuery::from_static(METHOD), codec);
        let reports = answering.await.map_err(failed)?.into_inner();
        let reports = reports.map(move |report| {
            // The connection lives as long as its reports are read.
            let _ = &client;
            report.map_err(failed)
        });
        Ok(reports.boxed())
    }

    async fn connect(&self, replica: &Replica, credential: &Credential) -> Result<Channel, PeerError> {
        let invalid = |error: String| PeerError::Failed(error);
        let name = self.names.first().map(String::as_str).unwrap_or_default();
        let tls = self.tls(credential).map_err(invalid)?;
        let config = tls.config().map_err(|error| invalid(error.to_string()))?;
        let endpoint = Endpoint::Host(replica.host.to_string(), replica.port);
        let dialer = Dialer::new(endpoint, Some((name, config))).map_err(|error| invalid(error.to_string()))?;
        let endpoint = TonicEndpoint::from_shared(format!("http://{name}"));
        let endpoint = endpoint
            .map_err(|error| invalid(error.to_string()))?
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE)
            .keep_alive_while_idle(true);
        let connected = endpoint.connect_with_connector(dialer).await;
        connected.map_err(|error| {
            let text = with_causes(&error);
            if is_refused(&error) {
                PeerError::Closed(text)
            } else {
                PeerError::Failed(text)
            }
        })
    }

    fn tls(&self, credential: &Credential) -> Result<ClientTls, String> {
        let trust = self.trust.as_ref().and_then(|trust| trust.borrow().clone());
        let (identity, own_roots) = match credential {
            Credential::Certificate(certificate) => {
                let MeshCertificate { chain, key, roots } = certificate.clone();
                (Some((chain, key)), Some(roots))
            }
            Credential::Token(_) => (None, None),
        };
        let roots = trust.as_ref().map(|trust| trust.roots.clone()).or(own_roots);
        Ok(ClientTls {
            roots: Some(roots.ok_or("the roots of the mesh are not known yet")?),
            identity,
            subject_alt_names: self.names.clone(),
            revoked: trust.and_then(|trust| trust.crl.clone()).unwrap_or_default(),
            alpn: vec![b"h2".to_vec()],
            ..ClientTls::default()
        })
    }

    /// Returns the credential of this replica.
    async fn credential(&self) -> Result<Credential, String> {
        let mut issued = self.issued.lock().await;
        if let Some((at, certificate)) = &*issued
            && at.elapsed() < RENEWAL
        {
            return Ok(Credential::Certificate(certificate.clone()));
        }
        match (self.issue)().await {
            Ok(certificate) => {
                *issued = Some((Instant::now(), certificate.clone()));
                Ok(Credential::Certificate(certificate))
            }
            Err(error) => match tokio::fs::read_to_string(ISTIO_TOKEN_PATH).await {
                Ok(token) => Ok(Credential::Token(token.trim().to_owned())),
                Err(_) => Err(format!("no certificate of the control plane: {error}")),
            },
        }
    }
}

fn failed(status: Status) -> PeerError {
    PeerError::Failed(format!("{:?}: {}", status.code(), status.message()))
}

/// Returns true if the port is closed.
fn is_refused(error: &(dyn Error + 'static)) -> bool {
    let errors = std::iter::successors(Some(error), |error: &&(dyn Error + 'static)| (*error).source());
    let mut system = errors.filter_map(|error| error.downcast_ref::<io::Error>());
    system.any(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}
