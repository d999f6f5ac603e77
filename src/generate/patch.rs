//! EnvoyFilter patches: the last step of every resource.

pub mod merge;

use super::{View, group::Note};
use crate::{
    base::ObjectKey,
    proto::envoy::config::{listener::v3::Listener, route::v3::RouteConfiguration},
};

/// Where a patch applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PatchContext {
    /// Inbound configuration of sidecars.
    SidecarInbound,
    /// Outbound configuration of sidecars.
    SidecarOutbound,
    /// Gateways.
    Gateway,
}

/// Applies the patches to a listener; `None` if one removes it.
pub fn listener(
    _view: &View,
    _filters: &[ObjectKey],
    _context: PatchContext,
    listener: Listener,
    _notes: &mut Vec<Note>,
) -> Option<Listener> {
    Some(listener)
}

/// Applies the patches to the routes that stand in an inbound listener.
pub fn inbound_routes(_view: &View, _filters: &[ObjectKey], routes: RouteConfiguration) -> RouteConfiguration {
    routes
}
