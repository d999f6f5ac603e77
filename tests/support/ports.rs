//! Ports for servers whose port must be given. They are below the kernel's ephemeral range, so that no outgoing
//! connection takes one between choice and use.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};

use tokio::net::TcpSocket;

use super::http::RUNTIME;

const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// Returns a port without a listener that no other test of this run gets.
pub(crate) fn free() -> u16 {
    choose().0
}

/// A port for a listener of an Envoy, held until this is dropped.
///
/// Envoy shares its listeners' ports with other sockets that allow it, and the kernel would then distribute connections
/// between the two. So the port is first bound exclusively, and opened to sharing afterwards.
pub(crate) struct Reserved {
    pub(crate) port: u16,
    _holder: TcpSocket,
}

impl Reserved {
    pub(crate) fn new() -> Reserved {
        let (port, holder) = choose();
        holder
            .set_reuseport(true)
            .expect("options of our own socket can be set");
        Reserved { port, _holder: holder }
    }
}

fn choose() -> (u16, TcpSocket) {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Parallel runs start at different ports.
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
