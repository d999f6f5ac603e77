//! HTTP/2 connections: accepted, prepared, served until their time is over.

use std::{
    collections::hash_map::RandomState,
    convert::Infallible,
    future::Future,
    hash::BuildHasher,
    io,
    net::SocketAddr,
    pin::pin,
    sync::Arc,
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
};
use tokio_util::sync::CancellationToken;

use super::{
    Peer,
    gate::Gate,
    lobby::{Guest, Lobby},
    place::Place,
    socket::{Socket, Uncork},
};
use crate::{auth::tls::PeerCertificate, task::Tasks};

/// How long the last trailers of a connection may take.
const LAST_PATIENCE: Duration = Duration::from_secs(1);
/// How long accepting rests after an error such as "too many open files".
const ACCEPT_REST: Duration = Duration::from_millis(20);
/// What a client may send on a stream, and on all of them, before it is read. When thousands come back at once, this is what is
/// held of each; of strangers [`Gate`] reads less. It must not be less than the 65,535 that every client takes for granted before
/// it has heard anything (RFC 9113, 6.9.2): a client that has sent more by then owes the difference, and the library below does
/// not give that back in every case; the stream then waits for ever.
const WINDOW_BYTES: u32 = 64 << 10;
/// Headers of a request where callers have to be known: a token, or what a gateway says of a chain of certificates.
const HEADER_BYTES: u32 = 12 << 10;
/// Headers of a request where nobody has to be known. What a stranger may open at once has to be little memory in all.
const PLAINTEXT_HEADER_BYTES: u32 = 4 << 10;

/// How connections are treated.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionOptions {
    /// A connection that is silent for so long is pinged.
    pub keepalive_interval: Duration,
    /// A ping that is not answered by then ends the connection.
    pub keepalive_timeout: Duration,
    /// A connection that is so old is closed, more or less.
    pub max_age: Option<Duration>,
    /// How long streams of a connection that reached its age may end by themselves.
    pub age_grace: Duration,
    /// Concurrent streams of a connection.
    pub max_streams: u32,
    /// How long the preparation of a connection (TLS) may take.
    pub handshake_patience: Duration,
    /// How long a connection may take until a stream of it is admitted.
    pub stranger_patience: Duration,
    /// How many connections may be without an admitted stream.
    pub strangers: u32,
    /// The calendar.
    pub wall_clock: fn() -> SystemTime,
}

/// Why a connection ends that its client did not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// It has to make place, or did what clients do not do.
    ShownOut,
    /// It did not say in time what it wants.
    Stranger,
    /// The certificate of the client has expired.
    Expired,
    /// It has reached its age.
    Aged,
    /// Its streams had time to end by themselves.
    GraceOver,
    /// The process ends.
    ShutDown,
}

/// What answers requests.
pub trait Service: Clone + Send + Sync + 'static {
    /// The piece of a body.
    type Data: Buf + Send + 'static;
    /// The body of an answer.
    type Body: http_body::Body<Data = Self::Data, Error = Infallible> + Send + 'static;
    /// Answers a request, in whose extensions are the [`Peer`], its [`Guest`] and [`Draining`].
    fn handle(&self, request: Request<Incoming>) -> impl Future<Output = Response<Self::Body>> + Send;
}

/// The state of a connection that its streams see.
#[derive(Clone, Debug)]
pub struct Draining {
    token: CancellationToken,
    place: Place,
}

impl Draining {
    /// Cancelled when the streams of the connection are to end.
    pub fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// The connection carries streams: its work moves to where streams are served, if that is elsewhere.
    pub fn carries_streams(&self) {
        self.place.shift();
    }
}

/// Serves connections. Cheap to clone.
#[derive(Clone)]
pub struct Connections<S> {
    service: S,
    options: ConnectionOptions,
    tasks: Tasks,
    lobby: Lobby,
    streams_on: Option<Handle>,
}

impl<S: Service> Connections<S> {
    /// Connections whose requests are answered by `service`.
    pub fn new(service: S, options: ConnectionOptions, tasks: Tasks) -> Self {
        Self {
            service,
            lobby: Lobby::new(options.strangers),
            options,
            tasks,
            streams_on: None,
        }
    }

    /// Connections that carry streams move to this runtime.
    #[must_use]
    pub fn with_streams_on(mut self, runtime: Handle) -> Self {
        self.streams_on = Some(runtime);
        self
    }

    /// Connections without an admitted stream.
    pub fn lobby(&self) -> &Lobby {
        &self.lobby
    }

    /// Serves plaintext connections until shutdown.
    pub async fn serve(&self, listener: TcpListener) {
        self.accept(listener, |stream| async { Ok((stream, None)) }, false)
            .await;
    }

