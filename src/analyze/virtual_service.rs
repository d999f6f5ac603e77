//! VirtualServices: destinations, subsets, gateways and hosts.

mod claims;
mod conflict;
mod destination;
mod gateways;

pub(super) use self::{
    claims::claims,
    conflict::conflicts,
    destination::{destinations, subsets},
    gateways::gateways,
};
