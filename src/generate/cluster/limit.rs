//! The services that a client gets outbound clusters for, where only those are wanted that something leads to: always on
//! waypoints, on gateways with `PILOT_FILTER_GATEWAY_CLUSTER_CONFIG`.

use std::collections::BTreeSet;

use super::dynamic;
use crate::{
    base::{Hostname, Namespace, ObjectKey, Shared, url},
    generate::{
        BuildContext,
        proxy::ProxyType,
        selected::Selected,
        waypoint::{Served, WaypointView},
    },
    model::{ServiceKey, envoy_filter::ReferencedService, features::RemoteJwks, policy, virtual_service},
};

/// What limits the services of a client.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    /// Whose routes count.
    leads: Leads,
    /// Services that count although no route leads to them.
    extra: Shared<[ReferencedService]>,
}

/// What leads to services.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Leads {
    /// The routes of Gateways.
    Gateways(Shared<[ObjectKey]>),
    /// The routes of services that go through a waypoint, as far as they lead elsewhere.
    Waypoint(WaypointView),
}

impl Limit {
    /// The limit of a proxy; `None` if it has none.
    pub(super) fn select(ctx: &BuildContext, selected: &Selected) -> Option<Self> {
        let features = &ctx.mesh.installation.features;
        let leads = match selected.proxy.proxy_type {
            ProxyType::Router if features.pilot_filter_gateway_cluster_config => {
                Some(Leads::Gateways(selected.gateways.clone()))
            }
            ProxyType::Waypoint => Some(Leads::Waypoint(selected.waypoint_view())),
            _ => None,
        };
        leads.map(|leads| {
            let mut extra: BTreeSet<_> = selected.patches.referenced_services.iter().cloned().collect();
            if features.pilot_jwt_enable_remote_jwks != RemoteJwks::Istiod {
                extra.extend(key_servers(ctx, selected));
            }
            Self {
                leads,
                extra: extra.into_iter().collect::<Vec<_>>().into(),
            }
        })
    }

    /// The services that proxies of a namespace get clusters for.
    pub(super) fn wanted(&self, ctx: &BuildContext, namespace: &Namespace) -> Wanted {
        let mut wanted: BTreeSet<ReferencedService> = self.extra.iter().cloned().collect();
        let providers = ctx.mesh_config().extension_providers.iter();
        wanted.extend(providers.filter_map(dynamic::provider_service));
        match &self.leads {
            Leads::Gateways(gateways) => wanted.extend(led_by_gateways(ctx, namespace, gateways)),
            Leads::Waypoint(waypoint) => wanted.extend(led_by_waypoint(ctx, waypoint)),
        }
        Wanted(wanted)
    }
}

fn led_by_gateways(ctx: &BuildContext, namespace: &Namespace, gateways: &[ObjectKey]) -> Vec<ReferencedService> {
    let scoped = ctx.mesh.installation.features.pilot_scope_gateway_to_namespace;
    let mut wanted = Vec::new();
    for gateway in gateways {
        let name = format!("{}/{}", gateway.namespace, gateway.name);
        let routes = virtual_service::for_gateway(ctx.cx, ctx.mesh, namespace, &name);
        let destinations = routes.into_iter().flat_map(|(_, reach)| &reach.destinations);
        // Gateways of one namespace take routes for clients of that namespace alone.
        let counted = destinations.filter(|destination| {
            !scoped || destination.sources.is_empty() || destination.sources.contains(&gateway.namespace)
        });
        wanted.extend(counted.map(|destination| by_host(destination.host.clone())));
    }
    wanted
}

fn led_by_waypoint(ctx: &BuildContext, waypoint: &WaypointView) -> Vec<ReferencedService> {
    let served = Served::of(ctx, waypoint);
    let routes = served.services.iter().filter_map(|service| served.routes(&service.key));
    let destinations = routes.flat_map(|(_, reach)| &reach.destinations);
    destinations
        .filter(|destination| served.service(&destination.host).is_none())
        .map(|destination| by_host(destination.host.clone()))
        .collect()
}

/// Services by host, some of one namespace only.
pub(super) struct Wanted(BTreeSet<ReferencedService>);

impl Wanted {
    /// True if it is none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn contains(&self, key: &ServiceKey) -> bool {
        let of_namespace = ReferencedService {
            namespace: Some(key.namespace.clone()),
            host: key.hostname.clone(),
        };
        self.0.contains(&by_host(key.hostname.clone())) || self.0.contains(&of_namespace)
    }
}

fn by_host(host: Hostname) -> ReferencedService {
    ReferencedService { namespace: None, host }
}

/// The hosts that the proxy fetches keys from itself.
fn key_servers(ctx: &BuildContext, selected: &Selected) -> Vec<ReferencedService> {
    let subject = policy::Subject::workload(selected.proxy.namespace.clone(), (*selected.labels).clone());
    let index = &ctx.mesh.request_authentications_by_namespace;
    let attached = policy::attached(ctx.cx, ctx.mesh, index, &subject);
    let rows = attached
        .iter()
        .filter_map(|key| ctx.mesh.request_authentications.get(ctx.cx, key));
    let rules = rows.flat_map(|row| &row.spec.jwt_rules);
    let hosts = rules.filter_map(|rule| url::authority(&rule.jwks_uri));
    hosts.map(|(host, _)| by_host(Hostname::new(host))).collect()
}
