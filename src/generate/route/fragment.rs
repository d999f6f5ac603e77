//! Encoded routes of one VirtualService, shared by all virtual hosts and route configurations that contain them.
//! Proxies differ in few attributes that routes depend on, so most fragments have many users.

use super::{
    RouteProxyView,
    destination::{PortInference, Target, TargetMap, TargetRows},
    http,
    routes::Routes,
    translation::Translation,
};
use crate::{
    base::{Hashed, Hostname, ObjectKey, Shared, SmolStr},
    generate::{BuildContext, name::ClusterMode},
    model::{
        ServiceKey,
        destination_rule::{self, RuleRef},
        service::ScopedService,
        virtual_service::{MESH_GATEWAY, VirtualServiceSummary},
    },
    table::{Cx, Table},
};

/// Inputs of the HTTP routes of a VirtualService, besides the rows that they read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fragment {
    virtual_service: ObjectKey,
    origin: TrafficOrigin,
    /// Destinations.
    targets: Vec<ResolvedTarget>,
    client: RouteProxyView,
}

/// Origin of the requests that routes are for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum TrafficOrigin {
    /// A sidecar listener with this port; 0 means every port.
    Mesh(u32),
    /// A server of a Gateway.
    Server(Server),
}

/// Attributes of a server that routes depend on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Server {
    /// `namespace/name` of the Gateway; empty if no match refers to it.
    pub(super) gateway: SmolStr,
    /// Declared port; 0 if the routes do not depend on it.
    pub(super) port: u32,
    /// True if the server has TLS settings; false if the routes depend on it only through the port.
    pub(super) tls: bool,
    /// True if responses advertise HTTP/3.
    pub(super) http3: bool,
}

impl Server {
    /// Removes the attributes that make no difference to the routes of a VirtualService, so that many servers share
    /// them. `infers_ports` returns true if the server's port is that of some destination.
    pub(super) fn reduced(mut self, summary: &VirtualServiceSummary, infers_ports: impl FnOnce() -> bool) -> Self {
        if !summary.by_gateway {
            self.gateway = SmolStr::default();
        }
        if !self.http3 && !summary.by_port && !infers_ports() {
            self.port = 0;
            self.tls = false;
        }
        self
    }
}

/// HTTP routes of a VirtualService at one origin of traffic.
pub(super) struct DeclaredRoutes<'a> {
    /// VirtualService.
    pub(super) virtual_service: &'a ObjectKey,
    /// Origin of the requests.
    pub(super) origin: TrafficOrigin,
    /// Destinations.
    pub(super) targets: Vec<Target>,
    /// True if a match depends on the proxy's labels or namespace.
    pub(super) by_source: bool,
}

/// A [`Target`] with the rule that applies to the proxy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct ResolvedTarget {
    host: Hostname,
    service: Option<ScopedService>,
    /// DestinationRule, if it has a consistent hash.
    rule: Option<RuleRef>,
}

/// Key of a fragment, hashed once and cheap to compare.
pub type FragmentKey = Hashed<Fragment>;

/// The fragments that live resources use; the store keeps them up to date.
pub type Fragments = Table<FragmentKey, Routes>;

/// Returns the routes of a fragment that a resource lists.
pub(super) fn routes<'a>(ctx: &BuildContext<'a>, key: &FragmentKey) -> &'a Shared<Routes> {
    let routes = ctx.memo.get::<Fragments>().get(ctx.cx, key);
    routes.expect("because the fragments of a resource are built before it")
}

/// Returns an equal key that is in use already, if there is one, to share its allocation.
fn known(ctx: &BuildContext, key: FragmentKey) -> FragmentKey {
    let known = ctx.memo.get::<Fragments>().get_key_value(&Cx::untracked(), &key);
    known.map_or(key, |(known, _)| known.clone())
}

impl Fragment {
    /// Returns the key of the routes of a VirtualService for a proxy.
    pub(super) fn declared(ctx: &BuildContext, routes: DeclaredRoutes, client: &RouteProxyView) -> FragmentKey {
        let DeclaredRoutes {
            virtual_service,
            origin,
            targets,
            by_source,
        } = routes;
        let found = |target: Target| ResolvedTarget {
            rule: target.ruled.and_then(|service| rule(ctx, client, &service)),
            host: target.host,
            service: target.service,
        };
        let key = Self {
            virtual_service: virtual_service.clone(),
            origin,
            targets: targets.into_iter().map(found).collect(),
            client: if by_source {
                client.clone()
            } else {
                client.without_source()
            },
        };
        known(ctx, Hashed::new(key))
    }
}

/// Returns the rule of a proxy for a service, if the rule has a consistent hash: the fragment reads nothing else of it.
pub(super) fn rule(ctx: &BuildContext, client: &RouteProxyView, service: &ServiceKey) -> Option<RuleRef> {
    if !destination_rule::may_have_consistent_hash(ctx.cx, ctx.mesh, &service.hostname) {
        return None;
    }
    let labels = Some(&*client.labels);
    let (found, rule) = destination_rule::find(ctx.cx, ctx.mesh, &client.namespace, labels, service)?;
    rule.has_consistent_hash.then_some(found)
}

impl Fragment {
    /// Builds the routes.
    pub fn build(&self, ctx: &BuildContext) -> Routes {
        let Some(declared) = ctx.mesh.virtual_services.get(ctx.cx, &self.virtual_service) else {
            return Routes::default();
        };
        let rows = |target: &ResolvedTarget| {
            let service = target.service.as_ref().and_then(|service| ctx.scoped(service));
            let rule = target.rule.as_ref();
            let rule = rule.and_then(|found| destination_rule::rule(ctx.cx, ctx.mesh, found));
            let mode = ClusterMode::Default;
            (target.host.clone(), TargetRows { service, rule, mode })
        };
        let targets: TargetMap = self.targets.iter().map(rows).collect();
        let sidecars = |port| Server {
            gateway: SmolStr::new_static(MESH_GATEWAY),
            port,
            tls: false,
            http3: false,
        };
        let (server, inference) = match &self.origin {
            TrafficOrigin::Mesh(0) => (&sidecars(0), PortInference::SolePort),
            TrafficOrigin::Mesh(port) => (&sidecars(*port), PortInference::Listener),
            TrafficOrigin::Server(server) => (server, PortInference::SolePort),
        };
        let translation = Translation {
            ctx,
            client: &self.client,
            clients_are_unknown: false,
            gateway: &server.gateway,
            port: server.port,
            tls: server.tls,
            advertise_http3: server.http3,
            inference,
            targets: &targets,
        };
        http::routes(&translation, declared)
    }
}

impl RouteProxyView {
    /// Returns the view without labels and namespace.
    pub(super) fn without_source(&self) -> Self {
        Self {
            namespace: crate::base::Namespace::default(),
            labels: Shared::default(),
            ..self.clone()
        }
    }
}
