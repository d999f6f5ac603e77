//! A port of the daemon, as attackers and honest proxies reach it, and a proxy without the rest of Envoy.

use std::{io, net::Ipv4Addr, sync::Arc};

use hyper_util::rt::TokioIo;
use istiod::proto::envoy::{
    config::core::v3,
    service::discovery::v3::{
        DiscoveryRequest, DiscoveryResponse,
        aggregated_discovery_service_client::AggregatedDiscoveryServiceClient as Client,
    },
};
use tokio::{net::TcpSocket, sync::mpsc};
use tokio_rustls::{TlsConnector, rustls::pki_types::ServerName};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Streaming,
    transport::{Channel, Endpoint},
};

use super::super::flood::Stream;
use crate::{
    secure::authority::Authority,
    support::agent::{Agent, Trust},
};

pub(super) const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
pub(super) const ENDPOINT: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
pub(super) const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
pub(super) const ROUTE: &str = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration";

/// A port, and the credentials of its clients.
#[derive(Clone)]
pub(super) struct Port {
    number: u16,
    tls: Option<TlsConnector>,
}

impl Port {
    pub(super) fn plaintext(number: u16) -> Self {
        Self { number, tls: None }
    }

    /// The secure port, for a client with a certificate of this service account in namespace `app`.
    pub(super) fn secure(number: u16, authority: &Authority, account: &str) -> Result<Self, String> {
        let certificate = authority.certificate(&format!("spiffe://cluster.local/ns/app/sa/{account}"));
        let tls = Agent::new(number, Trust::Anything).tls(Some(&certificate))?;
        let tls = Some(TlsConnector::from(Arc::new(tls)));
        Ok(Self { number, tls })
    }

    /// The secure port, for a client without a certificate.
    pub(super) fn unauthenticated(number: u16) -> Result<Self, String> {
        let tls = Agent::new(number, Trust::Anything).tls(None)?;
        let tls = Some(TlsConnector::from(Arc::new(tls)));
        Ok(Self { number, tls })
    }

    /// Opens a connection.
    pub(super) async fn open(&self) -> io::Result<Stream> {
        self.open_with_buffer(None).await
    }

    /// Opens a connection whose socket holds about this many unread bytes.
    pub(super) async fn open_with_buffer(&self, bytes: Option<u32>) -> io::Result<Stream> {
        let socket = TcpSocket::new_v4()?;
        if let Some(bytes) = bytes {
            socket.set_recv_buffer_size(bytes)?;
        }
        let stream = socket.connect((Ipv4Addr::LOCALHOST, self.number).into()).await?;
        stream.set_nodelay(true)?;
        let Some(tls) = &self.tls else {
            return Ok(Box::new(stream));
        };
        let name = ServerName::try_from("istiod.istio-system.svc").expect("the server name is valid");
        Ok(Box::new(tls.connect(name, stream).await?))
    }

    pub(super) async fn client(&self) -> Result<Client<Channel>, String> {
        let port = self.clone();
        let connector = tower::service_fn(move |_| {
            let port = port.clone();
            async move { Ok::<_, io::Error>(TokioIo::new(port.open().await?)) }
        });
        let endpoint = Endpoint::from_static("http://istiod").initial_stream_window_size(65_535);
        let channel = endpoint.connect_with_connector(connector).await.map_err(text)?;
        Ok(Client::new(channel).max_decoding_message_size(256 << 20))
    }
}

/// A stream of a client, with its first request sent.
pub(super) struct AdsStream {
    pub(super) requests: mpsc::Sender<DiscoveryRequest>,
    responses: Streaming<DiscoveryResponse>,
}

pub(super) fn request(node: &str, type_url: &str, names: Vec<String>) -> DiscoveryRequest {
    DiscoveryRequest {
        node: Some(v3::Node {
            id: node.to_owned(),
            ..Default::default()
        }),
        type_url: type_url.to_owned(),
        resource_names: names,
        ..Default::default()
    }
}

/// The node of a sidecar in namespace `app`.
pub(super) fn sidecar(pod: &str) -> String {
    format!("sidecar~10.0.0.9~{pod}.app~app.svc.cluster.local")
}

pub(super) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl AdsStream {
    /// Subscribes to endpoints of these names, or to clusters.
    pub(super) async fn open(port: &Port, pod: &str, names: Vec<String>) -> Result<Self, String> {
        Self::of_client(&mut port.client().await?, pod, names).await
    }

    pub(super) async fn of_client(client: &mut Client<Channel>, pod: &str, names: Vec<String>) -> Result<Self, String> {
        let type_url = if names.is_empty() { CLUSTER } else { ENDPOINT };
        Self::requesting(client, request(&sidecar(pod), type_url, names)).await
    }

    pub(super) async fn requesting(client: &mut Client<Channel>, first: DiscoveryRequest) -> Result<Self, String> {
        let (requests, outbox) = mpsc::channel(4);
        requests.send(first).await.map_err(text)?;
        let responses = client.stream_aggregated_resources(ReceiverStream::new(outbox)).await;
        Ok(Self {
            requests,
            responses: responses.map_err(text)?.into_inner(),
        })
    }

    pub(super) async fn response(&mut self) -> Result<DiscoveryResponse, String> {
        let response = self.responses.message().await.map_err(text)?;
        response.ok_or_else(|| "the stream has ended".to_owned())
    }
}

/// Returns distinct names, each about 45 bytes long.
pub(super) fn names(list: usize, number: usize) -> Vec<String> {
    let name = |name| format!("outbound|80||{list}-{name}.app.svc.cluster.local");
    (0..number).map(name).collect()
}
