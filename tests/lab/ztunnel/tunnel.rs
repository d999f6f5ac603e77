//! The client side of tunnels: HTTP/2 CONNECT over mutual TLS. Tunnels of one pod to one peer share a connection.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::Empty;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;

use super::addresses::Hop;
use super::socket::{self, Transport};
use super::{Member, lock, start, tls};
use crate::support::http::quietly;

/// The interval of pings on connections, which find peers that have gone.
const KEEPALIVE: Duration = Duration::from_secs(2);

type Requests = SendRequest<Empty<Bytes>>;
type Tunnel = Box<dyn Transport>;

/// The pod, the peer and its identities.
type Key = (String, SocketAddr, Vec<String>);

/// The connections to peers.
#[derive(Default)]
pub(super) struct Pool {
    connections: Mutex<BTreeMap<Key, Requests>>,
}

/// A tunnel that was not opened.
enum Failure {
    /// The connection ended before a response.
    Lost(String),
    /// The peer refused it.
    Refused(StatusCode),
}

impl From<Failure> for String {
    fn from(failure: Failure) -> String {
        match failure {
            Failure::Lost(error) => error,
            Failure::Refused(status) => format!("the peer answered {status}"),
        }
    }
}

impl Pool {
    /// Opens a tunnel from a pod.
    pub(super) async fn open(&self, member: &Member, hop: &Hop) -> Result<Tunnel, String> {
        let key = (member.name.clone(), hop.to, hop.peers.clone());
        let known = lock(&self.connections).get(&key).cloned();
        if let Some(known) = known {
            match connect(known, &hop.authority).await {
                Ok(tunnel) => return Ok(tunnel),
                Err(failure @ Failure::Refused(_)) => return Err(failure.into()),
                // The peer closes connections that it no longer needs. Nothing was sent through this tunnel yet.
                Err(Failure::Lost(_)) => lock(&self.connections).remove(&key),
            };
        }
        let stream = socket::connect(&member.host, hop.to).await;
        let stream = stream.map_err(|error| format!("{}: {error}", hop.to))?;
        let requests = handshake(member, stream, hop.to, &hop.peers).await?;
        lock(&self.connections).insert(key, requests.clone());
        Ok(connect(requests, &hop.authority).await?)
    }
}

/// Opens a tunnel inside another one.
pub(super) async fn open_inside(member: &Member, outer: Tunnel, hop: &Hop, peers: &[String]) -> Result<Tunnel, String> {
    let requests = handshake(member, outer, hop.to, peers).await?;
    Ok(connect(requests, &hop.authority).await?)
}

/// Authenticates both sides of a connection and begins HTTP/2.
async fn handshake(
    member: &Member,
    stream: impl Transport + 'static,
    to: SocketAddr,
    peers: &[String],
) -> Result<Requests, String> {
    let certificate = Arc::clone(&member.agent.known().borrow());
    let tls = TlsConnector::from(tls::client(&certificate, peers)?);
    let shaken = tokio::time::timeout(
        socket::timeout(),
        tls.connect(ServerName::IpAddress(to.ip().into()), stream),
    )
    .await;
    let stream = shaken.map_err(|_| format!("{to}: no TLS handshake in time"))?;
    let stream = stream.map_err(|error| format!("{to}: {error}"))?;
    let (requests, connection) = Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|error| format!("{to}: {error:?}"))?;
    drop(start(quietly(connection)));
    Ok(requests)
}

/// Asks for a tunnel to a destination.
async fn connect(mut requests: Requests, authority: &str) -> Result<Tunnel, Failure> {
    let lost = |error: hyper::Error| Failure::Lost(format!("{error:?}"));
    let request = Request::builder().method(Method::CONNECT).uri(authority);
    let request = request.body(Empty::<Bytes>::new());
    let request = request.map_err(|error| Failure::Lost(error.to_string()))?;
    let asking = async {
        requests.ready().await.map_err(lost)?;
        requests.send_request(request).await.map_err(lost)
    };
    let response = tokio::time::timeout(socket::timeout(), asking).await;
    let response = response.unwrap_or_else(|_| Err(Failure::Lost("no response to CONNECT in time".to_owned())))?;
    if response.status() != StatusCode::OK {
        return Err(Failure::Refused(response.status()));
    }
    let upgraded = hyper::upgrade::on(response).await.map_err(lost)?;
    Ok(Box::new(TokioIo::new(upgraded)))
}
