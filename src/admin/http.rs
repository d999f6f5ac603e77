//! Connections of the HTTP servers. Any client that reaches the port may open many connections and send nothing, or
//! slowly. So times, headers and windows are bounded, and idle connections are closed. A client that keeps all of them
//! busy loses one for each new connection of others, such as those of probes.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body, extract::ConnectInfo};
use futures::future::BoxFuture;
use http::Request;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
};
use tower::ServiceExt;

use crate::{
    base::address::canonical,
    rpc::{Established, PreAuthLimiter, UnauthenticatedConnection},
    task::Tasks,
};

/// Timeout for the header of a request, including later requests of a connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for the header of a request to a webhook. API servers keep idle connections for 90 s, and do not repeat a
/// request on a connection that is closed just then: the object of that request would be refused. So they close first.
const WEBHOOK_IDLE_TIMEOUT: Duration = Duration::from_secs(100);
/// Timeout for running responses at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay of accepting after an error such as "too many open files", and while there is no room for a connection.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Largest header of a request, in bytes.
const HEAD_BYTES: u32 = 16 << 10;
/// Read buffer of a connection, in bytes.
const BUFFER_BYTES: usize = 32 << 10;
/// HTTP/2 window, in bytes.
const WINDOW_BYTES: u32 = 64 << 10;
/// Concurrent streams of an HTTP/2 connection.
const STREAMS: u32 = 128;
/// Concurrent connections of one port. Idle ones are closed within [`HEADER_TIMEOUT`], which makes room for others.
const CONNECTIONS: u32 = 8192;
/// The first bytes of an HTTP/2 connection.
const HTTP2_START: &[u8; 4] = b"PRI ";

/// A server of HTTP/2 connections, in place of the one of this module.
pub type Http2 = Arc<dyn Fn(TcpStream, SocketAddr) -> BoxFuture<'static, ()> + Send + Sync>;

/// Serves pages until shutdown; HTTP/2 connections by another server if there is one.
pub async fn serve(listener: TcpListener, router: Router, http2: Option<Http2>, tasks: Tasks) {
    serve_within(PreAuthLimiter::new(CONNECTIONS), listener, router, http2, tasks).await;
}

