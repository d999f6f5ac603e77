//! The configuration of a group of proxies: its parts, and the resources that the parts list.
//!
//! [`select`] reduces a proxy class to a [`GroupSpec`], a list of parts. A part lists resources by key, and a key
//! builds one resource. The enums here only dispatch to the modules of the types.

mod part_list;

use std::sync::Arc;

use super::{
    BuildContext, address, authorization,
    block::BlockPool,
    build_context::PushMemo,
    cluster,
    encoded::ResourceType,
    endpoint::{self, EndpointMemo},
    extension,
    filter::FilterMemo,
    gateway::GatewayMemo,
    grpc,
    listener::{
        self,
        l4_match::MatchMemo,
        outbound::listener::StreamRoutesPool,
        waypoint::chains::{Chains, ServiceChainsKey},
    },
    name_table,
    proxy::{MetadataKey, ProxyType},
    proxy_class::ProxyClass,
    requested::{ADDRESSES, RequestedResources},
    resource::{Built, UnknownRoutes},
    route::{
        self, CommonRoutesMemo, DefaultRoutesMemo, HostNamesMemo,
        fragment::{FragmentKey, Fragments},
    },
    secret,
    selected::Selected,
    trust_anchors,
};
use crate::{
    api::access_review::Subject,
    base::{Hashed, Shared},
    model::ScopeKey,
    table::Cx,
};
pub use part_list::{CommonList, CommonLists, LastList, List, ListPieces, PartList};
use part_list::{PartListBuilder, of_grpc};

/// A part of the configuration of a group, with the results of selection that it depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// Clusters and the endpoints of those that use EDS.
    Clusters(cluster::ClusterPart),
    /// Listeners.
    Listeners(listener::ListenerPart),
    /// Route configurations.
    Routes(route::RoutePart),
    /// Extension configurations.
    Extensions(extension::ExtensionPart),
    /// The name table.
    NameTable(name_table::NameTableKey),
    /// Resources that a proxyless gRPC client requests.
    Grpc(grpc::GrpcPart),
    /// Secrets.
    Secrets(secret::SecretPart),
    /// The trust bundle.
    TrustAnchors(trust_anchors::TrustAnchorsKey),
    /// Workloads and services.
    Addresses(address::AddressPart),
    /// The policies of ztunnels.
    Authorizations(authorization::AuthorizationPart),
}

/// The key of a part, hashed once and cheap to compare.
pub type PartKey = Hashed<Part>;

/// The inputs of a resource besides the rows that it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Resource {
    /// A cluster.
    Cluster(cluster::ClusterKey),
    /// A load assignment.
    Endpoint(endpoint::EndpointKey),
    /// A listener.
    Listener(listener::ListenerKey),
    /// A route configuration.
    Route(route::RouteKey),
    /// An extension configuration.
    Extension(extension::ExtensionKey),
    /// The name table.
    NameTable(name_table::NameTableKey),
    /// A listener or cluster of a proxyless gRPC client.
    Grpc(grpc::GrpcKey),
    /// A secret.
    Secret(secret::SecretKey),
    /// The trust bundle.
    TrustAnchors(trust_anchors::TrustAnchorsKey),
    /// A workload or service.
    Address(address::AddressKey),
    /// A policy of ztunnels.
    Authorization(authorization::AuthorizationKey),
}

/// The key of a resource, hashed once and cheap to compare.
pub type ResourceKey = Hashed<Resource>;

/// A resource that a part lists.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ListedResource {
    /// Its type.
    pub resource_type: ResourceType,
    /// Inputs.
    pub key: ResourceKey,
}

impl ListedResource {
    /// Creates the key of a resource.
    pub fn new(resource_type: ResourceType, resource: Resource) -> Self {
        Self {
            resource_type,
            key: Hashed::new(resource),
        }
    }
}

impl Part {
    /// Returns the subject whose access to Secrets must be reviewed for the part.
    pub fn subject(&self) -> Option<&Subject> {
        match self {
            Self::Secrets(part) => part.subject(),
            _ => None,
        }
    }

    /// Returns true if the part may have resources of the type. Those of workloads and services come in many parts.
    pub fn may_have(&self, resource_type: ResourceType) -> bool {
        match self {
            Self::Addresses(part) => part.resource_type() == resource_type,
            _ => !ADDRESSES.contains(&resource_type),
        }
    }

