//! A TCP proxy with fault injection: it can cut, restore and silence the connections to a server.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::http::RUNTIME;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// Existing and new connections are closed.
    Cut,
    /// Connections stay open, but no bytes pass.
    Silent,
}

/// A TCP proxy from a free port of 127.0.0.1 to another port, with fault injection.
pub(crate) struct FaultProxy {
    pub(crate) port: u16,
    /// The state, and the number of times that connections were severed.
    state: watch::Sender<(State, u64)>,
    connections: Arc<AtomicU64>,
    /// The text before which the next response ends, with its connection.
    last_before: watch::Sender<Option<&'static [u8]>>,
    task: JoinHandle<()>,
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.state.send_modify(|(state, _)| *state = State::Cut);
        self.task.abort();
    }
}

impl FaultProxy {
    /// Forwards to this port of 127.0.0.1, which may have no listener yet.
    pub(crate) fn to(server: u16) -> FaultProxy {
        let listener = RUNTIME
            .block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
            .expect("a loopback address can be bound");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let state = watch::Sender::new((State::Open, 0));
        let connections = Arc::new(AtomicU64::new(0));
        let last_before = watch::Sender::new(None);
        let (receiver, count, before) = (state.subscribe(), Arc::clone(&connections), last_before.clone());
        let task = RUNTIME.spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                RUNTIME.spawn(carry(client, server, receiver.clone(), before.clone()));
            }
        });
        FaultProxy {
            port,
            state,
            connections,
            last_before,
            task,
        }
    }

    /// Closes the first connection whose server sends this text from now on, just before it.
    pub(crate) fn sever_before(&self, text: &'static [u8]) {
        self.last_before.send_replace(Some(text));
    }

    /// Returns true if no connection is to be closed before a text.
    pub(crate) fn has_severed(&self) -> bool {
        self.last_before.borrow().is_none()
    }

    /// Closes all connections and refuses new ones.
    pub(crate) fn cut(&self) {
        self.set(State::Cut);
    }

    /// Closes all connections, and accepts new ones.
    pub(crate) fn sever(&self) {
        self.state.send_modify(|(_, severed)| *severed += 1);
    }

    /// Keeps connections open, but stops all bytes.
    pub(crate) fn silence(&self) {
        self.set(State::Silent);
    }

    /// Forwards everything.
    pub(crate) fn open(&self) {
        self.set(State::Open);
    }

    /// Returns the number of accepted connections.
    pub(crate) fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    fn set(&self, new_state: State) {
        self.state.send_modify(|(state, _)| *state = new_state);
    }
}

/// Copies bytes both ways until either side closes, or the state becomes `Cut`.
async fn carry(
    client: TcpStream,
    server: u16,
    mut changes: watch::Receiver<(State, u64)>,
    last_before: watch::Sender<Option<&'static [u8]>>,
) {
    let (mut state, severed) = *changes.borrow_and_update();
    let mut way = Box::pin(copy(client, server, last_before));
    while state != State::Cut {
        tokio::select! {
            biased;
            changed = changes.changed() => {
                let (now, times) = *changes.borrow_and_update();
                if changed.is_err() || times != severed {
                    return;
                }
                state = now;
            }
            // Either side may close at any time.
            _ = &mut way, if state == State::Open => return,
        }
    }
}

/// Copies bytes both ways until both sides have closed, or the server sends the text before which it ends.
async fn copy(client: TcpStream, server: u16, last_before: watch::Sender<Option<&'static [u8]>>) -> io::Result<()> {
    let server = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, server))).await?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let asking = async {
        tokio::io::copy(&mut from_client, &mut to_server).await?;
        to_server.shutdown().await
    };
    let answering = async {
        let (mut seen, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
        loop {
            let len = from_server.read(&mut buffer).await?;
            if len == 0 {
                return to_client.shutdown().await;
            }
            let text = *last_before.borrow();
            if let Some(text) = text {
                let before = seen.len();
                seen.extend_from_slice(&buffer[..len]);
                if let Some(at) = seen.windows(text.len()).position(|part| part == text) {
                    to_client.write_all(&seen[before.min(at)..at]).await?;
                    last_before.send_replace(None);
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
            }
            to_client.write_all(&buffer[..len]).await?;
        }
    };
    tokio::try_join!(asking, answering).map(|_| ())
}
