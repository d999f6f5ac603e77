//! Ports for servers that have to be told theirs. They come from below the kernel's ephemeral range, so that no outgoing
//! connection takes one between the choice and the use.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// A port that nobody listens on, and that no other trial of this run is given.
pub(crate) fn free() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Runs beside each other begin in different places.
    let start = u16::try_from(std::process::id() * 131 % u32::from(COUNT)).expect("the remainder is below COUNT");
    for _ in 0..COUNT {
        let port = FIRST + (start + NEXT.fetch_add(1, Ordering::Relaxed) % COUNT) % COUNT;
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
    panic!("no free port between {FIRST} and {}", FIRST + COUNT);
}
