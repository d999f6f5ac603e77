//! The gRPC service `AggregatedDiscoveryService`, and the connections that carry it. The only place where gRPC statuses
//! are made.

use std::{future::Future, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::FutureExt;
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use tokio::{runtime::Handle, sync::watch};
use tonic::{Code, Status};

use super::{
    admission::{Admission, Limits},
    body::{Body, Chunks, Outlet},
    connection::Protocol,
    debug::{Debugger, Denial},
    events::{Events, Rejection},
    metrics::Metrics,
    registry::Registry,
    request::{RequestError, Requests},
    stream::{End, Patience, Shared, Stream},
};
use crate::{
    auth::{Authenticators, Caller},
    environment::{self, Environment},
    generate::proxy::NodeMetadataPool,
    push::groups::Groups,
    rpc::{
        self, Call, Connections, GRPC, Guest, Peer, Service, Unary,
        connection::{ConnectionOptions, Draining},
        is_grpc, unary,
    },
    settings::{ConnectionAge, DiscoveryFlags},
    task::Tasks,
};

const SOTW_PATH: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
const DELTA_PATH: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";

/// How long the preparation of a connection (TLS) may take.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);
/// How long a connection may take until a stream of it is admitted.
const STRANGER_PATIENCE: Duration = Duration::from_secs(30);
/// How many connections may be without an admitted stream.
const STRANGERS: u32 = 8192;

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
    /// How long a connection may take until a stream of it is admitted.
    pub stranger_patience: Duration,
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
            stranger_patience: STRANGER_PATIENCE,
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

/// How callers are known.
#[derive(Clone)]
pub struct Security {
    /// Who says who they are.
    pub authenticators: Authenticators,
    /// Callers of plaintext connections have to be known too (`XDS_AUTH_PLAINTEXT`).
    pub plaintext: bool,
    /// A client is only served what its identity may have (`PILOT_ENABLE_XDS_IDENTITY_CHECK`).
    pub check: bool,
}

/// The server. Cheap to clone.
#[derive(Clone)]
pub struct Server {
    shared: Arc<Shared>,
    ready: watch::Receiver<bool>,
    tasks: Tasks,
    options: ServerOptions,
    security: Option<Arc<Security>>,
    methods: Arc<[Arc<dyn Unary>]>,
    streams_on: Option<Handle>,
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
            admission: Arc::new(Admission::new(options.limits, environment::now)),
            patience: options.patience,
            max_message_bytes: options.max_message_bytes,
            clock: environment::now,
            wall_clock: environment::wall_clock,
            events,
            debugger: Arc::default(),
            known_names: Arc::default(),
            kinds: NodeMetadataPool::default(),
        };
        Ok(Self {
            shared: Arc::new(shared),
            ready: environment.ready.subscribe(),
            tasks: environment.tasks.clone(),
            options,
            security: None,
            methods: Arc::new([]),
            streams_on: None,
        })
    }

    /// A server that serves the same to callers who have to be known.
    #[must_use]
    pub fn with_security(mut self, security: Security) -> Self {
        self.security = Some(Arc::new(security));
        self
    }

    /// A server that also answers calls of these methods.
    #[must_use]
    pub fn with_methods(mut self, methods: Vec<Arc<dyn Unary>>) -> Self {
        self.methods = methods.into();
        self
    }

    /// A server whose streams run on this runtime, wherever their connections were accepted.
    #[must_use]
    pub fn with_streams_on(mut self, runtime: Handle) -> Self {
        self.streams_on = Some(runtime);
        self
    }

    /// Questions about the control plane are answered by `debugger` from now on, whichever way they come. The first that
    /// is given stays.
    pub fn answer_questions(&self, debugger: Arc<dyn Debugger>) {
        let _ = self.shared.debugger.set(debugger);
    }

    /// The live connections, for debug pages.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.shared.registry
    }

    /// Connections that this server answers, with other methods beside.
    pub fn connections(&self) -> Connections<Self> {
        let options = ConnectionOptions {
            keepalive_interval: self.options.keepalive_interval,
            keepalive_timeout: self.options.keepalive_timeout,
            max_age: self.options.max_connection_age,
            age_grace: self.options.age_grace,
            max_streams: self.options.max_streams,
            handshake_patience: HANDSHAKE_PATIENCE,
            stranger_patience: self.options.stranger_patience,
            strangers: STRANGERS,
            wall_clock: self.shared.wall_clock,
        };
        Connections::new(self.clone(), options, self.tasks.clone())
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
            path => match self.methods.iter().find(|method| method.path() == path) {
                Some(method) => return answer(method.as_ref(), request).await,
                None => return refusal(&Status::unimplemented(format!("unknown method {path}"))),
            },
        };
        if !*self.ready.borrow() {
            let message = "server is not ready to serve discovery information";
            return refusal(&Status::unavailable(message));
        }
        if let Err(error) = self.shared.admission.stream().await {
            return refusal(&Status::resource_exhausted(error.to_string()));
        }
        let (body, outlet) = Body::channel();
        let (mut parts, requests) = request.into_parts();
        let (peer, guest) = (
            parts.extensions.remove::<Peer>(),
            parts.extensions.remove::<Arc<Guest>>(),
        );
        let caller = match self.caller(peer.as_ref(), &parts.headers).await {
            Ok(caller) => caller,
            Err(status) => {
                if let Some(guest) = &guest {
                    guest.offend();
                }
                return refusal(&status);
            }
        };
        if let Some(guest) = &guest {
            // Who is known is admitted; of who need not be known, it is seen from the first request.
            if caller.is_some() {
                guest.admit();
            }
            guest.trust();
        }
        let draining = match parts.extensions.get::<Draining>() {
            Some(draining) => {
                draining.carries_streams();
                draining.token().clone()
            }
            None => self.tasks.shutdown().clone(),
        };
        let stream = Stream {
            shared: self.shared.clone(),
            protocol,
            peer: peer.map(|peer| peer.address),
            caller,
            check: self.security.as_ref().is_some_and(|security| security.check),
            requests: Requests::new(
                protocol,
                requests,
                self.shared.max_message_bytes,
                (self.shared.admission.clone(), self.shared.known_names.clone()),
                guest.clone(),
            ),
            guest,
            outlet: outlet.clone(),
            draining,
        };
        match &self.streams_on {
            Some(runtime) => self.tasks.spawn_on(runtime, "xds stream", run(stream, outlet)),
            None => self.tasks.spawn("xds stream", run(stream, outlet)),
        }
        let mut response = Response::new(body);
        response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
        response
    }

    /// Who calls; none where nobody has to be known.
    async fn caller(&self, peer: Option<&Peer>, headers: &HeaderMap) -> Result<Option<Caller>, Status> {
        let is_tls = peer.is_some_and(|peer| peer.is_tls);
        let security = self.security.as_ref().filter(|security| is_tls || security.plaintext);
        let Some(security) = security else {
            return Ok(None);
        };
        let credentials = rpc::credentials(peer, headers);
        let caller = security.authenticators.authenticate(credentials).await;
        caller.map(Some).map_err(|refused| {
            tracing::warn!(address = ?credentials.address, %refused, "a client is not known");
            if refused.is_unavailable() {
                Status::unavailable("the client cannot be authenticated now; try again")
            } else {
                Status::unauthenticated("authentication failure")
            }
        })
    }
}

