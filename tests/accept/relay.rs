//! A gRPC server on a Unix socket between one Envoy and the daemon; network namespaces share the file system. It
//! forwards every message of the delta stream, inserts the code of plugins (see `agent`), and keeps a record. It
//! answers requests for secrets itself (see `secrets`).

use std::convert::Infallible;
use std::future::ready;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use istiod::proto::Any;
use istiod::proto::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use istiod::proto::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use tokio::net::UnixListener;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use super::agent;
use super::record::{SECRET, StreamRecord};
use super::secrets::{self, Rendered};
use crate::support::http::RUNTIME;

const DELTA: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
const SECRETS: &str = "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets";

/// Capacity of the channel in each direction.
const UNDER_WAY: usize = 16;

type Outbox<T> = Sender<Result<T, Status>>;
type Answers<T> = Response<ReceiverStream<Result<T, Status>>>;

/// The server. Dropping it closes its socket.
pub(super) struct Relay {
    shared: Arc<Shared>,
    server: JoinHandle<()>,
}

struct Shared {
    /// The daemon's port on 127.0.0.1.
    xds: u16,
    secrets: Rendered,
    record: Mutex<StreamRecord>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Relay {
    /// Listens on `socket` for one Envoy of the daemon at port `xds`.
    pub(super) fn start(socket: &Path, xds: u16, secrets: Rendered) -> Result<Relay, String> {
        let shared = Arc::new(Shared {
            xds,
            secrets,
            record: Mutex::default(),
        });
        let _runtime = RUNTIME.enter();
        let listener = UnixListener::bind(socket).map_err(|error| format!("{}: {error}", socket.display()))?;
        let server = RUNTIME.spawn(serve(listener, Arc::clone(&shared)));
        Ok(Relay { shared, server })
    }

    pub(super) fn record(&self) -> MutexGuard<'_, StreamRecord> {
        self.shared.record()
    }
}

impl Shared {
    fn record(&self) -> MutexGuard<'_, StreamRecord> {
        // A test that panicked does not read the record.
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn serve(listener: UnixListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        let answers = service_fn(move |request| {
            let shared = Arc::clone(&shared);
            async move { Ok::<_, Infallible>(dispatch(request, shared).await) }
        });
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        let connection = connection.serve_connection(TokioIo::new(stream), answers);
        // Envoy may close a connection at any time; the record shows what was pending.
        RUNTIME.spawn(async move {
            let _ = connection.await;
        });
    }
}

async fn dispatch(request: http::Request<Incoming>, shared: Arc<Shared>) -> http::Response<tonic::body::Body> {
    match request.uri().path() {
        DELTA => {
            let rpc = tower::service_fn(move |request| ready(delta(request, Arc::clone(&shared))));
            let codec = ProstCodec::<DeltaDiscoveryResponse, DeltaDiscoveryRequest>::default();
            tonic::server::Grpc::new(codec).streaming(rpc, request).await
        }
        SECRETS => {
            let rpc = tower::service_fn(move |request| ready(of_agent(request, Arc::clone(&shared))));
            let codec = ProstCodec::<DiscoveryResponse, DiscoveryRequest>::default();
            tonic::server::Grpc::new(codec).streaming(rpc, request).await
        }
        path => Status::unimplemented(path.to_owned()).into_http(),
    }
}

fn delta(
    request: Request<Streaming<DeltaDiscoveryRequest>>,
    shared: Arc<Shared>,
) -> Result<Answers<DeltaDiscoveryResponse>, Status> {
    shared.record().streams += 1;
    let (outbox, answers) = mpsc::channel(UNDER_WAY);
    RUNTIME.spawn(async move {
        if let Err(status) = pass_on(request.into_inner(), &outbox, &shared).await {
            shared.record().broken = Some(status.to_string());
            let _ = outbox.send(Err(status)).await;
        }
    });
    Ok(Response::new(ReceiverStream::new(answers)))
}

/// The status for a message whose receiver was dropped.
fn gone<T>(_: mpsc::error::SendError<T>) -> Status {
    Status::unavailable("the peer has disconnected")
}

