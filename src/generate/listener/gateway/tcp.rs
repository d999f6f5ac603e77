//! Gateway chains that do not terminate HTTP: TCP routes, TLS routes by server name, and AUTO_PASSTHROUGH.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::{SmolStr, StrExt};

use super::{ListenerBuilder, REJECTED, SERVERS, TcpServer};
use crate::{
    generate::{
        filter::{
            chain_fields::NetworkFilters,
            tcp::{TcpChain, TcpClusters, TcpUpstream, add_black_hole},
        },
        listener::filter_chain::Chain,
        name::{self, ClusterMode},
        route::destination::{self, PortInference, TargetMap},
        traffic_policy,
    },
    model::{
        destination_rule,
        service::{Protocol, ScopedService, ServicePort},
        virtual_service::{Semantics, VirtualService},
    },
    proto::istio::networking::v1alpha3::{self as networking, RouteDestination, server_tls_settings::TlSmode},
};

/// ALPN values that proxies of the mesh use with each other.
const MESH_ALPNS: &[&str] = &[
    "istio",
    "istio-peer-exchange",
    "istio-http/1.0",
    "istio-http/1.1",
    "istio-h2",
];

/// Server names that passthrough chains of a listener already match, in lower case.
#[derive(Default)]
pub(super) struct TakenNames(BTreeSet<SmolStr>);

impl TakenNames {
    /// Adds names together; returns false if one exists.
    fn take(&mut self, names: &[String]) -> bool {
        let names: Vec<SmolStr> = names.iter().map(|name| name.to_ascii_lowercase_smolstr()).collect();
        if names.iter().any(|name| self.0.contains(name)) {
            return false;
        }
        self.0.extend(names);
        true
    }
}

impl ListenerBuilder<'_> {
    /// Returns the chain of a server with a TCP route; `None` without a route.
    pub(super) fn tcp_chain(&self, server: &TcpServer, place: usize) -> Option<Chain> {
        let filters = server.routes.iter().find_map(|binding| {
            let ctx = &self.stack.ctx;
            let declared = ctx.mesh.virtual_services.get(ctx.cx, &binding.virtual_service)?;
            let route = terminating_route(server, declared)?;
            if self.exceeds_limit(&server.gateway, SERVERS, self.route_size(server), place) {
                return Some(closed());
            }
            Some(self.route_filters(server, declared, &self.targets(&binding.targets), route))
        });
        let is_tls = server.spec.tls.is_some();
        filters.filter(|filters| !filters.is_empty()).map(|filters| Chain {
            sni: if is_tls {
                server.sni.iter().map(ToString::to_string).collect()
            } else {
                Vec::new()
            },
            filters,
            transport_socket: self.transport_socket(&server.spec, server.accepts_untrusted),
            ..Default::default()
        })
    }

    /// Returns a chain for each match of a TLS route. `places` are those of the server's VirtualServices.
    pub(super) fn passthrough_chains(
        &self,
        server: &TcpServer,
        places: &[usize],
        taken: &mut TakenNames,
    ) -> Vec<Chain> {
        let mut chains = Vec::new();
        for (binding, place) in server.routes.iter().zip(places) {
            let ctx = &self.stack.ctx;
            let Some(declared) = ctx.mesh.virtual_services.get(ctx.cx, &binding.virtual_service) else {
                continue;
            };
            let targets = self.targets(&binding.targets);
            let object = binding.virtual_service.to_string();
            let exceeds =
                !declared.tls.is_empty() && self.exceeds_limit(&object, "spec.tls", self.route_size(server), *place);
            for route in &declared.tls {
                for condition in &route.r#match {
                    if !applies(server, condition.port, &condition.gateways) {
                        continue;
                    }
                    if !taken.take(&condition.sni_hosts) {
                        self.stack.note(REJECTED, server.gateway.clone());
                        continue;
                    }
                    chains.push(Chain {
                        sni: condition.sni_hosts.clone(),
                        filters: if exceeds {
                            closed()
                        } else {
                            self.route_filters(server, declared, &targets, &route.route)
                        },
                        ..Default::default()
                    });
                }
            }
        }
        chains
    }

    /// Returns a chain for each port and subset of each service, to the cluster with the name of the SNI. `place` is
    /// that of the first chain.
    pub(super) fn auto_passthrough_chains(
        &self,
        gateway: &str,
        services: &[ScopedService],
        place: usize,
    ) -> Vec<Chain> {
        let ctx = &self.stack.ctx;
        let client = &self.key.client;
        let mut sizes: BTreeMap<u32, usize> = BTreeMap::new();
        let mut chains = Vec::new();
        for service in services.iter().filter_map(|service| ctx.scoped(service)) {
            let namespace = &client.filters.namespace;
            let rule = destination_rule::lookup(ctx.cx, ctx.mesh, namespace, &client.labels, &service);
            let rule = rule.as_deref();
            let host = &service.key.hostname;
            for port in service.ports.iter().filter(|port| port.protocol != Protocol::Udp) {
                let size = sizes.entry(port.number);
                let size = *size.or_insert_with(|| self.stack.repeated_tcp_size(port.number, true));
                let subsets = rule.into_iter().flat_map(traffic_policy::subset_names);
                for subset in std::iter::once("").chain(subsets) {
                    let cluster = name::sni_cluster(port.number, subset, host);
                    let place = place.saturating_add(chains.len()).next_power_of_two();
                    if self.exceeds_limit(gateway, SERVERS, size, place) {
                        chains.push(Chain {
                            sni: vec![cluster],
                            alpns: MESH_ALPNS,
                            filters: closed(),
                            ..Default::default()
                        });
                        continue;
                    }
                    let pattern = &self.stack.mesh.outbound_cluster_stat_name;
                    let stat_prefix = if pattern.is_empty() {
                        cluster.clone()
                    } else {
                        name::stat_prefix(pattern, host, subset, port, 0, Some(&service))
                    };
                    let upstream = TcpUpstream {
                        stat_prefix,
                        clusters: TcpClusters::Single(cluster.clone()),
                        subset,
                        rule,
                        may_tunnel: false,
                        dynamic_dns: None,
                    };
                    // The workload authorises its clients.
                    let chain = TcpChain {
                        port: port.number,
                        authorized_by_destination: true,
                        ..Default::default()
                    };
                    chains.push(Chain {
                        sni: vec![cluster],
                        alpns: MESH_ALPNS,
                        filters: self.stack.tcp_chain(chain, port.protocol, &upstream),
                        ..Default::default()
                    });
                }
            }
        }
        chains
    }

    /// Returns the size of what the chains of a server's routes repeat.
    fn route_size(&self, server: &TcpServer) -> usize {
        let port = server.spec.port.as_ref().map_or(0, |port| port.number);
        self.stack.repeated_tcp_size(port, false)
    }

    fn targets(&self, targets: &[destination::Target]) -> TargetMap {
        let client = &self.key.client;
        destination::rows(&self.stack.ctx, targets, &client.filters.namespace, &client.labels)
    }

    /// Returns the filters to the destinations of a route; none if all have weight 0.
    fn route_filters(
        &self,
        server: &TcpServer,
        declared: &VirtualService,
        targets: &TargetMap,
        routes: &[RouteDestination],
    ) -> NetworkFilters {
        let Some(first) = routes.first().and_then(|route| route.destination.as_ref()) else {
            return NetworkFilters::default();
        };
        let port = server_port(&server.spec);
        let service_of = |host: &str| targets.get(host).and_then(|rows| rows.service.as_deref());
        let cluster_of = |destination: &networking::Destination| {
            let service = service_of(&destination.host);
            destination::cluster(
                destination,
                service,
                port.number,
                PortInference::SolePort,
                ClusterMode::Default,
            )
        };
        let (stat_prefix, clusters, subset) = if routes.len() == 1 {
            let cluster = cluster_of(first);
            let pattern = &self.stack.mesh.outbound_cluster_stat_name;
            let stat_prefix = match service_of(&first.host) {
                Some(service) if !pattern.is_empty() => {
                    name::stat_prefix(pattern, &first.host, &first.subset, &port, 0, Some(service))
                }
                _ => cluster.clone(),
            };
            (stat_prefix, TcpClusters::Single(cluster), first.subset.as_str())
        } else {
            let weighted: Vec<(String, u32)> = routes
                .iter()
                .filter_map(|route| {
                    let weight = u32::try_from(route.weight).ok().filter(|weight| *weight > 0)?;
                    Some((cluster_of(route.destination.as_ref()?), weight))
                })
                .collect();
            if weighted.is_empty() {
                return NetworkFilters::default();
            }
            let stat_prefix = format!("{}.{}", declared.meta.name(), declared.meta.namespace());
            (stat_prefix, TcpClusters::Weighted(weighted), "")
        };
        let rule = targets.get(first.host.as_str()).and_then(|rows| rows.rule.as_deref());
        let upstream = TcpUpstream {
            stat_prefix,
            clusters,
            subset,
            rule,
            may_tunnel: true,
            dynamic_dns: None,
        };
        let mode = server.spec.tls.as_ref().map(networking::ServerTlsSettings::mode);
        let chain = TcpChain {
            port: port.number,
            exchanges_metadata: mode == Some(TlSmode::IstioMutual),
            ..Default::default()
        };
        self.stack.tcp_chain(chain, port.protocol, &upstream)
    }
}

