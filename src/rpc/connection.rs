//! HTTP/2 connections: serves them until they must close.

use std::{
    convert::Infallible,
    error::Error,
    future::Future,
    io,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, SystemTime},
};

use bytes::Buf;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use http::{Request, Response};
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    runtime::Handle,
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{
    Peer,
    accept::{Accepting, Established},
    data_parts::DataParts,
    frame_budget::WINDOW_BYTES,
    handoff::RuntimeHandoff,
    pre_auth::{PreAuthLimiter, UnauthenticatedConnection},
    socket::{Socket, Uncork},
    transport::LimitedTransport,
};
use crate::{
    auth::tls::PeerCertificate,
    task::{Tasks, jittered, random_part},
};

/// The time limit for the last trailers of a connection.
const TRAILERS_TIMEOUT: Duration = Duration::from_secs(1);
/// The maximum size of request headers with authentication: they carry a token, or a certificate chain from a gateway.
/// Headers of 16 KiB have room for the fields of every call.
const HEADER_BYTES: u32 = 17 << 10;
/// The maximum size of request headers on plaintext connections, which need no token. The streams of an unauthenticated
/// peer must use little memory.
const PLAINTEXT_HEADER_BYTES: u32 = 8 << 10;

/// The flow-control window of an encrypted connection, which a gateway may use for the streams of many proxies. If the
/// client of a stream does not read its response, the stream reads no request either, and holds up to [`WINDOW_BYTES`].
/// The others need room beside a few of these. Plaintext connections, which need no authentication, have only
/// [`WINDOW_BYTES`]. On encrypted ones, the transport reads less than that before authentication.
const SHARED_WINDOW_BYTES: u32 = 16 * WINDOW_BYTES;

/// The time per connection over which connections close at shutdown, so that their clients reach other replicas one
/// after the other: a thousand in a second.
const DRAIN_PER_CONNECTION: Duration = Duration::from_millis(1);

/// The options of connections.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionOptions {
    /// The idle time after which a connection is pinged.
    pub keepalive_interval: Duration,
    /// The time limit for the answer to a ping.
    pub keepalive_timeout: Duration,
    /// The age at which a connection is closed, with 10 % jitter.
    pub max_age: Option<Duration>,
    /// The time that streams have to end after their connection has reached its maximum age.
    pub age_grace: Duration,
    /// The longest time over which connections close at shutdown.
    pub drain: Duration,
    /// The maximum number of concurrent streams of a connection; 0 for no limit.
    pub max_streams: u32,
    /// The time limit of a TLS handshake.
    pub handshake_timeout: Duration,
    /// The time limit of a connection for the admission of its first stream.
    pub pre_auth_timeout: Duration,
    /// The maximum number of connections without an admitted stream.
    pub max_unauthenticated: u32,
    /// The wall clock.
    pub wall_clock: fn() -> SystemTime,
}

/// The reason why the server closes a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CloseReason {
    /// It was evicted for a newer connection, or it violated a limit.
    Evicted,
    /// None of its streams was admitted in time.
    PreAuthTimeout,
    /// The certificate of the client has expired.
    Expired,
    /// It has reached its maximum age.
    MaxAge,
    /// The grace period of its streams is over.
    GraceOver,
    /// Another replica has too few connections.
    Shed,
    /// The process shuts down.
    ShutDown,
}

/// The time over which the connections that are open now close, so that their clients reach other replicas; `None` if
/// none closes. Setting `None` also keeps the connections whose time has not come.
pub type Shedding = Option<Duration>;

/// An HTTP service.
pub trait Service: Clone + Send + Sync + 'static {
    /// The payload of a DATA frame.
    type Data: Buf + Send + 'static;
    /// The body of a response.
    type Body: http_body::Body<Data = Self::Data, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static;
    /// Answers a request. Its extensions have the [`Peer`], the [`UnauthenticatedConnection`] and [`Draining`].
    fn handle(&self, request: Request<Incoming>) -> impl Future<Output = Response<Self::Body>> + Send;
}

