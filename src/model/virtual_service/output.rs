//! The output of a VirtualService, and the row that refuses its surplus.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    HttpRoutes, MESH_GATEWAY, Requests, Resolver, Semantics, VirtualService, declared::Declared, delegate, units,
};
use crate::{
    api::{Config, Kind},
    base::{
        Namespace, ObjectKey, Shared,
        host::{self, HostsByEnd},
    },
    model::{
        MeshSnapshot,
        gateway::hosts::GatewayHosts,
        output_limit::{self, Demand, Limits, SMALL},
    },
    proto::istio::networking::v1alpha3::{
        self as networking, Destination, HttpDirectResponse, HttpMatchRequest, HttpRoute, RouteDestination,
        StringMatch, TcpRoute, TlsMatchAttributes, TlsRoute, string_match::MatchType,
    },
    table::Cx,
};

/// The number of comparisons of hosts with those of servers beyond which all hosts are surplus.
const MAX_COMPARISONS: usize = 10_000_000;
/// The number of hosts of servers after which the output is not counted further if it exceeds the limit. Messages about
/// smaller objects have the exact number.
const MAX_COUNTED: usize = 100_000;
/// The number of servers, on different ports, that usually have one exact host.
const USUAL_PORTS: u64 = 4;
/// The status of requests to surplus hosts.
const REFUSED_STATUS: u32 = 404;
/// The destination of connections to surplus hosts. There is no such service (RFC 2606).
const NOWHERE: &str = "surplus.invalid";

/// Returns true if the output may be above that of a small object, as far as the object alone shows.
pub fn may_be_large(spec: &networking::VirtualService, converted: Option<&Requests>) -> bool {
    let is_elsewhere = spec.gateways.iter().any(|gateway| gateway != MESH_GATEWAY);
    let delegates = spec.http.iter().any(|route| route.delegate.is_some());
    let own = units::sum(spec.http.iter().map(|route| of_route(route, |_| 0)));
    let http = converted.map_or(own, Requests::counted);
    let declared = Entries::of(http, spec);
    let hosts = spec.hosts.len() as u64;
    // Servers of Gateways multiply the routes of wildcard hosts, and TLS routes.
    let multiplies = is_elsewhere && (declared.streams() > 0 || spec.hosts.iter().any(|name| host::is_wildcard(name)));
    let ports = if is_elsewhere { USUAL_PORTS } else { 1 };
    delegates || multiplies || hosts * declared.http * ports + declared.streams() > SMALL
}

