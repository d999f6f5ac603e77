//! HTTP for the tests: single requests, and applications that answer with their name.

use std::convert::Infallible;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::net::{TcpListener, UnixStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::wait;

/// The runtime of all sockets; the tests themselves are plain threads.
pub(crate) static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().expect("a runtime can be created"));

static CLIENT: LazyLock<Client<HttpConnector, Full<Bytes>>> =
    // A pooled connection would stay with the listener of a proxy that a test has just replaced.
    LazyLock::new(|| {
        Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(0)
            .build_http()
    });

/// The time limit of a request.
const ANSWERED: Duration = Duration::from_secs(20);

/// A response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) body: String,
}

impl Answer {
    /// The name of the application that answered, if one did.
    pub(crate) fn application(&self) -> Option<String> {
        let body: Value = serde_json::from_str(&self.body).ok()?;
        Some(body["application"].as_str()?.to_owned())
    }
}

/// Sends `GET http://address/path` with this `Host`. The error is a text.
pub(crate) fn get(address: SocketAddr, host: &str, path: &str) -> Result<Answer, String> {
    RUNTIME.block_on(request(address, host, path))
}

/// Sends a request with these headers. The error is a text.
pub(crate) fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Result<Answer, String> {
    let mut request = Request::builder().method(method).uri(format!("http://{address}{path}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request
        .body(Full::from(body.to_owned()))
        .map_err(|error| error.to_string())?;
    RUNTIME.block_on(exchange(request))
}

/// Posts JSON to a server on 127.0.0.1 and returns its JSON answer. Any status but success is an error.
pub(crate) fn post(port: u16, path: &str, body: &Value) -> Result<Value, String> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let request = Request::post(format!("http://{address}{path}"))
        .header("content-type", "application/json")
        .body(Full::from(body.to_string()))
        .map_err(|error| error.to_string())?;
    let answer = RUNTIME.block_on(exchange(request))?;
    if !answer.status.is_success() {
        return Err(format!("{path}: {} {}", answer.status, answer.body));
    }
    serde_json::from_str(&answer.body).map_err(|error| format!("{path}: {error}"))
}

/// Sends `GET path` to a server on a Unix socket.
pub(crate) fn get_at(socket: &Path, path: &str) -> Result<Answer, String> {
    ask_at(socket, Request::get(path))
}

/// Sends `POST path` with an empty body to a server on a Unix socket.
pub(crate) fn post_at(socket: &Path, path: &str) -> Result<Answer, String> {
    ask_at(socket, Request::post(path))
}

fn ask_at(socket: &Path, request: http::request::Builder) -> Result<Answer, String> {
    let request = request.header("host", "local").body(Full::<Bytes>::default());
    let request = request.map_err(|error| error.to_string())?;
    let exchange = async {
        let stream = UnixStream::connect(socket).await.map_err(|error| error.to_string())?;
        let connected = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = connected.map_err(|error| error.to_string())?;
        RUNTIME.spawn(quietly(connection));
        let response = sender
            .send_request(request)
            .await
            .map_err(|error| format!("{error:?}"))?;
        answered(response).await
    };
    let exchange = async { tokio::time::timeout(wait::extended(ANSWERED), exchange).await };
    let answer = RUNTIME.block_on(exchange);
    answer.unwrap_or_else(|_| Err(format!("{} no response in time", socket.display())))
}

/// The asynchronous form of [`get`].
pub(crate) async fn request(address: SocketAddr, host: &str, path: &str) -> Result<Answer, String> {
    request_with(address, host, path, None).await
}

/// Like [`request`], with a bearer token.
pub(crate) async fn request_with(
    address: SocketAddr,
    host: &str,
    path: &str,
    token: Option<&str>,
) -> Result<Answer, String> {
    let mut request = Request::builder()
        .uri(format!("http://{address}{path}"))
        .header("host", host);
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let request = request.body(Full::default()).map_err(|error| error.to_string())?;
    exchange(request).await
}

async fn exchange(request: Request<Full<Bytes>>) -> Result<Answer, String> {
    let uri = request.uri().clone();
    let exchange = async {
        let response = CLIENT.request(request).await.map_err(|error| format!("{error:?}"))?;
        answered(response).await
    };
    match tokio::time::timeout(wait::extended(ANSWERED), exchange).await {
        Ok(answer) => answer,
        Err(_) => Err(format!("{uri} no response in time")),
    }
}

pub(crate) async fn answered(response: Response<Incoming>) -> Result<Answer, String> {
    let status = response.status();
    let body = response
        .into_body()
        .collect()
        .await
        .map_err(|error| format!("{error:?}"))?
        .to_bytes();
    Ok(Answer {
        status,
        body: String::from_utf8_lossy(&body).into_owned(),
    })
}

/// An application that answers every request with its name and the request. `/hold` waits for [`Self::release`].
pub(crate) struct Application {
    pub(crate) address: SocketAddr,
    pending: Arc<watch::Sender<u32>>,
    released: watch::Sender<bool>,
    server: JoinHandle<()>,
}

impl Application {
    /// Listens on a free port of `ip`, which may be any loopback address.
    pub(crate) fn start(name: &str, ip: &str) -> Application {
        let ip: IpAddr = ip.parse().expect("an IP address");
        Application::at(name, SocketAddr::new(ip, 0))
    }

    /// Listens at an address.
    pub(crate) fn at(name: &str, address: SocketAddr) -> Application {
        let listener = RUNTIME
            .block_on(TcpListener::bind(address))
            .expect("a loopback address can be bound");
        let address = listener.local_addr().expect("a bound socket has an address");
        let pending = Arc::new(watch::Sender::new(0));
        let (released, release) = watch::channel(false);
        let server = RUNTIME.spawn(serve(listener, name.to_owned(), Arc::clone(&pending), release));
        Application {
            address,
            pending,
            released,
            server,
        }
    }

    /// Returns the number of `/hold` requests received.
    pub(crate) fn pending(&self) -> u32 {
        *self.pending.borrow()
    }

    /// Answers the requests to `/hold`.
    pub(crate) fn release(&self) {
        self.released.send_replace(true);
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve(listener: TcpListener, name: String, pending: Arc<watch::Sender<u32>>, release: watch::Receiver<bool>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (name, pending, release) = (name.clone(), Arc::clone(&pending), release.clone());
        let answers = service_fn(move |request| {
            let (pending, mut release) = (Arc::clone(&pending), release.clone());
            let answer = answer(&request, &name);
            async move {
                if request.uri().path() == "/hold" {
                    pending.send_modify(|count| *count += 1);
                    // An error means that the application was dropped; its clients are gone as well.
                    let _ = release.wait_for(|released| *released).await;
                }
                Ok::<_, Infallible>(answer)
            }
        });
        let connection = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answers);
        RUNTIME.spawn(quietly(connection));
    }
}

/// Runs a connection and ignores its error: the peer may close it at any time.
pub(crate) async fn quietly(connection: impl Future<Output = hyper::Result<()>>) {
    let _ = connection.await;
}

/// The response of an application: its name, and the request.
pub(crate) fn answer(request: &Request<Incoming>, name: &str) -> Response<Full<Bytes>> {
    let header = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
        (name.to_string(), json!(String::from_utf8_lossy(value.as_bytes())))
    };
    let headers: serde_json::Map<String, Value> = request.headers().iter().map(header).collect();
    let body = json!({ "application": name, "path": request.uri().path(), "headers": headers });
    Response::new(Full::from(body.to_string()))
}
