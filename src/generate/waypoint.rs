//! Services behind a waypoint, for its listeners, clusters and routes.

use std::collections::{BTreeMap, BTreeSet};

use super::BuildContext;
use crate::{
    base::{Hostname, Namespace, ObjectKey, Shared, host},
    model::{
        Service, ServiceKey,
        virtual_service::{self, MESH_GATEWAY, VirtualService, VirtualServiceSummary},
        waypoint,
    },
};

/// The attributes of a waypoint that its services depend on. Part of keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WaypointView {
    /// The namespace.
    pub namespace: Namespace,
    /// The Gateways of the waypoint.
    pub gateways: Shared<[ObjectKey]>,
}

/// The services that go through a waypoint.
pub struct Served<'a> {
    /// The services, oldest first.
    pub services: Vec<&'a Shared<Service>>,
    by_host: BTreeMap<&'a Hostname, &'a Shared<Service>>,
    routing: Routing<'a>,
}

impl<'a> Served<'a> {
    /// Looks up the services of a waypoint.
    pub fn of(ctx: &BuildContext<'a>, waypoint: &WaypointView) -> Self {
        let services = waypoint::served(ctx.cx, ctx.mesh, &waypoint.gateways);
        let by_host = services.iter().map(|service| (&service.key.hostname, *service));
        Self {
            by_host: by_host.collect(),
            routing: Routing::of(ctx, &waypoint.namespace),
            services,
        }
    }

    /// Returns the waypoint's namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.routing.namespace
    }

    /// Returns the service of a host, if it uses the waypoint.
    pub fn service(&self, host: &Hostname) -> Option<&'a Shared<Service>> {
        self.by_host.get(host).copied()
    }

    /// Returns the VirtualServices for one of the services, in order of precedence: those for its host in the namespace
    /// of the waypoint or the service.
    pub fn routes(&self, service: &ServiceKey) -> impl Iterator<Item = (&'a ObjectKey, &'a VirtualServiceSummary)> {
        let positions = self.routing.positions(service).into_iter();
        positions.map(|at| {
            let (key, summary) = self.routing.all[at];
            (key, &**summary)
        })
    }

    /// Returns the rows of the VirtualServices for one of the services, in order of precedence.
    pub fn virtual_services(&self, ctx: &BuildContext<'a>, service: &ServiceKey) -> Vec<&'a Shared<VirtualService>> {
        let keys = self.routes(service);
        keys.filter_map(|(key, _)| ctx.mesh.virtual_services.get(ctx.cx, key))
            .collect()
    }
}

/// The VirtualServices for waypoints of a namespace, by host.
struct Routing<'a> {
    namespace: Namespace,
    /// All of them, in order of precedence.
    all: Vec<(&'a ObjectKey, &'a Shared<VirtualServiceSummary>)>,
    /// Indexes into `all`.
    by_host: BTreeMap<&'a Hostname, Vec<usize>>,
    wildcards: Vec<(&'a Hostname, usize)>,
}

impl<'a> Routing<'a> {
    fn of(ctx: &BuildContext<'a>, namespace: &Namespace) -> Self {
        let all = virtual_service::for_gateway(ctx.cx, ctx.mesh, namespace, MESH_GATEWAY);
        let mut by_host: BTreeMap<_, Vec<_>> = BTreeMap::new();
        let mut wildcards = Vec::new();
        for (at, (_, reach)) in all.iter().enumerate() {
            for hostname in &reach.hosts {
                if host::is_wildcard(hostname) {
                    wildcards.push((hostname, at));
                } else {
                    by_host.entry(hostname).or_default().push(at);
                }
            }
        }
        Self {
            namespace: namespace.clone(),
            all,
            by_host,
            wildcards,
        }
    }

    fn positions(&self, service: &ServiceKey) -> BTreeSet<usize> {
        let exact = self.by_host.get(&service.hostname).into_iter().flatten().copied();
        let matching = self
            .wildcards
            .iter()
            .filter(|(wildcard, _)| host::subset_of(&service.hostname, wildcard));
        let counts = |at: &usize| {
            let of = self.all[*at].1.meta.namespace();
            *of == self.namespace || *of == service.namespace
        };
        exact.chain(matching.map(|(_, at)| *at)).filter(counts).collect()
    }
}
