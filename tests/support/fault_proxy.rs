//! A TCP proxy with fault injection: it can cut, restore and silence the connections to a server.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::copy_bidirectional;
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
        let (receiver, count) = (state.subscribe(), Arc::clone(&connections));
        let task = RUNTIME.spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                RUNTIME.spawn(carry(client, server, receiver.clone()));
            }
        });
        FaultProxy {
            port,
            state,
            connections,
            task,
        }
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
async fn carry(mut client: TcpStream, server: u16, mut changes: watch::Receiver<(State, u64)>) {
    let (mut state, severed) = *changes.borrow_and_update();
    let way = async move {
        let mut server = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, server))).await?;
        copy_bidirectional(&mut client, &mut server).await
    };
    let mut way = std::pin::pin!(way);
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
