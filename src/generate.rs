//! Generation of Envoy configuration from a mesh snapshot.
//!
//! Four steps, each with recorded reads: [`proxy_class::ProxyClass::of`] computes the class of a proxy,
//! [`plan::select`] reduces a class to a [`ProxyGroupKey`] with a list of parts, a part lists resources by key, and a
//! key builds one encoded resource. A key contains every attribute of the proxy that its result depends on. Everything
//! else is read through a [`BuildContext`]. Proxies with equal keys therefore share one result.

pub mod address;
pub mod authorization;
pub mod block;
pub mod build_context;
pub mod cluster;
pub mod config_object;
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
pub mod trust_anchors;
pub mod tunnel;
pub mod vip;
pub mod waypoint;
pub mod wire;

use crate::{api::Kind, model::MeshSnapshot};

pub use build_context::{BuildContext, ScopeTables};
pub use encoded::{EncodedResource, ResourceType};
pub use gateway::GatewayView;
pub use plan::{PartKey, ProxyGroupKey, ResourceKey};
pub use proxy::{Proxy, ProxyType};
pub use requested::RequestedResources;
pub use resource::ResourceSnapshot;
pub use vip::VipView;

/// Returns the number of objects, by kind, that are parsed and validated but have no effect on generation, also
/// where there are none. Callers report them to the user.
pub fn without_effect(mesh: &MeshSnapshot) -> impl Iterator<Item = (Kind, usize)> {
    [(Kind::UdpRoute, mesh.udp_routes.len())].into_iter()
}
