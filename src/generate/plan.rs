//! The configuration of a group of proxies: its parts, and the resources that the parts list.
//!
//! [`select`] reduces a proxy class to a [`GroupSpec`], a list of parts. A part lists resources by key, and a key
//! builds one resource. The enums here only dispatch to the modules of the types.

use super::{
    BuildContext, address, authorization,
    block::BlockPool,
    build_context::PushMemo,
    cluster::{self, ClusterList, ClusterResource},
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
    model::{ScopeKey, SidecarScope},
    table::{ChangeSet, LastPieces, PieceReads},
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

/// The list of a part.
#[derive(Default)]
pub struct PartList {
    /// The resources, in order.
    pub resources: Vec<ListedResource>,
    /// The pieces that it was listed in; none if it was listed as a whole.
    pub pieces: Option<ListPieces>,
}

/// The pieces that a list was made in.
pub enum ListPieces {
    /// Those of clusters.
    Clusters(ClusterPieces),
    /// Those of a gateway's routes.
    Routes(route::GatewayPieces),
}

/// One piece for each service of a scope, from the beginning of the list.
pub struct ClusterPieces {
    scope: Shared<SidecarScope>,
    reads: PieceReads,
    /// The end of each piece among the resources.
    ends: Vec<usize>,
}

/// The last list of a part, from which another one takes what is the same. That changes nothing but the cost.
#[derive(Clone, Copy)]
pub struct LastList<'a> {
    /// The resources.
    pub resources: &'a [ListedResource],
    /// The pieces of the last evaluation.
    pub pieces: Option<&'a ListPieces>,
    /// The changes since the last evaluation.
    pub changes: &'a ChangeSet,
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

/// The number of removed resources or services after which the place in the last list is found again.
const WINDOW: usize = 64;

/// Takes keys from the last list. Most resources of a changed list are in it, in the same order, and comparing a
/// resource with the expected one is cheaper than hashing it.
struct KnownKeys<'a> {
    /// The rest of the last list.
    rest: &'a [ListedResource],
}

impl KnownKeys<'_> {
    fn listed(&mut self, (resource_type, resource): TypedResource) -> ListedResource {
        if let Some((next, rest)) = self.rest.split_first()
            && next.resource_type == resource_type
            && *next.key == resource
        {
            self.rest = rest;
            return next.clone();
        }
        let listed = ListedResource::new(resource_type, resource);
        match self.rest.iter().take(WINDOW).position(|known| *known == listed) {
            Some(at) => {
                let known = self.rest[at].clone();
                self.rest = &self.rest[at + 1..];
                known
            }
            None => listed,
        }
    }
}

/// A list while resources are added, with what is known from the last one.
struct Lister<'a> {
    last: LastList<'a>,
    /// The pieces of the last list, if they are those of clusters and may be used.
    last_clusters: Option<&'a ClusterPieces>,
    clusters: Option<ClusterPieces>,
    /// The position of the next service in the scope of the last list.
    next: usize,
    known: KnownKeys<'a>,
    list: PartList,
}

impl<'a> Lister<'a> {
    fn new(last: LastList<'a>) -> Self {
        Self {
            last,
            last_clusters: match last.pieces {
                Some(ListPieces::Clusters(pieces)) => Some(pieces),
                _ => None,
            },
            clusters: None,
            next: 0,
            known: KnownKeys { rest: last.resources },
            list: PartList::default(),
        }
    }

    fn add(&mut self, resource: TypedResource) {
        self.list.resources.push(self.known.listed(resource));
    }

    fn extend(&mut self, resources: impl Iterator<Item = TypedResource>) {
        resources.for_each(|resource| self.add(resource));
    }

    /// Returns the pieces of the last list, with the position of a service among them if the scope shows it as before.
    fn last_piece(&mut self, scope: &SidecarScope, position: usize) -> Option<(&'a ClusterPieces, usize)> {
        let last = self.last_clusters?;
        let service = &scope.services[position];
        let rest = last.scope.services.get(self.next..)?;
        let at = self.next + rest.iter().take(WINDOW).position(|known| known == service)?;
        self.next = at + 1;
        let is_shown_as_before = scope.merged.get(service) == last.scope.merged.get(service)
            && scope.port_filters.get(service) == last.scope.port_filters.get(service);
        is_shown_as_before.then_some((last, at))
    }
}