/// The state of a connection that is visible to its streams.
#[derive(Clone, Debug)]
pub struct Draining {
    token: CancellationToken,
    handoff: RuntimeHandoff,
}

impl Draining {
    /// Creates the state of a connection whose streams end with this token, for tests of streams.
    #[cfg(test)]
    pub(super) fn of(token: CancellationToken) -> Self {
        let handoff = RuntimeHandoff::new(Tasks::default(), None);
        Self { token, handoff }
    }

    /// Returns the token that is cancelled when the streams of the connection must end.
    pub fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// Moves the connection to the runtime for streams, if there is one.
    pub fn hand_off_to_stream_runtime(&self) {
        self.handoff.hand_off();
    }
}

/// A connection after its handshake.
struct Accepted<I> {
    /// The stream that carries HTTP/2.
    io: I,
    uncork: Uncork,
    peer: Peer,
    pre_auth: Arc<UnauthenticatedConnection>,
    handoff: RuntimeHandoff,
}

/// A server of connections. Cheap to clone.
#[derive(Clone)]
pub struct Connections<S> {
    service: S,
    options: ConnectionOptions,
    tasks: Tasks,
    limiter: PreAuthLimiter,
    stream_runtime: Option<Handle>,
    /// The number of connections.
    live: Arc<AtomicU32>,
    shedding: Option<watch::Receiver<Shedding>>,
}

/// A connection that counts as live until it is dropped.
struct Live(Arc<AtomicU32>);

impl Live {
    fn new(live: &Arc<AtomicU32>) -> Self {
        live.fetch_add(1, Ordering::Relaxed);
        Self(live.clone())
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<S: Service> Connections<S> {
    /// Creates a server whose requests are answered by `service`.
    pub fn new(service: S, options: ConnectionOptions, tasks: Tasks) -> Self {
        Self {
            service,
            limiter: PreAuthLimiter::new(options.max_unauthenticated),
            options,
            tasks,
            stream_runtime: None,
            live: Arc::default(),
            shedding: None,
        }
    }

    /// Closes connections as this receiver says. A value that was set before a connection began does not concern it.
    #[must_use]
    pub fn with_shedding(mut self, shedding: watch::Receiver<Shedding>) -> Self {
        self.shedding = Some(shedding);
        self
    }

    /// Sets the runtime to which connections with streams move.
    #[must_use]
    pub fn with_stream_runtime(mut self, runtime: Handle) -> Self {
        self.stream_runtime = Some(runtime);
        self
    }

    /// Returns the limiter of connections without an admitted stream.
    pub fn limiter(&self) -> &PreAuthLimiter {
        &self.limiter
    }

    /// Serves plaintext connections until shutdown.
    pub async fn serve(&self, listener: TcpListener) {
        self.accept(listener, |stream| async { Ok((stream, None)) }, false)
            .await;
    }

    /// Serves encrypted connections until shutdown. `handshake` returns the encrypted stream and the certificate of the
    /// client. It runs in the task of the connection, with a time limit.
    pub async fn serve_tls<H, F, I>(&self, listener: TcpListener, handshake: H)
    where
        H: Fn(Socket) -> F,
        F: Future<Output = io::Result<(I, Option<Arc<PeerCertificate>>)>> + Send + 'static,
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        self.accept(listener, handshake, true).await;
    }

    async fn accept<H, F, I>(&self, listener: TcpListener, handshake: H, is_tls: bool)
    where
        H: Fn(Socket) -> F,
        F: Future<Output = io::Result<(I, Option<Arc<PeerCertificate>>)>> + Send + 'static,
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let accepting = Accepting {
            tasks: self.tasks.clone(),
            limiter: self.limiter.clone(),
            handshake_timeout: self.options.handshake_timeout,
        };
        // Shared, since the task of a connection would hold a copy twice.
        let server = Arc::new(self.clone());
        let serve = move |established: Established<I>| {
            let handoff = RuntimeHandoff::new(server.tasks.clone(), server.stream_runtime.clone());
            let peer = Peer {
                address: established.address,
                is_tls,
                certificate: established.certificate,
            };
            let serving = server.clone().serve_connection(Accepted {
                io: established.io,
                uncork: established.uncork,
                peer,
                pre_auth: established.pre_auth,
                handoff: handoff.clone(),
            });
            handoff.spawn("connection", serving);
        };
        accepting.run(listener, handshake, serve).await;
    }

