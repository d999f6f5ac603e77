//! Listeners.
//!
//! A sidecar has two parts: outbound listeners, shared by all proxies of one scope, and inbound listeners, shared by
//! workloads that serve the same ports. A gateway has one. Note: a listener is named by address and port; the services
//! that share it are determined when the part is listed ([`outbound`]), not when it is built.

pub mod filter_chain;
pub mod gateway;
pub mod hbone;
pub mod inbound;
pub mod inspector;
pub(super) mod l4_match;
pub mod outbound;
mod termination;
#[cfg(test)]
mod tests;
pub mod waypoint;

use super::{
    BuildContext,
    filter::FilterProxyView,
    patch::{self, AddedListener},
    proxy::{InterceptionMode, ProxyType},
    resource::Built,
    selected::Selected,
};
use crate::{base::Hashed, model::sidecar_scope::OutboundPolicy};
use gateway::{GatewayKey, GatewayPart};
use hbone::{HbonePart, InternalKey, OriginateKey, TerminateKey};
use inbound::{InboundListenerKey, InboundListenerPart, InboundProxyView};
use outbound::{
    OutboundListenerPart, catch_all_cluster,
    listener::OutboundListenerKey,
    proxy_view::OutboundListenerProxyView,
    virtual_listener::{HttpProxyKey, VirtualOutboundKey},
};
use waypoint::{CrossingPart, WaypointKey, WaypointListenerPart};

/// Inputs of the selection of a listener part.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ListenerPart {
    /// Outbound listeners of a sidecar.
    Outbound(OutboundListenerPart),
    /// Inbound listeners of a sidecar.
    Inbound(InboundListenerPart),
    /// Listeners of a gateway.
    Gateway(GatewayPart),
    /// Listeners of a waypoint.
    Waypoint(WaypointListenerPart),
    /// Listeners of a gateway for nested tunnels.
    Crossing(CrossingPart),
    /// HBONE listeners.
    Hbone(HbonePart),
    /// Listeners that EnvoyFilters add.
    Added(Vec<AddedListener>),
}

/// Inputs of one listener, besides the rows that it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ListenerKey {
    /// A listener for service ports.
    Outbound(OutboundListenerKey),
    /// The listener of intercepted outbound connections.
    VirtualOutbound(VirtualOutboundKey),
    /// The HTTP proxy.
    HttpProxy(HttpProxyKey),
    /// An inbound listener.
    Inbound(InboundListenerKey),
    /// A listener of a gateway.
    Gateway(GatewayKey),
    /// The listener that originates tunnels.
    ConnectOriginate(OriginateKey),
    /// The listener that terminates tunnels.
    ConnectTerminate(TerminateKey),
    /// The internal listener of connections out of tunnels to a sidecar.
    MainInternal(InternalKey),
    /// A listener of a waypoint.
    Waypoint(WaypointKey),
    /// A listener that an EnvoyFilter adds.
    Added(AddedListener),
}

/// Selects the listener parts of a proxy.
pub fn select(ctx: &BuildContext, selected: &Selected) -> Vec<ListenerPart> {
    let filters = FilterProxyView::of(ctx, selected);
    let mut parts: Vec<ListenerPart> = match selected.proxy.proxy_type {
        ProxyType::Sidecar => sidecar(ctx, selected, &filters),
        ProxyType::Router => {
            let gateway = ListenerPart::Gateway(GatewayPart::of(ctx, selected, &filters));
            let hbone = HbonePart::of(ctx, selected, &filters, None).map(ListenerPart::Hbone);
            let crossing = CrossingPart::of(ctx, selected, &filters).map(ListenerPart::Crossing);
            std::iter::once(gateway).chain(crossing).chain(hbone).collect()
        }
        ProxyType::Waypoint => {
            let waypoint = ListenerPart::Waypoint(WaypointListenerPart::of(ctx, selected, &filters));
            // Only gateways between networks have Gateways.
            let has_gateways = !selected.gateways.is_empty();
            let gateway = has_gateways.then(|| ListenerPart::Gateway(GatewayPart::of(ctx, selected, &filters)));
            std::iter::once(waypoint).chain(gateway).collect()
        }
        ProxyType::Ztunnel | ProxyType::Agentgateway => Vec::new(),
    };
    let added = patch::added_listeners(ctx, selected.proxy.proxy_type, &selected.patches);
    if !added.is_empty() {
        let key = |patch| AddedListener {
            patch,
            extensions: filters.extensions.clone(),
        };
        parts.push(ListenerPart::Added(added.into_iter().map(key).collect()));
    }
    parts
}

fn sidecar(ctx: &BuildContext, selected: &Selected, filters: &Hashed<FilterProxyView>) -> Vec<ListenerPart> {
    let inbound = InboundProxyView::of(ctx, selected, filters);
    let hbone = HbonePart::of(ctx, selected, filters, Some(&inbound)).map(ListenerPart::Hbone);
    // Without a port for intercepted connections there are no listeners.
    if ctx.mesh_config().proxy_listen_port <= 0 {
        return hbone.into_iter().collect();
    }
    let mut parts = vec![
        ListenerPart::Outbound(OutboundListenerPart {
            scope: selected.scope.clone(),
            client: OutboundListenerProxyView::of(ctx, selected, filters),
        }),
        ListenerPart::Inbound(InboundListenerPart { client: inbound }),
    ];
    parts.extend(hbone);
    parts
}

impl ListenerPart {
    /// Lists the resources of the part, in order.
    pub fn list(&self, ctx: &BuildContext) -> Vec<ListenerKey> {
        match self {
            Self::Outbound(part) => {
                let mut keys = part.list(ctx);
                keys.extend(static_listeners(ctx, part));
                keys
            }
            Self::Inbound(part) => part.list(ctx),
            Self::Gateway(part) => part.list(ctx).into_iter().map(ListenerKey::Gateway).collect(),
            Self::Waypoint(part) => part.list(ctx),
            Self::Crossing(part) => part.list(),
            Self::Hbone(part) => part.list(),
            Self::Added(added) => added.iter().cloned().map(ListenerKey::Added).collect(),
        }
    }
}

/// Returns the outbound listeners that do not depend on services.
fn static_listeners(ctx: &BuildContext, part: &OutboundListenerPart) -> Vec<ListenerKey> {
    let client = &part.client;
    let mut keys = Vec::new();
    let mesh_port = ctx.mesh_config().proxy_http_port as u32;
    let port = client.http_proxy_port.unwrap_or(mesh_port);
    if port != 0 {
        keys.push(ListenerKey::HttpProxy(HttpProxyKey {
            client: client.clone(),
            port,
        }));
    }
    if client.interception != InterceptionMode::None {
        keys.push(ListenerKey::VirtualOutbound(VirtualOutboundKey {
            client: client.clone(),
            catch_all: catch_all_cluster(&OutboundPolicy::of(ctx.cx, ctx.mesh, &part.scope)),
        }));
    }
    keys
}

impl ListenerKey {
    /// Builds the resource.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        match self {
            Self::Outbound(key) => key.build(ctx),
            Self::VirtualOutbound(key) => key.build(ctx),
            Self::HttpProxy(key) => key.build(ctx),
            Self::Inbound(key) => key.build(ctx),
            Self::Gateway(key) => key.build(ctx),
            Self::ConnectOriginate(key) => key.build(ctx),
            Self::ConnectTerminate(key) => key.build(ctx),
            Self::MainInternal(key) => key.build(ctx),
            Self::Waypoint(key) => key.build(ctx),
            Self::Added(key) => key.build(ctx),
        }
    }
}
