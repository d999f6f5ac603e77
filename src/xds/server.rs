//! The gRPC service `AggregatedDiscoveryService`, and the connections that carry it. The only place where gRPC statuses
//! are made.

use std::{
    collections::hash_map::RandomState, convert::Infallible, future::Future, hash::BuildHasher, io, net::SocketAddr,
    panic::AssertUnwindSafe, pin::pin, sync::Arc, time::Duration,
};

use bytes::Bytes;
use futures::FutureExt;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use hyper::{server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use super::{
    admission::{Admission, Limits},
    body::{Body, Outlet},
    connection::Protocol,
    events::{Events, Rejection},
    metrics::Metrics,
    registry::Registry,
    request::{RequestError, Requests},
    stream::{End, Patience, Shared, Stream},
};
use crate::{
    environment::{self, Environment},
    push::groups::Groups,
    settings::{ConnectionAge, DiscoveryFlags},
    task::Tasks,
};

const SOTW_PATH: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
const DELTA_PATH: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// How long the preparation of a connection (TLS) may take.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);
/// How long the last trailers of a connection may take.
const LAST_PATIENCE: Duration = Duration::from_secs(1);
/// How long accepting rests after an error such as "too many open files".
const ACCEPT_REST: Duration = Duration::from_millis(100);
/// What a client may send before it is read: the names of a request are small, and each stream may use this much memory.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;
const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;

/// How the server works.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// A connection that is silent for so long is pinged (`--keepaliveInterval`).
    pub keepalive_interval: Duration,
    /// A ping that is not answered by then ends the connection (`--keepaliveTimeout`).
    pub keepalive_timeout: Duration,
    /// A connection that is so old is closed, more or less (`--keepaliveMaxServerConnectionAge`).
    pub max_connection_age: Option<Duration>,
    /// How long streams of a connection that reached its age may end by themselves.
    pub age_grace: Duration,
    /// Concurrent streams of a connection (`ISTIO_GPRC_MAXSTREAMS`).
    pub max_streams: u32,
    /// Largest request (`ISTIO_GPRC_MAXRECVMSGSIZE`).
    pub max_message_bytes: usize,
    /// What may be in flight.
    pub limits: Limits,
    /// How long streams may take.
    pub patience: Patience,
}

impl Default for ServerOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            keepalive_interval: Duration::from_secs(30),
            keepalive_timeout: Duration::from_secs(10),
            max_connection_age: None,
            age_grace: Duration::from_secs(10),
            max_streams: 100_000,
            max_message_bytes: 4 << 20,
            limits: Limits {
                // As many as Istio generates for at once.
                first_configurations: (15 + 5 * cores).min(100),
                bytes_in_flight: 256 << 20,
                longest_wait: Duration::from_secs(10),
                streams_per_second: None,
            },
            patience: Patience::default(),
        }
    }
}

impl ServerOptions {
    /// The defaults but for what flags say; what feature variables say is up to the caller.
    pub fn from_flags(flags: &DiscoveryFlags) -> Self {
        Self {
            keepalive_interval: flags.keepalive_interval,
            keepalive_timeout: flags.keepalive_timeout,
            max_connection_age: match flags.keepalive_max_server_connection_age {
                Some(ConnectionAge::AtMost(age)) => Some(age),
                Some(ConnectionAge::Infinite) | None => None,
            },
            ..Self::default()
        }
    }
}

/// What is known of the other side of a connection; a request without it in its extensions has an unknown peer.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its address.
    pub address: SocketAddr,
}

/// Cancelled when the streams of a connection are to end; in the extensions of its requests.
#[derive(Clone, Debug)]
struct Draining(CancellationToken);

/// The server. Cheap to clone.
#[derive(Clone)]
pub struct Server {
    shared: Arc<Shared>,
    ready: watch::Receiver<bool>,
    tasks: Tasks,
    options: ServerOptions,
}

