//! Route configuration of a single host. A proxyless gRPC client requests it by the name of a cluster.
//!
//! It contains the virtual hosts of the port that match the host, seldom more than one. So only services and
//! VirtualServices that may concern the host are read. Note: the others still count if a destination refers to them, or
//! if a full name takes precedence over a short one.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
};

use super::{
    Binding, BindingPool, RouteConfigProxyView, ServiceNames, SidecarRoutes,
    domains::{self, NameSpace, PortForms, lower_case},
    egress_view::{EgressView, OmittedServices, is_http_proxy},
    visible_host::{ListedServices, VisibleHost},
};
use crate::{
    base::{
        Hashed, Hostname, Namespace, ObjectKey, Shared, SmolStr,
        host::{self, HostsByEnd},
    },
    generate::{BuildContext, name::ClusterName, patch::route::RoutePatches, requested::has_room},
    model::{
        Service, ServiceKey, SidecarScope,
        service::{Resolution, UNSPECIFIED_IP},
        sidecar_scope::{AliasFilters, EgressListener},
        virtual_service::VirtualServiceSummary,
    },
};

/// The host of a single-host route configuration.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Single {
    /// Host in lower case.
    host: SmolStr,
    /// Requested port.
    port: u32,
    /// Full names of other services that equal short names in the route configuration.
    conflicting_names: Vec<SmolStr>,
}

impl Single {
    /// Adds the full names that take precedence over short names.
    pub(super) fn add_known(&self, known: &mut ServiceNames) {
        for rival in &self.conflicting_names {
            known.add(rival, self.port);
        }
    }

    /// Returns true if a virtual host with these domains matches the host.
    pub(super) fn answers<'d>(&self, mut domains: impl Iterator<Item = &'d str>) -> bool {
        domains.any(|domain| self.is_meant(&domain.to_ascii_lowercase()))
    }

    fn is_meant(&self, domain: &str) -> bool {
        if domain == domains::bracketed(&self.host) {
            return true;
        }
        let (name, port) = match domain.rsplit_once(':') {
            Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
            _ => (domain, None),
        };
        let on_port = port.is_none_or(|port| port.parse() == Ok(self.port));
        on_port
            && (name == domains::bracketed(&self.host) || host::is_wildcard(name) && host::overlaps(name, &self.host))
    }
}

/// Lists the route configurations of these names; names that are not cluster names have none. The subset of a name does
/// not count.
pub(crate) fn list<'n>(
    ctx: &BuildContext,
    scope: &SidecarScope,
    client: &Hashed<RouteConfigProxyView>,
    names: impl Iterator<Item = &'n SmolStr>,
) -> Vec<SidecarRoutes> {
    let mut catalogues: BTreeMap<usize, HostIndex> = BTreeMap::new();
    let (mut listed, mut copies) = (Vec::new(), BTreeMap::new());
    for name in names {
        let Some(cluster) = ClusterName::outbound(name) else {
            continue;
        };
        let host = SmolStr::from(cluster.host.to_ascii_lowercase());
        let answers = |egress: &EgressListener| egress.port.as_ref().is_none_or(|port| port.number == cluster.port);
        let mut routes = SidecarRoutes {
            name: name.clone(),
            port: cluster.port,
            client: client.clone(),
            catch_all: None,
            bindings: Hashed::new(Vec::new()),
            services: Hashed::new(Vec::new()),
            alias_filters: AliasFilters::default(),
            single: None,
            patches: RoutePatches::default(),
        };
        let (mut conflicting_names, mut is_declared) = (Vec::new(), false);
        if let Some(position) = scope.egress.iter().position(answers) {
            let catalogue = catalogues
                .entry(position)
                .or_insert_with(|| HostIndex::of(ctx, &scope.egress[position]));
            conflicting_names = catalogue.fill(&mut routes, ctx, scope, &host);
            is_declared = catalogue.declares(&host);
        }
        // Hosts that nothing declares have the routes of wildcards in common.
        let own = is_declared.then(|| host.clone());
        let common = (!is_declared).then(|| (routes.bindings.clone(), routes.services.clone()));
        let is_empty = routes.bindings.is_empty() && routes.services.is_empty();
        if !is_empty && !has_room(&mut copies, (cluster.port, own, common)) {
            continue;
        }
        routes.single = Some(Single {
            host,
            port: cluster.port,
            conflicting_names,
        });
        listed.push(routes);
    }
    listed
}