async fn serve_within(
    limiter: PreAuthLimiter,
    listener: TcpListener,
    router: Router,
    http2: Option<Http2>,
    tasks: Tasks,
) {
    let shutdown = tasks.shutdown().clone();
    loop {
        let accepting = async {
            let (stream, address) = listener.accept().await?;
            let address = canonical(address);
            Ok::<_, io::Error>((stream, address, registered(&limiter, address.ip()).await))
        };
        let accepted = tokio::select! {
            () = shutdown.cancelled() => return,
            accepted = accepting => accepted,
        };
        match accepted {
            Ok((stream, address, registered)) => {
                let (router, http2) = (router.clone(), http2.clone());
                let serving = serve_connection(stream, address, registered, router, http2, tasks.clone());
                tasks.spawn("http connection", serving);
            }
            Err(error) => {
                let evicted = limiter.evict_oldest();
                tracing::warn!(
                    %error,
                    evicted,
                    "failed to accept connection; hint: check the limit of open files"
                );
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// Serves a connection until it ends or is evicted.
async fn serve_connection(
    stream: TcpStream,
    address: SocketAddr,
    registered: Arc<UnauthenticatedConnection>,
    router: Router,
    http2: Option<Http2>,
    tasks: Tasks,
) {
    let serving = async {
        match http2 {
            Some(http2) if starts_http2(&stream, &tasks).await => {
                // The other server has limits of its own.
                registered.admit();
                http2(stream, address).await;
            }
            _ => connection(stream, address, router, &builder(), tasks).await,
        }
    };
    tokio::select! {
        () = serving => {}
        () = registered.evicted() => tracing::debug!(%address, reason = "evicted", "closing connection"),
    }
}

/// Waits until there is room for a connection of this address. Further ones wait in the backlog of the listener.
async fn registered(limiter: &PreAuthLimiter, source: IpAddr) -> Arc<UnauthenticatedConnection> {
    loop {
        match limiter.register(source) {
            Ok(registered) => return registered,
            Err(_) => tokio::time::sleep(ACCEPT_RETRY_DELAY).await,
        }
    }
}

/// Returns true if the client begins with the preface of HTTP/2 (RFC 9113, section 3.4). No method of HTTP/1 begins
/// like it.
async fn starts_http2(stream: &TcpStream, tasks: &Tasks) -> bool {
    let mut start = [0; HTTP2_START.len()];
    tokio::select! {
        read = stream.peek(&mut start) => drop(read),
        () = tokio::time::sleep(HEADER_TIMEOUT) => {}
        () = tasks.shutdown().cancelled() => {}
    }
    start == *HTTP2_START
}

/// Serves a connection of the webhooks over HTTP/1.1 until it ends or is evicted. Its requests come one after the
/// other, so it holds one body at most. It stays unauthenticated: the API server sends no credentials.
pub async fn webhooks<I>(established: Established<I>, router: Router, tasks: Tasks)
where
    I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let Established {
        io, address, pre_auth, ..
    } = established;
    let mut builder = builder().http1_only();
    builder.http1().header_read_timeout(WEBHOOK_IDLE_TIMEOUT);
    tokio::select! {
        () = connection(io, address, router, &builder, tasks) => {}
        () = pre_auth.evicted() => tracing::debug!(%address, reason = "evicted", "closing connection"),
    }
}

async fn connection<I>(io: I, address: SocketAddr, router: Router, builder: &Builder<TokioExecutor>, tasks: Tasks)
where
    I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let asked = AtomicBool::new(false);
    let service = service_fn(|request: Request<Incoming>| {
        asked.store(true, Ordering::Release);
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(ConnectInfo(address));
        let router = router.clone();
        async move { router.oneshot(request).await }
    });
    let mut connection = pin!(builder.serve_connection(TokioIo::new(io), service));
    let silent = async {
        tokio::time::sleep(HEADER_TIMEOUT).await;
        if asked.load(Ordering::Acquire) {
            std::future::pending::<()>().await;
        }
    };
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = silent => return tracing::debug!(%address, "idle connection closed"),
        () = tasks.shutdown().cancelled() => {
            connection.as_mut().graceful_shutdown();
            tokio::time::timeout(SHUTDOWN_TIMEOUT, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%address, %error, "connection failed");
    }
}

fn builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(BUFFER_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(HEADER_TIMEOUT)
        .keep_alive_timeout(HEADER_TIMEOUT)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEAD_BYTES)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES);
    builder
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn r20_busy_connections_make_room_for_others() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("a bound address");
        let tasks = Tasks::default();
        let router = Router::new().route("/", get(|| async { "page" }));
        let serving = serve_within(PreAuthLimiter::new(2), listener, router, None, tasks.clone());
        tasks.spawn("server", serving);
        let asked = async || {
            let mut stream = TcpStream::connect(address).await.expect("a connection");
            let request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
            stream.write_all(request).await.expect("an open connection");
            let mut answer = Vec::new();
            while !answer.ends_with(b"page") {
                let read = stream.read_buf(&mut answer).await.expect("an open connection");
                assert!(read > 0, "the connection ended");
            }
            stream
        };
        let [mut first, mut second] = [asked().await, asked().await];
        let later = async {
            drop(asked().await);
            first.read(&mut [0]).await
        };
        let closed = tokio::time::timeout(Duration::from_secs(20), later).await;
        assert!(matches!(closed, Ok(Ok(0) | Err(_))), "{closed:?}");
        let request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
        second.write_all(request).await.expect("an open connection");
        assert!(second.read(&mut [0]).await.is_ok_and(|read| read > 0));
        assert!(tasks.end(Duration::from_secs(20)).await);
    }

    #[test]
    fn api_servers_close_idle_connections_before_the_webhooks_do() {
        // client-go has the timeout of Go's http.DefaultTransport.
        let of_api_servers = Duration::from_secs(90);
        assert!(WEBHOOK_IDLE_TIMEOUT > of_api_servers);
    }
}
