//! Configuration of proxyless gRPC clients and servers.
//!
//! They subscribe by name to everything that they use: the listener of a target, its route configuration, the clusters
//! of the routes, their endpoints. So there is one part per type, which consists of the requested names, and names are
//! resolved when the part is listed. Unrequested names cost nothing. Resources are keyed by their inputs and
//! shared by all clients with equal views; Envoys share the endpoints. Note: policies may contain only what gRPC
//! supports, or the client refuses the resource.

mod cluster;
mod listener;
#[cfg(test)]
mod tests;
mod tls;

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::{
    BuildContext, RequestedResources, ResourceType, VipView,
    endpoint::{self, EndpointKey, EndpointProxyView},
    filter::proxy_view::SecurityPolicies,
    name::{ClusterMode, ClusterName},
    proxy::MetadataKey,
    proxy_class::ServiceTarget,
    proxy_view::{ProxyLocation, UpstreamProxyView},
    requested::{Names, has_room},
    resource::Built,
    route::{self, RouteKey, sidecar},
    selected::Selected,
    traffic_policy,
};
use crate::{
    base::{Hashed, Labels, ObjectKey, Shared},
    model::{
        ScopeKey, ServiceKey, SidecarScope,
        authentication::{self, PeerPolicy},
        destination_rule,
        policy::Subject,
        workload::MUTUAL_TLS,
    },
};

/// Requested names of one type.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GrpcPart {
    client: Hashed<GrpcProxyView>,
    resource_type: ResourceType,
    names: Names,
}

/// Attributes of a client that resources depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct GrpcProxyView {
    /// Visible services.
    scope: ScopeKey,
    /// `NAMESPACE` of its node.
    namespace: SmolStr,
    /// `<namespace>.svc.<suffix>`, which completes short names.
    dns_domain: SmolStr,
    /// Visibility of service addresses.
    vip: VipView,
    /// Attributes that clusters and endpoints depend on.
    outbound: Hashed<UpstreamProxyView>,
    /// Locality, if endpoints depend on it.
    location: Option<ProxyLocation>,
    /// Attributes that routes depend on.
    routes: Hashed<route::RouteConfigProxyView>,
    /// Attributes that its own listeners depend on.
    server: Server,
}

/// Attributes of a server that its listeners depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Server {
    /// Service ports that it serves.
    targets: Shared<[ServiceTarget]>,
    /// PeerAuthentication of its peers.
    peers: PeerPolicy,
    /// True if the label `security.istio.io/tlsMode` announces mutual TLS.
    announces_mtls: bool,
    /// AuthorizationPolicies that apply, in order.
    authorization: Shared<[ObjectKey]>,
}

/// Inputs of one listener or cluster, besides the rows that it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum GrpcKey {
    /// A target of the client.
    Outbound(listener::TargetListenerKey),
    /// A socket of the server.
    Inbound(listener::ServerListenerKey),
    /// A cluster.
    Cluster(cluster::ClusterKey),
}

/// A resource that a part lists.
pub enum GrpcResource {
    /// A listener.
    Listener(GrpcKey),
    /// A route configuration.
    Route(RouteKey),
    /// A cluster.
    Cluster(GrpcKey),
    /// A load assignment.
    Endpoint(EndpointKey),
}

/// Selects the parts of a client: one for each type that it requests.
pub fn select(ctx: &BuildContext, selected: &Selected, requested: &RequestedResources) -> Vec<GrpcPart> {
    let client = Hashed::new(GrpcProxyView::of(ctx, selected));
    let part = |(resource_type, names): (ResourceType, &Names)| GrpcPart {
        client: client.clone(),
        resource_type,
        names: names.clone(),
    };
    requested.iter().map(part).collect()
}

impl GrpcProxyView {
    fn of(ctx: &BuildContext, selected: &Selected) -> Self {
        let proxy = selected.proxy;
        let subject = Subject::workload(proxy.namespace.clone(), Labels::clone(&selected.labels));
        let mode = selected.labels.get(tls::MODE_LABEL);
        let announces_mtls = mode.is_some_and(|mode| mode == MUTUAL_TLS);
        Self {
            scope: selected.scope.clone(),
            namespace: proxy.metadata_value(MetadataKey::Namespace),
            dns_domain: proxy.dns_domain.clone(),
            vip: VipView::of(proxy, &ctx.mesh.installation.features),
            outbound: UpstreamProxyView::of(ctx, selected),
            location: ProxyLocation::of(ctx, selected),
            routes: Hashed::new(route::RouteConfigProxyView::of(ctx, selected)),
            server: Server {
                targets: selected.targets.clone(),
                peers: authentication::peer_policy(ctx.cx, ctx.mesh, &proxy.namespace, &selected.labels),
                announces_mtls,
                authorization: SecurityPolicies::of(ctx, &subject).authorization,
            },
        }
    }
}