/// Derives the output of one VirtualService that is not small.
pub fn demand(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<Demand> {
    let object = Declared::get(cx, mesh, key)?;
    let raw = &*object.object;
    if raw.spec.hosts.is_empty() {
        return None;
    }
    let mut spec = networking::VirtualService {
        hosts: raw.spec.hosts.clone(),
        gateways: raw.spec.gateways.clone(),
        ..Default::default()
    };
    if super::semantics_of(&raw.meta) != Semantics::Gateway {
        Resolver::new(&mesh.installation, &raw.meta).resolve(&mut spec);
    }
    let delegates = super::delegates(cx, mesh, key, &raw.spec.http).into_iter();
    let sizes: BTreeMap<ObjectKey, delegate::Size> = delegates
        .map(|(key, delegate)| (key, delegate::Size::of(&delegate.spec.http)))
        .collect();
    let delegated = |route: &HttpRoute| {
        let size = super::delegate_key(key, route).and_then(|key| sizes.get(&key));
        size.map_or(0, |size| size.below(route))
    };
    let offered = OfferedHosts::of(cx, mesh, raw, &spec);
    let limit = Limits::of(mesh, Kind::VirtualService).object;
    let output = |entries| offered.output(&spec.hosts, entries, limit);
    let http = units::sum(object.http().map(|route| of_route(route, delegated)));
    let whole = output(Entries::of(http, &raw.spec));
    if whole.declared <= SMALL {
        return None;
    }
    let numbers = match super::semantics_of(&raw.meta) {
        Semantics::Gateway => mesh.routes_by_namespace(cx, key),
        Semantics::Istio | Semantics::Ingress => BTreeMap::new(),
    };
    let share = |number| output(Entries::of_requests(number)).declared;
    Some(Demand {
        meta: raw.meta.clone(),
        declared: whole.declared,
        applied: whole.applied,
        parts: spec.hosts.len(),
        kept: whole.kept,
        shares: numbers
            .into_iter()
            .map(|(namespace, number)| (namespace, share(number)))
            .collect(),
    })
}

/// Numbers of the TLS or TCP routes of a VirtualService that may apply in sidecars, by port: one for each match, and
/// more for large ones.
#[derive(Default)]
pub struct PortRoutes {
    /// Those for all ports.
    all: u64,
    /// Those for one port.
    by_port: BTreeMap<u32, u64>,
}

impl PortRoutes {
    /// Returns the number of routes on a port.
    pub fn on(&self, port: u32) -> u64 {
        self.all + self.by_port.get(&port).unwrap_or(&0)
    }

    fn add(&mut self, gateways: &[String], port: u32, units: u64) {
        if !gateways.is_empty() && !gateways.iter().any(|gateway| gateway == MESH_GATEWAY) {
            return;
        }
        match port {
            0 => self.all += units,
            port => *self.by_port.entry(port).or_default() += units,
        }
    }
}

impl VirtualService {
    /// Returns the numbers of its TLS routes.
    pub fn tls_routes(&self) -> PortRoutes {
        let mut numbers = PortRoutes::default();
        for route in &self.tls {
            for (matched, units) in route.r#match.iter().zip(units::of_tls_matches(route)) {
                numbers.add(&matched.gateways, matched.port, units);
            }
        }
        numbers
    }

    /// Returns the numbers of its TCP routes.
    pub fn tcp_routes(&self) -> PortRoutes {
        let mut numbers = PortRoutes::default();
        for route in &self.tcp {
            if route.r#match.is_empty() {
                numbers.add(&[], 0, units::of_tcp(route));
            }
            for (matched, units) in route.r#match.iter().zip(units::of_tcp_matches(route)) {
                numbers.add(&matched.gateways, matched.port, units);
            }
        }
        numbers
    }
}

/// Returns the number of ports of a service on which HTTP routes apply: as many as they reach the limit of an object
/// with, and no fewer than a small object may have routes. It is rounded, because scopes of sidecars depend on it.
/// Without HTTP routes, nothing is repeated: requests to any number of ports have default routes.
pub(super) fn most_ports(mesh: &MeshSnapshot, http: &HttpRoutes) -> u32 {
    let routes = http.counted();
    if routes == 0 {
        return u32::MAX;
    }
    let limit = Limits::of(mesh, Kind::VirtualService).object;
    u32::try_from((limit / routes.next_power_of_two()).max(SMALL)).unwrap_or(u32::MAX)
}

/// Numbers of routes: one for each match, and more for large ones.
#[derive(Clone, Copy)]
struct Entries {
    http: u64,
    tls: u64,
    tcp: u64,
}

impl Entries {
    fn of(http: u64, spec: &networking::VirtualService) -> Self {
        Self {
            http,
            tls: units::sum(spec.tls.iter().map(units::of_tls)),
            tcp: units::sum(spec.tcp.iter().map(units::of_tcp)),
        }
    }

    fn of_requests(http: u64) -> Self {
        Self { http, tls: 0, tcp: 0 }
    }

    /// Returns the number of routes of connections. Part of a list of these cannot be refused alone.
    fn streams(self) -> u64 {
        self.tls + self.tcp
    }
}

/// Returns what an HTTP route counts.
fn of_route(route: &HttpRoute, delegated: impl Fn(&HttpRoute) -> u64) -> u64 {
    match &route.delegate {
        Some(_) => delegated(route),
        None => units::of_http(route),
    }
}

/// The hosts of the sidecars and Gateways that a VirtualService names, as far as its namespace may use them.
struct OfferedHosts {
    /// True if it names sidecars, where all hosts are offered.
    mesh: bool,
    /// The number of servers of its Gateways.
    servers: usize,
    /// The number of hosts of these that its namespace may use.
    count: usize,
    /// The hosts of Gateways with few: the server, and the position among its hosts.
    by_host: HostsByEnd<Vec<(usize, usize)>>,
    /// The other Gateways, each with the number of servers before its own.
    many: Vec<(usize, Shared<GatewayHosts>)>,
    /// The namespace of the VirtualService.
    namespace: Namespace,
    /// True if hosts of a server share routes.
    collapses: bool,
}

