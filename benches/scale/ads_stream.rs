//! An ADS stream on its own connection, as bytes.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use http::Request;
use http_body_util::BodyExt;
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::support::http::RUNTIME;

/// Length of a gRPC message prefix: one byte for the compression flag, four for the length.
const PREFIX: usize = 5;
const WINDOW: u32 = 1 << 20;

/// The stream. Dropping it closes the connection.
pub(crate) struct AdsStream {
    requests: mpsc::Sender<Bytes>,
    body: Incoming,
    buffer: BytesMut,
    _sender: SendRequest<Requests>,
    connection: JoinHandle<()>,
}

impl Drop for AdsStream {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// The request body.
struct Requests(mpsc::Receiver<Bytes>);

impl hyper::body::Body for Requests {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|message| Some(Ok(Frame::data(message?))))
    }
}

impl AdsStream {
    /// Connects and sends the first request, without which a server may not respond.
    pub(crate) async fn open(address: SocketAddr, is_delta: bool, first: Vec<u8>) -> Result<AdsStream, String> {
        let stream = TcpStream::connect(address).await.map_err(error_text)?;
        stream.set_nodelay(true).map_err(error_text)?;
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder.initial_stream_window_size(WINDOW);
        builder.initial_connection_window_size(WINDOW);
        let (mut sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(error_text)?;
        let connection = RUNTIME.spawn(async move {
            // Errors show up on the stream.
            let _ = connection.await;
        });
        let (requests, outbox) = mpsc::channel(16);
        requests.send(framed(first)).await.map_err(error_text)?;
        let method = if is_delta { "Delta" } else { "Stream" };
        let service = "envoy.service.discovery.v3.AggregatedDiscoveryService";
        let request = Request::post(format!("http://{address}/{service}/{method}AggregatedResources"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(Requests(outbox))
            .map_err(error_text)?;
        let response = sender.send_request(request).await.map_err(error_text)?;
        if let Some(status) = response.headers().get("grpc-status") {
            return Err(format!(
                "refused: {status:?} {:?}",
                response.headers().get("grpc-message")
            ));
        }
        Ok(AdsStream {
            requests,
            body: response.into_body(),
            buffer: BytesMut::new(),
            _sender: sender,
            connection,
        })
    }

    pub(crate) async fn send(&self, message: Vec<u8>) -> Result<(), String> {
        self.requests.send(framed(message)).await.map_err(error_text)
    }

    /// Returns the next message.
    pub(crate) async fn next(&mut self) -> Result<Bytes, String> {
        loop {
            if let Some(length) = self.buffer.get(1..PREFIX) {
                let length = length.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
                if self.buffer.len() >= PREFIX + length {
                    self.buffer.advance(PREFIX);
                    let message = self.buffer.split_to(length).freeze();
                    if self.buffer.is_empty() {
                        // Otherwise, thousands of idle streams would each keep a buffer of their largest message.
                        self.buffer = BytesMut::new();
                    }
                    return Ok(message);
                }
                self.buffer.reserve(PREFIX + length - self.buffer.len());
            }
            let frame = self.body.frame().await.ok_or("stream ended")?.map_err(error_text)?;
            match frame.into_data() {
                Ok(data) => self.buffer.extend_from_slice(&data),
                Err(frame) => return Err(format!("stream ended: {:?}", frame.into_trailers())),
            }
        }
    }
}

fn framed(message: Vec<u8>) -> Bytes {
    let mut framed = Vec::with_capacity(PREFIX + message.len());
    framed.push(0);
    framed.extend_from_slice(&(message.len() as u32).to_be_bytes());
    framed.extend_from_slice(&message);
    framed.into()
}

fn error_text(error: impl std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
