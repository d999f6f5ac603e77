//! Clusters: outbound clusters of a scope, inbound clusters of a workload, and static ones.
//!
//! A cluster key contains the service port, the subset, the rule, and only those attributes of the proxy that affect
//! the cluster. So all scopes that see a service share its clusters. Note: whether a cluster exists (DNS clusters
//! without endpoints do not) is known only once it is built.

mod added;
mod builder;
mod connection_pool;
mod discovery;
pub mod dynamic;
mod inbound;
mod load_balancer;
mod outbound;
mod outbound_key;
mod outlier;
mod referenced_services;
mod service;
mod static_clusters;
mod tls;
mod tunnel;
mod waypoint;

pub use added::{AddedKey, AddedPart};
pub use inbound::{InboundClusterKey, InboundClusterPart};
pub(super) use load_balancer::consistent_hash;
pub(super) use service::{has_persistent_sessions, identities, statuses_of_sessions};
pub use static_clusters::{StaticKey, StaticPart};
pub use tunnel::TunnelCluster;
pub use waypoint::WaypointClusterPart;
pub use {outbound::OutboundClusterPart, outbound_key::OutboundClusterKey};

use super::{
    BuildContext, EncodedResource,
    endpoint::EndpointKey,
    patch::{self, PatchContext, PatchRef},
    proxy::ProxyType,
    resource::{Built, Note},
    selected::Selected,
};
use crate::{
    base::{Hostname, Shared},
    model::{ScopeKey, SidecarScope},
};
use builder::EncodedCluster;

/// Inputs of the selection of a cluster part.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ClusterPart {
    /// Clusters of the services in a scope, and their endpoints.
    Outbound(OutboundClusterPart),
    /// Clusters of the workload's own ports.
    Inbound(InboundClusterPart),
    /// Clusters of the services behind a waypoint, and their endpoints.
    Waypoint(WaypointClusterPart),
    /// Clusters that do not depend on services.
    Static(StaticPart),
    /// Clusters that EnvoyFilters add.
    Added(AddedPart),
}

/// Inputs of one cluster, besides the rows that it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ClusterKey {
    /// A service port or subset.
    Outbound(OutboundClusterKey),
    /// A port of the workload.
    Inbound(InboundClusterKey),
    /// A cluster that does not depend on services.
    Static(StaticKey),
    /// A cluster that an EnvoyFilter adds.
    Added(AddedKey),
}

/// A resource of a cluster part.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ClusterResource {
    /// A cluster.
    Cluster(ClusterKey),
    /// Load assignment of an EDS cluster.
    Endpoint(EndpointKey),
}

/// Receives the resources of a cluster part, in order.
pub trait ClusterList {
    /// Adds a resource.
    fn add(&mut self, resource: ClusterResource);

    /// Begins with the services of a scope, and returns the scope as clusters see it. The resources of all services
    /// depend on what was read before.
    fn begin_services(&mut self, ctx: &BuildContext, scope: &ScopeKey) -> Shared<SidecarScope>;

    /// Adds the resources of a service of the scope, by its position. They are listed by `list` unless they are known
    /// and nothing that they depend on has changed. `is_common` is true if they are the same in other namespaces.
    ///
    /// Note: they may also depend on the part, on what the scope shows of the service, and on what `list` reads, but on
    /// nothing else. All services of the scope are added in order, before other resources.
    fn add_service(
        &mut self,
        ctx: &BuildContext,
        position: usize,
        is_common: bool,
        list: impl FnOnce(&BuildContext, &mut Vec<ClusterResource>),
    );
}

fn add_clusters(keys: impl IntoIterator<Item = ClusterKey>, list: &mut impl ClusterList) {
    keys.into_iter().for_each(|key| list.add(ClusterResource::Cluster(key)));
}

/// Selects the cluster parts of a proxy.
pub fn select(ctx: &BuildContext, selected: &Selected) -> Vec<ClusterPart> {
    let outbound = OutboundClusterPart::select(ctx, selected)
        .into_iter()
        .map(ClusterPart::Outbound);
    let mut parts: Vec<ClusterPart> = outbound.collect();
    parts.push(ClusterPart::Static(StaticPart::select(ctx, selected)));
    let added = |context| AddedPart::select(ctx, selected, context).map(ClusterPart::Added);
    match selected.proxy.proxy_type {
        // Parity (pilot/pkg/networking/core/cluster.go): if an added cluster has the name of an inbound one, the added
        // one is sent.
        ProxyType::Sidecar => {
            parts.extend(added(PatchContext::SidecarOutbound));
            parts.extend(InboundClusterPart::select(ctx, selected).map(ClusterPart::Inbound));
            parts.extend(added(PatchContext::SidecarInbound));
        }
        ProxyType::Router => parts.extend(added(PatchContext::Gateway)),
        ProxyType::Waypoint => {
            let behind = WaypointClusterPart::select(ctx, selected).into_iter();
            parts.extend(behind.map(ClusterPart::Waypoint));
            parts.extend(added(PatchContext::SidecarInbound));
        }
        ProxyType::Ztunnel | ProxyType::Agentgateway => {}
    }
    parts
}

impl ClusterPart {
    /// Returns the part that lists what parts of several namespaces have in common; `None` if this one is that part, or
    /// shares nothing.
    pub fn common(&self) -> Option<Self> {
        match self {
            Self::Outbound(part) => part.common().map(Self::Outbound),
            _ => None,
        }
    }

    /// Lists the resources of the part, in order.
    pub fn list(&self, ctx: &BuildContext, list: &mut impl ClusterList) {
        match self {
            Self::Outbound(part) => part.list(ctx, list),
            Self::Waypoint(part) => part.list(ctx).into_iter().for_each(|resource| list.add(resource)),
            Self::Inbound(part) => add_clusters(part.list(ctx), list),
            Self::Static(part) => add_clusters(part.list(ctx), list),
            Self::Added(part) => add_clusters(part.list(), list),
        }
    }
}

impl ClusterKey {
    /// Builds the resource.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        match self {
            Self::Outbound(key) => key.build(ctx),
            Self::Inbound(key) => key.build(ctx),
            Self::Static(key) => key.build(ctx),
            Self::Added(key) => key.build(ctx),
        }
    }
}

/// Applies the patches and encodes the result. `hosts` are the services of an inbound cluster.
fn finished(
    ctx: &BuildContext,
    patches: &[PatchRef],
    hosts: &[Hostname],
    cluster: EncodedCluster,
    mut notes: Vec<Note>,
) -> Built {
    if patches.is_empty() {
        return Built::new(cluster.encoded()).with_notes(notes);
    }
    let built = match patch::cluster::apply(ctx, patches, hosts, cluster.into_message(), &mut notes) {
        Some(cluster) => Built::new(EncodedResource::new(cluster.name.as_str(), &cluster)),
        None => Built::none(),
    };
    patch::set::compact(&mut notes);
    built.with_notes(notes)
}

#[cfg(test)]
mod tests;
