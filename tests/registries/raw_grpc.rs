//! A gRPC server that answers every call as a test says, also with what no gRPC server would answer.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use libtest_mimic::Failed;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::support::http::{RUNTIME, quietly};

/// The answer to a call.
#[derive(Clone)]
pub(super) enum Reply {
    /// One message.
    Message(Vec<u8>),
    /// An HTTP status without a message.
    Status(u16),
    /// The first half of a message.
    Half(Vec<u8>),
    /// A message of gigabytes.
    Endless,
}

type Replies = Arc<dyn Fn(&str) -> Reply + Send + Sync>;

/// The server. Dropping it stops it and ends its connections.
pub(super) struct RawGrpc {
    pub(super) port: u16,
    replies: Arc<Mutex<Replies>>,
    stop: CancellationToken,
}

impl Drop for RawGrpc {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl RawGrpc {
    /// Starts the server on a port, or on a free one if it is 0. `replies` has the reply by the path of the call.
    pub(super) fn start(
        port: u16,
        tls: Option<TlsAcceptor>,
        replies: impl Fn(&str) -> Reply + Send + Sync + 'static,
    ) -> Result<RawGrpc, Failed> {
        let listener = RUNTIME.block_on(tokio::net::TcpListener::bind(("127.0.0.1", port)))?;
        let replies: Arc<Mutex<Replies>> = Arc::new(Mutex::new(Arc::new(replies)));
        let server = RawGrpc {
            port: listener.local_addr()?.port(),
            replies: replies.clone(),
            stop: CancellationToken::new(),
        };
        let stop = server.stop.clone();
        let accepting = async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (replies, tls) = (replies.clone(), tls.clone());
                let serving = async move {
                    match tls {
                        None => serve(stream, replies).await,
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                serve(stream, replies).await;
                            }
                        }
                    }
                };
                RUNTIME.spawn(stop.clone().run_until_cancelled_owned(serving));
            }
        };
        RUNTIME.spawn(server.stop.clone().run_until_cancelled_owned(accepting));
        Ok(server)
    }

    /// Changes the replies.
    pub(super) fn set(&self, replies: impl Fn(&str) -> Reply + Send + Sync + 'static) {
        *self.replies.lock().expect("no panic") = Arc::new(replies);
    }
}

async fn serve<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(stream: S, replies: Arc<Mutex<Replies>>) {
    let service = hyper::service::service_fn(move |request: hyper::Request<Incoming>| {
        let replies = replies.lock().expect("no panic").clone();
        let response = response(replies(request.uri().path()));
        async move { Ok::<_, Infallible>(response) }
    });
    let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    quietly(builder.serve_connection(TokioIo::new(stream), service)).await;
}

fn response(reply: Reply) -> hyper::Response<BoxBody<Bytes, Infallible>> {
    let framed = |length: usize, message: &[u8]| {
        let mut bytes = vec![0];
        bytes.extend(u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
        bytes.extend(message);
        Frame::data(Bytes::from(bytes))
    };
    let (status, body) = match reply {
        Reply::Status(status) => (status, Full::new(Bytes::from_static(b"sorry")).boxed()),
        Reply::Message(message) => (200, frames([framed(message.len(), &message), trailers()])),
        Reply::Half(message) => {
            let half = &message[..message.len() / 2];
            (200, frames([framed(message.len(), half), trailers()]))
        }
        Reply::Endless => {
            let part = Bytes::from(vec![b'x'; 1 << 20]);
            let rest = futures::stream::repeat_with(move || Ok::<_, Infallible>(Frame::data(part.clone())));
            let head = futures::stream::iter([Ok(framed(usize::MAX, &[]))]);
            let body = StreamBody::new(futures::StreamExt::chain(head, rest));
            (200, BodyExt::boxed(body))
        }
    };
    hyper::Response::builder()
        .status(status)
        .header("content-type", "application/grpc")
        .body(body)
        .expect("a valid response")
}

fn frames(frames: [Frame<Bytes>; 2]) -> BoxBody<Bytes, Infallible> {
    BodyExt::boxed(StreamBody::new(futures::stream::iter(frames.map(Ok))))
}

fn trailers() -> Frame<Bytes> {
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
    Frame::trailers(trailers)
}
