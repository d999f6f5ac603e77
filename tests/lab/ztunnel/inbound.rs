//! Connections to pods: tunnels, and plaintext where policies admit it.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::server::conn::http2::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use istiod::proto::istio::workload::Workload;
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use super::policy::Connection;
use super::socket::{Transport, accept, connect, original_destination, timeout};
use super::{HBONE, Member, PLAINTEXT, Shared, count, lock, start, tls};
use crate::lab::app::listen;
use crate::support::http::quietly;

/// Accepts tunnels to a pod.
pub(super) fn serve_tunnels(shared: &Arc<Shared>, member: &Arc<Member>) -> Result<JoinHandle<()>, String> {
    let listener = listen(&member.host, HBONE).map_err(|error| format!("{}: {error}", member.name))?;
    let (shared, member) = (Arc::clone(shared), Arc::clone(member));
    Ok(start(accept(listener, move |stream| {
        let (shared, member) = (Arc::clone(&shared), Arc::clone(&member));
        async move {
            if let Err(error) = converse(&shared, &member, stream).await {
                shared.say(&format!("{}: connection of a tunnel refused: {error}", member.name));
            }
        }
    })))
}

/// Serves the tunnels of one connection.
async fn converse(shared: &Arc<Shared>, member: &Arc<Member>, stream: TcpStream) -> Result<(), String> {
    let from = stream.peer_addr().map_err(|error| error.to_string())?;
    let certificate = Arc::clone(&member.agent.known().borrow());
    let acceptor = TlsAcceptor::from(Arc::new(tls::server(&certificate)?));
    let stream = tokio::time::timeout(timeout(), acceptor.accept(stream)).await;
    let stream = stream.map_err(|_| format!("{from}: no TLS handshake in time"))?;
    let stream = stream.map_err(|error| format!("{from}: {error}"))?;
    let source = tls::peer(&stream)?;
    let answers = service_fn(move |request: Request<Incoming>| {
        let (shared, member, source) = (Arc::clone(shared), Arc::clone(member), source.clone());
        async move {
            let status = answer(&shared, &member, source.clone(), from, request).await;
            let status = status.unwrap_or_else(|(status, reason)| {
                shared.say(&format!("{}: tunnel of {source} refused: {reason}", member.name));
                status
            });
            let mut response = Response::new(Empty::<Bytes>::new());
            *response.status_mut() = status;
            Ok::<_, Infallible>(response)
        }
    });
    quietly(Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), answers)).await;
    Ok(())
}

/// Opens a tunnel. The error is the status and the reason of the refusal.
async fn answer(
    shared: &Arc<Shared>,
    member: &Arc<Member>,
    source: String,
    from: SocketAddr,
    request: Request<Incoming>,
) -> Result<StatusCode, (StatusCode, String)> {
    let authority = request.uri().authority().map(ToString::to_string).unwrap_or_default();
    if request.method() != Method::CONNECT {
        return Err((StatusCode::NOT_FOUND, format!("{} is not CONNECT", request.method())));
    }
    let workload = shared.workload(member).await;
    let workload = workload.map_err(|error| (StatusCode::SERVICE_UNAVAILABLE, error))?;
    let to = destination(member, &workload, &authority).map_err(|reason| (StatusCode::BAD_REQUEST, reason))?;
    let connection = Connection {
        source: Some(source.clone()),
        from: from.ip(),
        to,
    };
    let verdict = shared.discovery.view().verdict(&workload, &connection);
    if let Err(reason) = verdict {
        count(&shared.counts.denied);
        return Err((StatusCode::UNAUTHORIZED, reason));
    }
    let application = connect(&member.host, to).await;
    let application = application.map_err(|error| (StatusCode::SERVICE_UNAVAILABLE, format!("{to}: {error}")))?;
    count(&shared.counts.accepted);
    lock(&shared.peers).insert((member.name.clone(), source));
    let (shared, member) = (Arc::clone(shared), Arc::clone(member));
    drop(start(async move {
        if let Ok(tunnel) = hyper::upgrade::on(request).await {
            relay(&shared, &member, TokioIo::new(tunnel), application, &connection).await;
        }
    }));
    Ok(StatusCode::OK)
}

/// Returns the address of the pod that a tunnel asks for, directly or as the port of a service.
fn destination(member: &Member, workload: &Workload, authority: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = authority.parse::<SocketAddr>() {
        let is_own = address.ip() == member.address;
        return is_own
            .then_some(address)
            .ok_or(format!("{authority} is not an address of the pod"));
    }
    let (host, port) = authority.rsplit_once(':').ok_or(format!("{authority} has no port"))?;
    let port: u32 = port.parse().map_err(|error| format!("{authority}: {error}"))?;
    let of_host = workload
        .services
        .iter()
        .filter(|(name, _)| name.split_once('/').is_some_and(|(_, own)| own == host));
    let mut ports = of_host.flat_map(|(_, ports)| &ports.ports);
    let target = ports.find(|one| one.service_port == port);
    let target = target.and_then(|one| u16::try_from(one.target_port).ok());
    let target = target.ok_or(format!("the pod does not serve {authority}"))?;
    Ok(SocketAddr::new(member.address, target))
}

/// Accepts plaintext to a pod.
pub(super) fn serve_plaintext(shared: &Arc<Shared>, member: &Arc<Member>) -> Result<JoinHandle<()>, String> {
    let listener = listen(&member.host, PLAINTEXT).map_err(|error| format!("{}: {error}", member.name))?;
    let (shared, member) = (Arc::clone(shared), Arc::clone(member));
    Ok(start(accept(listener, move |stream| {
        let (shared, member) = (Arc::clone(&shared), Arc::clone(&member));
        async move {
            if let Err(error) = pass(&shared, &member, stream).await {
                shared.say(&format!("{}: plaintext refused: {error}", member.name));
            }
        }
    })))
}

async fn pass(shared: &Arc<Shared>, member: &Arc<Member>, stream: TcpStream) -> Result<(), String> {
    let text = |error: std::io::Error| error.to_string();
    let connection = Connection {
        source: None,
        from: stream.peer_addr().map_err(text)?.ip(),
        to: original_destination(&stream).map_err(text)?,
    };
    let workload = shared.workload(member).await?;
    let verdict = shared.discovery.view().verdict(&workload, &connection);
    if let Err(reason) = verdict {
        count(&shared.counts.denied);
        return Err(format!("{}: {reason}", connection.from));
    }
    let application = connect(&member.host, connection.to).await.map_err(text)?;
    count(&shared.counts.plaintext);
    relay(shared, member, stream, application, &connection).await;
    Ok(())
}

/// Copies bytes until one side ends, or policies no longer admit the connection.
async fn relay(
    shared: &Shared,
    member: &Member,
    mut client: impl Transport,
    mut application: TcpStream,
    connection: &Connection,
) {
    let address = (shared.spec.network.as_str(), member.address);
    tokio::select! {
        // Either side may close at any time.
        _ = copy_bidirectional(&mut client, &mut application) => {}
        () = shared.discovery.until_denied(address, connection) => {
            count(&shared.counts.denied);
            shared.say(&format!("{}: connection closed after a change of policies", member.name));
        }
    }
}