/// Hosts of one egress listener.
struct HostIndex<'a> {
    egress: &'a EgressListener,
    /// Services by row.
    listed: ListedServices<'a>,
    /// Services by host in lower case.
    by_host: BTreeMap<String, &'a ServiceKey>,
    /// Services by the end of their hosts, if a VirtualService has a wildcard.
    by_end: HostsByEnd<Vec<&'a ServiceKey>>,
    /// Hosts of VirtualServices in lower case.
    declared: BTreeSet<SmolStr>,
    /// Positions of the VirtualServices by the ends of their hosts.
    by_route_host: HostsByEnd<Vec<usize>>,
    /// Hosts of each VirtualService.
    route_hosts: Vec<RouteHosts>,
}

/// The hosts of a VirtualService. These and the requested names may both be thousands.
#[derive(Default)]
struct RouteHosts {
    /// In lower case, in order.
    names: Vec<SmolStr>,
    /// Their positions by their ends, found on first use.
    by_end: OnceCell<HostsByEnd<Vec<usize>>>,
    /// Namespace of the VirtualService.
    namespace: Namespace,
    /// Services that decide where it applies, found on first use.
    deciding: OnceCell<DecidingServices>,
}

/// The services of a VirtualService's hosts that decide whether it applies to all of its hosts on a port.
#[derive(Default)]
struct DecidingServices {
    /// Services of hosts without wildcards, by port; port 0 is any port.
    by_port: BTreeMap<u32, ServicesOfPort>,
    /// Services whose hosts are wildcards.
    wildcards: Vec<SmolStr>,
}

/// The services with a port, by the positions of their hosts.
#[derive(Default)]
struct ServicesOfPort {
    /// The first service: it counts for routes of the client's namespace.
    any: Option<usize>,
    /// Those with HTTP routes on the port, in order.
    routed: Vec<usize>,
    /// The first one of the VirtualService's namespace.
    own: Option<usize>,
    /// The first of those with HTTP routes that has an address, found on first use.
    by_address: OnceCell<BTreeMap<SmolStr, usize>>,
}

impl RouteHosts {
    fn of(summary: &VirtualServiceSummary) -> Self {
        Self {
            names: summary.hosts.iter().map(lower_case).collect(),
            namespace: summary.meta.namespace().clone(),
            ..Self::default()
        }
    }

    /// Returns its hosts that overlap some of these names, in order.
    fn overlapping(&self, names: &[&str]) -> Vec<Hostname> {
        let all = self.names.iter().enumerate();
        let all = all.map(|(place, name)| (name.as_str(), place));
        let by_end = self.by_end.get_or_init(|| HostsByEnd::of(all));
        let places = names.iter().flat_map(|name| by_end.overlapping(name));
        let places: BTreeSet<usize> = places.collect();
        let names = places.into_iter().map(|place| self.names[place].clone());
        names.map(Hostname::from).collect()
    }
}

impl<'a> HostIndex<'a> {
    fn of(ctx: &BuildContext, egress: &'a EgressListener) -> Self {
        let services = egress.services.iter();
        let by_host: BTreeMap<String, &ServiceKey> = services
            .map(|listed| (listed.key.hostname.to_ascii_lowercase(), &listed.key))
            .collect();
        let hosts_of = |key: &ObjectKey| {
            let summary = ctx.mesh.virtual_service_summaries.get(ctx.cx, key);
            summary.map(|summary| RouteHosts::of(summary)).unwrap_or_default()
        };
        let route_hosts: Vec<RouteHosts> = egress.virtual_services.iter().map(hosts_of).collect();
        let mut declared: BTreeSet<SmolStr> = BTreeSet::new();
        let mut by_route_host: HostsByEnd<Vec<usize>> = HostsByEnd::default();
        for (position, hosts) in route_hosts.iter().enumerate() {
            for host in &hosts.names {
                declared.insert(host.clone());
                by_route_host.add(host, position);
            }
        }
        let has_wildcards = declared.iter().any(|host| host::is_wildcard(host));
        let by_end = has_wildcards.then(|| HostsByEnd::of(by_host.iter().map(|(host, key)| (host.as_str(), *key))));
        Self {
            egress,
            listed: ListedServices::of(egress),
            by_end: by_end.unwrap_or_default(),
            by_host,
            declared,
            by_route_host,
            route_hosts,
        }
    }

    /// Returns true if a service or VirtualService has the host.
    fn declares(&self, host: &str) -> bool {
        self.by_host.contains_key(host) || self.declared.contains(host)
    }

