//! Listing of the resources of a part, with what is known from the last list and from other namespaces. Neither changes
//! anything but the cost.

use super::{ListedResource, PartKey, Resource};
use crate::{
    base::{Hashed, Shared},
    generate::{
        BuildContext,
        cluster::{ClusterList, ClusterResource},
        encoded::ResourceType,
        grpc::GrpcResource,
        route,
    },
    model::{ScopeKey, SidecarScope},
    table::{ChangeSet, LastPieces, PieceReads, Table},
};

/// The resources that a part lists, hashed once and cheap to compare.
pub type List = Hashed<Vec<ListedResource>>;

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
    ranges: ServiceRanges,
    reads: PieceReads,
}

/// The ranges of the services of a scope in a list.
#[derive(Clone, Debug, PartialEq)]
struct ServiceRanges {
    scope: Shared<SidecarScope>,
    /// The end of each service among the resources.
    ends: Vec<usize>,
}

impl ServiceRanges {
    fn begin(scope: Shared<SidecarScope>) -> Self {
        Self {
            ends: Vec::with_capacity(scope.services.len()),
            scope,
        }
    }

    /// Returns the resources of the service at a position, in a list with these ranges, and those after it.
    fn resources<'l>(
        &self,
        list: &'l [ListedResource],
        position: usize,
    ) -> (&'l [ListedResource], &'l [ListedResource]) {
        let begin = if position == 0 { 0 } else { self.ends[position - 1] };
        let (until, rest) = list.split_at(self.ends[position]);
        (&until[begin..], rest)
    }
}

/// The last list of a part, from which another one takes what is the same.
#[derive(Clone, Copy)]
pub struct LastList<'a> {
    /// The resources.
    pub resources: &'a [ListedResource],
    /// The pieces of the last evaluation.
    pub pieces: Option<&'a ListPieces>,
    /// The changes since the last evaluation.
    pub changes: &'a ChangeSet,
}

impl<'a> LastList<'a> {
    /// Returns the pieces of a gateway's routes.
    pub(super) fn routes(&self) -> LastPieces<'a, route::GatewayPieces> {
        LastPieces {
            pieces: match self.pieces {
                Some(ListPieces::Routes(pieces)) => Some(pieces),
                _ => None,
            },
            changes: self.changes,
        }
    }
}

/// The common lists of parts in several namespaces, by their keys (see [`super::Part::common`]).
pub type CommonLists = Table<PartKey, CommonList>;

/// The list that equal parts of several namespaces have in common, apart from what depends on the namespace.
#[derive(Debug, PartialEq)]
pub enum CommonList {
    /// Clusters and endpoints.
    Clusters(CommonClusters),
    /// Route configurations.
    Routes(route::CommonRouteList),
}

/// The clusters and endpoints of a scope.
#[derive(Debug, PartialEq)]
pub struct CommonClusters {
    resources: List,
    ranges: ServiceRanges,
}

impl CommonList {
    /// Returns the clusters of a list, with its pieces; `None` if it was not listed in pieces.
    pub(super) fn of_clusters(list: PartList) -> Option<(Self, Option<ListPieces>)> {
        let ranges = match list.pieces.as_ref()? {
            ListPieces::Clusters(pieces) => pieces.ranges.clone(),
            ListPieces::Routes(_) => return None,
        };
        let resources = List::new(list.resources);
        Some((Self::Clusters(CommonClusters { resources, ranges }), list.pieces))
    }

    /// Returns the route configurations; `None` for a list of clusters.
    pub(super) fn routes(&self) -> Option<&route::CommonRouteList> {
        match self {
            Self::Routes(routes) => Some(routes),
            Self::Clusters(_) => None,
        }
    }

    /// Returns true for clusters of the services that a scope shows.
    fn has_services_of(&self, scope: &SidecarScope) -> bool {
        match self {
            Self::Clusters(clusters) => clusters.ranges.scope.shows_same(scope),
            Self::Routes(_) => false,
        }
    }

    /// Returns the listed resources; none of route configurations, which each namespace has its own of.
    pub fn resources(&self) -> &[ListedResource] {
        match self {
            Self::Clusters(clusters) => &clusters.resources,
            Self::Routes(_) => &[],
        }
    }

