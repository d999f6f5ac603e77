//! The limit of what filter chains may repeat. Each chain has all filters of its proxy's policies, Telemetries and
//! extensions, so a large object of these and thousands of ports take gigabytes.
//!
//! The size is that of encoded filters, and the number of chains is part of the keys of resources. So the decision
//! depends on the mesh alone.

use super::{proxy_view::ListenerClass, stack::FilterStack};

/// The maximum size of the filters in all chains of a kind: those of inbound ports of a proxy or of a service behind a
/// waypoint, or those of a gateway's servers of one namespace. 1 MiB is possible in two chains of 128 ports.
const MAX_BYTES: usize = 256 << 20;

/// The maximum number of HTTP chains of an inbound port.
pub const HTTP_CHAINS: usize = 2;

/// The maximum number of TCP chains of an inbound port. One without a declared protocol has all chains of both kinds.
pub const TCP_CHAINS: usize = 3;

/// Code of the note about filters beyond the limit.
const TOO_LARGE: &str = "filter_chains_too_large";

/// Returns true if all chains together would repeat too much.
pub fn is_too_large(size: usize, chains: usize) -> bool {
    size.saturating_mul(chains) > MAX_BYTES
}

impl FilterStack<'_> {
    /// Returns true, with a note, if the chains of all inbound ports would repeat too much. Such a chain must deny all
    /// traffic, since its filters may decide about access.
    pub fn exceeds_inbound_limit(&self, chains_of_port: usize, size: impl FnOnce() -> usize) -> bool {
        if self.class != ListenerClass::SidecarInbound {
            return false;
        }
        let chains = chains_of_port.saturating_mul(self.client.inbound_ports);
        let size = size();
        let exceeds = is_too_large(size, chains);
        if exceeds {
            let namespace = &self.client.namespace;
            self.note(
                TOO_LARGE,
                format!("{namespace}: {size} bytes in each of up to {chains} filter chains"),
            );
        }
        exceeds
    }
}