impl GrpcPart {
    /// Lists the resources of the names; unknown names have none.
    pub fn list(&self, ctx: &BuildContext) -> Vec<GrpcResource> {
        let scope = ctx.scope(&self.client.scope);
        match self.resource_type {
            ResourceType::Listener => {
                let keys = listener::list(ctx, &scope, &self.client, &self.names);
                keys.into_iter().map(GrpcResource::Listener).collect()
            }
            ResourceType::Route => {
                let keys = sidecar::single::list(ctx, &scope, &self.client.routes, self.names.iter());
                keys.into_iter()
                    .map(RouteKey::Sidecar)
                    .map(GrpcResource::Route)
                    .collect()
            }
            ResourceType::Cluster => {
                let keys = self.names.iter().filter_map(|name| self.cluster(ctx, &scope, name));
                keys.map(GrpcKey::Cluster).map(GrpcResource::Cluster).collect()
            }
            ResourceType::Endpoint => {
                let mut copies = BTreeMap::new();
                let names = self.names.iter();
                let keys = names.filter_map(|name| self.endpoints(ctx, &scope, name, &mut copies));
                keys.map(GrpcResource::Endpoint).collect()
            }
            _ => Vec::new(),
        }
    }

    fn cluster(&self, ctx: &BuildContext, scope: &SidecarScope, requested: &str) -> Option<cluster::ClusterKey> {
        let name = ClusterName::outbound(requested)?;
        let service = scope.service(name.host)?;
        if !scope.shows_port(service, name.port) {
            return None;
        }
        let key = cluster::ClusterKey {
            service: service.clone(),
            port: name.port,
            merged: scope.merged_port(service, name.port),
            subset: name.subset.into(),
            rule: self.rule(ctx, scope, service).map(|(rule, _)| rule),
        };
        // The requested name may have another form, which is not a cluster name.
        (key.name() == requested).then_some(key)
    }

    /// Returns the endpoints of any cluster, requested or not. Those of unknown subsets are copies of all endpoints of
    /// the port.
    fn endpoints(
        &self,
        ctx: &BuildContext,
        scope: &SidecarScope,
        requested: &str,
        copies: &mut BTreeMap<(ServiceKey, u32), usize>,
    ) -> Option<EndpointKey> {
        let name = ClusterName::outbound(requested)?;
        let service = ctx.scoped(&scope.scoped(scope.service(name.host)?))?;
        let found = self.rule(ctx, scope, &service.key);
        let rule = found.as_ref().map(|(_, rule)| rule);
        let policy = rule.and_then(|rule| traffic_policy::policy_of(rule, name.port, name.subset));
        let is_known = name.subset.is_empty() || rule.is_some_and(|rule| rule.subset(name.subset).is_some());
        let needs = endpoint::needs(ctx, &service, policy);
        let location = self.client.location.as_ref().filter(|_| needs.any());
        let location = location.map(|location| (location, &needs));
        let client = EndpointProxyView::of(ctx, &service, &self.client.outbound, location);
        let key = EndpointKey {
            service: service.key.clone(),
            port: name.port,
            merged: scope.merged_port(&service.key, name.port),
            subset: name.subset.into(),
            mode: ClusterMode::Default,
            rule: found.map(|(rule, _)| rule),
            client,
        };
        let is_requested = key.name() == requested;
        (is_requested && (is_known || has_room(copies, (key.service.clone(), key.port)))).then_some(key)
    }

    fn rule(
        &self,
        ctx: &BuildContext,
        scope: &SidecarScope,
        service: &ServiceKey,
    ) -> Option<(destination_rule::RuleRef, Shared<destination_rule::DestinationRule>)> {
        let labels = Some(&self.client.outbound.rule_labels);
        destination_rule::find(ctx.cx, ctx.mesh, scope.key.namespace(), labels, service)
    }
}

impl GrpcKey {
    /// Builds the resource.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        match self {
            Self::Outbound(key) => key.build(ctx),
            Self::Inbound(key) => key.build(ctx),
            Self::Cluster(key) => key.build(ctx),
        }
    }
}