    /// Returns the part that lists what parts of several namespaces have in common; `None` if this one is that part, or
    /// shares nothing.
    pub fn common(&self) -> Option<PartKey> {
        let common = match self {
            Self::Clusters(part) => Self::Clusters(part.common()?),
            Self::Routes(part) => Self::Routes(part.common()?),
            _ => return None,
        };
        Some(Hashed::new(common))
    }

    /// Lists what parts of several namespaces have in common; `None` if there is nothing.
    pub fn list_common(&self, ctx: &BuildContext, last: LastList) -> Option<(CommonList, Option<ListPieces>)> {
        match self {
            Self::Routes(part) => Some((CommonList::Routes(part.list_common(ctx)?), None)),
            _ => CommonList::of_clusters(self.list_alone(ctx, last)),
        }
    }

    /// Lists the resources of the part, in order. The first resource of a name wins.
    pub fn list(&self, ctx: &BuildContext, last: LastList) -> PartList {
        let list = self.list_with(ctx, last, self.common());
        debug_assert!(
            self.common().is_none() || {
                let cx = &Cx::untracked();
                let last = LastList { pieces: None, ..last };
                list.resources == self.list_alone(&BuildContext { cx, ..*ctx }, last).resources
            },
            "the common list is not that of {self:?}"
        );
        list
    }

    /// Lists the resources without a common list.
    fn list_alone(&self, ctx: &BuildContext, last: LastList) -> PartList {
        self.list_with(ctx, last, None)
    }

    fn list_with(&self, ctx: &BuildContext, last: LastList, common: Option<PartKey>) -> PartList {
        let mut builder = PartListBuilder::new(last, common);
        match self {
            Self::Clusters(part) => part.list(ctx, &mut builder),
            Self::Grpc(part) => builder.extend(part.list(ctx).into_iter().map(of_grpc)),
            Self::Listeners(part) => {
                let keys = part.list(ctx).into_iter();
                builder.extend(keys.map(|key| (ResourceType::Listener, Resource::Listener(key))));
            }
            Self::Routes(part) => {
                let common = builder.common(ctx);
                let common = common.as_deref().and_then(CommonList::routes);
                let (keys, pieces) = part.list(ctx, last.routes(), common);
                builder.extend(keys.into_iter().map(|key| (ResourceType::Route, Resource::Route(key))));
                builder.set_route_pieces(pieces);
            }
            Self::Extensions(part) => {
                let keys = part.list();
                builder.extend(keys.map(|key| (ResourceType::Extension, Resource::Extension(key))));
            }
            Self::NameTable(key) => builder.add((ResourceType::NameTable, Resource::NameTable(key.clone()))),
            Self::TrustAnchors(key) => builder.add((ResourceType::ProxyConfig, Resource::TrustAnchors(key.clone()))),
            Self::Addresses(part) => {
                let keys = part.list(ctx).into_iter();
                builder.extend(keys.map(|key| (part.resource_type(), Resource::Address(key))));
            }
            Self::Authorizations(part) => {
                let keys = part.list(ctx).into_iter();
                builder.extend(keys.map(|key| (ResourceType::Authorization, Resource::Authorization(key))));
            }
            Self::Secrets(part) => {
                let keys = part.list();
                builder.extend(keys.map(|key| (ResourceType::Secret, Resource::Secret(key))));
            }
        }
        builder.finish()
    }
}

impl Resource {
    /// Returns the fragments that the resource consists of. They are built before it and shared with other resources.
    pub fn fragments(&self) -> impl Iterator<Item = &FragmentKey> {
        let routes = match self {
            Self::Route(key) => Some(key),
            _ => None,
        };
        routes.into_iter().flat_map(route::RouteKey::fragments)
    }

    /// Returns the chains of services that the resource consists of. They are built before it.
    pub fn chains(&self) -> &[ServiceChainsKey] {
        match self {
            Self::Listener(listener::ListenerKey::Waypoint(key)) => key.chains(),
            _ => &[],
        }
    }

    /// Builds the resource.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        match self {
            Self::Cluster(key) => key.build(ctx),
            Self::Endpoint(key) => key.build(ctx),
            Self::Listener(key) => key.build(ctx),
            Self::Route(key) => key.build(ctx),
            Self::Extension(key) => key.build(ctx),
            Self::NameTable(key) => key.build(ctx),
            Self::Grpc(key) => key.build(ctx),
            Self::Secret(key) => key.build(ctx),
            Self::TrustAnchors(key) => key.build(ctx),
            Self::Address(key) => key.build(ctx),
            Self::Authorization(key) => key.build(ctx),
        }
    }
}