    /// Fills in the inputs of a route configuration, and returns the full names of other services that take precedence.
    fn fill(&self, routes: &mut SidecarRoutes, ctx: &BuildContext, scope: &SidecarScope, host: &str) -> Vec<SmolStr> {
        let related = self.related(ctx, &routes.client, host);
        let virtual_services = self.virtual_services_of(related.iter().copied().chain([host]));
        if is_http_proxy(self.egress) {
            routes.port = 0;
        }
        // On ports other than 80, a VirtualService applies to all its hosts if it applies to one.
        let mut hosts = related.clone();
        for position in self.virtual_services_of([host].into_iter()) {
            hosts.extend(self.deciding(ctx, position, routes.port));
            hosts.extend(self.first_with_addresses(ctx, position, routes, &related));
        }
        let names: Vec<&str> = hosts.iter().copied().chain([host]).collect();
        let services = hosts.iter().filter_map(|host| ctx.service(self.by_host.get(*host)?));
        let services: Vec<&Shared<Service>> = services.collect();
        let visible = services.iter().map(|row| VisibleHost::of(row, &self.listed)).collect();
        let keys = virtual_services.iter().map(|position| {
            let relevant = self.route_hosts[*position].overlapping(&names);
            (&self.egress.virtual_services[*position], Some(relevant))
        });
        let others = OmittedServices {
            ctx: *ctx,
            by_host: &self.by_host,
            by_end: &self.by_end,
            listed: &self.listed,
        };
        let visible = EgressView::narrowed(ctx, scope, self.egress, visible, keys, Some(others));
        let client = &routes.client.routes;
        let (bindings, taken) = visible.bindings(routes.port, client);
        routes.services = Hashed::new(visible.default_hosts(routes.port, client, &taken));
        routes.alias_filters = self.egress.alias_filters.clone();
        let reduced = |binding: Hashed<Binding>| {
            let (kept, others): (Vec<Hostname>, Vec<Hostname>) = binding
                .hosts
                .iter()
                .cloned()
                .partition(|name| host::overlaps(name, host));
            if binding.services.is_empty() && kept.is_empty() {
                return None;
            }
            if others.is_empty() {
                return Some(binding);
            }
            Some(ctx.memo.get::<Shared<BindingPool>>().share(Binding {
                hosts: kept,
                ..Binding::clone(&binding)
            }))
        };
        routes.bindings = Hashed::new(bindings.into_iter().filter_map(reduced).collect());
        self.conflicting_names(ctx, routes, &services)
    }

    /// Returns the hosts of the services that may have a name which the host matches.
    fn related(&self, ctx: &BuildContext, client: &RouteConfigProxyView, host: &str) -> BTreeSet<&str> {
        let mut names = vec![host.to_owned()];
        // The host may be a pod of a headless service.
        names.extend(host.split_once('.').map(|(_, parent)| parent.to_owned()));
        // The host may be a short name.
        let mut suffix = client.dns_domain.as_str();
        while !suffix.is_empty() {
            names.push(format!("{host}.{suffix}"));
            suffix = suffix.split_once('.').map_or("", |(_, rest)| rest);
        }
        let found = names.iter().filter_map(|name| self.by_host.get_key_value(name));
        let wildcards = self.by_host.range("*".to_owned().."+".to_owned());
        let wildcards = wildcards.filter(|(name, _)| host::overlaps(name, host));
        let mut related: BTreeSet<&str> = BTreeSet::new();
        for (name, key) in found.chain(wildcards) {
            related.insert(name);
            // An alias is served under the service that it refers to.
            let service = ctx
                .service(key)
                .filter(|service| service.resolution == Resolution::Alias);
            let target = service.map(|service| service.external_name.to_ascii_lowercase());
            let target = target.and_then(|target| self.by_host.get_key_value(&target));
            related.extend(target.map(|(name, _)| name.as_str()));
        }
        related
    }

