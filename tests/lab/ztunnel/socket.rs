//! Sockets in network namespaces of pods.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt::ip_original_dst;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::lab::host::Host;
use crate::support::wait;

/// The mark of the ztunnel's own packets, which are not redirected.
pub(super) const MARK: u32 = 0x539;
/// Time limit of a connection, on a quiet machine.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A connection or a tunnel.
pub(super) trait Transport: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Transport for T {}

/// Returns the time limit of a connection.
pub(super) fn timeout() -> Duration {
    wait::extended(TIMEOUT)
}

/// Connects from a pod to an address, as traffic of the ztunnel.
pub(super) async fn connect(host: &Arc<Host>, to: SocketAddr) -> io::Result<TcpStream> {
    let host = Arc::clone(host);
    let open = move || {
        host.enter(|| {
            let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
            socket.set_mark(MARK)?;
            socket.connect_timeout(&to.into(), timeout())?;
            socket.set_nonblocking(true)?;
            socket.set_tcp_nodelay(true)?;
            Ok(std::net::TcpStream::from(socket))
        })
    };
    let opened = tokio::task::spawn_blocking(open).await;
    TcpStream::from_std(opened.expect("opening a socket does not panic")?)
}

/// Returns the address to which a redirected connection was opened.
pub(super) fn original_destination(stream: &TcpStream) -> io::Result<SocketAddr> {
    Ok(SocketAddr::V4(ip_original_dst(stream)?))
}

/// Handles all connections of a port. They end with the returned future.
pub(super) async fn accept<F>(listener: TcpListener, handle: impl Fn(TcpStream) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        // Without it, small writes wait for acknowledgements.
        let _ = stream.set_nodelay(true);
        connections.spawn(handle(stream));
        while connections.try_join_next().is_some() {}
    }
}
