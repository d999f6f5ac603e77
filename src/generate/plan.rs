//! The configuration of a group of proxies: its parts, and the resources that the parts list.
//!
//! [`select`] reduces a proxy class to a [`GroupSpec`], a list of parts. A part lists resources by key, and a key
//! builds one resource. The enums here only dispatch to the modules of the types.

use super::{
    BuildContext, address, authorization,
    build_context::PushMemo,
    cluster::{self, ClusterResource},
    encoded::ResourceType,
    endpoint, extension,
    filter::FilterMemo,
    gateway::GatewayMemo,
    grpc::{self, GrpcResource},
    listener::{
        self,
        waypoint::chains::{Chains, ServiceChainsKey},
    },
    name_table,
    proxy::ProxyType,
    proxy_class::ProxyClass,
    requested::{ADDRESSES, RequestedResources},
    resource::{Built, UnknownRoutes},
    route::{
        self, DefaultRoutesMemo,
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
};

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

/// A resource with its type.
type TypedResource = (ResourceType, Resource);

fn of_cluster(listed: ClusterResource) -> TypedResource {
    match listed {
        ClusterResource::Cluster(key) => (ResourceType::Cluster, Resource::Cluster(key)),
        ClusterResource::Endpoint(key) => (ResourceType::Endpoint, Resource::Endpoint(key)),
    }
}

fn of_grpc(listed: GrpcResource) -> TypedResource {
    match listed {
        GrpcResource::Listener(key) => (ResourceType::Listener, Resource::Grpc(key)),
        GrpcResource::Route(key) => (ResourceType::Route, Resource::Route(key)),
        GrpcResource::Cluster(key) => (ResourceType::Cluster, Resource::Grpc(key)),
        GrpcResource::Endpoint(key) => (ResourceType::Endpoint, Resource::Endpoint(key)),
    }
}

/// Takes keys from the list before. Most resources of a changed list are in it, in the same order, and comparing a
/// resource with the expected one is cheaper than hashing it.
struct KnownKeys<'a> {
    /// The rest of the list before.
    rest: &'a [ListedResource],
}

impl KnownKeys<'_> {
    /// The number of removed resources after which the place in the list is found again.
    const WINDOW: usize = 64;

    fn listed(&mut self, (resource_type, resource): TypedResource) -> ListedResource {
        if let Some((next, rest)) = self.rest.split_first()
            && next.resource_type == resource_type
            && *next.key == resource
        {
            self.rest = rest;
            return next.clone();
        }
        let listed = ListedResource::new(resource_type, resource);
        match self.rest.iter().take(Self::WINDOW).position(|known| *known == listed) {
            Some(at) => {
                let known = self.rest[at].clone();
                self.rest = &self.rest[at + 1..];
                known
            }
            None => listed,
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

    /// Lists the resources of the part, in order. The first resource of a name wins. Keys of the list `before` are used
    /// again, which changes nothing but the cost.
    pub fn list(&self, ctx: &BuildContext, before: &[ListedResource]) -> Vec<ListedResource> {
        let mut known = KnownKeys { rest: before };
        let mut all = |resources: &mut dyn Iterator<Item = TypedResource>| {
            resources.map(|resource| known.listed(resource)).collect()
        };
        match self {
            Self::Clusters(part) => all(&mut part.list(ctx).into_iter().map(of_cluster)),
            Self::Grpc(part) => all(&mut part.list(ctx).into_iter().map(of_grpc)),
            Self::Listeners(part) => {
                let keys = part.list(ctx).into_iter();
                all(&mut keys.map(|key| (ResourceType::Listener, Resource::Listener(key))))
            }
            Self::Routes(part) => {
                let keys = part.list(ctx).into_iter();
                all(&mut keys.map(|key| (ResourceType::Route, Resource::Route(key))))
            }
            Self::Extensions(part) => all(&mut part
                .list()
                .map(|key| (ResourceType::Extension, Resource::Extension(key)))),
            Self::NameTable(key) => {
                let resource = Resource::NameTable(key.clone());
                all(&mut std::iter::once((ResourceType::NameTable, resource)))
            }
            Self::TrustAnchors(key) => {
                let resource = Resource::TrustAnchors(key.clone());
                all(&mut std::iter::once((ResourceType::ProxyConfig, resource)))
            }
            Self::Addresses(part) => {
                let keys = part.list(ctx).into_iter();
                all(&mut keys.map(|key| (part.resource_type(), Resource::Address(key))))
            }
            Self::Authorizations(part) => {
                let keys = part.list(ctx).into_iter();
                all(&mut keys.map(|key| (ResourceType::Authorization, Resource::Authorization(key))))
            }
            Self::Secrets(part) => all(&mut part.list().map(|key| (ResourceType::Secret, Resource::Secret(key)))),
        }
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
    /// The scope that the parts read.
    pub scope: ScopeKey,
    /// The parts, in order.
    pub parts: Vec<PartKey>,
    /// The answer to unknown names of route configurations.
    pub unknown_routes: UnknownRoutes,
    /// The requested names, if the parts depend on them.
    pub requested: Option<Shared<RequestedResources>>,
}

/// The key of a group, hashed once and cheap to compare.
pub type ProxyGroupKey = Hashed<GroupSpec>;

/// Returns the parts of the configuration of a proxy class.
pub fn select(ctx: &BuildContext, class: &ProxyClass) -> ProxyGroupKey {
    let selected = Selected::of(ctx, class);
    let proxy = selected.proxy;
    let mut parts: Vec<Part> = Vec::new();
    match proxy.proxy_type {
        _ if proxy.is_proxyless() => {
            let requested = class.requested.iter();
            let selected = requested.flat_map(|requested| grpc::select(ctx, &selected, requested));
            parts.extend(selected.map(Part::Grpc));
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
    Hashed::new(GroupSpec {
        scope: selected.scope,
        parts: parts.into_iter().map(Hashed::new).collect(),
        unknown_routes,
        requested: class.requested.clone(),
    })
}

/// Creates the values that resources share during one update, with the fragments from before it.
pub fn push_memo(fragments: Fragments, chains: Chains) -> PushMemo {
    PushMemo::default()
        .with(fragments)
        .with(chains)
        .with(GatewayMemo::default())
        .with(DefaultRoutesMemo::default())
        .with(FilterMemo::default())
}
