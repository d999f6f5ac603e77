//! Accepts connections of unauthenticated peers within the limits of [`PreAuthLimiter`], and runs their handshakes.

use std::{future::Future, io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
};

use super::{
    pre_auth::{PreAuthLimiter, UnauthenticatedConnection},
    socket::{Socket, Uncork},
};
use crate::{auth::tls::PeerCertificate, base::address::canonical, task::Tasks};

/// The pause after an accept error such as "too many open files".
const ACCEPT_BACKOFF: Duration = Duration::from_millis(20);

/// A connection after its handshake.
pub struct Established<I> {
    /// The stream of the application's bytes.
    pub io: I,
    /// The address of the peer.
    pub address: SocketAddr,
    /// The verified certificate of the peer.
    pub certificate: Option<Arc<PeerCertificate>>,
    /// Its place among the unauthenticated connections.
    pub pre_auth: Arc<UnauthenticatedConnection>,
    pub(super) uncork: Uncork,
}

/// Accepts connections until shutdown. Cheap to clone.
#[derive(Clone)]
pub struct Accepting {
    /// Runs the handshakes.
    pub tasks: Tasks,
    /// The bounded set of unauthenticated connections.
    pub limiter: PreAuthLimiter,
    /// The time limit of a handshake.
    pub handshake_timeout: Duration,
}

impl Accepting {
    /// Passes each connection to `serve` after its handshake, which runs in a task of its own.
    pub async fn run<H, F, I, S>(&self, listener: TcpListener, handshake: H, serve: S)
    where
        H: Fn(Socket) -> F,
        F: Future<Output = io::Result<(I, Option<Arc<PeerCertificate>>)>> + Send + 'static,
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
        S: Fn(Established<I>) + Clone + Send + 'static,
    {
        let shutdown = self.tasks.shutdown().clone();
        loop {
            let accepted = tokio::select! {
                () = shutdown.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            let (stream, address) = match accepted {
                Ok((stream, address)) => (stream, canonical(address)),
                Err(error) => {
                    let evicted = self.limiter.evict_oldest();
                    tracing::warn!(
                        %error,
                        evicted,
                        "failed to accept connection; hint: check the limit of open files"
                    );
                    tokio::time::sleep(ACCEPT_BACKOFF).await;
                    continue;
                }
            };
            let pre_auth = loop {
                match self.limiter.register(address.ip()) {
                    Ok(pre_auth) => break pre_auth,
                    // More connections wait in the backlog of the listener.
                    Err(_) => tokio::time::sleep(ACCEPT_BACKOFF).await,
                }
            };
            // Responses are written when they are complete, so Nagle's algorithm would only delay them.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, %address, "failed to set TCP_NODELAY");
            }
            let socket = Socket::new(stream);
            let uncork = socket.uncork();
            let handshake = tokio::time::timeout(self.handshake_timeout, handshake(socket));
            let serve = serve.clone();
            self.tasks.spawn("handshake", async move {
                let established = tokio::select! {
                    established = handshake => established,
                    () = pre_auth.evicted() => {
                        return tracing::debug!(%address, error = "evicted", "handshake failed");
                    }
                };
                match established {
                    Ok(Ok((io, certificate))) => serve(Established {
                        io,
                        address,
                        certificate,
                        pre_auth,
                        uncork,
                    }),
                    Ok(Err(error)) => tracing::debug!(%address, %error, "handshake failed"),
                    Err(_) => tracing::debug!(%address, error = "timeout", "handshake failed"),
                }
            });
        }
    }
}