    /// Serves one HTTP/2 connection over `io` until it closes.
    pub async fn connection<I>(&self, io: I, peer: Peer)
    where
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let Ok(pre_auth) = self.limiter.register(peer.address.ip()) else {
            return;
        };
        let handoff = RuntimeHandoff::new(self.tasks.clone(), None);
        Arc::new(self.clone())
            .serve_connection(Accepted {
                io,
                uncork: Uncork::default(),
                peer,
                pre_auth,
                handoff,
            })
            .await;
    }

    async fn serve_connection<I>(self: Arc<Self>, accepted: Accepted<I>)
    where
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let Accepted {
            io,
            uncork,
            peer,
            pre_auth,
            handoff,
        } = accepted;
        let _live = Live::new(&self.live);
        let address = peer.address;
        let expires = peer.certificate.as_ref().map(|certificate| certificate.expires_at);
        let draining = Draining {
            token: CancellationToken::new(),
            handoff: handoff.clone(),
        };
        let service = service_fn(|mut request: Request<Incoming>| {
            let stream = pre_auth.open_stream();
            request.extensions_mut().insert(peer.clone());
            request.extensions_mut().insert(pre_auth.clone());
            request.extensions_mut().insert(draining.clone());
            let service = self.service.clone();
            // Boxed, since the task of a stream lives on with the body of its response: 0.7 instead of 3 KiB.
            Box::pin(async move {
                let response = service.handle(request).await;
                stream.answered();
                Ok::<_, Infallible>(response)
            })
        });
        let io = LimitedTransport::new(DataParts::new(io), pre_auth.clone());
        let http2 = self.builder(handoff, peer.is_tls);
        let mut connection = pin!(http2.serve_connection(TokioIo::new(io), service));
        let mut close_reasons = self.close_reasons(&pre_auth, expires);
        let reason = tokio::select! {
            biased;
            Some(reason) = close_reasons.next() => reason,
            ended = uncork.after_each_poll(connection.as_mut()) => return log_end(address, ended),
        };
        tracing::debug!(%address, ?reason, "closing connection");
        if matches!(reason, CloseReason::Evicted | CloseReason::PreAuthTimeout) {
            return;
        }
        if reason == CloseReason::ShutDown {
            // The connection is served as before in the meantime.
            let delay = random_part(drain_window(self.options.drain, self.live.load(Ordering::Relaxed)));
            tokio::select! {
                () = tokio::time::sleep(delay) => {}
                () = pre_auth.evicted() => return,
                ended = uncork.after_each_poll(connection.as_mut()) => return log_end(address, ended),
            }
        }
        // Clients move to another connection after the GOAWAY.
        connection.as_mut().graceful_shutdown();
        let grace = self.options.age_grace;
        close_reasons.push(Box::pin(tokio::time::sleep(grace).map(|()| CloseReason::GraceOver)));
        let mut last = reason;
        while !matches!(last, CloseReason::ShutDown | CloseReason::GraceOver) {
            tokio::select! {
                biased;
                Some(reason) = close_reasons.next() => last = reason,
                ended = uncork.after_each_poll(connection.as_mut()) => return log_end(address, ended),
            }
            if last == CloseReason::Evicted {
                return;
            }
        }
        draining.token.cancel();
        if let Ok(ended) = tokio::time::timeout(TRAILERS_TIMEOUT, uncork.after_each_poll(connection)).await {
            log_end(address, ended);
        }
    }

    /// Returns the events that close a connection. Each is polled only when it was woken, not for every frame.
    fn close_reasons<'a>(
        &'a self,
        pre_auth: &'a UnauthenticatedConnection,
        expires: Option<SystemTime>,
    ) -> FuturesUnordered<BoxFuture<'a, CloseReason>> {
        let close_reasons = FuturesUnordered::<BoxFuture<CloseReason>>::new();
        close_reasons.push(Box::pin(pre_auth.evicted().map(|()| CloseReason::Evicted)));
        close_reasons.push(Box::pin(
            self.tasks.shutdown().cancelled().map(|()| CloseReason::ShutDown),
        ));
        close_reasons.push(Box::pin(async {
            tokio::time::sleep(self.options.pre_auth_timeout).await;
            if pre_auth.is_admitted() {
                std::future::pending::<()>().await;
            }
            CloseReason::PreAuthTimeout
        }));
        if let Some(at) = expires {
            close_reasons.push(Box::pin(
                reached(at, self.options.wall_clock).map(|()| CloseReason::Expired),
            ));
        }
        if let Some(mut shedding) = self.shedding.clone() {
            shedding.mark_unchanged();
            close_reasons.push(Box::pin(shed(shedding).map(|()| CloseReason::Shed)));
        }
        if let Some(age) = self.options.max_age {
            // Connections of the same age are not closed at once.
            close_reasons.push(Box::pin(
                tokio::time::sleep(jittered(age)).map(|()| CloseReason::MaxAge),
            ));
        }
        close_reasons
    }

    fn builder(&self, handoff: RuntimeHandoff, is_tls: bool) -> http2::Builder<RuntimeHandoff> {
        let max_streams = Some(self.options.max_streams).filter(|most| *most > 0);
        let mut builder = http2::Builder::new(handoff);
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(self.options.keepalive_interval)
            .keep_alive_timeout(self.options.keepalive_timeout)
            .max_concurrent_streams(max_streams)
            .max_header_list_size(if is_tls { HEADER_BYTES } else { PLAINTEXT_HEADER_BYTES })
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(if is_tls { SHARED_WINDOW_BYTES } else { WINDOW_BYTES });
        builder
    }
}