impl Server {
    /// A server that serves what groups are sent, once the environment is ready. An error means that a metric's name is
    /// taken.
    ///
    /// `events` is told of machines and their health; without it such clients are served like all others.
    pub fn new(
        environment: &Environment,
        groups: Groups,
        options: ServerOptions,
        events: Option<Events>,
    ) -> Result<Self, prometheus::Error> {
        let shared = Shared {
            groups,
            registry: Arc::default(),
            metrics: Metrics::new(&environment.registry)?,
            admission: Admission::new(options.limits, environment::now),
            patience: options.patience,
            max_message_bytes: options.max_message_bytes,
            clock: environment::now,
            wall_clock: environment::wall_clock,
            events,
        };
        Ok(Self {
            shared: Arc::new(shared),
            ready: environment.ready.subscribe(),
            tasks: environment.tasks.clone(),
            options,
        })
    }

    /// The live connections, for debug pages.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.shared.registry
    }

    /// Serves plaintext connections until shutdown.
    pub async fn serve(&self, listener: TcpListener) {
        self.serve_with(listener, |stream| async { Ok(stream) }).await;
    }

    /// Serves connections until shutdown. `handshake` makes of a TCP stream what HTTP/2 is spoken over; it runs in the
    /// connection's own task and is given up after ten seconds.
    pub async fn serve_with<H, F, I>(&self, listener: TcpListener, handshake: H)
    where
        H: Fn(TcpStream) -> F,
        F: Future<Output = io::Result<I>> + Send + 'static,
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let shutdown = self.tasks.shutdown().clone();
        loop {
            let accepted = tokio::select! {
                () = shutdown.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted; hint: the limit of open files may be too low");
                    tokio::time::sleep(ACCEPT_REST).await;
                    continue;
                }
            };
            // Responses are written when they are whole; waiting for more would only delay them.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, %address, "TCP_NODELAY cannot be set");
            }
            let server = self.clone();
            let prepared = tokio::time::timeout(HANDSHAKE_PATIENCE, handshake(stream));
            self.tasks.spawn("xds connection", async move {
                match prepared.await {
                    Ok(Ok(io)) => server.connection(io, Peer { address }).await,
                    Ok(Err(error)) => tracing::debug!(%address, %error, "the handshake failed"),
                    Err(_) => tracing::debug!(%address, "the handshake took too long"),
                }
            });
        }
    }

    /// Serves one connection to its end.
    async fn connection<I>(&self, io: I, peer: Peer)
    where
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let address = peer.address;
        let draining = CancellationToken::new();
        let service = service_fn(|mut request: Request<hyper::body::Incoming>| {
            request.extensions_mut().insert(peer.clone());
            request.extensions_mut().insert(Draining(draining.clone()));
            let server = self.clone();
            async move { Ok::<_, Infallible>(server.handle(request).await) }
        });
        let mut builder = http2::Builder::new(Executor(self.tasks.clone()));
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(self.options.keepalive_interval)
            .keep_alive_timeout(self.options.keepalive_timeout)
            .max_concurrent_streams(self.options.max_streams)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
        let mut connection = pin!(builder.serve_connection(TokioIo::new(io), service));
        let age = self.options.max_connection_age.map(jittered);
        tokio::select! {
            ended = connection.as_mut() => return log_end(address, ended),
            () = tokio::time::sleep(age.unwrap_or_default()), if age.is_some() => {
                // Clients that heed the GOAWAY move in their own time.
                connection.as_mut().graceful_shutdown();
                tokio::select! {
                    ended = connection.as_mut() => return log_end(address, ended),
                    () = tokio::time::sleep(self.options.age_grace) => {}
                    () = self.tasks.shutdown().cancelled() => {}
                }
            }
            () = self.tasks.shutdown().cancelled() => connection.as_mut().graceful_shutdown(),
        }
        draining.cancel();
        if let Ok(ended) = tokio::time::timeout(LAST_PATIENCE, connection).await {
            log_end(address, ended);
        }
    }

    /// Answers one request; streams go on after the response was given. Usable under any HTTP/2 server, see
    /// [`FlatBody`](super::body::FlatBody) for those that want plain `Bytes`.
    pub async fn handle<B>(&self, request: Request<B>) -> Response<Body>
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: std::fmt::Display,
    {
        if request.method() != Method::POST || !is_grpc(request.headers()) {
            return unsupported();
        }
        let protocol = match request.uri().path() {
            SOTW_PATH => Protocol::Sotw,
            DELTA_PATH => Protocol::Delta,
            path => return refusal(&Status::unimplemented(format!("unknown method {path}"))),
        };
        if !*self.ready.borrow() {
            let message = "server is not ready to serve discovery information";
            return refusal(&Status::unavailable(message));
        }
        if let Err(error) = self.shared.admission.stream().await {
            return refusal(&Status::resource_exhausted(error.to_string()));
        }
        let (body, outlet) = Body::channel();
        let (parts, requests) = request.into_parts();
        let draining = parts
            .extensions
            .get()
            .map_or_else(|| self.tasks.shutdown().clone(), |Draining(draining)| draining.clone());
        let stream = Stream {
            shared: self.shared.clone(),
            protocol,
            peer: parts.extensions.get().map(|peer: &Peer| peer.address),
            requests: Requests::new(protocol, requests, self.shared.max_message_bytes),
            outlet: outlet.clone(),
            draining,
        };
        self.tasks.spawn("xds stream", run(stream, outlet));
        let mut response = Response::new(body);
        response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
        response
    }
}

