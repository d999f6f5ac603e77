//! Ports for servers that have to be told theirs. They come from below the kernel's ephemeral range, so that no outgoing
//! connection takes one between the choice and the use.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};

use tokio::net::TcpSocket;

use super::http::RUNTIME;

const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// A port that nobody listens on, and that no other trial of this run is given.
pub(crate) fn free() -> u16 {
    choose().0
}

/// A port for a listener of an Envoy, held until this is dropped.
///
/// Envoy shares the ports of its listeners with whoever allows that, and the kernel would then deal connections out
/// between the two. So the port is taken alone first, and opened to sharing only afterwards.
pub(crate) struct Reserved {
    pub(crate) port: u16,
    _holder: TcpSocket,
}

impl Reserved {
    pub(crate) fn new() -> Reserved {
        let (port, holder) = choose();
        holder
            .set_reuseport(true)
            .expect("an option of a socket of ours can be set");
        Reserved { port, _holder: holder }
    }
}

fn choose() -> (u16, TcpSocket) {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Runs beside each other begin in different places.
    let start = u16::try_from(std::process::id() * 131 % u32::from(COUNT)).expect("the remainder is below COUNT");
    let _runtime = RUNTIME.enter();
    for _ in 0..COUNT {
        let port = FIRST + (start + NEXT.fetch_add(1, Ordering::Relaxed) % COUNT) % COUNT;
        let socket = TcpSocket::new_v4().expect("the machine has sockets left");
        if socket.bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).is_ok() {
            return (port, socket);
        }
    }
    panic!("no free port between {FIRST} and {}", FIRST + COUNT);
}
