//! Patches of listeners.

use super::{PatchContext, PatchRef};
use crate::{
    generate::{View, group::Note},
    proto::envoy::config::{listener::v3::Listener, route::v3::RouteConfiguration},
};

/// Applies the patches to a listener; `None` if one removes it.
pub fn listener(
    _view: &View,
    _patches: &[PatchRef],
    _context: PatchContext,
    listener: Listener,
    _notes: &mut Vec<Note>,
) -> Option<Listener> {
    Some(listener)
}

/// Applies the patches to the routes that stand in an inbound listener.
pub fn inbound_routes(_view: &View, _patches: &[PatchRef], routes: RouteConfiguration) -> RouteConfiguration {
    routes
}