    /// Replaces the list of resources by an equal one.
    #[must_use]
    pub fn shared(self, share: impl FnOnce(List) -> List) -> Self {
        match self {
            Self::Clusters(CommonClusters { resources, ranges }) => Self::Clusters(CommonClusters {
                resources: share(resources),
                ranges,
            }),
            routes @ Self::Routes(_) => routes,
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

pub(super) fn of_grpc(listed: GrpcResource) -> TypedResource {
    match listed {
        GrpcResource::Listener(key) => (ResourceType::Listener, Resource::Grpc(key)),
        GrpcResource::Route(key) => (ResourceType::Route, Resource::Route(key)),
        GrpcResource::Cluster(key) => (ResourceType::Cluster, Resource::Grpc(key)),
        GrpcResource::Endpoint(key) => (ResourceType::Endpoint, Resource::Endpoint(key)),
    }
}

/// The number of removed resources or services after which the place in the last list is found again.
const WINDOW: usize = 64;

/// Takes keys from a known list. Most resources of a changed list are in it, in the same order, and comparing a
/// resource with the expected one is cheaper than hashing it.
struct KnownKeys<'a> {
    /// The rest of the known list.
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

/// A list while resources are added.
pub(super) struct PartListBuilder<'a> {
    last: LastList<'a>,
    /// The pieces of the last list, if they are those of clusters and may be used.
    last_clusters: Option<&'a ClusterPieces>,
    clusters: Option<ClusterPieces>,
    /// The position of the next service in the scope of the last list.
    next: usize,
    known: KnownKeys<'a>,
    /// The key of the common list.
    common_key: Option<PartKey>,
    /// The common list of clusters, if its services are those of this one.
    common_clusters: Option<Shared<CommonList>>,
    list: PartList,
}

impl<'a> PartListBuilder<'a> {
    /// Begins a list. It may take resources from the common list with this key.
    pub(super) fn new(last: LastList<'a>, common_key: Option<PartKey>) -> Self {
        Self {
            last,
            last_clusters: match last.pieces {
                Some(ListPieces::Clusters(pieces)) => Some(pieces),
                _ => None,
            },
            clusters: None,
            next: 0,
            known: KnownKeys { rest: last.resources },
            common_key,
            common_clusters: None,
            list: PartList::default(),
        }
    }

    pub(super) fn add(&mut self, resource: TypedResource) {
        self.list.resources.push(self.known.listed(resource));
    }

    pub(super) fn extend(&mut self, resources: impl Iterator<Item = TypedResource>) {
        resources.for_each(|resource| self.add(resource));
    }

    pub(super) fn set_route_pieces(&mut self, pieces: Option<route::GatewayPieces>) {
        self.list.pieces = pieces.map(ListPieces::Routes);
    }

    /// Returns the common list.
    pub(super) fn common(&self, ctx: &BuildContext) -> Option<Shared<CommonList>> {
        let key = self.common_key.as_ref()?;
        ctx.memo.get::<CommonLists>().get(ctx.cx, key).cloned()
    }

    /// Ends the list. It is kept, with its pieces, until the part is listed again, so they give back the room for more:
    /// up to half of their memory.
    pub(super) fn finish(mut self) -> PartList {
        self.list.resources.shrink_to_fit();
        if let Some(clusters) = &mut self.clusters {
            clusters.reads.finish();
        }
        PartList {
            pieces: self.list.pieces.or(self.clusters.map(ListPieces::Clusters)),
            ..self.list
        }
    }

    /// Returns the pieces of the last list, with the position of a service among them if the scope shows it as before.
    fn last_piece(&mut self, scope: &SidecarScope, position: usize) -> Option<(&'a ClusterPieces, usize)> {
        let last = self.last_clusters?;
        let before = &last.ranges.scope;
        let service = &scope.services[position];
        let rest = before.services.get(self.next..)?;
        let at = self.next + rest.iter().take(WINDOW).position(|known| known == service)?;
        self.next = at + 1;
        let is_shown_as_before = scope.merged.get(service) == before.merged.get(service)
            && scope.port_filters.get(service) == before.port_filters.get(service);
        is_shown_as_before.then_some((last, at))
    }
}

impl ClusterList for PartListBuilder<'_> {
    fn add(&mut self, resource: ClusterResource) {
        self.add(of_cluster(resource));
    }

    fn begin_services(&mut self, ctx: &BuildContext, scope: &ScopeKey) -> Shared<SidecarScope> {
        let changes = self.last.changes;
        self.last_clusters = self.last_clusters.filter(|last| last.reads.are_usable(changes));
        let reads = PieceReads::begin(ctx.cx);
        let scope = ctx.tcp_scope(scope);
        // It is read after the beginning of the pieces, which do not depend on it.
        self.common_clusters = self.common(ctx).filter(|common| common.has_services_of(&scope));
        if self.common_clusters.is_none() {
            let ranges = ServiceRanges::begin(scope.clone());
            self.clusters = Some(ClusterPieces { ranges, reads });
        }
        scope
    }

    fn add_service(
        &mut self,
        ctx: &BuildContext,
        position: usize,
        is_common: bool,
        list: impl FnOnce(&BuildContext, &mut Vec<ClusterResource>),
    ) {
        if let Some(CommonList::Clusters(common)) = self.common_clusters.as_deref() {
            let (known, _) = common.ranges.resources(&common.resources, position);
            if is_common {
                self.list.resources.extend_from_slice(known);
                return;
            }
            let mut listed = Vec::new();
            list(ctx, &mut listed);
            let mut known = KnownKeys { rest: known };
            let listed = listed.into_iter().map(of_cluster);
            self.list
                .resources
                .extend(listed.map(|resource| known.listed(resource)));
            return;
        }
        let mut pieces = self.clusters.take().expect("because the services have begun");
        let last = self.last_piece(&pieces.ranges.scope, position);
        let resources = &mut self.list.resources;
        let reused = last.filter(|(last, at)| pieces.reads.reuse(ctx.cx, &last.reads, *at, self.last.changes));
        if let Some((last, at)) = reused {
            let (known, rest) = last.ranges.resources(self.last.resources, at);
            resources.extend_from_slice(known);
            self.known.rest = rest;
        } else {
            let mut listed = Vec::new();
            pieces
                .reads
                .evaluate(ctx.cx, |cx| list(&BuildContext { cx, ..*ctx }, &mut listed));
            let listed = listed.into_iter().map(of_cluster);
            resources.extend(listed.map(|resource| self.known.listed(resource)));
        }
        pieces.ranges.ends.push(self.list.resources.len());
        self.clusters = Some(pieces);
    }
}
