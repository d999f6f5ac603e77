//! Connections to servers that the operator configured: TCP, Unix sockets and TLS; and HTTP on them. Their addresses
//! are not restricted, other than those of users' URLs.

use std::{
    future::Future,
    io,
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Empty};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::{
    client::legacy::{
        Client,
        connect::{Connected, Connection},
    },
    rt::{TokioExecutor, TokioIo},
};
use rustls::{
    ClientConfig,
    pki_types::{InvalidDnsNameError, ServerName},
};
use tokio::{
    net::{TcpStream, UnixStream},
    time::timeout,
};
use tokio_rustls::TlsConnector;
use tower::Service;

use super::connect::Stream;

/// The time limit of a connection, with its handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time after which an unused connection is closed.
const IDLE_TIMEOUT: Duration = Duration::from_mins(1);

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// Host and port.
    Host(String, u16),
    /// The path of a Unix socket.
    Socket(PathBuf),
}

/// The host of an endpoint, or the name for its TLS, is not the name of a server.
#[derive(Debug, thiserror::Error)]
#[error("{name:?} is not the name of a server")]
pub struct ServerNameError {
    name: String,
    #[source]
    error: InvalidDnsNameError,
}

/// Makes connections to one server. Cheap to clone.
#[derive(Clone)]
pub struct Dialer {
    endpoint: Endpoint,
    tls: Option<(ServerName<'static>, Arc<ClientConfig>)>,
}

impl Dialer {
    /// Returns a dialer. `tls` has the name of the server; empty for the host of the endpoint. Fails if it is no name.
    pub fn new(endpoint: Endpoint, tls: Option<(&str, Arc<ClientConfig>)>) -> Result<Self, ServerNameError> {
        let tls = match tls {
            None => None,
            Some((name, config)) => {
                let host = match &endpoint {
                    Endpoint::Host(host, _) if name.is_empty() => host.trim_matches(['[', ']']),
                    Endpoint::Host(..) | Endpoint::Socket(_) => name,
                };
                let name = ServerName::try_from(host.to_owned());
                let name = name.map_err(|error| ServerNameError {
                    name: host.to_owned(),
                    error,
                })?;
                Some((name, config))
            }
        };
        Ok(Self { endpoint, tls })
    }

    /// Returns true if connections use TLS.
    pub fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Connects.
    pub async fn connect(&self) -> io::Result<Link> {
        let connecting = timeout(CONNECT_TIMEOUT, self.dial());
        let stream = connecting
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
        Ok(Link(TokioIo::new(stream)))
    }

    async fn dial(&self) -> io::Result<Stream> {
        let plain: Stream = match &self.endpoint {
            Endpoint::Socket(path) => Box::new(UnixStream::connect(path).await?),
            Endpoint::Host(host, port) => {
                let stream = TcpStream::connect((host.trim_matches(['[', ']']), *port)).await?;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
        };
        match &self.tls {
            None => Ok(plain),
            Some((name, config)) => {
                let connector = TlsConnector::from(config.clone());
                Ok(Box::new(connector.connect(name.clone(), plain).await?))
            }
        }
    }
}

/// A connection of a [`Dialer`].
pub struct Link(TokioIo<Stream>);

impl Read for Link {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl Write for Link {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

impl Connection for Link {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Service<Uri> for Dialer {
    type Response = Link;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Link>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let dialer = self.clone();
        Box::pin(async move { dialer.connect().await })
    }
}

/// A failed request. Its text has nothing of the response's body.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    /// The server cannot be reached, or the connection was lost.
    #[error("cannot reach the server: {0}")]
    Connection(String),
    /// The response is not a success.
    #[error("server returned status {0}")]
    Status(u16),
    /// The body is too large.
    #[error("the response exceeds {0} bytes")]
    TooLarge(usize),
    /// The response did not arrive in time.
    #[error("no response within {0:?}")]
    Timeout(Duration),
}

impl HttpError {
    /// Returns the label of the error in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Connection(_) => "unreachable",
            Self::Status(_) => "status",
            Self::TooLarge(_) => "too_large",
            Self::Timeout(_) => "timeout",
        }
    }
}

/// An HTTP client of one server, with a pool of connections. Cheap to clone.
#[derive(Clone)]
pub struct HttpClient {
    client: Client<Dialer, Empty<Bytes>>,
    /// Scheme and authority of all requests.
    base: String,
    headers: HeaderMap,
    max_bytes: usize,
}

impl HttpClient {
    /// Returns a client. `headers` are sent with all requests; larger bodies than `max_bytes` are errors.
    pub fn new(dialer: Dialer, headers: HeaderMap, max_bytes: usize) -> Self {
        let scheme = if dialer.is_tls() { "https" } else { "http" };
        let authority = match &dialer.endpoint {
            Endpoint::Host(host, port) => format!("{host}:{port}"),
            Endpoint::Socket(_) => "localhost".to_owned(),
        };
        Self {
            client: Client::builder(TokioExecutor::new())
                .pool_idle_timeout(IDLE_TIMEOUT)
                .build(dialer),
            base: format!("{scheme}://{authority}"),
            headers,
            max_bytes,
        }
    }

    /// Sends a GET request for a path with its query, and returns headers and body of a successful response.
    pub async fn get(&self, path: &str, limit: Duration) -> Result<(HeaderMap, Bytes), HttpError> {
        match timeout(limit, self.exchange(path)).await {
            Ok(answer) => answer,
            Err(_) => Err(HttpError::Timeout(limit)),
        }
    }

    async fn exchange(&self, path: &str) -> Result<(HeaderMap, Bytes), HttpError> {
        let failed = |error: &dyn std::error::Error| HttpError::Connection(with_causes(error));
        let request = Request::get(format!("{}{path}", self.base)).body(Empty::new());
        let mut request = request.map_err(|error| failed(&error))?;
        *request.headers_mut() = self.headers.clone();
        let response = self.client.request(request).await.map_err(|error| failed(&error))?;
        let (parts, mut body) = response.into_parts();
        if parts.status != StatusCode::OK {
            return Err(HttpError::Status(parts.status.as_u16()));
        }
        let mut bytes = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| failed(&error))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > self.max_bytes {
                return Err(HttpError::TooLarge(self.max_bytes));
            }
            bytes.extend_from_slice(&data);
        }
        Ok((parts.headers, bytes.freeze()))
    }
}

/// Returns the text of an error with its causes.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
