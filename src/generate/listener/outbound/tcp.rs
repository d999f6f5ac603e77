//! TCP and TLS chains of outbound listeners: routes of VirtualServices, or else the service itself.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use super::{
    listener::{ListenPort, ListenerService, OutboundListenerBuilder, StreamRoutes},
    resolves_on_demand,
};
use crate::{
    api::kube::service::TargetPort,
    base::{Shared, cidr::IpMode, select},
    generate::{
        constant::{config_metadata, wildcards},
        filter::{
            chain_fields::NetworkFilters,
            tcp::{TcpChain, TcpClusters, TcpUpstream},
        },
        listener::{
            filter_chain::Chain,
            l4_match::{MatchMemo, StaticMatch, on_port},
        },
        name::{self, BLACK_HOLE, ClusterMode, outbound_cluster},
        route::{
            destination::{self, PortInference},
            domains::{self, NameSpace, PortForms},
        },
    },
    model::{
        Service,
        destination_rule::{self, DestinationRule, RuleRef},
        output_limit,
        service::{Registry, ScopedService, ServicePort, UNSPECIFIED_IP},
        virtual_service::VirtualService,
    },
    proto::istio::networking::v1alpha3::{L4MatchAttributes, RouteDestination},
};

/// A VirtualService with its destinations.
type RoutedRow<'r> = (&'r Shared<VirtualService>, &'r StreamRoutes);

