//! The gRPC service `AggregatedDiscoveryService`.

use std::{
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures::FutureExt;
use http::{HeaderMap, Request, Response, header};
use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
    time::timeout,
};
use tonic::{Code, Status};

use super::{
    admission::{Admission, Limits, Source},
    config_objects::ConfigObjects,
    debug::DebugHandler,
    events::Events,
    message::{Body, Message, ResponseSender},
    metrics::Metrics,
    protocol::Protocol,
    registry::{ConnectionRegistry, RefusedResource},
    request::{RequestOptions, Requests},
    share::{Interners, held::HeldBytes, quarantine::Quarantine},
    stream::{Ambient, EndReason, Shared, Stream, StreamTimeouts},
};
use crate::{
    auth::{Authenticators, Caller},
    environment::{self, Environment},
    generate::proxy::NodeMetadataPool,
    push::groups::Groups,
    rpc::{
        self, GRPC, Peer, StreamService, UnauthenticatedConnection,
        connection::{ConnectionOptions, Draining},
        trailers_only,
    },
    settings::{ConnectionAge, Settings},
    task::Tasks,
};

/// The keepalive times that 0 stands for, and the shortest interval.
///
/// Parity (google.golang.org/grpc, `KeepaliveParams` and `internal/transport/defaults.go`).
const ZERO_KEEPALIVE_INTERVAL: Duration = Duration::from_hours(2);
const ZERO_KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
const SHORTEST_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
/// The time limit of a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit of a connection for the admission of its first stream.
const PRE_AUTH_TIMEOUT: Duration = Duration::from_secs(30);
/// The maximum number of connections without an admitted stream.
const MAX_UNAUTHENTICATED: u32 = 8192;

/// The time that a client has to read the last response and the status of a stream, also after an eviction.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(5);
const EVICTED_TIMEOUT: Duration = Duration::from_millis(250);

/// The options of the server.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// The idle time after which a connection is pinged (`--keepaliveInterval`).
    pub keepalive_interval: Duration,
    /// The time limit for the answer to a ping (`--keepaliveTimeout`).
    pub keepalive_timeout: Duration,
    /// The age at which a connection is closed, with 10 % jitter (`--keepaliveMaxServerConnectionAge`).
    pub max_connection_age: Option<Duration>,
    /// The time that streams have to end after their connection has reached its maximum age.
    pub age_grace: Duration,
    /// The longest time over which connections close at shutdown: half of `--shutdownDuration`, as their streams need
    /// time to end.
    pub drain: Duration,
    /// The maximum number of concurrent streams of a connection (`ISTIO_GPRC_MAXSTREAMS`); 0 for no limit.
    pub max_streams: u32,
    /// The maximum size of a request (`ISTIO_GPRC_MAXRECVMSGSIZE`).
    pub max_message_bytes: usize,
    /// The memory that the subscriptions of all clients may hold (`PILOT_XDS_SUBSCRIPTION_MEMORY_MB`).
    pub max_held_bytes: usize,
    /// True if refused resources are withheld until they change (`PILOT_ENABLE_XDS_QUARANTINE`).
    pub quarantines: bool,
    /// True if ztunnel is served (`PILOT_ENABLE_AMBIENT`).
    pub serves_ambient: bool,
    /// The limits of work in flight.
    pub limits: Limits,
    /// The time limits of streams.
    pub timeouts: StreamTimeouts,
    /// The time limit of a connection for the admission of its first stream.
    pub pre_auth_timeout: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            keepalive_interval: Duration::from_secs(30),
            keepalive_timeout: Duration::from_secs(10),
            max_connection_age: None,
            age_grace: Duration::from_secs(10),
            drain: Duration::from_secs(5),
            max_streams: 100_000,
            max_message_bytes: 4 << 20,
            max_held_bytes: 256 << 20,
            quarantines: true,
            serves_ambient: false,
            limits: Limits {
                // Parity (pilot/pkg/features/tuning.go): the default of PILOT_PUSH_THROTTLE.
                first_configurations: (15 + 5 * cores).min(100),
                bytes_in_flight: 256 << 20,
                longest_wait: Duration::from_secs(10),
                streams_per_second: None,
            },
            timeouts: StreamTimeouts::default(),
            pre_auth_timeout: PRE_AUTH_TIMEOUT,
        }
    }
}

