//! Listeners.
//!
//! A sidecar has two parts: what goes out, shared by all clients of one scope, and what comes in, shared by workloads
//! that serve the same ports. A gateway has one. What one would get wrong: a listener is named by address and port, and which services
//! stand behind it is decided when the part is listed ([`outbound`]), not when it is built.

pub mod access_log;
pub mod client;
pub mod filter_chain;
pub mod gateway;
pub mod hcm;
pub mod http_filters;
pub mod inbound;
pub mod inbound_chain;
mod inbound_filters;
pub mod inspector;
pub mod outbound;
pub mod outbound_client;
pub mod outbound_listener;
mod outbound_tcp;
pub mod stack;
pub mod stats;
pub mod tcp;
pub mod telemetry;
pub mod tls;
pub mod tracing;
pub mod virtual_listener;

pub use client::{FilterClient, ListenerClass};
pub use stack::FilterStack;

use gateway::{GatewayKey, GatewayPart};
use inbound::{InboundClient, InboundKey, InboundPart};
use outbound::{OutboundPart, catch_all_cluster};
use outbound_client::OutboundClient;
use outbound_listener::OutboundKey;
use virtual_listener::{HttpProxyKey, VirtualOutboundKey};

use super::{
    View,
    encoded::ResourceType,
    group::{Built, Listed, Resource},
    proxy::{InterceptionMode, ProxyType},
    select::Selected,
};

/// What a part of this kind is selected by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ListenerPart {
    /// What a sidecar's workload reaches.
    Outbound(OutboundPart),
    /// What reaches a sidecar's workload.
    Inbound(InboundPart),
    /// What comes through a gateway.
    Gateway(GatewayPart),
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
}

/// The parts of this kind that a proxy gets.
pub fn select(view: &View, selected: &Selected) -> Vec<ListenerPart> {
    match selected.proxy.proxy_type {
        ProxyType::Sidecar if view.mesh_config().proxy_listen_port > 0 => sidecar(view, selected),
        ProxyType::Router => {
            let filters = FilterClient::of(view, selected);
            vec![ListenerPart::Gateway(GatewayPart::of(view, selected, &filters))]
        }
        _ => Vec::new(),
    }
}

fn sidecar(view: &View, selected: &Selected) -> Vec<ListenerPart> {
    let filters = FilterClient::of(view, selected);
    vec![
        ListenerPart::Outbound(OutboundPart {
            scope: selected.scope.clone(),
            client: OutboundClient::of(view, selected, &filters),
        }),
        ListenerPart::Inbound(InboundPart {
            client: InboundClient::of(view, selected, &filters),
        }),
    ]
}

impl ListenerPart {
    /// The resources of the part, in order.
    pub fn list(&self, view: &View) -> Vec<Listed> {
        let keys = match self {
            Self::Outbound(part) => {
                let mut keys = part.list(view);
                keys.extend(static_listeners(view, part));
                keys
            }
            Self::Inbound(part) => part.list(view),
            Self::Gateway(part) => part.list(view).into_iter().map(ListenerKey::Gateway).collect(),
        };
        keys.into_iter()
            .map(|key| Listed::new(ResourceType::Listener, Resource::Listener(key)))
            .collect()
    }
}

/// The outbound listeners that no service asks for.
fn static_listeners(view: &View, part: &OutboundPart) -> Vec<ListenerKey> {
    let client = &part.client;
    let mut keys = Vec::new();
    let mesh_port = view.mesh_config().proxy_http_port as u32;
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
            catch_all: catch_all_cluster(&view.scope(&part.scope)),
        }));
    }
    keys
}

impl ListenerKey {
    /// Builds the resource.
    pub fn build(&self, view: &View) -> Built {
        match self {
            Self::Outbound(key) => key.build(view),
            Self::VirtualOutbound(key) => key.build(view),
            Self::HttpProxy(key) => key.build(view),
            Self::Inbound(key) => key.build(view),
            Self::Gateway(key) => key.build(view),
        }
    }
}