/// The routes of a VirtualService in sidecars and all servers together.
struct Output {
    declared: u64,
    applied: u64,
    kept: usize,
}

impl OfferedHosts {
    fn of(
        cx: &Cx,
        mesh: &MeshSnapshot,
        raw: &Config<networking::VirtualService>,
        spec: &networking::VirtualService,
    ) -> Self {
        // A Gateway that is named repeatedly counts once, as in the index.
        let named: BTreeSet<&String> = spec.gateways.iter().collect();
        let named = named.into_iter().filter_map(|gateway| gateway.split_once('/'));
        let gateways = named.filter_map(|(namespace, name)| {
            let key = ObjectKey::new(&raw.meta.key.cluster, Namespace::new(namespace), name);
            mesh.declared_gateways.get_key_value(cx, &key)
        });
        let mut result = Self {
            mesh: spec.gateways.is_empty() || spec.gateways.iter().any(|gateway| gateway == MESH_GATEWAY),
            servers: 0,
            count: 0,
            by_host: HostsByEnd::default(),
            many: Vec::new(),
            namespace: raw.meta.namespace().clone(),
            collapses: mesh.installation.features.pilot_enable_route_collapse_optimization,
        };
        for (key, gateway) in gateways {
            if let Some(hosts) = mesh.gateway_hosts.get(cx, key) {
                result.count += hosts.count(&result.namespace);
                result.many.push((result.servers, hosts.clone()));
                result.servers += hosts.servers();
                continue;
            }
            for server in gateway.servers.iter().flatten() {
                let offered = server.hosts_for(cx, mesh, &result.namespace);
                result.count += offered.len();
                for (position, name) in offered.into_iter().enumerate() {
                    result.by_host.add(name, (result.servers, position));
                }
                result.servers += 1;
            }
        }
        result
    }

    /// Returns the offered hosts that have a name in common with a host, as server and position.
    fn overlapping(&self, name: &str) -> BTreeSet<(usize, usize)> {
        let mut found = self.by_host.overlapping(name);
        for (first, hosts) in &self.many {
            let of_gateway = hosts.overlapping(&self.namespace, name).into_iter();
            found.extend(of_gateway.map(|(server, position)| (first + server, position)));
        }
        found
    }

    /// Counts the routes of each host in order, at least until they exceed the limit.
    fn output(&self, hosts: &[String], entries: Entries, limit: u64) -> Output {
        if hosts.len().saturating_mul(self.count) > MAX_COMPARISONS {
            let declared = (hosts.len() as u64).saturating_mul(self.count as u64);
            return Output {
                declared: declared.saturating_mul(entries.http + entries.streams()).max(limit),
                applied: 0,
                kept: 0,
            };
        }
        let mut served = vec![false; self.servers];
        let (mut declared, mut applied, mut kept) = (0_u64, 0, 0);
        let mut counted = 0;
        for (position, name) in hosts.iter().enumerate() {
            // No further host applies.
            if declared > limit.max(SMALL) && counted >= MAX_COUNTED {
                break;
            }
            let mut own = if self.mesh { entries.http } else { 0 };
            // There may be thousands of servers, too, most of which have none of the hosts.
            let mut common: BTreeMap<usize, u64> = BTreeMap::new();
            for (server, _) in self.overlapping(name) {
                *common.entry(server).or_default() += 1;
                counted += 1;
            }
            for (server, common) in common {
                let virtual_hosts = if entries.http > 0 { common } else { 0 };
                own += match (self.collapses, served[server]) {
                    (true, true) => virtual_hosts,
                    (true, false) => virtual_hosts + entries.http + entries.streams(),
                    (false, _) => common * entries.http + entries.streams(),
                };
                served[server] = true;
            }
            declared += own;
            if declared <= limit {
                (applied, kept) = (declared, position + 1);
            }
        }
        if self.mesh {
            declared += entries.streams();
            applied += entries.streams();
        }
        if entries.streams() > 0 && declared > limit {
            (applied, kept) = (0, 0);
        }
        // Routes that delegates multiply take memory even where no server has the hosts.
        if entries.http > limit {
            (declared, applied, kept) = (declared.max(entries.http), 0, 0);
        }
        Output {
            declared,
            applied,
            kept,
        }
    }
}