impl ServerOptions {
    /// Returns the defaults with the values of flags. The caller applies feature variables.
    pub fn of(settings: &Settings) -> Self {
        let (flags, defaults) = (&settings.flags, Self::default());
        let (interval, timeout) = (flags.keepalive_interval, flags.keepalive_timeout);
        let interval = settings.duration(interval, "GRPC_KEEPALIVE_INTERVAL", defaults.keepalive_interval);
        let timeout = settings.duration(timeout, "GRPC_KEEPALIVE_TIMEOUT", defaults.keepalive_timeout);
        Self {
            keepalive_interval: if interval.is_zero() {
                ZERO_KEEPALIVE_INTERVAL
            } else {
                interval.max(SHORTEST_KEEPALIVE_INTERVAL)
            },
            keepalive_timeout: if timeout.is_zero() {
                ZERO_KEEPALIVE_TIMEOUT
            } else {
                timeout
            },
            max_connection_age: match flags.keepalive_max_server_connection_age {
                Some(ConnectionAge::AtMost(age)) => Some(age),
                Some(ConnectionAge::Infinite) | None => None,
            },
            drain: flags.shutdown_duration / 2,
            ..defaults
        }
    }
}

/// The authentication of callers.
#[derive(Clone)]
pub struct Security {
    /// The authenticators, in order.
    pub authenticators: Authenticators,
    /// True if plaintext connections need authentication too (`XDS_AUTH_PLAINTEXT`).
    pub plaintext: bool,
    /// True if the node must match an identity of the caller (`PILOT_ENABLE_XDS_IDENTITY_CHECK`).
    pub checks_identity: bool,
}

/// The ADS server. Cheap to clone.
#[derive(Clone)]
pub struct Server {
    shared: Arc<Shared>,
    ready: watch::Receiver<bool>,
    tasks: Tasks,
    options: ServerOptions,
    security: Option<Arc<Security>>,
    stream_runtime: Option<Handle>,
}

impl Server {
    /// Creates a server of the publications of groups. It serves once the environment is ready. An error means that the
    /// name of a metric is in use.
    ///
    /// `events` receives machines and their health. Without it, machines are served like all other clients.
    pub fn new(
        environment: &Environment,
        groups: Groups,
        options: ServerOptions,
        events: Option<Events>,
    ) -> Result<Self, prometheus::Error> {
        let held = Arc::new(HeldBytes::default());
        let metrics = Metrics::new(&environment.registry)?;
        let quarantine = options
            .quarantines
            .then(|| Arc::new(Quarantine::new(metrics.quarantined.clone())));
        let shared = Shared {
            groups,
            registry: Arc::new(ConnectionRegistry::new(held.clone(), quarantine)),
            metrics,
            admission: Arc::new(Admission::new(options.limits, environment::now)),
            timeouts: options.timeouts,
            max_message_bytes: options.max_message_bytes,
            max_held_bytes: options.max_held_bytes,
            clock: environment::now,
            wall_clock: environment::wall_clock,
            events,
            debug_handler: Arc::default(),
            config_objects: Arc::default(),
            refusals: Arc::default(),
            interners: Arc::new(Interners::new(held)),
            node_metadata: NodeMetadataPool::default(),
            ambient: if options.serves_ambient {
                Ambient::On
            } else {
                Ambient::Off
            },
            refuses_first: AtomicBool::new(environment.settings.variable("K_REVISION").is_some()),
            aliases: environment.settings.flags.aliases(),
        };
        Ok(Self {
            shared: Arc::new(shared),
            ready: environment.ready.subscribe(),
            tasks: environment.tasks.clone(),
            options,
            security: None,
            stream_runtime: None,
        })
    }

    /// Returns the same server with authentication.
    #[must_use]
    pub fn with_security(mut self, security: Security) -> Self {
        self.security = Some(Arc::new(security));
        self
    }

    /// Returns the same server, whose streams run on this runtime.
    #[must_use]
    pub fn with_stream_runtime(mut self, runtime: Handle) -> Self {
        self.stream_runtime = Some(runtime);
        self
    }