/// Waits for the time at which this connection closes.
async fn shed(mut shedding: watch::Receiver<Shedding>) {
    let mut due = None;
    loop {
        tokio::select! {
            changed = shedding.changed() => {
                if changed.is_err() {
                    // Nothing is shed any more.
                    return std::future::pending().await;
                }
                let over = *shedding.borrow_and_update();
                // A second order does not postpone the first.
                due = over.map(|over| due.unwrap_or_else(|| Instant::now() + random_part(over)));
            }
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => return,
        }
    }
}

/// Waits until the wall clock shows this time. The clock may be changed in the meantime.
pub async fn reached(at: SystemTime, wall_clock: fn() -> SystemTime) {
    const STEP: Duration = Duration::from_mins(10);
    while let Ok(left) = at.duration_since(wall_clock())
        && !left.is_zero()
    {
        tokio::time::sleep(left.min(STEP)).await;
    }
}

/// Returns the time over which this number of connections closes at shutdown.
fn drain_window(longest: Duration, live: u32) -> Duration {
    longest.min(DRAIN_PER_CONNECTION * live)
}

fn log_end(address: SocketAddr, ended: hyper::Result<()>) {
    if let Err(error) = ended {
        tracing::debug!(%address, %error, "connection failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_order_that_ends_sheds_nothing() {
        let (sender, orders) = watch::channel(None);
        let mut shedding = Box::pin(shed(orders));
        assert!(futures::poll!(&mut shedding).is_pending(), "closed without an order");
        sender.send_replace(Some(Duration::from_hours(1)));
        assert!(futures::poll!(&mut shedding).is_pending(), "closed too early");
        sender.send_replace(None);
        assert!(
            futures::poll!(&mut shedding).is_pending(),
            "closed after the end of the order"
        );
        // If the first order still counted, its time would be kept.
        sender.send_replace(Some(Duration::ZERO));
        shedding.await;
    }

    #[test]
    fn few_connections_close_early() {
        let longest = Duration::from_secs(5);
        assert_eq!(drain_window(longest, 20), Duration::from_millis(20));
        assert_eq!(drain_window(longest, 10_000), longest);
    }
}