impl OutboundListenerBuilder<'_> {
    /// Returns the chains of a TCP, TLS or undeclared port.
    pub(super) fn tcp_chains(&self, member: &ListenerService, service: &Service) -> Vec<Chain> {
        if member.is_surplus {
            return vec![self.refusal(member, service)];
        }
        let ctx = &self.stack.ctx;
        let rows = member.virtual_services.iter().filter_map(|routes| {
            let row = ctx.mesh.virtual_services.get(ctx.cx, &routes.virtual_service)?;
            Some((row, &**routes))
        });
        let rows: Vec<RoutedRow<'_>> = rows.collect();
        if member.port.protocol.is_tls() {
            self.tls_chains(member, service, &rows)
        } else {
            self.plain_chains(member, service, &rows)
        }
    }

    fn tls_chains(&self, member: &ListenerService, service: &Service, rows: &[RoutedRow<'_>]) -> Vec<Chain> {
        let mut ranges = owned(&member.ranges);
        let mut handled: BTreeSet<(&[String], &[String])> = BTreeSet::new();
        let mut chains = Vec::new();
        let (cx, port) = (self.stack.ctx.cx, member.port.number);
        let memo: &MatchMemo = self.stack.ctx.memo.get();
        for (row, declared) in rows.iter().copied() {
            let routes = on_port(cx, &memo.tls, (&declared.virtual_service, &row.tls[..]), port).into_iter();
            for (route, matches) in routes.filter(|(route, _)| !route.route.is_empty()) {
                for attributes in matches
                    .into_iter()
                    .filter(|attributes| self.applies(&StaticMatch::from(*attributes)))
                {
                    // Parity (pilot/pkg/networking/core/tls.go): subnets of a match stay in effect for later matches
                    // without subnets.
                    if !attributes.destination_subnets.is_empty() && member.port.number > 0 {
                        ranges.clone_from(&attributes.destination_subnets);
                    }
                    let predicate = (
                        attributes.sni_hosts.as_slice(),
                        attributes.destination_subnets.as_slice(),
                    );
                    if !handled.insert(predicate) {
                        continue;
                    }
                    chains.push(Chain {
                        sni: attributes.sni_hosts.clone(),
                        ranges: ranges.clone(),
                        metadata: Some(config_metadata(&row.meta)),
                        filters: self.route_filters(member, (row, declared), &route.route),
                        ..Default::default()
                    });
                }
            }
        }
        if chains.is_empty() {
            chains.push(Chain {
                sni: self.service_sni(member, service, &ranges),
                ranges,
                filters: self.service_filters(member, service),
                ..Default::default()
            });
        }
        chains
    }

    fn plain_chains(&self, member: &ListenerService, service: &Service, rows: &[RoutedRow<'_>]) -> Vec<Chain> {
        let ranges = owned(&member.ranges);
        let mut chains = Vec::new();
        let mut has_default = false;
        let (cx, port) = (self.stack.ctx.cx, member.port.number);
        let memo: &MatchMemo = self.stack.ctx.memo.get();
        for (row, declared) in rows.iter().copied() {
            let routes = on_port(cx, &memo.tcp, (&declared.virtual_service, &row.tcp[..]), port).into_iter();
            for (route, matches) in routes.filter(|(route, _)| !route.route.is_empty()) {
                let applying: Vec<_> = matches
                    .into_iter()
                    .filter(|attributes| self.applies(&StaticMatch::from(*attributes)))
                    .collect();
                let open = |attributes: &&L4MatchAttributes| {
                    attributes.destination_subnets.is_empty() || member.port.number == 0
                };
                if route.r#match.is_empty() || applying.iter().copied().any(|attributes| open(&attributes)) {
                    chains.push(Chain {
                        ranges,
                        metadata: Some(config_metadata(&row.meta)),
                        filters: self.route_filters(member, (row, declared), &route.route),
                        ..Default::default()
                    });
                    return chains;
                }
                let mut subnets: Vec<String> = applying
                    .iter()
                    .flat_map(|attributes| attributes.destination_subnets.clone())
                    .collect();
                if subnets.is_empty() {
                    continue;
                }
                subnets.sort_unstable();
                let mut own = ranges.clone();
                own.sort_unstable();
                has_default |= subnets == own;
                chains.push(Chain {
                    ranges: subnets,
                    filters: self.route_filters(member, (row, declared), &route.route),
                    ..Default::default()
                });
            }
        }
        if !has_default {
            chains.push(Chain {
                ranges,
                filters: self.service_filters(member, service),
                ..Default::default()
            });
        }
        chains
    }

    /// Returns the chain that closes the connections to a service whose routes exceed a limit.
    fn refusal(&self, member: &ListenerService, service: &Service) -> Chain {
        let detail = format!("{}: routes of {}", self.key.name(), service.key.hostname);
        self.stack.note(output_limit::CODE, detail);
        let ranges = owned(&member.ranges);
        let sni = if member.port.protocol.is_tls() {
            self.service_sni(member, service, &ranges)
        } else {
            Vec::new()
        };
        let upstream = TcpUpstream {
            stat_prefix: BLACK_HOLE.to_owned(),
            clusters: TcpClusters::Single(BLACK_HOLE.to_owned()),
            subset: "",
            rule: None,
            may_tunnel: false,
            dynamic_dns: None,
        };
        Chain {
            sni,
            ranges,
            filters: self.chain_to(member, &upstream),
            ..Default::default()
        }
    }

    /// Returns true if a match for the port may apply to this proxy.
    fn applies(&self, by: &StaticMatch) -> bool {
        let client = &self.key.client;
        let labels = by.source_labels.iter();
        (by.source_namespace.is_empty() || client.filters.namespace == by.source_namespace)
            && select::matches(
                labels.map(|(key, value)| (key.as_str(), value.as_str())),
                &client.labels,
            )
    }

    /// Returns the server names that distinguish a TLS service from others at the same address; none if the address
    /// suffices.
    fn service_sni(&self, member: &ListenerService, service: &Service, ranges: &[String]) -> Vec<String> {
        let vips = &self.key.client.vips;
        let mode = vips.ip_mode;
        let wildcard = wildcards(mode)[0];
        let mut address = vips.address(service);
        if address.contains('/') {
            address = "".into();
        }
        if service.registry == Registry::External && mode == IpMode::V6 && address == UNSPECIFIED_IP {
            address = "::".into();
        }
        let at_wildcard = address == wildcard && self.key.binds[0] == wildcard;
        if ranges.is_empty() && !address.is_empty() && !at_wildcard && !resolves_on_demand(service) {
            return Vec::new();
        }
        let client = NameSpace {
            dns_domain: &self.key.client.dns_domain,
            absolute: self.stack.features().pilot_enable_absolute_fqdn_vhost_domain,
        };
        let mut names = vec![service.key.hostname.to_string()];
        for alias in member.aliases.as_deref().unwrap_or(&service.aliases) {
            names.push(alias.hostname.to_string());
            names.extend(domains::alternatives(&alias.hostname, client, PortForms::Ignored));
        }
        names
    }

    /// Returns the filters of a chain to the service itself.
    fn service_filters(&self, member: &ListenerService, service: &Service) -> NetworkFilters {
        let number = match &*service.ports {
            [only] => only.number,
            _ => member.port.number,
        };
        let cluster = outbound_cluster(number, "", &service.key.hostname);
        let pattern = &self.stack.mesh.outbound_cluster_stat_name;
        let stat_prefix = if pattern.is_empty() {
            cluster.clone()
        } else {
            // Parity (pilot/pkg/networking/core/networkfilter.go): the port's name is not substituted here.
            let port = service_port(number, "", &member.port);
            name::stat_prefix(pattern, &service.key.hostname, "", &port, 0, Some(service))
        };
        let rule = self.rule(member.rule.as_ref());
        let upstream = TcpUpstream {
            stat_prefix,
            clusters: TcpClusters::Single(cluster),
            subset: "",
            rule: rule.as_deref(),
            may_tunnel: true,
            dynamic_dns: resolves_on_demand(service).then(|| service.key.hostname.clone()),
        };
        self.chain_to(member, &upstream)
    }

    /// Returns the filters of a chain to the destinations of a route.
    fn route_filters(
        &self,
        member: &ListenerService,
        (row, declared): RoutedRow<'_>,
        routes: &[RouteDestination],
    ) -> NetworkFilters {
        let destination = routes[0].destination.clone().unwrap_or_default();
        let (service, rule) = self.destination(declared, &destination.host).unzip();
        let service = service.as_deref();
        let rule = self.rule(rule.flatten());
        let rule = rule.as_deref();
        let upstream = if routes.len() == 1 {
            let cluster = destination::cluster(
                &destination,
                service,
                member.port.number,
                PortInference::SolePort,
                ClusterMode::Default,
            );
            let pattern = &self.stack.mesh.outbound_cluster_stat_name;
            let stat_prefix = match service {
                Some(service) if !pattern.is_empty() => {
                    let port = service_port(member.port.number, &member.port.name, &member.port);
                    name::stat_prefix(pattern, &destination.host, &destination.subset, &port, 0, Some(service))
                }
                _ => cluster.clone(),
            };
            TcpUpstream {
                stat_prefix,
                clusters: TcpClusters::Single(cluster),
                subset: &destination.subset,
                rule,
                may_tunnel: true,
                dynamic_dns: None,
            }
        } else {
            let clusters: Vec<(String, u32)> = routes
                .iter()
                .filter(|route| route.weight > 0)
                .filter_map(|route| Some((route.destination.as_ref()?, route.weight)))
                .map(|(destination, weight)| {
                    let service = self
                        .destination(declared, &destination.host)
                        .map(|(service, _)| service);
                    let cluster = destination::cluster(
                        destination,
                        service.as_deref(),
                        member.port.number,
                        PortInference::SolePort,
                        ClusterMode::Default,
                    );
                    (cluster, weight.unsigned_abs())
                })
                .collect();
            if clusters.is_empty() {
                return NetworkFilters::default();
            }
            TcpUpstream {
                stat_prefix: format!("{}.{}", row.meta.name(), row.meta.namespace()),
                clusters: TcpClusters::Weighted(clusters),
                subset: "",
                rule,
                may_tunnel: true,
                dynamic_dns: None,
            }
        };
        self.chain_to(member, &upstream)
    }

    fn chain_to(&self, member: &ListenerService, upstream: &TcpUpstream) -> NetworkFilters {
        let chain = TcpChain {
            port: member.port.number,
            ..Default::default()
        };
        self.stack.tcp_chain(chain, member.port.protocol, upstream)
    }

    fn destination<'r>(
        &self,
        declared: &'r StreamRoutes,
        host: &str,
    ) -> Option<(Shared<Service>, Option<&'r RuleRef>)> {
        let of_host = |(service, _): &(ScopedService, _)| service.key.hostname.as_str().cmp(host);
        let place = declared.destinations.binary_search_by(of_host).ok()?;
        let (service, rule) = &declared.destinations[place];
        Some((self.stack.ctx.scoped(service)?, rule.as_ref()))
    }

    fn rule(&self, found: Option<&RuleRef>) -> Option<Shared<DestinationRule>> {
        let ctx = &self.stack.ctx;
        destination_rule::rule(ctx.cx, ctx.mesh, found?)
    }
}

fn service_port(number: u32, name: &str, port: &ListenPort) -> ServicePort {
    ServicePort {
        name: name.into(),
        number,
        target: TargetPort::Number(0),
        protocol: port.protocol,
    }
}

fn owned(ranges: &[SmolStr]) -> Vec<String> {
    ranges.iter().map(ToString::to_string).collect()
}