    /// Sets the handler of debug requests. Only the first call has an effect.
    pub fn set_debug_handler(&self, debug_handler: Arc<dyn DebugHandler>) {
        let _ = self.shared.debug_handler.set(debug_handler);
    }

    /// Sets the handler of requests for objects of configuration. Only the first call has an effect.
    pub fn set_config_objects(&self, config_objects: Arc<dyn ConfigObjects>) {
        let _ = self.shared.config_objects.set(config_objects);
    }

    /// Sets the queue of refused resources. Only the first call has an effect.
    pub fn set_refusal_queue(&self, refusals: mpsc::Sender<RefusedResource>) {
        let _ = self.shared.refusals.set(refusals);
    }

    /// Returns the live connections, for debug pages.
    pub fn registry(&self) -> &Arc<ConnectionRegistry> {
        &self.shared.registry
    }

    /// Returns the options of connections that carry this service.
    pub fn connection_options(&self) -> ConnectionOptions {
        ConnectionOptions {
            keepalive_interval: self.options.keepalive_interval,
            keepalive_timeout: self.options.keepalive_timeout,
            max_age: self.options.max_connection_age,
            age_grace: self.options.age_grace,
            drain: self.options.drain,
            max_streams: self.options.max_streams,
            handshake_timeout: HANDSHAKE_TIMEOUT,
            pre_auth_timeout: self.options.pre_auth_timeout,
            max_unauthenticated: MAX_UNAUTHENTICATED,
            wall_clock: self.shared.wall_clock,
        }
    }

    /// Authenticates the caller; `None` where authentication is not required.
    async fn caller(&self, peer: Option<&Peer>, headers: &HeaderMap) -> Result<Option<Caller>, Status> {
        let is_tls = peer.is_some_and(|peer| peer.is_tls);
        let security = self.security.as_ref().filter(|security| is_tls || security.plaintext);
        let Some(security) = security else {
            return Ok(None);
        };
        let credentials = rpc::credentials(peer, headers);
        let caller = security.authenticators.authenticate(credentials).await;
        caller.map(Some).map_err(|refused| {
            tracing::warn!(address = ?credentials.address, %refused, "client authentication failed");
            if refused.is_unavailable() {
                Status::unavailable("the client cannot be authenticated now; try again")
            } else {
                Status::unauthenticated("authentication failure")
            }
        })
    }

    /// Accepts a call while the server is ready and below its limits. Returns the protocol of the method.
    async fn accept(&self, path: &str) -> Result<Protocol, Status> {
        let Some(protocol) = Protocol::of_path(path) else {
            let message = "ADS v2 is no longer served; hint: connect with ADS v3 (transport_api_version: V3)";
            return Err(Status::unimplemented(message));
        };
        if self.shared.refuses_first.swap(false, Ordering::Relaxed) {
            return Err(Status::unavailable("server warmup not complete; try again"));
        }
        if !*self.ready.borrow() {
            let message = "server is not ready to serve discovery information";
            return Err(Status::unavailable(message));
        }
        if let Err(error) = self.shared.admission.stream().await {
            return Err(Status::resource_exhausted(error.to_string()));
        }
        Ok(protocol)
    }

    /// Authenticates the caller, and reports the result to its connection.
    async fn authenticate(
        &self,
        peer: Option<&Peer>,
        pre_auth: Option<&Arc<UnauthenticatedConnection>>,
        headers: &HeaderMap,
    ) -> Result<Option<Caller>, Status> {
        let caller = self.caller(peer, headers).await;
        match (&caller, pre_auth) {
            (_, None) => {}
            // The client is not to blame, and behind a gateway, others share its connection.
            (Err(status), Some(_)) if status.code() == Code::Unavailable => {}
            (Err(_), Some(pre_auth)) => pre_auth.record_violation(),
            (Ok(caller), Some(pre_auth)) => {
                // Without authentication, the connection is admitted after the first request.
                if caller.is_some() {
                    pre_auth.admit();
                }
                pre_auth.accept_credentials();
            }
        }
        caller
    }
}

