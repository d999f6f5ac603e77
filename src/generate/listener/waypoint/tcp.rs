//! TCP chains of waypoints: a route of a VirtualService, or else the service's own cluster.

use super::VIP_CHAIN;
use crate::{
    base::{Namespace, Shared, host},
    generate::{
        filter::{
            chain_fields::NetworkFilters,
            stack::FilterStack,
            tcp::{TcpChain, TcpClusters, TcpUpstream},
        },
        listener::l4_match::StaticMatch,
        route::waypoint::{self as route, ServedPort},
    },
    model::{
        Service,
        service::{Registry, Resolution, ServicePort},
        virtual_service::VirtualService,
    },
    proto::istio::networking::v1alpha3::{L4MatchAttributes, RouteDestination, TlsMatchAttributes},
};

/// Returns the filters of the TCP chain of a service port.
///
/// Parity (pilot/pkg/networking/core/listener_waypoint.go): the rule of the first destination applies, and the server
/// name is resolved if the host of that destination is a wildcard.
pub(super) fn filters(stack: &FilterStack, target: &ServedPort, port: &ServicePort) -> NetworkFilters {
    let ctx = &stack.ctx;
    let service = target.service;
    let mut rule = route::rule(ctx, target, service);
    let mut clusters = TcpClusters::Single(target.cluster.to_owned());
    let mut subset = "";
    let hostname = &service.key.hostname;
    let mut is_wildcard = host::is_wildcard(hostname);
    if let Some((namespace, routes)) = routes(target) {
        let resolved = |route: &RouteDestination| {
            let destination = route.destination.clone().unwrap_or_default();
            let (cluster, rule) = route::tcp_target(ctx, target, &destination, namespace);
            (cluster, route.weight, rule)
        };
        let mut found: Vec<_> = routes.iter().map(resolved).collect();
        rule = found[0].2.take();
        let first = routes[0].destination.as_ref();
        is_wildcard = first.is_some_and(|destination| host::is_wildcard(&destination.host));
        if let [(cluster, ..)] = found.as_slice() {
            clusters = TcpClusters::Single(cluster.clone());
            subset = first.map_or("", |destination| destination.subset.as_str());
        } else {
            let weighted = found.into_iter().filter(|(_, weight, _)| *weight > 0);
            let weighted: Vec<(String, u32)> = weighted
                .map(|(cluster, weight, _)| (cluster, weight.unsigned_abs()))
                .collect();
            if !weighted.is_empty() {
                clusters = TcpClusters::Weighted(weighted);
            }
        }
    }
    let is_dynamic = service.resolution == Resolution::DynamicDns && is_wildcard;
    let upstream = TcpUpstream {
        stat_prefix: stat_prefix(stack, Some((service, port)), target.cluster),
        clusters,
        subset,
        rule: rule.as_deref(),
        may_tunnel: true,
        dynamic_dns: is_dynamic.then(|| hostname.clone()),
    };
    let chain = TcpChain {
        port: port.number,
        ..VIP_CHAIN
    };
    stack.tcp_chain(chain, port.protocol, &upstream)
}

/// Returns the destinations of the first TLS route that applies to the port, or else of the first TCP route, with the
/// namespace of its VirtualService. Of TLS routes, only those for exactly the service's host apply.
fn routes<'a>(target: &ServedPort<'a>) -> Option<(&'a Namespace, &'a [RouteDestination])> {
    let hostname = target.service.key.hostname.as_str();
    let declared = target.declared.iter();
    let tls = declared.clone().find_map(|declared| {
        let applies = |attributes: &TlsMatchAttributes| {
            let of_host = matches!(attributes.sni_hosts.as_slice(), [sni] if sni == hostname);
            of_host && applies_to(&StaticMatch::from(attributes), target.port)
        };
        let mut routes = declared.tls.iter();
        let found = routes.find(|route| route.r#match.is_empty() || route.r#match.iter().any(applies))?;
        of_route(declared, &found.route)
    });
    let tcp = || {
        declared.clone().find_map(|declared| {
            let applies = |attributes: &L4MatchAttributes| applies_to(&StaticMatch::from(attributes), target.port);
            let mut routes = declared.tcp.iter();
            let found = routes.find(|route| route.r#match.is_empty() || route.r#match.iter().any(applies))?;
            of_route(declared, &found.route)
        })
    };
    tls.or_else(tcp)
}

fn of_route<'a>(
    declared: &'a Shared<VirtualService>,
    destinations: &'a [RouteDestination],
) -> Option<(&'a Namespace, &'a [RouteDestination])> {
    (!destinations.is_empty()).then(|| (declared.meta.namespace(), destinations))
}

/// Returns true if a match applies to a port. The client is unknown, so none with a condition on it applies.
fn applies_to(by: &StaticMatch, port: u32) -> bool {
    by.is_for_mesh(port) && by.source_namespace.is_empty() && by.source_labels.is_empty()
}

/// Returns the statistics prefix of a TCP proxy: that of inbound clusters.
///
/// Parity (pilot/pkg/networking/core/listener_waypoint.go): every service counts as one of Kubernetes, a connection to
/// a workload has neither service nor port, and the target port stays a placeholder.
pub(super) fn stat_prefix(stack: &FilterStack, target: Option<(&Service, &ServicePort)>, cluster: &str) -> String {
    let pattern = &stack.mesh.inbound_cluster_stat_name;
    if pattern.is_empty() {
        return cluster.to_owned();
    }
    let [host, short, name, number, port] = match target {
        Some((service, port)) => {
            let name = match service.registry {
                Registry::Kubernetes => service.name.as_str(),
                Registry::External => &service.key.hostname,
            };
            let short = format!("{name}.{}", service.key.namespace);
            let host = service.key.hostname.to_string();
            [
                host,
                short,
                name.to_owned(),
                port.number.to_string(),
                port.name.to_string(),
            ]
        }
        None => ["", "", "", "0", "unknown"].map(str::to_owned),
    };
    pattern
        .replace("%SERVICE%", &short)
        .replace("%SERVICE_NAME%", &name)
        .replace("%SERVICE_FQDN%", &host)
        .replace("%SUBSET_NAME%", "")
        .replace("%SERVICE_PORT%", &number)
        .replace("%SERVICE_PORT_NAME%", &port)
}