/// Forwards both directions until either side ends.
async fn pass_on(
    mut requests: Streaming<DeltaDiscoveryRequest>,
    outbox: &Outbox<DeltaDiscoveryResponse>,
    shared: &Shared,
) -> Result<(), Status> {
    let (inbox, forwarded) = mpsc::channel(UNDER_WAY);
    let mut responses = daemon(shared.xds, forwarded).await?;
    let mut secrets = 0_usize;
    loop {
        tokio::select! {
            request = requests.message() => {
                // An Envoy that is killed resets its stream; that is not an error.
                let Ok(Some(request)) = request else { return Ok(()) };
                shared.record().request(&request);
                if request.type_url != SECRET {
                    inbox.send(request).await.map_err(gone)?;
                } else if let Some(response) = secrets_for(&request, shared, &mut secrets)? {
                    shared.record().response(&response);
                    outbox.send(Ok(response)).await.map_err(gone)?;
                }
            }
            response = responses.message() => {
                let mut response = response?.ok_or_else(|| Status::unavailable("the daemon closed the stream"))?;
                agent::fetch(&mut response);
                shared.record().response(&response);
                outbox.send(Ok(response)).await.map_err(gone)?;
            }
        }
    }
}

async fn daemon(
    xds: u16,
    forwarded: Receiver<DeltaDiscoveryRequest>,
) -> Result<Streaming<DeltaDiscoveryResponse>, Status> {
    let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{xds}")).expect("the address is valid");
    let channel = endpoint
        .connect()
        .await
        .map_err(|error| Status::unavailable(format!("{error:?}")))?;
    let mut client = AggregatedDiscoveryServiceClient::new(channel).max_decoding_message_size(1 << 30);
    let stream = client
        .delta_aggregated_resources(ReceiverStream::new(forwarded))
        .await?;
    Ok(stream.into_inner())
}

/// The response to a request for the daemon's secrets; none for an ACK.
fn secrets_for(
    request: &DeltaDiscoveryRequest,
    shared: &Shared,
    count: &mut usize,
) -> Result<Option<DeltaDiscoveryResponse>, Status> {
    if request.resource_names_subscribe.is_empty() {
        return Ok(None);
    }
    let rendered = tokio::task::block_in_place(|| shared.secrets.as_ref());
    let rendered = rendered.map_err(|error| Status::internal(error.clone()))?;
    let resource = |name: &String| {
        rendered.get(name).map(|secret| Resource {
            name: name.clone(),
            version: "1".into(),
            resource: Some(secret.clone()),
            ..Default::default()
        })
    };
    let resources: Vec<Resource> = request.resource_names_subscribe.iter().filter_map(resource).collect();
    *count += 1;
    Ok((!resources.is_empty()).then(|| DeltaDiscoveryResponse {
        type_url: SECRET.into(),
        nonce: format!("secrets-{count}"),
        resources,
        ..Default::default()
    }))
}

/// The agent's own SDS service: one stream for each secret.
fn of_agent(
    request: Request<Streaming<DiscoveryRequest>>,
    shared: Arc<Shared>,
) -> Result<Answers<DiscoveryResponse>, Status> {
    let mut requests = request.into_inner();
    let (outbox, answers) = mpsc::channel(UNDER_WAY);
    RUNTIME.spawn(async move {
        let mut names = Vec::new();
        while let Ok(Some(request)) = requests.message().await {
            if let Some(error) = request.error_detail {
                let complaint = format!("{:?}: {}", request.resource_names, error.message);
                shared.record().refused_secrets.push(complaint);
            }
            if names == request.resource_names {
                continue;
            }
            names = request.resource_names;
            let response = DiscoveryResponse {
                version_info: "1".into(),
                type_url: SECRET.into(),
                nonce: names.join(","),
                resources: names.iter().map(|name| secrets::of_agent(name)).collect::<Vec<Any>>(),
                ..Default::default()
            };
            if outbox.send(Ok(response)).await.is_err() {
                return;
            }
        }
    });
    Ok(Response::new(ReceiverStream::new(answers)))
}
