//! Services that a proxy gets outbound clusters for, if only referenced services count: on waypoints always, on
//! gateways with `PILOT_FILTER_GATEWAY_CLUSTER_CONFIG`.

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
    model::{Service, ServiceKey, envoy_filter::ReferencedService, features::RemoteJwks, policy, virtual_service},
    proto::istio::security::v1beta1::RequestAuthentication,
};

/// Restriction of the services of a proxy.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServiceRestriction {
    /// Routes that count.
    routes: RouteSource,
    /// Services that count without a route.
    extra: Shared<[ReferencedService]>,
}

/// Routes that refer to services.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum RouteSource {
    /// Routes of Gateways.
    Gateways(Shared<[ObjectKey]>),
    /// Routes of the services behind a waypoint, as far as they refer to other services, and those of its Gateways,
    /// which only gateways between networks have.
    Waypoint(WaypointView, Shared<[ObjectKey]>),
}

impl ServiceRestriction {
    /// Returns the restriction of a proxy, if there is one.
    pub(super) fn select(ctx: &BuildContext, selected: &Selected) -> Option<Self> {
        let features = &ctx.mesh.installation.features;
        let routes = match selected.proxy.proxy_type {
            ProxyType::Router if features.pilot_filter_gateway_cluster_config => {
                Some(RouteSource::Gateways(selected.gateways.clone()))
            }
            ProxyType::Waypoint => {
                let gateways = selected.gateways.clone();
                Some(RouteSource::Waypoint(selected.waypoint_view(), gateways))
            }
            _ => None,
        };
        routes.map(|routes| {
            let mut extra: BTreeSet<_> = selected.patches.referenced_services.iter().cloned().collect();
            extra.extend(
                selected
                    .inference_pools(ctx)
                    .map(|pool| by_host(pool.picker.host.clone())),
            );
            if features.pilot_jwt_enable_remote_jwks != RemoteJwks::Istiod {
                extra.extend(key_servers(ctx, selected));
            }
            Self {
                routes,
                extra: extra.into_iter().collect::<Vec<_>>().into(),
            }
        })
    }

    /// Returns the services that proxies of a namespace get clusters for.
    pub(super) fn services(&self, ctx: &BuildContext, namespace: &Namespace) -> ServiceSet {
        let mut services: BTreeSet<ReferencedService> = self.extra.iter().cloned().collect();
        let providers = ctx.mesh_config().extension_providers.iter();
        services.extend(providers.filter_map(dynamic::provider_service));
        match &self.routes {
            RouteSource::Gateways(gateways) => services.extend(routed_by_gateways(ctx, gateways)),
            RouteSource::Waypoint(waypoint, gateways) => {
                services.extend(routed_by_waypoint(ctx, waypoint));
                services.extend(routed_between_networks(ctx, namespace, gateways));
            }
        }
        ServiceSet(services)
    }
}

/// Returns the destinations of routes of Gateways.
///
/// Parity (pilot/pkg/model/push_context.go, initVirtualServices): routes that the proxies do not see count, too.
fn routed_by_gateways(ctx: &BuildContext, gateways: &[ObjectKey]) -> Vec<ReferencedService> {
    let scoped = ctx.mesh.installation.features.pilot_scope_gateway_to_namespace;
    let mut services = Vec::new();
    for gateway in gateways {
        let name = format!("{}/{}", gateway.namespace, gateway.name);
        let routes = virtual_service::naming_gateway(ctx.cx, ctx.mesh, &name);
        let destinations = routes.flat_map(|reach| reach.destinations.iter());
        // Gateways with a namespace accept only routes for proxies of that namespace.
        let counted = destinations.filter(|destination| {
            !scoped || destination.sources.is_empty() || destination.sources.contains(&gateway.namespace)
        });
        services.extend(counted.map(|destination| by_host(destination.host.clone())));
    }
    services
}

/// Returns the destinations of routes of Gateways between networks that a namespace sees.
fn routed_between_networks(
    ctx: &BuildContext,
    namespace: &Namespace,
    gateways: &[ObjectKey],
) -> Vec<ReferencedService> {
    let names = gateways
        .iter()
        .map(|gateway| format!("{}/{}", gateway.namespace, gateway.name));
    let routes = names.flat_map(|name| virtual_service::for_gateway(ctx.cx, ctx.mesh, namespace, &name));
    let destinations = routes.flat_map(|(_, reach)| reach.destinations.iter());
    destinations
        .map(|destination| by_host(destination.host.clone()))
        .collect()
}

fn routed_by_waypoint(ctx: &BuildContext, waypoint: &WaypointView) -> Vec<ReferencedService> {
    // Parity (pilot/pkg/model/push_context.go): nothing else of a waypoint's configuration depends on the variable.
    if !ctx.mesh.installation.features.pilot_enable_ambient_waypoints {
        return Vec::new();
    }
    let served = Served::of(ctx, waypoint);
    let followed = served.keys().flat_map(|key| served.routes(key));
    let followed = followed.map(|(_, reach)| reach);
    // Parity (pilot/pkg/model/push_context.go, initVirtualServices): VirtualServices that name a host count even if the
    // waypoint does not follow their routes.
    let named = served
        .keys()
        .flat_map(|key| virtual_service::naming_host(ctx.cx, ctx.mesh, &key.hostname));
    let named = named.filter(|reach| !reach.only_own_clients || *reach.meta.namespace() == waypoint.namespace);
    let destinations = followed.chain(named).flat_map(|reach| reach.destinations.iter());
    // Parity (pilot/pkg/networking/core/waypoint.go): services outside the mesh have both kinds of clusters.
    let is_elsewhere = |service: Option<&Shared<Service>>| service.is_none_or(|service| service.mesh_external);
    destinations
        .filter(|destination| is_elsewhere(served.service(&destination.host)))
        .map(|destination| by_host(destination.host.clone()))
        .collect()
}

/// Services by host, possibly restricted to one namespace.
pub(super) struct ServiceSet(BTreeSet<ReferencedService>);

impl ServiceSet {
    /// Returns true if no service counts.
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

/// Returns the hosts that the proxy fetches JWT keys from.
fn key_servers(ctx: &BuildContext, selected: &Selected) -> Vec<ReferencedService> {
    let attached = policy::attached::<RequestAuthentication>(ctx.cx, ctx.mesh, &selected.subject);
    let rows = attached
        .iter()
        .filter_map(|key| ctx.mesh.request_authentications.get(ctx.cx, key));
    let rules = rows.flat_map(|row| &row.spec.jwt_rules);
    let hosts = rules.filter_map(|rule| url::authority(&rule.jwks_uri));
    hosts.map(|(host, _)| by_host(Hostname::new(host))).collect()
}
