//! Applications on hosts of the lab, and requests from them. Sockets are created on the host; the test process moves
//! the bytes.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle, JoinSet};
use tokio::time::MissedTickBehavior;
use tokio_rustls::TlsAcceptor;

use super::host::Host;
use crate::support::http::{Answer, RUNTIME, answer, quietly};
use crate::support::wait::now;

/// Time limit of a whole request.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A running application. Dropping it closes its port.
pub(crate) struct Application {
    server: JoinHandle<()>,
}

impl Application {
    /// Answers with its name on a port of every address of the host.
    pub(crate) fn start(host: &Host, name: &str, port: u16) -> Result<Application, String> {
        let listener = listen(host, port).map_err(|error| format!("{name} cannot listen on {port}: {error}"))?;
        let server = RUNTIME.spawn(serve(listener, name.to_owned(), None));
        Ok(Application { server })
    }

    /// Like [`Self::start`], over TLS only.
    pub(crate) fn start_tls(host: &Host, name: &str, port: u16, tls: ServerConfig) -> Result<Application, String> {
        let listener = listen(host, port).map_err(|error| format!("{name} cannot listen on {port}: {error}"))?;
        let tls = TlsAcceptor::from(Arc::new(tls));
        let server = RUNTIME.spawn(serve(listener, name.to_owned(), Some(tls)));
        Ok(Application { server })
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Listens on a port of every address of a host.
pub(crate) fn listen(host: &Host, port: u16) -> io::Result<TcpListener> {
    host.enter(|| std::net::TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
        .and_then(asynchronous)
}

fn asynchronous(listener: std::net::TcpListener) -> io::Result<TcpListener> {
    listener.set_nonblocking(true)?;
    let _runtime = RUNTIME.enter();
    TcpListener::from_std(listener)
}

/// A request from an application.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// The value of the header `Host`.
    pub(crate) host: String,
    pub(crate) address: IpAddr,
    pub(crate) port: u16,
    pub(crate) path: String,
    pub(crate) headers: Vec<(&'static str, String)>,
}

impl Call {
    /// Sends the request from a host, on a new connection.
    pub(crate) fn from(&self, host: &Arc<Host>) -> Result<Answer, String> {
        RUNTIME.block_on(self.clone().send(Arc::clone(host)))
    }

    async fn send(self, host: Arc<Host>) -> Result<Answer, String> {
        let target = SocketAddr::from((self.address, self.port));
        let name = host.name.clone();
        let connected =
            tokio::task::spawn_blocking(move || host.enter(|| std::net::TcpStream::connect_timeout(&target, TIMEOUT)));
        let stream = connected.await.expect("creating a socket does not panic");
        let stream = stream.map_err(|error| format!("{name}: {target}: {error}"))?;
        let answer = tokio::time::timeout(TIMEOUT, self.over(stream)).await;
        answer.unwrap_or_else(|_| Err(format!("{}: no response within {TIMEOUT:?}", self.host)))
    }

    async fn over(&self, stream: std::net::TcpStream) -> Result<Answer, String> {
        let error_text = |error: io::Error| error.to_string();
        stream.set_nonblocking(true).map_err(error_text)?;
        let stream = TcpStream::from_std(stream).map_err(error_text)?;
        let shaken = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = shaken.map_err(|error| format!("{error:?}"))?;
        RUNTIME.spawn(async move {
            let _ = connection.await;
        });
        let mut request = Request::get(&self.path).header("host", &self.host);
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        let request = request
            .body(Full::<Bytes>::default())
            .map_err(|error| error.to_string())?;
        let response = sender
            .send_request(request)
            .await
            .map_err(|error| format!("{error:?}"))?;
        let status = response.status();
        let body = response
            .into_body()
            .collect()
            .await
            .map_err(|error| format!("{error:?}"))?;
        Ok(Answer {
            status,
            body: String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        })
    }
}

/// A stream of requests that runs until [`Self::end`].
pub(crate) struct Load {
    stop: watch::Sender<bool>,
    answered: Arc<AtomicUsize>,
    sender: JoinHandle<Outcome>,
}

/// The results of the requests.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Number of successful responses.
    pub(crate) answered: usize,
    pub(crate) failures: Vec<Failure>,
}

/// A request without a successful response.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) started_at: Instant,
    pub(crate) ended: Instant,
    /// The error.
    pub(crate) message: String,
}

impl Load {
    /// Sends a call from a host once per `pace`, each on a new connection. Slow requests do not delay later ones.
    pub(crate) fn start(host: Arc<Host>, call: Call, pace: Duration) -> Load {
        let (stop, mut stopped) = watch::channel(false);
        let answered = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&answered);
        let sender = RUNTIME.spawn(async move {
            let mut outcome = Outcome::default();
            let mut under_way = JoinSet::new();
            let mut ticks = tokio::time::interval(pace);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                tokio::select! {
                    _ = ticks.tick() => {
                        let (call, host) = (call.clone(), Arc::clone(&host));
                        under_way.spawn(async move { (now(), call.send(host).await, now()) });
                    }
                    Some(one) = under_way.join_next() => outcome.count(one, &counted),
                    _ = stopped.changed() => break,
                }
            }
            while let Some(one) = under_way.join_next().await {
                outcome.count(one, &counted);
            }
            outcome
        });
        Load { stop, answered, sender }
    }

    /// Returns the number of successful requests so far.
    pub(crate) fn answered(&self) -> usize {
        self.answered.load(Ordering::Relaxed)
    }

    /// Ends the load and returns its results.
    pub(crate) fn end(self) -> Outcome {
        self.stop.send_replace(true);
        RUNTIME.block_on(self.sender).expect("sending requests does not panic")
    }
}

/// Start, result and end of one request.
type RequestResult = (Instant, Result<Answer, String>, Instant);

impl Outcome {
    fn count(&mut self, one: Result<RequestResult, JoinError>, answered: &AtomicUsize) {
        let (started_at, answer, ended) = one.expect("a request does not panic");
        let message = match answer {
            Ok(answer) if answer.status.is_success() => {
                self.answered += 1;
                answered.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Ok(answer) => format!("{} {}", answer.status, answer.body),
            Err(error) => error,
        };
        self.failures.push(Failure {
            started_at,
            ended,
            message,
        });
    }
}

async fn serve(listener: TcpListener, name: String, tls: Option<TlsAcceptor>) {
    while let Ok((stream, _)) = listener.accept().await {
        let name = name.clone();
        match tls.clone() {
            None => drop(RUNTIME.spawn(converse(stream, name))),
            Some(tls) => drop(RUNTIME.spawn(async move {
                // A client without TLS gets no answer.
                if let Ok(stream) = tls.accept(stream).await {
                    converse(stream, name).await;
                }
            })),
        }
    }
}

/// Answers the requests of one connection.
async fn converse(stream: impl AsyncRead + AsyncWrite + Unpin, name: String) {
    let answers = service_fn(move |request| {
        let answer = answer(&request, &name);
        async move { Ok::<_, Infallible>(answer) }
    });
    let connection = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answers);
    quietly(connection).await;
}