/// Runs a stream and says how it ended.
async fn run<B>(stream: Stream<B>, outlet: Outlet)
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    let shared = stream.shared.clone();
    let status = match AssertUnwindSafe(stream.run()).catch_unwind().await {
        Ok(Ok(())) => Status::ok(""),
        Ok(Err(End::Gone)) => return,
        Ok(Err(end)) => {
            tracing::debug!(%end, "a stream ends");
            status(&end)
        }
        Err(_) => {
            shared.metrics.internal_errors.inc();
            tracing::error!("a stream panicked; this is a defect of istiod");
            Status::internal("a defect of the control plane ended the stream")
        }
    };
    // If the client is gone, nobody wants to know.
    let _ = outlet.end(headers(&status)).await;
}

fn status(end: &End) -> Status {
    let code = match end {
        End::Gone => Code::Cancelled,
        End::Draining | End::ShuttingDown => Code::Unavailable,
        End::Node(_) => Code::InvalidArgument,
        End::Busy { .. } | End::Refused(_) | End::Request(RequestError::TooLarge { .. } | RequestError::TooMany) => {
            Code::ResourceExhausted
        }
        End::Request(RequestError::Compressed) => Code::Unimplemented,
        End::Request(RequestError::Malformed(_)) | End::TooLarge(_) => Code::Internal,
        End::Request(RequestError::Broken(_)) => Code::Cancelled,
        End::Rejected(Rejection::Missing(_)) => Code::FailedPrecondition,
        End::Rejected(Rejection::Forbidden(_)) => Code::PermissionDenied,
        End::Rejected(Rejection::Failed(_)) => Code::Unavailable,
    };
    Status::new(code, end.to_string())
}

fn headers(status: &Status) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if status.add_header(&mut headers).is_err() {
        headers.insert(Status::GRPC_STATUS, HeaderValue::from(Code::Internal as i32));
    }
    headers
}

/// A response that is over before it began.
fn refusal(status: &Status) -> Response<Body> {
    let mut response = Response::new(Body::default());
    *response.headers_mut() = headers(status);
    response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    response
}

fn unsupported() -> Response<Body> {
    let mut response = Response::new(Body::default());
    *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    response
}

/// True for gRPC requests, as their content type says.
pub fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    let rest = content_type.and_then(|content_type| content_type.strip_prefix(b"application/grpc"));
    rest.is_some_and(|rest| matches!(rest, [] | b"+proto" | [b';', ..]))
}

/// 90 % to 110 % of an age, so that connections which came together do not go together.
fn jittered(age: Duration) -> Duration {
    // Each state is keyed at random; nothing else here needs randomness.
    let part = RandomState::new().hash_one(0) % 2001;
    age.mul_f64(0.9 + part as f64 / 10_000.0)
}

fn log_end(address: SocketAddr, ended: hyper::Result<()>) {
    if let Err(error) = ended {
        tracing::debug!(%address, %error, "a connection broke");
    }
}

#[cfg(test)]
mod tests;

/// Starts what a connection needs to go on by itself.
#[derive(Clone)]
struct Executor(Tasks);

impl<F> hyper::rt::Executor<F> for Executor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.0.spawn("xds request", task);
    }
}
