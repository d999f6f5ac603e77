//! From a snapshot to Envoy's configuration.
//!
//! Four steps, each with recorded reads: [`select`] finds the profile of a proxy, and reduces a profile to a
//! [`ProxyGroupKey`], a list of parts; a part lists resources by key; a resource key is built into bytes. A key holds everything about the client that its
//! result depends on, the rest is read through a [`BuildContext`]; so equal keys share one result, whoever asks.

pub mod cluster;
pub mod constant;
pub mod demand;
pub mod encoded;
pub mod endpoint;
pub mod extension;
#[cfg(test)]
pub(crate) mod fixture;
pub mod gateway;
pub mod group;
pub mod grpc;
pub mod labels;
pub mod listener;
pub mod name;
pub mod name_table;
pub mod patch;
pub mod proxy;
pub mod route;
pub mod secret;
pub mod security;
pub mod select;
pub mod store;
pub mod tunnel;
pub mod view;
pub mod vip;
pub mod waypoint;
pub mod wire;

use crate::{api::Kind, model::MeshSnapshot};

pub use demand::RequestedResources;
pub use encoded::{EncodedResource, ResourceType};
pub use gateway::GatewayView;
pub use group::{PartKey, ProxyGroupKey, ResourceKey, ResourceSnapshot};
pub use proxy::{Proxy, ProxyType};
pub use view::BuildContext;
pub use vip::VipView;

/// Objects that are read and checked but have no effect on what is generated, by kind. Whoever serves or renders tells it, so that nobody relies on them.
pub fn without_effect(mesh: &MeshSnapshot) -> impl Iterator<Item = (Kind, usize)> {
    let counts = [
        (Kind::KubeGateway, mesh.kube_gateways.len()),
        (Kind::HttpRoute, mesh.http_routes.len()),
        (Kind::GrpcRoute, mesh.grpc_routes.len()),
        (Kind::TlsRoute, mesh.tls_routes.len()),
        (Kind::TcpRoute, mesh.tcp_routes.len()),
        (Kind::UdpRoute, mesh.udp_routes.len()),
        (Kind::BackendTlsPolicy, mesh.backend_tls_policies.len()),
        (Kind::ListenerSet, mesh.listener_sets.len()),
        (Kind::BackendTrafficPolicy, mesh.backend_traffic_policies.len()),
        (Kind::Ingress, mesh.ingresses.len()),
    ];
    counts.into_iter().filter(|(_, count)| *count > 0)
}
