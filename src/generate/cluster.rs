//! Clusters: the outbound ones of a scope, the inbound ones of a workload, and the fixed ones.
//!
//! A cluster key names the service port, the subset and the rule, and of the client only what shows in the cluster; so
//! that all scopes that see a service share its clusters. What one would get wrong: whether a cluster exists at all
//! (DNS clusters without endpoints do not) is known only when it is built.

mod added;
mod connection_pool;
mod discovery;
mod draft;
pub mod dynamic;
mod inbound;
mod limit;
mod load_balancer;
mod outbound;
mod outbound_key;
mod outlier;
mod service;
mod static_clusters;
mod tls;
mod tunnel;
mod waypoint;

pub use added::{AddedKey, AddedPart};
pub use inbound::{InboundKey, InboundPart};
pub(super) use load_balancer::consistent_hash;
pub(super) use service::{has_persistent_sessions, identities, statuses_of_sessions};
pub use static_clusters::{BLACK_HOLE, INBOUND_PASSTHROUGH, PASSTHROUGH, StaticKey, StaticPart};
pub use tunnel::TunnelCluster;
pub use waypoint::WaypointPart;
pub use {outbound::OutboundPart, outbound_key::OutboundKey};

use super::{
    BuildContext, EncodedResource,
    endpoint::EndpointKey,
    patch::{self, PatchContext, PatchRef},
    proxy::ProxyType,
    resource::{Built, Note},
    selected::Selected,
};
use crate::base::Hostname;
use draft::Finished;

/// What a part of this kind is selected by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ClusterPart {
    /// Clusters of what a scope sees, and their endpoints.
    Outbound(OutboundPart),
    /// Clusters of the workload's own ports.
    Inbound(InboundPart),
    /// Clusters of what goes through a waypoint, and their endpoints.
    Waypoint(WaypointPart),
    /// Clusters that do not depend on services.
    Static(StaticPart),
    /// Clusters that EnvoyFilters add.
    Added(AddedPart),
}

/// What one resource is built from, besides what it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ClusterKey {
    /// A service port or subset.
    Outbound(OutboundKey),
    /// A port of the workload.
    Inbound(InboundKey),
    /// One that does not depend on services.
    Static(StaticKey),
    /// One that an EnvoyFilter adds.
    Added(AddedKey),
}

/// A resource that a part lists: a cluster, or the endpoints of one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ClusterResource {
    /// A cluster.
    Cluster(ClusterKey),
    /// The load assignment of a cluster that uses EDS.
    Endpoint(EndpointKey),
}

fn clusters(keys: impl IntoIterator<Item = ClusterKey>) -> Vec<ClusterResource> {
    keys.into_iter().map(ClusterResource::Cluster).collect()
}

/// The parts of this kind that a proxy gets.
pub fn select(ctx: &BuildContext, selected: &Selected) -> Vec<ClusterPart> {
    let outbound = OutboundPart::select(ctx, selected)
        .into_iter()
        .map(ClusterPart::Outbound);
    let mut parts: Vec<ClusterPart> = outbound.collect();
    parts.push(ClusterPart::Static(StaticPart::select(ctx, selected)));
    let added = |context| AddedPart::select(ctx, selected, context).map(ClusterPart::Added);
    match selected.proxy.proxy_type {
        // Parity: of an added cluster and one of the workload's own that have the same name, the added one is sent.
        ProxyType::Sidecar => {
            parts.extend(added(PatchContext::SidecarOutbound));
            parts.extend(InboundPart::select(ctx, selected).map(ClusterPart::Inbound));
            parts.extend(added(PatchContext::SidecarInbound));
        }
        ProxyType::Router => parts.extend(added(PatchContext::Gateway)),
        ProxyType::Waypoint => {
            let behind = WaypointPart::select(ctx, selected).into_iter();
            parts.extend(behind.map(ClusterPart::Waypoint));
            parts.extend(added(PatchContext::SidecarOutbound));
            parts.extend(added(PatchContext::SidecarInbound));
        }
        ProxyType::Ztunnel | ProxyType::Agentgateway => {}
    }
    parts
}

impl ClusterPart {
    /// The resources of the part, in order.
    pub fn list(&self, ctx: &BuildContext) -> Vec<ClusterResource> {
        match self {
            Self::Outbound(part) => part.list(ctx),
            Self::Waypoint(part) => part.list(ctx),
            Self::Inbound(part) => clusters(part.list(ctx)),
            Self::Static(part) => clusters(part.list(ctx)),
            Self::Added(part) => clusters(part.list()),
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

/// Applies the patches, and encodes what is left. `hosts`: the services of an inbound cluster.
fn finished(
    ctx: &BuildContext,
    patches: &[PatchRef],
    hosts: &[Hostname],
    cluster: Finished,
    mut notes: Vec<Note>,
) -> Built {
    if patches.is_empty() {
        return Built::new(cluster.encoded()).with_notes(notes);
    }
    let built = match patch::cluster::apply(ctx, patches, hosts, cluster.into_message(), &mut notes) {
        Some(cluster) => Built::new(EncodedResource::new(cluster.name.as_str(), &cluster)),
        None => Built::none(),
    };
    built.with_notes(notes)
}

#[cfg(test)]
mod tests;
