//! What a waypoint serves: what its listeners and its clusters have in common.

use std::collections::BTreeMap;

use super::BuildContext;
use crate::{
    base::{Hostname, Namespace, ObjectKey, Shared, host},
    model::{
        Service, ServiceKey,
        virtual_service::{self, MESH_GATEWAY, VirtualServiceSummary},
        waypoint,
    },
};

/// A waypoint, as far as it decides what is served.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WaypointView {
    /// Its namespace.
    pub namespace: Namespace,
    /// The Gateways that it is.
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
    /// Finds them.
    pub fn of(ctx: &BuildContext<'a>, waypoint: &WaypointView) -> Self {
        let services = waypoint::served(ctx.cx, ctx.mesh, &waypoint.gateways);
        let by_host = services.iter().map(|service| (&service.key.hostname, *service));
        Self {
            by_host: by_host.collect(),
            routing: Routing::of(ctx, &waypoint.namespace),
            services,
        }
    }

    /// The waypoint's namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.routing.namespace
    }

    /// The service of a host, if it goes through the waypoint.
    pub fn service(&self, host: &Hostname) -> Option<&'a Shared<Service>> {
        self.by_host.get(host).copied()
    }

    /// The VirtualService by which requests to one of the services are routed: the first for its host of the waypoint's or
    /// the service's own namespace.
    pub fn routes(&self, service: &ServiceKey) -> Option<(&'a ObjectKey, &'a VirtualServiceSummary)> {
        self.routing.first_for(service)
    }
}

/// The VirtualServices that waypoints of a namespace may obey, by host.
struct Routing<'a> {
    namespace: Namespace,
    /// In order of precedence.
    all: Vec<(&'a ObjectKey, &'a Shared<VirtualServiceSummary>)>,
    /// Places in that order.
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

    fn first_for(&self, service: &ServiceKey) -> Option<(&'a ObjectKey, &'a VirtualServiceSummary)> {
        let exact = self.by_host.get(&service.hostname).into_iter().flatten().copied();
        let matching = self
            .wildcards
            .iter()
            .filter(|(wildcard, _)| host::subset_of(&service.hostname, wildcard));
        let counts = |at: &usize| {
            let of = self.all[*at].1.meta.namespace();
            *of == self.namespace || *of == service.namespace
        };
        let first = exact.chain(matching.map(|(_, at)| *at)).filter(counts).min()?;
        let (key, reach) = self.all[first];
        Some((key, &**reach))
    }
}