    /// Returns the VirtualServices that name one of these hosts, or a wildcard that covers one of them.
    fn virtual_services_of<'h>(&self, hosts: impl Iterator<Item = &'h str>) -> BTreeSet<usize> {
        hosts.flat_map(|host| self.by_route_host.overlapping(host)).collect()
    }

    /// Returns the hosts of the services that decide whether a VirtualService applies to all its hosts on a port.
    fn deciding(&self, ctx: &BuildContext, position: usize, port: u32) -> Vec<&str> {
        let hosts = &self.route_hosts[position];
        let found = hosts.deciding.get_or_init(|| self.find_deciding(ctx, hosts));
        let of_port = found.by_port.get(&port).into_iter();
        let places = of_port.flat_map(|of_port| [of_port.any, of_port.routed.first().copied(), of_port.own]);
        let names = places.flatten().map(|place| &hosts.names[place]);
        names.chain(&found.wildcards).map(SmolStr::as_str).collect()
    }

    fn find_deciding(&self, ctx: &BuildContext, hosts: &RouteHosts) -> DecidingServices {
        let mut found = DecidingServices::default();
        for (place, name) in hosts.names.iter().enumerate() {
            let Some(row) = self.by_host.get(name.as_str()).and_then(|key| ctx.service(key)) else {
                continue;
            };
            if host::is_wildcard(name) {
                found.wildcards.push(name.clone());
                continue;
            }
            for (port, is_routed) in VisibleHost::of(row, &self.listed).routed_by_port() {
                let of_port = found.by_port.entry(port).or_default();
                of_port.any.get_or_insert(place);
                if is_routed {
                    of_port.routed.push(place);
                }
                if row.key.namespace == hosts.namespace {
                    of_port.own.get_or_insert(place);
                }
            }
        }
        found
    }

    /// Returns the hosts of a VirtualService whose services are the first with the addresses of the services of
    /// `names`. The virtual hosts of the others do not have these addresses.
    ///
    /// Parity (pilot/pkg/networking/core/httproute.go, `dedupeDomains`).
    fn first_with_addresses(
        &self,
        ctx: &BuildContext,
        position: usize,
        routes: &SidecarRoutes,
        names: &BTreeSet<&str>,
    ) -> Vec<&str> {
        let hosts = &self.route_hosts[position];
        let found = hosts.deciding.get_or_init(|| self.find_deciding(ctx, hosts));
        let of_port = found.by_port.get(&routes.port);
        let Some(of_port) = of_port.filter(|of_port| of_port.routed.len() > 1) else {
            return Vec::new();
        };
        let by_address = of_port.by_address.get_or_init(|| {
            let mut first = BTreeMap::new();
            for place in &of_port.routed {
                for address in self.addresses(ctx, routes, &hosts.names[*place]) {
                    first.entry(address).or_insert(*place);
                }
            }
            first
        });
        let addresses = names.iter().flat_map(|name| self.addresses(ctx, routes, name));
        let places = addresses.filter_map(|address| by_address.get(&address).copied());
        let places: BTreeSet<usize> = places.collect();
        places.into_iter().map(|place| hosts.names[place].as_str()).collect()
    }

    /// Returns the addresses that a route configuration has for the service of a host.
    fn addresses(&self, ctx: &BuildContext, routes: &SidecarRoutes, name: &str) -> Vec<SmolStr> {
        let row = self.by_host.get(name).and_then(|key| ctx.service(key));
        let service = row.and_then(|row| VisibleHost::of(row, &self.listed).at(routes.port));
        let Some((_, service)) = service else {
            return Vec::new();
        };
        let mut addresses = routes.client.vip.addresses(service);
        addresses.retain(|address| !address.is_empty() && *address != UNSPECIFIED_IP);
        addresses
    }

    fn conflicting_names(
        &self,
        ctx: &BuildContext,
        routes: &SidecarRoutes,
        services: &[&Shared<Service>],
    ) -> Vec<SmolStr> {
        let names = NameSpace {
            dns_domain: &routes.client.dns_domain,
            absolute: false,
        };
        let hosts = services.iter().flat_map(|service| {
            let aliases = service.aliases.iter().map(|alias| &alias.hostname);
            std::iter::once(&service.key.hostname).chain(aliases)
        });
        let forms = hosts.flat_map(|host| domains::alternatives(host, names, PortForms::Ignored));
        let others = OmittedServices {
            ctx: *ctx,
            by_host: &self.by_host,
            by_end: &self.by_end,
            listed: &self.listed,
        };
        let conflicting_names: BTreeSet<SmolStr> = forms
            .filter(|form| others.with_port(form, routes.port).is_some())
            .map(SmolStr::from)
            .collect();
        conflicting_names.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn single(host: &str, port: u32) -> Single {
        Single {
            host: host.into(),
            port,
            conflicting_names: Vec::new(),
        }
    }

    fn answers(single: &Single, domain: &str) -> bool {
        single.answers(std::iter::once(domain))
    }

    #[test]
    fn a_host_matches_its_domains_and_covering_wildcards() {
        let single = single("a.ns.svc.cluster.local", 8080);
        for domain in [
            "a.ns.svc.cluster.local",
            "A.ns.svc.cluster.local:8080",
            "*.ns.svc.cluster.local",
            "*.ns.svc.cluster.local:8080",
            "*",
        ] {
            assert!(answers(&single, domain), "{domain}");
        }
        for domain in [
            "a.ns.svc.cluster.local:9090",
            "b.ns.svc.cluster.local",
            "*.other.svc.cluster.local",
            "*.ns.svc.cluster.local:9090",
            "a",
        ] {
            assert!(!answers(&single, domain), "{domain}");
        }
    }

    #[test]
    fn ipv6_addresses_are_in_brackets() {
        let single = single("2001:db8::1", 8080);
        assert!(answers(&single, "[2001:db8::1]"));
        assert!(answers(&single, "[2001:db8::1]:8080"));
        assert!(!answers(&single, "[2001:db8::2]:8080"));
        assert!(!answers(&single, "[2001:db8::1]:80"));
    }
}