impl StreamService for Server {
    type Message = Message;

    fn has_method(&self, path: &str) -> bool {
        Protocol::of_path(path).is_some() || Protocol::is_old_path(path)
    }

    async fn call<B>(&self, request: Request<B>) -> Response<Body>
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: std::fmt::Display,
    {
        let (mut parts, requests) = request.into_parts();
        let protocol = match self.accept(parts.uri.path()).await {
            Ok(protocol) => protocol,
            Err(status) => return trailers_only(&status),
        };
        let (body, sender) = Body::channel();
        let (peer, pre_auth) = (
            parts.extensions.remove::<Peer>(),
            parts.extensions.remove::<Arc<UnauthenticatedConnection>>(),
        );
        let caller = self.authenticate(peer.as_ref(), pre_auth.as_ref(), &parts.headers);
        let caller = match caller.await {
            Ok(caller) => caller,
            Err(status) => return trailers_only(&status),
        };
        let draining = match parts.extensions.get::<Draining>() {
            Some(draining) => {
                draining.hand_off_to_stream_runtime();
                draining.token().clone()
            }
            None => self.tasks.shutdown().clone(),
        };
        let identity = caller.as_ref().and_then(|caller| caller.identities.first());
        let source = match identity {
            Some(identity) => Source::Identity(identity.clone()),
            None => Source::Address(peer.as_ref().map(|peer| peer.address.ip())),
        };
        let stream = Box::new(Stream {
            shared: self.shared.clone(),
            protocol,
            peer: peer.map(|peer| peer.address),
            source: source.clone(),
            caller,
            checks_identity: self.security.as_ref().is_some_and(|security| security.checks_identity),
            requests: Requests::new(
                protocol,
                requests,
                RequestOptions {
                    limit_bytes: self.shared.max_message_bytes,
                    admission: self.shared.admission.clone(),
                    source,
                    interners: self.shared.interners.clone(),
                    pre_auth: pre_auth.clone(),
                },
            ),
            pre_auth,
            sender: sender.clone(),
            draining,
        });
        match &self.stream_runtime {
            Some(runtime) => self.tasks.spawn_on(runtime, "xds stream", run(stream, sender)),
            None => self.tasks.spawn("xds stream", run(stream, sender)),
        }
        let mut response = Response::new(body);
        response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
        response
    }
}

/// Runs a stream and sends its status. The stream is boxed, since an async function holds an argument twice.
async fn run<B>(mut stream: Box<Stream<B>>, sender: ResponseSender)
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    let shared = stream.shared.clone();
    let mut unread_timeout = UNREAD_TIMEOUT;
    let status = match AssertUnwindSafe(stream.run()).catch_unwind().await {
        Ok(Ok(())) => Status::ok(""),
        Ok(Err(EndReason::Disconnected)) => return,
        Ok(Err(end)) => {
            tracing::debug!(reason = %end, "stream closed");
            if let Some(limit) = end.limit() {
                shared.metrics.limited(limit);
            }
            // Parity (pkg/xds/server.go, `Receive`).
            if matches!(&end, EndReason::Request(error) if error.is_unreadable()) {
                shared.metrics.internal_errors.inc();
            }
            if matches!(end, EndReason::SubscriptionMemory(_)) {
                unread_timeout = EVICTED_TIMEOUT;
            }
            end.status()
        }
        Err(_) => {
            shared.metrics.internal_errors.inc();
            tracing::error!("stream panicked; this is a bug in istiod");
            Status::internal("the stream failed because of a bug in the control plane")
        }
    };
    let (unread, pre_auth) = (sender.clone(), stream.pre_auth.clone());
    // Fails if the client closed the stream, which needs no status then.
    let _ = sender.end(rpc::headers(&status)).await;
    let read = async {
        // A response that is not read keeps its memory for as long as the connection lives.
        if timeout(unread_timeout, unread.closed()).await.is_err()
            && let Some(pre_auth) = pre_auth
        {
            tracing::debug!(
                reason = "unread response of a stream that has ended",
                "closing connection"
            );
            pre_auth.close();
        }
    };
    tokio::join!(read, stream.requests.discard());
}

#[cfg(test)]
mod tests;