/// Returns the part of a VirtualService that applies, or the row that refuses the rest.
pub(super) fn limited(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<VirtualService> {
    let surplus_of = output_limit::surplus_of(key);
    let object = surplus_of.as_ref().unwrap_or(key);
    let declared = Declared::get(cx, mesh, object)?;
    let large = may_be_large(&declared.object.spec, declared.converted.as_deref());
    let kept = large.then(|| output_limit::kept(cx, mesh, Kind::VirtualService, object));
    let kept = kept.flatten();
    match (surplus_of.is_some(), kept) {
        (false, None) => {
            let refused = large.then(|| output_limit::refused_namespaces(cx, mesh, object));
            match refused.filter(|refused| !refused.is_empty()) {
                None => super::resolved(cx, mesh, object, &declared),
                Some(refused) => {
                    let rest = Declared {
                        object: declared.object.clone(),
                        converted: Some(mesh.requests_without(cx, object, &refused).into()),
                    };
                    super::resolved(cx, mesh, object, &rest)
                }
            }
        }
        (true, None) => None,
        (false, Some(0)) => None,
        (false, Some(kept)) => {
            let mut row = super::resolved(cx, mesh, object, &declared)?;
            row.hosts.truncate(kept);
            Some(row)
        }
        (true, Some(kept)) => {
            let refusing = Declared {
                object: refusing(&declared).into(),
                converted: None,
            };
            let mut row = super::resolved(cx, mesh, object, &refusing)?;
            row.hosts.drain(..kept);
            Some(row)
        }
    }
}

/// Returns a VirtualService with refusals in place of all routes. Delegates are not merged before: their routes may be
/// what is too large.
fn refusing(declared: &Declared) -> Config<networking::VirtualService> {
    let mut spec = declared.object.spec.clone();
    if declared.http().next().is_some() {
        spec.http = vec![refusal()];
    }
    let matches = spec.tls.iter().flat_map(|route| &route.r#match);
    let mut names: Vec<String> = matches.flat_map(|matched| matched.sni_hosts.iter().cloned()).collect();
    names.sort();
    names.dedup();
    if !names.is_empty() {
        let condition = TlsMatchAttributes {
            sni_hosts: names,
            ..Default::default()
        };
        spec.tls = vec![TlsRoute {
            r#match: vec![condition],
            route: nowhere(),
        }];
    }
    if !spec.tcp.is_empty() {
        spec.tcp = vec![TcpRoute {
            route: nowhere(),
            ..Default::default()
        }];
    }
    Config {
        meta: declared.object.meta.clone(),
        spec,
        status: None,
    }
}

/// Returns a route that refuses every request. Its match is a condition, so that the catch-all route of another
/// VirtualService with the same host does not precede it.
fn refusal() -> HttpRoute {
    let everything = HttpMatchRequest {
        uri: Some(StringMatch {
            match_type: Some(MatchType::Regex("(.*)".to_owned())),
        }),
        ..Default::default()
    };
    HttpRoute {
        name: "surplus".to_owned(),
        r#match: vec![everything],
        direct_response: Some(Box::new(HttpDirectResponse {
            status: REFUSED_STATUS,
            body: None,
        })),
        ..Default::default()
    }
}

fn nowhere() -> Vec<RouteDestination> {
    vec![RouteDestination {
        destination: Some(Destination {
            host: NOWHERE.to_owned(),
            ..Default::default()
        }),
        ..Default::default()
    }]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r21_output_is_not_counted_far_beyond_the_limit() {
        let mut offered = OfferedHosts {
            mesh: false,
            servers: 1,
            count: 2_000,
            by_host: HostsByEnd::default(),
            many: Vec::new(),
            namespace: Namespace::default(),
            collapses: false,
        };
        for position in 0..offered.count {
            offered.by_host.add(&format!("h{position}.example.com"), (0, position));
        }
        let entries = Entries::of_requests(1);
        let output = |hosts: usize, limit| {
            let output = offered.output(&vec!["*.example.com".to_owned(); hosts], entries, limit);
            (output.declared, output.applied, output.kept)
        };
        assert_eq!(output(200, u64::MAX), (400_000, 400_000, 200));
        assert_eq!(output(50, 10_000), (100_000, 10_000, 5));
        assert_eq!(
            output(200, 10_000),
            (100_000, 10_000, 5),
            "as many as fit, and no more counted"
        );
    }
}