    /// Serves encrypted connections until shutdown. `handshake` makes of a TCP stream what HTTP/2 is spoken over, and says
    /// what certificate the client has; it runs in the connection's own task and is given up after a while.
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
        let shutdown = self.tasks.shutdown().clone();
        loop {
            let accepted = tokio::select! {
                () = shutdown.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    let made_place = self.lobby.show_one_out();
                    tracing::warn!(%error, made_place, "a connection could not be accepted; hint: the limit of open files may be too low");
                    tokio::time::sleep(ACCEPT_REST).await;
                    continue;
                }
            };
            let guest = loop {
                match self.lobby.enter(address.ip()) {
                    Ok(guest) => break guest,
                    // The system keeps the next ones waiting.
                    Err(_) => tokio::time::sleep(ACCEPT_REST).await,
                }
            };
            // Responses are written when they are whole; waiting for more would only delay them.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, %address, "TCP_NODELAY cannot be set");
            }
            let server = self.clone();
            let socket = Socket::new(stream);
            let uncork = socket.uncork();
            let prepared = handshake(socket);
            let place = Place::new(self.tasks.clone(), self.streams_on.clone());
            self.tasks.spawn("handshake", async move {
                let prepared = tokio::select! {
                    prepared = tokio::time::timeout(server.options.handshake_patience, prepared) => prepared,
                    () = guest.shown_out() => return tracing::debug!(%address, "a connection made place for others"),
                };
                match prepared {
                    Ok(Ok((io, certificate))) => {
                        let peer = Peer {
                            address,
                            is_tls,
                            certificate,
                        };
                        let serving = server.into_served((io, uncork), peer, guest, place.clone());
                        place.spawn("connection", serving);
                    }
                    Ok(Err(error)) => tracing::debug!(%address, %error, "the handshake failed"),
                    Err(_) => tracing::debug!(%address, "the handshake took too long"),
                }
            });
        }
    }

    /// Serves one connection to its end: what comes over `io` is HTTP/2.
    pub async fn connection<I>(&self, io: I, peer: Peer)
    where
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let Ok(guest) = self.lobby.enter(peer.address.ip()) else {
            return;
        };
        let place = Place::new(self.tasks.clone(), None);
        self.clone()
            .into_served((io, Uncork::default()), peer, guest, place)
            .await;
    }

    async fn into_served<I>(self, (io, uncork): (I, Uncork), peer: Peer, guest: Arc<Guest>, place: Place)
    where
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let address = peer.address;
        let expires = peer.certificate.as_ref().map(|certificate| certificate.expires_at);
        let draining = Draining {
            token: CancellationToken::new(),
            place: place.clone(),
        };
        let service = service_fn(|mut request: Request<Incoming>| {
            let stream = guest.stream();
            request.extensions_mut().insert(peer.clone());
            request.extensions_mut().insert(guest.clone());
            request.extensions_mut().insert(draining.clone());
            let service = self.service.clone();
            async move {
                let response = service.handle(request).await;
                stream.answered();
                Ok::<_, Infallible>(response)
            }
        });
        let gate = TokioIo::new(Gate::new(io, guest.clone()));
        let mut connection = pin!(self.builder(place, peer.is_tls).serve_connection(gate, service));
        let mut causes = self.causes(&guest, expires);
        let cause = tokio::select! {
            biased;
            Some(cause) = causes.next() => cause,
            ended = uncork.after_each_turn(connection.as_mut()) => return log_end(address, ended),
        };
        tracing::debug!(%address, ?cause, "a connection is to end");
        if matches!(cause, Cause::ShownOut | Cause::Stranger) {
            return;
        }
        // Clients that heed the GOAWAY move in their own time.
        connection.as_mut().graceful_shutdown();
        let grace = self.options.age_grace;
        causes.push(Box::pin(tokio::time::sleep(grace).map(|()| Cause::GraceOver)));
        let mut last = cause;
        while !matches!(last, Cause::ShutDown | Cause::GraceOver) {
            tokio::select! {
                biased;
                Some(cause) = causes.next() => last = cause,
                ended = uncork.after_each_turn(connection.as_mut()) => return log_end(address, ended),
            }
            if last == Cause::ShownOut {
                return;
            }
        }
        draining.token.cancel();
        if let Ok(ended) = tokio::time::timeout(LAST_PATIENCE, uncork.after_each_turn(connection)).await {
            log_end(address, ended);
        }
    }

    /// What may end a connection. Each is looked at only when it was woken, not whenever something is sent or received.
    fn causes<'a>(&'a self, guest: &'a Guest, expires: Option<SystemTime>) -> FuturesUnordered<BoxFuture<'a, Cause>> {
        let causes = FuturesUnordered::<BoxFuture<Cause>>::new();
        causes.push(Box::pin(guest.shown_out().map(|()| Cause::ShownOut)));
        causes.push(Box::pin(self.tasks.shutdown().cancelled().map(|()| Cause::ShutDown)));
        causes.push(Box::pin(async {
            tokio::time::sleep(self.options.stranger_patience).await;
            if guest.is_admitted() {
                std::future::pending::<()>().await;
            }
            Cause::Stranger
        }));
        if let Some(at) = expires {
            causes.push(Box::pin(reached(at, self.options.wall_clock).map(|()| Cause::Expired)));
        }
        if let Some(age) = self.options.max_age {
            causes.push(Box::pin(tokio::time::sleep(jittered(age)).map(|()| Cause::Aged)));
        }
        causes
    }

    fn builder(&self, place: Place, is_tls: bool) -> http2::Builder<Place> {
        let mut builder = http2::Builder::new(place);
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(self.options.keepalive_interval)
            .keep_alive_timeout(self.options.keepalive_timeout)
            .max_concurrent_streams(self.options.max_streams)
            .max_header_list_size(if is_tls { HEADER_BYTES } else { PLAINTEXT_HEADER_BYTES })
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES);
        builder
    }
}

/// Completes at a time of the calendar, which may be set meanwhile.
pub async fn reached(at: SystemTime, wall_clock: fn() -> SystemTime) {
    const STEP: Duration = Duration::from_mins(10);
    while let Ok(left) = at.duration_since(wall_clock())
        && !left.is_zero()
    {
        tokio::time::sleep(left.min(STEP)).await;
    }
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
