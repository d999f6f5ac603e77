//! From a snapshot to Envoy's configuration.
//!
//! Four steps, each with recorded reads: [`plan::select`] finds the profile of a proxy, and reduces a profile to a
//! [`ProxyGroupKey`], a list of parts; a part lists resources by key; a resource key is built into bytes. A key holds everything about the client that its
//! result depends on, the rest is read through a [`BuildContext`]; so equal keys share one result, whoever asks.

pub mod build_context;
pub mod cluster;
pub mod constant;
pub mod encoded;
pub mod endpoint;
pub mod extension;
pub mod filter;
#[cfg(test)]
pub(crate) mod fixture;
pub mod gateway;
pub mod grpc;
pub mod labels;
pub mod listener;
pub mod name;
pub mod name_table;
pub mod patch;
pub mod plan;
pub mod proxy;
pub mod proxy_class;
pub mod proxy_view;
pub mod requested;
pub mod resource;
pub mod route;
pub mod secret;
pub mod selected;
pub mod store;
pub mod tls;
pub mod traffic_policy;
pub mod tunnel;
pub mod vip;
pub mod waypoint;
pub mod wire;

use crate::{api::Kind, model::MeshSnapshot};

pub use build_context::BuildContext;
pub use encoded::{EncodedResource, ResourceType};
pub use gateway::GatewayView;
pub use plan::{PartKey, ProxyGroupKey, ResourceKey};
pub use proxy::{Proxy, ProxyType};
pub use requested::RequestedResources;
pub use resource::ResourceSnapshot;
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
