//! The limit of what filter chains may repeat. Each chain has all filters of its proxy's policies, Telemetries and
//! extensions, so a large object of these and thousands of ports take gigabytes.
//!
//! The size is that of encoded filters, and the number of chains is part of the keys of resources. So the decision
//! depends on the mesh alone.

use std::fmt;

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

/// Filters that are too large for all chains together.
pub struct Excess {
    /// The size of the filters of one chain in bytes.
    size: usize,
    /// Upper bound of the number of chains.
    chains: usize,
}

impl Excess {
    /// Returns `None` if the chains may repeat filters of this size.
    pub fn of(size: usize, chains: usize) -> Option<Self> {
        (size.saturating_mul(chains) > MAX_BYTES).then_some(Self { size, chains })
    }
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} bytes in each of up to {} filter chains", self.size, self.chains)
    }
}

impl FilterStack<'_> {
    /// Returns true, with a note, if the chains of all inbound ports would repeat too much. Such a chain must deny all
    /// traffic, since its filters may decide about access.
    pub fn exceeds_inbound_limit(&self, chains_of_port: usize, size: impl FnOnce() -> usize) -> bool {
        let excess = self.inbound_excess(chains_of_port, size);
        if let Some(excess) = &excess {
            self.note(TOO_LARGE, format!("{}: {excess}", self.client.namespace));
        }
        excess.is_some()
    }

    /// Returns what the chains of all inbound ports would repeat, if that is too much.
    ///
    /// Note: only owners of the workload or service decide about its ports, but tenants may add servers to a gateway
    /// that they share. So its listeners decide for each namespace of its Gateways.
    pub(super) fn inbound_excess(&self, chains_of_port: usize, size: impl FnOnce() -> usize) -> Option<Excess> {
        if self.class != ListenerClass::SidecarInbound {
            return None;
        }
        let chains = chains_of_port.saturating_mul(self.client.inbound_ports);
        Excess::of(size(), chains)
    }
}
