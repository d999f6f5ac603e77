//! A way to a server that can be cut, mended, and made to swallow everything.

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
    /// Every connection ends, and a new one ends as soon as it is made.
    Cut,
    /// Connections stand, and nothing passes.
    Silent,
}

/// A port of 127.0.0.1 that leads to another.
pub(crate) struct Detour {
    pub(crate) port: u16,
    /// The state, and how often connections were severed.
    state: watch::Sender<(State, u64)>,
    arrivals: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Drop for Detour {
    fn drop(&mut self) {
        self.state.send_modify(|(state, _)| *state = State::Cut);
        self.task.abort();
    }
}

impl Detour {
    /// An open way to that port of 127.0.0.1, on which nobody needs to listen yet.
    pub(crate) fn to(server: u16) -> Detour {
        let listener = RUNTIME
            .block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
            .expect("a loopback address can be bound");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let state = watch::Sender::new((State::Open, 0));
        let arrivals = Arc::new(AtomicU64::new(0));
        let (receiver, count) = (state.subscribe(), Arc::clone(&arrivals));
        let task = RUNTIME.spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                RUNTIME.spawn(carry(client, server, receiver.clone()));
            }
        });
        Detour {
            port,
            state,
            arrivals,
            task,
        }
    }

    /// Ends all connections, and refuses more.
    pub(crate) fn cut(&self) {
        self.set(State::Cut);
    }

    /// Ends all connections; new ones are let through.
    pub(crate) fn sever(&self) {
        self.state.send_modify(|(_, severed)| *severed += 1);
    }

    /// Keeps connections, and lets nothing pass.
    pub(crate) fn silence(&self) {
        self.set(State::Silent);
    }

    /// Lets everything pass.
    pub(crate) fn open(&self) {
        self.set(State::Open);
    }

    /// How many connections were asked for so far.
    pub(crate) fn arrivals(&self) -> u64 {
        self.arrivals.load(Ordering::Relaxed)
    }

    fn set(&self, wanted: State) {
        self.state.send_modify(|(state, _)| *state = wanted);
    }
}

/// Carries bytes both ways until either side ends, or the way is cut.
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
            // Either side may end as it likes.
            _ = &mut way, if state == State::Open => return,
        }
    }
}