impl Service for Server {
    type Data = Chunks;
    type Body = Body;

    fn handle(&self, request: Request<hyper::body::Incoming>) -> impl Future<Output = Response<Body>> + Send {
        Self::handle(self, request)
    }
}

/// Runs a stream and says how it ended.
async fn run<B>(mut stream: Stream<B>, outlet: Outlet)
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
    let _ = outlet.end(rpc::headers(&status)).await;
    stream.requests.discard().await;
}

fn status(end: &End) -> Status {
    let code = match end {
        End::Gone => Code::Cancelled,
        End::Draining | End::ShuttingDown => Code::Unavailable,
        End::Silent => Code::DeadlineExceeded,
        End::Expired => Code::Unauthenticated,
        End::Forbidden(_) => Code::PermissionDenied,
        End::Node(_) => Code::InvalidArgument,
        End::Busy { .. }
        | End::Refused(_)
        | End::Request(RequestError::TooLarge { .. } | RequestError::TooMany | RequestError::Slow) => {
            Code::ResourceExhausted
        }
        End::Request(RequestError::Compressed) => Code::Unimplemented,
        End::Request(RequestError::Malformed(_)) | End::TooLarge(_) => Code::Internal,
        End::Request(RequestError::Broken(_)) => Code::Cancelled,
        End::Denied(Denial::Unauthenticated) => Code::Unauthenticated,
        End::Denied(Denial::Malformed(_)) => Code::InvalidArgument,
        End::Denied(Denial::Forbidden(_)) => Code::PermissionDenied,
        End::Rejected(Rejection::Missing(_)) => Code::FailedPrecondition,
        End::Rejected(Rejection::Forbidden(_)) => Code::PermissionDenied,
        End::Rejected(Rejection::Failed(_)) => Code::Unavailable,
    };
    Status::new(code, end.to_string())
}

/// Lets a method answer.
async fn answer<B>(method: &dyn Unary, request: Request<B>) -> Response<Body>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: std::fmt::Display,
{
    let answered = AssertUnwindSafe(method.call(Call::new(request))).catch_unwind().await;
    let answered = answered.unwrap_or_else(|_| {
        tracing::error!(method = method.path(), "a call panicked; this is a defect of istiod");
        Err(Status::internal("a defect of the control plane ended the call"))
    });
    match answered.and_then(|message| unary::framed(&message)) {
        Ok(message) => {
            let mut response = Response::new(Body::whole(message, rpc::headers(&Status::ok(""))));
            response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
            response
        }
        Err(status) => refusal(&status),
    }
}

/// A response that is over before it began.
fn refusal(status: &Status) -> Response<Body> {
    let mut response = Response::new(Body::default());
    *response.headers_mut() = rpc::headers(status);
    response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    response
}

fn unsupported() -> Response<Body> {
    let mut response = Response::new(Body::default());
    *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    response
}

#[cfg(test)]
mod tests;