impl ClusterList for Lister<'_> {
    fn add(&mut self, resource: ClusterResource) {
        self.add(of_cluster(resource));
    }

    fn begin_services(&mut self, ctx: &BuildContext, scope: &ScopeKey) -> Shared<SidecarScope> {
        let changes = self.last.changes;
        self.last_clusters = self.last_clusters.filter(|last| last.reads.are_usable(changes));
        let reads = PieceReads::begin(ctx.cx);
        let scope = ctx.tcp_scope(scope);
        self.clusters = Some(ClusterPieces {
            ends: Vec::with_capacity(scope.services.len()),
            scope: scope.clone(),
            reads,
        });
        scope
    }

    fn add_service(
        &mut self,
        ctx: &BuildContext,
        position: usize,
        list: impl FnOnce(&BuildContext, &mut Vec<ClusterResource>),
    ) {
        let mut pieces = self.clusters.take().expect("because the services have begun");
        let last = self.last_piece(&pieces.scope, position);
        let resources = &mut self.list.resources;
        let reused = last.filter(|(last, at)| pieces.reads.reuse(ctx.cx, &last.reads, *at, self.last.changes));
        if let Some((last, at)) = reused {
            let begin = if at == 0 { 0 } else { last.ends[at - 1] };
            let (known, rest) = self.last.resources.split_at(last.ends[at]);
            resources.extend_from_slice(&known[begin..]);
            self.known.rest = rest;
        } else {
            let mut listed = Vec::new();
            pieces
                .reads
                .evaluate(ctx.cx, |cx| list(&BuildContext { cx, ..*ctx }, &mut listed));
            let listed = listed.into_iter().map(of_cluster);
            resources.extend(listed.map(|resource| self.known.listed(resource)));
        }
        pieces.ends.push(self.list.resources.len());
        self.clusters = Some(pieces);
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

    /// Lists the resources of the part, in order. The first resource of a name wins.
    pub fn list(&self, ctx: &BuildContext, last: LastList) -> PartList {
        let mut lister = Lister::new(last);
        match self {
            Self::Clusters(part) => {
                part.list(ctx, &mut lister);
                lister.list.pieces = lister.clusters.take().map(ListPieces::Clusters);
            }
            Self::Grpc(part) => lister.extend(part.list(ctx).into_iter().map(of_grpc)),
            Self::Listeners(part) => {
                let keys = part.list(ctx).into_iter();
                lister.extend(keys.map(|key| (ResourceType::Listener, Resource::Listener(key))));
            }
            Self::Routes(part) => {
                let last = LastPieces {
                    pieces: match last.pieces {
                        Some(ListPieces::Routes(pieces)) => Some(pieces),
                        _ => None,
                    },
                    changes: last.changes,
                };
                let (keys, pieces) = part.list(ctx, last);
                lister.extend(keys.into_iter().map(|key| (ResourceType::Route, Resource::Route(key))));
                lister.list.pieces = pieces.map(ListPieces::Routes);
            }
            Self::Extensions(part) => {
                let keys = part.list();
                lister.extend(keys.map(|key| (ResourceType::Extension, Resource::Extension(key))));
            }
            Self::NameTable(key) => lister.add((ResourceType::NameTable, Resource::NameTable(key.clone()))),
            Self::TrustAnchors(key) => lister.add((ResourceType::ProxyConfig, Resource::TrustAnchors(key.clone()))),
            Self::Addresses(part) => {
                let keys = part.list(ctx).into_iter();
                lister.extend(keys.map(|key| (part.resource_type(), Resource::Address(key))));
            }
            Self::Authorizations(part) => {
                let keys = part.list(ctx).into_iter();
                lister.extend(keys.map(|key| (ResourceType::Authorization, Resource::Authorization(key))));
            }
            Self::Secrets(part) => {
                let keys = part.list();
                lister.extend(keys.map(|key| (ResourceType::Secret, Resource::Secret(key))));
            }
        }
        lister.list
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

/// Equal values of keys and resources, each held once as long as it is used.
#[derive(Clone, Default)]
pub struct Pools {
    /// Parts of resources.
    pub blocks: Shared<BlockPool>,
    bindings: Shared<route::BindingPool>,
}

/// Creates the values that resources share during one update, with the fragments from before it.
pub fn push_memo(fragments: Fragments, chains: Chains, pools: &Pools) -> PushMemo {
    PushMemo::default()
        .with(pools.blocks.clone())
        .with(pools.bindings.clone())
        .with(fragments)
        .with(chains)
        .with(GatewayMemo::default())
        .with(DefaultRoutesMemo::default())
        .with(HostNamesMemo::default())
        .with(CommonRoutesMemo::default())
        .with(FilterMemo::default())
}
