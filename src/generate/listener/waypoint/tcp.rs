//! TCP chains of waypoints: a route of a VirtualService, or else the service's own cluster.

use std::collections::BTreeMap;

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
    proto::istio::networking::v1alpha3::{RouteDestination, TlsMatchAttributes},
};

/// Returns the filters of the TCP chain of a service port.
///
/// Parity (pilot/pkg/networking/core/listener_waypoint.go): the rule of the first destination applies, and the server
/// name is resolved if the host of that destination is a wildcard.
pub(super) fn filters(
    stack: &FilterStack,
    target: &ServedPort,
    port: &ServicePort,
    declared: &DeclaredStreams,
) -> NetworkFilters {
    let ctx = &stack.ctx;
    let service = target.service;
    let mut rule = route::rule(ctx, target, service);
    let mut clusters = TcpClusters::Single(target.cluster.to_owned());
    let mut subset = "";
    let hostname = &service.key.hostname;
    let mut is_wildcard = host::is_wildcard(hostname);
    if let Some((namespace, routes)) = declared.on(target.port) {
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

/// TCP and TLS routes of the VirtualServices of a service by port. There may be tens of thousands of matches and of
/// ports, so they are read once.
pub(super) struct DeclaredStreams<'a> {
    declared: &'a [&'a Shared<VirtualService>],
    tls: FirstRoutes<'a>,
    tcp: FirstRoutes<'a>,
}

/// Destinations of the first route of each VirtualService by port, with the position of the VirtualService.
#[derive(Default)]
struct FirstRoutes<'a> {
    /// First routes for all ports.
    all: BTreeMap<usize, &'a [RouteDestination]>,
    /// First routes for one port, where they come before those for all.
    by_port: BTreeMap<u32, BTreeMap<usize, &'a [RouteDestination]>>,
}

impl<'a> DeclaredStreams<'a> {
    /// Returns the routes of the VirtualServices of a host.
    pub(super) fn of(declared: &'a [&'a Shared<VirtualService>], hostname: &str) -> Self {
        let (mut tls, mut tcp) = (FirstRoutes::default(), FirstRoutes::default());
        for (position, row) in declared.iter().enumerate() {
            for route in &row.tls {
                let of_host = |by: &&TlsMatchAttributes| matches!(by.sni_hosts.as_slice(), [sni] if sni == hostname);
                let matches = route.r#match.iter().filter(of_host);
                let ports = matches.filter_map(|by| port_of(&StaticMatch::from(by)));
                tls.add(
                    position,
                    &route.route,
                    ports.chain(route.r#match.is_empty().then_some(0)),
                );
            }
            for route in &row.tcp {
                let ports = route.r#match.iter().filter_map(|by| port_of(&StaticMatch::from(by)));
                tcp.add(
                    position,
                    &route.route,
                    ports.chain(route.r#match.is_empty().then_some(0)),
                );
            }
        }
        Self { declared, tls, tcp }
    }

    /// Returns the destinations of the first TLS route that applies to the port, or else of the first TCP route, with
    /// the namespace of its VirtualService. Of TLS routes, only those for exactly the service's host apply.
    fn on(&self, port: u32) -> Option<(&'a Namespace, &'a [RouteDestination])> {
        let (position, destinations) = self.tls.on(port).or_else(|| self.tcp.on(port))?;
        Some((self.declared[position].meta.namespace(), destinations))
    }
}

impl<'a> FirstRoutes<'a> {
    /// Adds a route of a VirtualService, which follows its routes before, for some ports.
    fn add(&mut self, position: usize, destinations: &'a [RouteDestination], ports: impl Iterator<Item = u32>) {
        for port in ports {
            if self.all.contains_key(&position) {
                return;
            }
            let first = match port {
                0 => &mut self.all,
                port => self.by_port.entry(port).or_default(),
            };
            first.entry(position).or_insert(destinations);
        }
    }

    /// Returns the destinations for a port of the first VirtualService of which the first route for it has any.
    fn on(&self, port: u32) -> Option<(usize, &'a [RouteDestination])> {
        let own = self.by_port.get(&port);
        let has_own = |position: &usize| own.is_some_and(|own| own.contains_key(position));
        let mut all = self.all.iter().filter(|(position, _)| !has_own(position));
        let has_any = |(_, destinations): &(&usize, &&'a [RouteDestination])| !destinations.is_empty();
        let found = [all.find(has_any), own.and_then(|own| own.iter().find(has_any))];
        let found = found.into_iter().flatten();
        let first = found.min_by_key(|(position, _)| **position);
        first.map(|(position, destinations)| (*position, *destinations))
    }
}

/// Returns the port of a match, 0 for all ports; `None` if it does not apply. The client is unknown, so none with a
/// condition on it applies.
fn port_of(by: &StaticMatch) -> Option<u32> {
    let is_open = by.source_namespace.is_empty() && by.source_labels.is_empty();
    by.port_in_mesh().filter(|_| is_open)
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
