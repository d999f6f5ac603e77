//! The connections of pages. Whoever reaches a port may open many of them and say nothing, or say it slowly; so time, heads
//! and windows are bounded, and what does not ask for anything is ended.

use std::{
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body, extract::ConnectInfo};
use http::Request;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tower::ServiceExt;

use crate::task::Tasks;

/// How long the head of a request may take, also that of the next one on a connection.
const HEAD_PATIENCE: Duration = Duration::from_secs(10);
/// How long what is being answered may take at shutdown.
const LAST_PATIENCE: Duration = Duration::from_secs(5);
/// How long accepting rests after an error such as "too many open files".
const ACCEPT_REST: Duration = Duration::from_millis(100);
/// The largest head of a request, in bytes.
const HEAD_BYTES: u32 = 16 << 10;
/// What is held of a connection that was not read yet, in bytes.
const BUFFER_BYTES: usize = 32 << 10;
/// What a client of HTTP/2 may send before it is read, in bytes.
const WINDOW_BYTES: u32 = 64 << 10;
/// Streams of a connection of HTTP/2.
const STREAMS: u32 = 128;
/// Connections at once of one port. Those that ask for nothing leave within [`HEAD_PATIENCE`], so the next ones get in.
const CONNECTIONS: usize = 8192;

/// Serves pages until shutdown.
pub async fn serve(listener: TcpListener, router: Router, tasks: Tasks) {
    let shutdown = tasks.shutdown().clone();
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let accepting = async {
            let place = places.clone().acquire_owned().await;
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            () = shutdown.cancelled() => return,
            accepted = accepting => accepted,
        };
        match accepted {
            Ok((stream, address)) => {
                let serving = connection(stream, address, router.clone(), tasks.clone());
                tasks.spawn("http connection", async move {
                    serving.await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted; hint: the limit of open files may be too low");
                tokio::time::sleep(ACCEPT_REST).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, address: SocketAddr, router: Router, tasks: Tasks) {
    let asked = AtomicBool::new(false);
    let service = service_fn(|request: Request<Incoming>| {
        asked.store(true, Ordering::Release);
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(ConnectInfo(address));
        let router = router.clone();
        async move { router.oneshot(request).await }
    });
    let builder = builder();
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let silent = async {
        tokio::time::sleep(HEAD_PATIENCE).await;
        if asked.load(Ordering::Acquire) {
            std::future::pending::<()>().await;
        }
    };
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = silent => return tracing::debug!(%address, "a connection asked for nothing"),
        () = tasks.shutdown().cancelled() => {
            connection.as_mut().graceful_shutdown();
            tokio::time::timeout(LAST_PATIENCE, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%address, %error, "a connection broke");
    }
}

fn builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_PATIENCE)
        .max_buf_size(BUFFER_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(HEAD_PATIENCE)
        .keep_alive_timeout(HEAD_PATIENCE)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEAD_BYTES)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES);
    builder
}