/// The complete result of selection. Proxies with equal specs share all resources.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GroupSpec {
    /// The scope of the proxies.
    pub scope: ScopeKey,
    /// The parts, in order. A `Vec` would keep the allocation of the list of [`Part`]s that it is collected from in
    /// place, which is 14 times as large.
    pub parts: Box<[PartKey]>,
    /// The answer to unknown names of route configurations.
    pub unknown_routes: UnknownRoutes,
    /// The requested names, if the parts depend on them.
    pub requested: Option<Shared<RequestedResources>>,
}

impl GroupSpec {
    /// Replaces parts by the equal ones that `share` returns.
    #[must_use]
    pub fn sharing(mut self, mut share: impl FnMut(&PartKey) -> PartKey) -> Self {
        for part in &mut self.parts {
            *part = share(part);
        }
        self
    }

    /// Returns the scopes that the parts read: that of the proxies, and that of the name table if it is another one.
    pub fn scopes(&self) -> impl Iterator<Item = &ScopeKey> {
        let of_table = self.parts.iter().find_map(|part| match &**part {
            Part::NameTable(key) => Some(key.scope()),
            _ => None,
        });
        std::iter::once(&self.scope).chain(of_table.filter(|scope| **scope != self.scope))
    }
}

/// The key of a group, hashed once and cheap to compare.
pub type ProxyGroupKey = Hashed<GroupSpec>;

/// Returns the parts of the configuration of a proxy class.
pub fn select(ctx: &BuildContext, class: &ProxyClass) -> GroupSpec {
    let selected = Selected::of(ctx, class);
    let proxy = selected.proxy;
    let mut parts: Vec<Part> = Vec::new();
    match proxy.proxy_type {
        _ if proxy.is_proxyless() => {
            let requested = class.requested.iter();
            let requested = requested.flat_map(|requested| grpc::select(ctx, &selected, requested));
            parts.extend(requested.map(Part::Grpc));
            // The agent of the workload requests these, over the stream of its client. It needs names only for DNS.
            if proxy.has(MetadataKey::DnsCapture) {
                parts.push(Part::NameTable(name_table::select(ctx, &selected)));
            }
            parts.extend(trust_anchors::select(ctx).map(Part::TrustAnchors));
        }
        ProxyType::Sidecar | ProxyType::Router | ProxyType::Waypoint => {
            parts.extend(cluster::select(ctx, &selected).into_iter().map(Part::Clusters));
            parts.extend(listener::select(ctx, &selected).into_iter().map(Part::Listeners));
            parts.extend(route::select(ctx, &selected).into_iter().map(Part::Routes));
            parts.extend(extension::select(ctx, &selected).map(Part::Extensions));
            parts.push(Part::NameTable(name_table::select(ctx, &selected)));
            parts.extend(secret::select(ctx, &selected).map(Part::Secrets));
            parts.extend(trust_anchors::select(ctx).map(Part::TrustAnchors));
        }
        ProxyType::Ztunnel => parts.extend(authorization::select(ctx).map(Part::Authorizations)),
        ProxyType::Agentgateway => {}
    }
    let addresses = address::select(ctx, class.requested.as_deref(), &class.node_name);
    parts.extend(addresses.into_iter().map(Part::Addresses));
    let unknown_routes = route::unknown(ctx, &selected);
    GroupSpec {
        scope: selected.scope,
        parts: parts.into_iter().map(Hashed::new).collect(),
        unknown_routes,
        requested: class.requested.clone(),
    }
}

/// Equal values of keys and resources, each held once as long as it is used.
#[derive(Clone, Default)]
pub struct Pools {
    /// Parts of resources.
    pub blocks: Shared<BlockPool>,
    bindings: Shared<route::BindingPool>,
    streams: Shared<StreamRoutesPool>,
}

/// Creates the values that resources share during one update, with the lists and fragments from before it. The store
/// keeps common route configurations for longer.
pub fn push_memo(common: CommonLists, fragments: Fragments, chains: Chains, pools: &Pools) -> PushMemo {
    PushMemo::default()
        .with(common)
        .with(pools.blocks.clone())
        .with(pools.bindings.clone())
        .with(pools.streams.clone())
        .with(fragments)
        .with(chains)
        .with(GatewayMemo::default())
        .with(DefaultRoutesMemo::default())
        .with(HostNamesMemo::default())
        .with(Arc::<CommonRoutesMemo>::default())
        .with(FilterMemo::default())
        .with(EndpointMemo::default())
        .with(MatchMemo::default())
}
