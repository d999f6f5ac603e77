//! Listeners.
//!
//! A sidecar has two parts: what goes out, shared by all clients of one scope, and what comes in, shared by workloads
//! that serve the same ports. A gateway has one. What one would get wrong: a listener is named by address and port, and
//! which services stand behind it is decided when the part is listed ([`outbound`]), not when it is built.

pub mod filter_chain;
pub mod gateway;
pub mod hbone;
pub mod inbound;
pub mod inspector;
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
use crate::base::Hashed;
use gateway::{GatewayKey, GatewayPart};
use hbone::{HbonePart, InternalKey, OriginateKey, TerminateKey};
use inbound::{InboundKey, InboundPart, InboundProxyView};
use outbound::{
    OutboundPart, catch_all_cluster,
    listener::OutboundKey,
    proxy_view::OutboundProxyView,
    virtual_listener::{HttpProxyKey, VirtualOutboundKey},
};
use waypoint::{WaypointKey, WaypointPart};

/// What a part of this kind is selected by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ListenerPart {
    /// What a sidecar's workload reaches.
    Outbound(OutboundPart),
    /// What reaches a sidecar's workload.
    Inbound(InboundPart),
    /// What comes through a gateway.
    Gateway(GatewayPart),
    /// What goes through a waypoint.
    Waypoint(WaypointPart),
    /// HBONE.
    Hbone(HbonePart),
    /// What EnvoyFilters add, listener by listener.
    Added(Vec<AddedListener>),
}

/// What one resource is built from, besides what it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ListenerKey {
    /// A listener for ports of services.
    Outbound(OutboundKey),
    /// The listener that intercepted outbound connections come to.
    VirtualOutbound(VirtualOutboundKey),
    /// The HTTP proxy.
    HttpProxy(HttpProxyKey),
    /// An inbound listener.
    Inbound(InboundKey),
    /// A listener of a gateway.
    Gateway(GatewayKey),
    /// Opens tunnels.
    ConnectOriginate(OriginateKey),
    /// Ends tunnels.
    ConnectTerminate(TerminateKey),
    /// Takes what comes out of tunnels to a sidecar.
    MainInternal(InternalKey),
    /// One of a waypoint's own.
    Waypoint(WaypointKey),
    /// Added by an EnvoyFilter.
    Added(AddedListener),
}

/// The parts of this kind that a proxy gets.
pub fn select(ctx: &BuildContext, selected: &Selected) -> Vec<ListenerPart> {
    // Clients without Envoy ask for listeners of another kind.
    if !selected.proxy.generator.is_empty() {
        return Vec::new();
    }
    let filters = FilterProxyView::of(ctx, selected);
    let mut parts: Vec<ListenerPart> = match selected.proxy.proxy_type {
        ProxyType::Sidecar => sidecar(ctx, selected, &filters),
        ProxyType::Router => {
            let gateway = ListenerPart::Gateway(GatewayPart::of(ctx, selected, &filters));
            let hbone = HbonePart::of(ctx, selected, &filters, None).map(ListenerPart::Hbone);
            std::iter::once(gateway).chain(hbone).collect()
        }
        ProxyType::Waypoint => vec![ListenerPart::Waypoint(WaypointPart::of(ctx, selected, &filters))],
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
    // Without a port to intercept connections there is nothing to make listeners for.
    if ctx.mesh_config().proxy_listen_port <= 0 {
        return hbone.into_iter().collect();
    }
    let mut parts = vec![
        ListenerPart::Outbound(OutboundPart {
            scope: selected.scope.clone(),
            client: OutboundProxyView::of(ctx, selected, filters),
        }),
        ListenerPart::Inbound(InboundPart { client: inbound }),
    ];
    parts.extend(hbone);
    parts
}

impl ListenerPart {
    /// The resources of the part, in order.
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
            Self::Hbone(part) => part.list(),
            Self::Added(added) => added.iter().cloned().map(ListenerKey::Added).collect(),
        }
    }
}

/// The outbound listeners that no service asks for.
fn static_listeners(ctx: &BuildContext, part: &OutboundPart) -> Vec<ListenerKey> {
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
            catch_all: catch_all_cluster(&ctx.scope(&part.scope)),
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