/// Returns filters that close every connection.
fn closed() -> NetworkFilters {
    let mut filters = NetworkFilters::new();
    add_black_hole(&mut filters);
    filters
}

/// Returns the destinations of a server that terminates TLS: those of the first TCP route that applies. Gateway API
/// routes for terminated TLS are TLS routes all the same.
fn terminating_route<'v>(server: &TcpServer, declared: &'v VirtualService) -> Option<&'v [RouteDestination]> {
    let tcp = declared.tcp.iter().find(|route| {
        route.r#match.is_empty()
            || route
                .r#match
                .iter()
                .any(|attributes| applies(server, attributes.port, &attributes.gateways))
    });
    if let Some(route) = tcp {
        return Some(&route.route);
    }
    let tls = declared.tls.iter().filter(|_| declared.semantics == Semantics::Gateway);
    let mut tls = tls.filter(|route| {
        route
            .r#match
            .iter()
            .any(|attributes| applies(server, attributes.port, &attributes.gateways))
    });
    tls.next().map(|route| route.route.as_slice())
}

/// Returns true if a match applies to the server.
fn applies(server: &TcpServer, port: u32, gateways: &[String]) -> bool {
    let declared = server.spec.port.as_ref().map_or(0, |port| port.number);
    (port == 0 || port == declared)
        && (gateways.is_empty() || gateways.iter().any(|gateway| *gateway == server.gateway))
}

/// Returns the port of a server in the form of a service port.
fn server_port(server: &networking::Server) -> ServicePort {
    let port = server.port.as_ref();
    ServicePort {
        name: port.map_or("", |port| port.name.as_str()).into(),
        number: port.map_or(0, |port| port.number),
        target: crate::api::kube::service::TargetPort::Number(0),
        protocol: Protocol::parse(port.map_or("", |port| port.protocol.as_str())),
    }
}
