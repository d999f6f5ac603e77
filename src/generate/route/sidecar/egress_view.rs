//! Services and VirtualServices of one egress listener, with the relations between their hosts.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
};

use super::{
    Binding, BindingPool, DefaultHost, HTTP_PORT, is_routed,
    visible_host::{ListedServices, VisibleHost},
};
use crate::{
    base::{
        Hashed, Hostname, ObjectKey, Shared, SmolStr,
        host::{self, HostsByEnd},
        keyed::KeyedMap,
    },
    generate::{
        BuildContext,
        route::{
            RouteProxyView,
            destination::Target,
            domains::lower_case,
            fragment::{self, DeclaredRoutes, Fragment, FragmentKey, TrafficOrigin},
            surplus,
        },
    },
    model::{
        MeshSnapshot, Service, ServiceKey, SidecarScope,
        destination_rule::RuleRef,
        service::{Protocol, Resolution, ScopedService, ServiceRef},
        sidecar_scope::EgressListener,
        virtual_service::{Semantics, VirtualServiceSummary},
    },
};

/// The position of a service in an [`EgressView`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ServiceIndex(usize);

/// The position of a VirtualService in an [`EgressView`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct VirtualServiceIndex(usize);

/// Services and VirtualServices of one egress listener, with the relations between their hosts.
pub(super) struct EgressView<'a> {
    ctx: BuildContext<'a>,
    pub(super) egress: &'a EgressListener,
    scope: &'a SidecarScope,
    services: Vec<RelatedService<'a>>,
    /// Services by host in lower case.
    pub(super) by_host: BTreeMap<SmolStr, ServiceIndex>,
    virtual_services: Vec<VisibleVirtualService<'a>>,
    /// The services that have HTTP routes, by port and then by host; port 0 is any port.
    routed: BTreeMap<u32, Vec<ServiceIndex>>,
    /// The VirtualServices that apply to a service of a port, in order.
    by_port: BTreeMap<u32, Vec<VirtualServiceIndex>>,
    /// Services that are left out, if the view is restricted to some services.
    others: Option<OmittedServices<'a>>,
}

/// A service with its relations to the VirtualServices.
struct RelatedService<'a> {
    host: VisibleHost<'a>,
    /// Those that apply to it.
    virtual_services: Vec<VirtualServiceIndex>,
    /// The most specific one.
    most_specific: Option<VirtualServiceIndex>,
    /// The cached rule, see [`EgressView::rule`], for the one proxy view that uses the view.
    rule: OnceCell<Option<Shared<RuleRef>>>,
    /// Its ports with HTTP routes, sorted, if there are many.
    many_ports: OnceCell<Vec<u32>>,
}

/// Services of an egress listener that a restricted view leaves out.
pub(super) struct OmittedServices<'a> {
    /// Context for reading one of them when needed.
    pub(super) ctx: BuildContext<'a>,
    /// All services of the listener by host in lower case.
    pub(super) by_host: &'a BTreeMap<String, &'a ServiceKey>,
    /// The same by the end of the host, if a VirtualService of the listener has a wildcard.
    pub(super) by_end: &'a HostsByEnd<Vec<&'a ServiceKey>>,
    /// The same by row.
    pub(super) listed: &'a ListedServices<'a>,
}

impl<'a> OmittedServices<'a> {
    /// Returns the service of a host if it has the port; 0 means any port.
    pub(super) fn with_port(&self, host: &str, port: u32) -> Option<&'a ServiceKey> {
        let key = *self.by_host.get(host)?;
        self.has_port(key, port).then_some(key)
    }

    fn has_port(&self, key: &ServiceKey, port: u32) -> bool {
        let row = self.ctx.mesh.visibility.get(self.ctx.cx, key);
        row.is_some_and(|row| port == 0 || row.has_port(port))
    }

    /// Returns true if a wildcard covers a service with the port.
    fn overlaps(&self, wildcard: &str, port: u32) -> bool {
        self.by_end.any_overlapping(wildcard, |key| self.has_port(key, port))
    }
}

/// Services by the end of their hosts, with their places among all hosts.
type ServicesByEnd = HostsByEnd<Vec<(usize, ServiceIndex)>>;

fn by_end<'h>(services: impl Iterator<Item = (&'h str, ServiceIndex)>) -> ServicesByEnd {
    let services = services.enumerate();
    HostsByEnd::of(services.map(|(place, (host, index))| (host, (place, index))))
}

/// The services of a view, to find those that a host of a VirtualService overlaps. Both may be tens of thousands.
struct RelatedHosts<'v> {
    /// By host in lower case.
    by_host: &'v BTreeMap<SmolStr, ServiceIndex>,
    /// The same by the end of the host, for wildcards of VirtualServices.
    by_end: OnceCell<ServicesByEnd>,
    /// Those whose hosts are wildcards, as they are written.
    wildcards: ServicesByEnd,
}

impl<'v> RelatedHosts<'v> {
    fn of(services: &[VisibleHost], by_host: &'v BTreeMap<SmolStr, ServiceIndex>) -> Self {
        let wildcards = by_host.iter().filter(|(name, _)| host::is_wildcard(name));
        let wildcards = wildcards.map(|(_, index)| (services[index.0].row.key.hostname.as_str(), *index));
        Self {
            by_host,
            by_end: OnceCell::new(),
            wildcards: by_end(wildcards),
        }
    }

    /// Returns the services that a host in lower case overlaps: the one with this host, then by host.
    fn overlapping(&self, name: &str) -> Vec<ServiceIndex> {
        let (exact, others) = if host::is_wildcard(name) {
            let all = || by_end(self.by_host.iter().map(|(host, index)| (host.as_str(), *index)));
            (None, self.by_end.get_or_init(all).overlapping(name))
        } else {
            (self.by_host.get(name).copied(), self.wildcards.overlapping(name))
        };
        exact
            .into_iter()
            .chain(others.into_iter().map(|(_, index)| index))
            .collect()
    }
}

/// A VirtualService with the relations of its hosts to the services.
struct VisibleVirtualService<'a> {
    key: &'a ObjectKey,
    summary: &'a Shared<VirtualServiceSummary>,
    /// Hosts that matter in the view, in lower case.
    hosts: Vec<Hostname>,
    /// The services that each host overlaps.
    overlapping: Vec<Vec<ServiceIndex>>,
    /// Set if the hosts are too many for the ports of their services.
    spread: Option<LimitedSpread>,
}

/// The ports of a VirtualService whose hosts are repeated for some of them only. A service may have tens of thousands,
/// and a VirtualService thousands of other hosts, which have its routes on each.
struct LimitedSpread {
    /// The ports with the hosts whose services lack them. Port 80 has them, too.
    ports: BTreeSet<u32>,
    /// The positions of the hosts whose services have a port.
    by_port: BTreeMap<u32, Vec<usize>>,
}

impl LimitedSpread {
    /// Returns the ports of hosts with these services; `None` if each may have all hosts.
    fn of(mesh: &MeshSnapshot, overlapping: &[Vec<ServiceIndex>], services: &[VisibleHost]) -> Option<Self> {
        if overlapping.len() < 2 {
            return None;
        }
        let numbers = |index: &ServiceIndex| {
            let routed = services[index.0].ports().filter(|(_, port)| is_routed(port.protocol));
            routed.map(|(_, port)| port.number)
        };
        let most = surplus::most_ports_of_hosts(mesh, overlapping.len());
        let all = || overlapping.iter().flatten();
        if all().flat_map(numbers).count() <= most as usize {
            return None;
        }
        let distinct: BTreeSet<u32> = all().flat_map(numbers).collect();
        if distinct.len() <= most as usize {
            return None;
        }
        let related: BTreeSet<ServiceIndex> = all().copied().collect();
        let ports_of = |index: &ServiceIndex| {
            let ports: Vec<u32> = numbers(index).collect();
            (services[index.0].row.creation, ports)
        };
        let ports = surplus::first_ports(related.iter().map(ports_of).collect(), most);
        let mut by_port: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (position, services) in overlapping.iter().enumerate() {
            for number in services.iter().flat_map(numbers) {
                let positions = by_port.entry(number).or_default();
                if positions.last() != Some(&position) {
                    positions.push(position);
                }
            }
        }
        Some(Self { ports, by_port })
    }

    /// Returns true if a port has all hosts. A configuration of all ports (0) leaves some out when it is built.
    fn has_all(&self, port: u32) -> bool {
        port == 0 || port == HTTP_PORT || self.ports.contains(&port)
    }
}

impl<'a> EgressView<'a> {
    /// Returns the view of all that a listener selects.
    pub(super) fn of(ctx: &BuildContext<'a>, scope: &'a SidecarScope, egress: &'a EgressListener) -> Self {
        let mut hosts: Vec<VisibleHost> = Vec::with_capacity(egress.services.len());
        let mut with_members: BTreeMap<&ServiceKey, usize> = BTreeMap::new();
        for listed in egress.services.iter() {
            let Some(row) = ctx.service(&listed.key) else { continue };
            if row.members.is_empty() {
                hosts.push(VisibleHost::new(row));
                continue;
            }
            let index = *with_members.entry(&listed.key).or_insert_with(|| {
                hosts.push(VisibleHost::new(row));
                hosts.len() - 1
            });
            hosts[index].add(listed.member);
        }
        let virtual_services = egress.virtual_services.iter().map(|key| (key, None));
        Self::narrowed(ctx, scope, egress, hosts, virtual_services, None)
    }

    /// Returns a view of some services, and of some VirtualServices with those of their hosts that matter, in lower
    /// case; `None` means all. `others` resolves the rest where it matters.
    pub(super) fn narrowed(
        ctx: &BuildContext<'a>,
        scope: &'a SidecarScope,
        egress: &'a EgressListener,
        hosts: Vec<VisibleHost<'a>>,
        virtual_services: impl Iterator<Item = (&'a ObjectKey, Option<Vec<Hostname>>)>,
        others: Option<OmittedServices<'a>>,
    ) -> Self {
        let by_host: BTreeMap<_, _> = hosts
            .iter()
            .enumerate()
            .map(|(position, host)| (lower_case(&host.row.key.hostname), ServiceIndex(position)))
            .collect();
        let relations = RelatedHosts::of(&hosts, &by_host);
        let visible = |(key, names)| {
            let summary = ctx.mesh.virtual_service_summaries.get(ctx.cx, key)?;
            let spread = |overlapping: &[Vec<ServiceIndex>]| LimitedSpread::of(ctx.mesh, overlapping, &hosts);
            Some(VisibleVirtualService::of(key, summary, names, &relations, spread))
        };
        let virtual_services: Vec<_> = virtual_services.filter_map(visible).collect();
        let mut by_port: BTreeMap<u32, Vec<VirtualServiceIndex>> = BTreeMap::new();
        let mut by_service = vec![Vec::new(); hosts.len()];
        for (position, declared) in virtual_services.iter().enumerate() {
            let virtual_service = VirtualServiceIndex(position);
            // A wildcard may apply to all services of the mesh, most of which have the same few ports.
            let mut ports = Vec::new();
            for index in declared.overlapping.iter().flatten().copied().collect::<BTreeSet<_>>() {
                by_service[index.0].push(virtual_service);
                let of_host = hosts[index.0].ports().map(|(_, port)| port.number);
                ports.extend(of_host.chain([0]));
            }
            ports.sort_unstable();
            ports.dedup();
            for port in ports {
                by_port.entry(port).or_default().push(virtual_service);
            }
        }
        let routed = routed_services(&hosts, by_host.values().copied());
        let most_specific = most_specific(&hosts, &virtual_services);
        let related = hosts.into_iter().zip(by_service).zip(most_specific);
        let services = related.map(|((host, virtual_services), most_specific)| RelatedService {
            host,
            virtual_services,
            most_specific,
            rule: OnceCell::new(),
            many_ports: OnceCell::new(),
        });
        Self {
            ctx: *ctx,
            egress,
            scope,
            services: services.collect(),
            by_host,
            virtual_services,
            routed,
            by_port,
            others,
        }
    }

    /// Returns a service.
    pub(super) fn host(&self, index: ServiceIndex) -> &VisibleHost<'a> {
        &self.services[index.0].host
    }

    /// Returns all services.
    pub(super) fn hosts(&self) -> impl Iterator<Item = (ServiceIndex, &VisibleHost<'a>)> {
        let services = self.services.iter().enumerate();
        services.map(|(position, service)| (ServiceIndex(position), &service.host))
    }

    pub(super) fn is_http_proxy(&self) -> bool {
        is_http_proxy(self.egress)
    }

    fn has_port(&self, index: ServiceIndex, port: u32) -> bool {
        port == 0 || self.host(index).at(port).is_some()
    }

    /// Returns true if the service has HTTP routes on the port.
    fn is_routed(&self, index: ServiceIndex, port: u32) -> bool {
        self.host(index).is_routed(port)
    }

    /// Returns the services with default routes, by host, except those that are `taken`.
    pub(super) fn default_hosts(
        &self,
        port: u32,
        client: &RouteProxyView,
        taken: &BTreeSet<ServiceIndex>,
    ) -> Vec<DefaultHost> {
        let routed = self.routed.get(&port).into_iter().flatten().copied();
        // An alias is served under the service that it refers to.
        let is_alias = |(_, service): (_, &Shared<Service>)| service.resolution == Resolution::Alias;
        let own = routed.filter(|index| !self.host(*index).at(port).is_some_and(is_alias));
        self.hosts_with_routes(own, port, client, taken)
    }

    /// Returns the rule of a service if it has a consistent hash; it is the same for all ports.
    fn rule(&self, index: ServiceIndex, client: &RouteProxyView) -> Option<Shared<RuleRef>> {
        let service = &self.services[index.0];
        let find = || fragment::rule(&self.ctx, client, &service.host.row.key).map(Shared::new);
        service.rule.get_or_init(find).clone()
    }

    /// Returns the services with default routes for a port, except those that are `taken`.
    pub(super) fn hosts_with_routes(
        &self,
        services: impl Iterator<Item = ServiceIndex>,
        port: u32,
        client: &RouteProxyView,
        taken: &BTreeSet<ServiceIndex>,
    ) -> Vec<DefaultHost> {
        let services = services.filter(|index| !taken.contains(index));
        services
            .filter_map(|index| Some((index, self.host(index).at(port)?)))
            .flat_map(|(index, (member, service))| {
                let (all, only) = match port {
                    0 => (&service.ports[..], None),
                    // The first of several ports with the same number counts, if it is not one of UDP.
                    port => (&[][..], service.port(port)),
                };
                let ports = all.iter().chain(only);
                ports
                    .filter(|port| is_routed(port.protocol))
                    .map(move |port| DefaultHost {
                        service: ServiceRef {
                            key: service.key.clone(),
                            member,
                        },
                        port: port.number,
                        rule: self.rule(index, client),
                    })
            })
            .collect()
    }

    /// Returns the VirtualServices of a port, and the services that they take unconditionally. VirtualServices without
    /// a service count on port 80 only.
    pub(super) fn bindings(
        &self,
        port: u32,
        client: &RouteProxyView,
    ) -> (Vec<Hashed<Binding>>, BTreeSet<ServiceIndex>) {
        let mut taken = BTreeSet::new();
        let all = (0..self.virtual_services.len()).map(VirtualServiceIndex);
        let concerned = self.by_port.get(&port).into_iter().flatten().copied();
        let applied: Vec<VirtualServiceIndex> = if port == HTTP_PORT {
            all.collect()
        } else {
            concerned.collect()
        };
        let mut bindings = Vec::new();
        for index in applied {
            if let Some((services, hosts)) = self.bound(index, port, &client.namespace) {
                self.take(index, &services, &mut taken);
                bindings.extend(self.bindings_with(index, port, client, services, hosts));
            }
        }
        (bindings, taken)
    }

    /// Returns the VirtualServices of one service on a port, restricted to that service, and the service if they take
    /// it unconditionally.
    pub(super) fn bindings_of(
        &self,
        service: ServiceIndex,
        port: u32,
        client: &RouteProxyView,
    ) -> (Vec<Hashed<Binding>>, BTreeSet<ServiceIndex>) {
        let mut taken = BTreeSet::new();
        let only = &self.host(service).row.key;
        let reduced = |index: &VirtualServiceIndex| {
            let (mut services, _) = self.bound(*index, port, &client.namespace)?;
            services.retain(|service| self.host(*service).row.key == *only);
            if services.is_empty() {
                return None;
            }
            self.take(*index, &services, &mut taken);
            Some(self.bindings_with(*index, port, client, services, Vec::new()))
        };
        let applied = &self.services[service.0].virtual_services;
        let bindings = applied.iter().filter_map(reduced).flatten().collect();
        (bindings, taken)
    }

    /// Records the services that the VirtualService takes for every proxy.
    fn take(&self, index: VirtualServiceIndex, services: &[ServiceIndex], taken: &mut BTreeSet<ServiceIndex>) {
        if self.virtual_services[index.0].summary.unconditional {
            taken.extend(services);
        }
    }

    /// Returns the binding of a VirtualService on a port, and one that refuses requests to the services of which the
    /// port is surplus.
    fn bindings_with(
        &self,
        index: VirtualServiceIndex,
        port: u32,
        client: &RouteProxyView,
        services: Vec<ServiceIndex>,
        hosts: Vec<Hostname>,
    ) -> Vec<Hashed<Binding>> {
        let most = self.virtual_services[index.0].summary.most_ports;
        let is_surplus = |service: &ServiceIndex| self.is_surplus(*service, port, most);
        let (surplus, kept): (Vec<ServiceIndex>, Vec<ServiceIndex>) = services.into_iter().partition(is_surplus);
        let mut bindings = Vec::with_capacity(1);
        if !kept.is_empty() || port == HTTP_PORT && !hosts.is_empty() {
            bindings.push(self.binding(index, port, client, kept, hosts));
        }
        if !surplus.is_empty() {
            bindings.push(self.share(port, None, 0, surplus, Vec::new()));
        }
        bindings
    }

    /// Returns true if a port is not among the first ports of a service with HTTP routes, of which `most` count.
    fn is_surplus(&self, index: ServiceIndex, port: u32, most: u32) -> bool {
        let service = &self.services[index.0];
        let ports = service.many_ports.get_or_init(|| service.host.many_routed_ports());
        ports.get(most as usize).is_some_and(|first| port >= *first)
    }

    fn binding(
        &self,
        index: VirtualServiceIndex,
        port: u32,
        client: &RouteProxyView,
        services: Vec<ServiceIndex>,
        hosts: Vec<Hostname>,
    ) -> Hashed<Binding> {
        let declared = &self.virtual_services[index.0];
        let routes = DeclaredRoutes {
            virtual_service: declared.key,
            origin: TrafficOrigin::Mesh(port),
            targets: self.targets(declared, port),
            by_source: declared.summary.by_source,
        };
        let routes = Fragment::declared(&self.ctx, routes, client);
        let most_ports = if port == 0 { declared.summary.most_ports } else { 0 };
        self.share(port, Some(routes), most_ports, services, hosts)
    }

    fn share(
        &self,
        port: u32,
        routes: Option<FragmentKey>,
        most_ports: u32,
        services: Vec<ServiceIndex>,
        hosts: Vec<Hostname>,
    ) -> Hashed<Binding> {
        self.ctx.memo.get::<Shared<BindingPool>>().share(Binding {
            routes,
            most_ports,
            services: services
                .into_iter()
                .filter_map(|service| self.host(service).reference(port))
                .collect(),
            hosts,
        })
    }

    /// Returns the services and other hosts that a VirtualService applies to on a port.
    fn bound(&self, index: VirtualServiceIndex, port: u32, client: &str) -> Option<(Vec<ServiceIndex>, Vec<Hostname>)> {
        let declared = &self.virtual_services[index.0];
        let mut services: Vec<ServiceIndex> = Vec::new();
        let mut hosts = Vec::new();
        let spread = declared.spread.as_ref().filter(|spread| !spread.has_all(port));
        let positions: Box<dyn Iterator<Item = usize> + '_> = match spread {
            None => Box::new(0..declared.hosts.len()),
            Some(spread) => Box::new(spread.by_port.get(&port).into_iter().flatten().copied()),
        };
        for position in positions {
            let (name, overlapping) = (&declared.hosts[position], &declared.overlapping[position]);
            if !host::is_wildcard(name) {
                match self
                    .by_host
                    .get(name.as_str())
                    .filter(|service| self.has_port(**service, port))
                {
                    Some(service) => services.push(*service),
                    None if spread.is_none() => hosts.push(name.clone()),
                    None => {}
                }
                continue;
            }
            let mut on_port = overlapping
                .iter()
                .filter(|service| self.has_port(**service, port))
                .peekable();
            let elsewhere = || self.others.as_ref().is_some_and(|others| others.overlaps(name, port));
            if declared.summary.semantics == Semantics::Gateway || on_port.peek().is_none() && !elsewhere() {
                if spread.is_none() {
                    hosts.push(name.clone());
                }
                continue;
            }
            services.extend(on_port.filter(|service| self.services[service.0].most_specific == Some(index)));
        }
        if declared.summary.semantics == Semantics::Gateway && !self.is_allowed(declared, &services, client) {
            return None;
        }
        services.retain(|service| self.is_routed(*service, port));
        if services.is_empty() && (port != HTTP_PORT || hosts.is_empty()) {
            return None;
        }
        let mut seen = BTreeSet::new();
        services.retain(|service| seen.insert(*service));
        Some((services, hosts))
    }

    /// Gateway API routes must come from the namespace of the proxy or of the service.
    fn is_allowed(&self, declared: &VisibleVirtualService, services: &[ServiceIndex], client: &str) -> bool {
        let namespace = declared.summary.meta.namespace();
        services
            .iter()
            .any(|service| self.host(*service).row.key.namespace == *namespace || *namespace == client)
    }

    /// Returns the service that represents an omitted host on a port.
    fn omitted(&self, others: &OmittedServices, key: &ServiceKey, port: u32) -> Option<ScopedService> {
        let row = self.ctx.mesh.visibility.get(self.ctx.cx, key)?;
        if row.members.is_empty() {
            let key = key.clone();
            return Some(ScopedService { key, merged: None });
        }
        VisibleHost::of(self.ctx.service(key)?, others.listed).scoped(port)
    }

    fn targets(&self, declared: &VisibleVirtualService, port: u32) -> Vec<Target> {
        let hosts: BTreeSet<&Hostname> = declared
            .summary
            .destinations
            .iter()
            .map(|destination| &destination.host)
            .collect();
        hosts
            .into_iter()
            .map(|host| {
                let index = self.by_host.get(host.as_str());
                let own = index.and_then(|index| self.host(*index).scoped(port));
                let other = || {
                    let others = self.others.as_ref()?;
                    self.omitted(others, others.with_port(host, port)?, port)
                };
                Target {
                    host: host.clone(),
                    service: own.or_else(other),
                    ruled: self.scope.by_host.get(host).cloned(),
                }
            })
            .collect()
    }
}

impl<'a> VisibleVirtualService<'a> {
    fn of(
        key: &'a ObjectKey,
        summary: &'a Shared<VirtualServiceSummary>,
        hosts: Option<Vec<Hostname>>,
        services: &RelatedHosts,
        spread: impl Fn(&[Vec<ServiceIndex>]) -> Option<LimitedSpread>,
    ) -> Self {
        let all = summary.hosts.iter().map(|host| Hostname::from(lower_case(host)));
        let hosts = hosts.unwrap_or_else(|| all.collect());
        let overlapping: Vec<_> = hosts.iter().map(|name| services.overlapping(name)).collect();
        Self {
            key,
            summary,
            hosts,
            spread: spread(&overlapping),
            overlapping,
        }
    }
}

/// Returns true if an egress listener routes to all services and ports.
pub(super) fn is_http_proxy(egress: &EgressListener) -> bool {
    let declared = egress.port.as_ref();
    declared.is_some_and(|declared| Protocol::parse(&declared.protocol) == Protocol::HttpProxy)
}

/// Returns the services that have HTTP routes, by port, in the given order; port 0 is any port.
fn routed_services(
    hosts: &[VisibleHost],
    indexes: impl Iterator<Item = ServiceIndex>,
) -> BTreeMap<u32, Vec<ServiceIndex>> {
    let mut routed: BTreeMap<u32, Vec<ServiceIndex>> = BTreeMap::new();
    let mut numbers = Vec::new();
    for index in indexes {
        let host = &hosts[index.0];
        let ports = host
            .ports()
            .map(|(_, port)| port)
            .filter(|port| is_routed(port.protocol));
        numbers.extend(ports.map(|port| port.number));
        if !numbers.is_empty() {
            numbers.push(0);
        }
        if host.has_members() {
            numbers.retain(|number| host.is_routed(*number));
        }
        numbers.sort_unstable();
        numbers.dedup();
        for number in numbers.drain(..) {
            routed.entry(number).or_default().push(index);
        }
    }
    routed
}

/// Returns the VirtualService of each service: the one that names its host, or else the one with the longest wildcard
/// that covers it. Among equal hosts the first counts.
fn most_specific(
    services: &[VisibleHost],
    virtual_services: &[VisibleVirtualService],
) -> Vec<Option<VirtualServiceIndex>> {
    if virtual_services.is_empty() {
        return vec![None; services.len()];
    }
    let mut exact: KeyedMap<&str, VirtualServiceIndex> = KeyedMap::default();
    let mut wild: HostsByEnd<Option<VirtualServiceIndex>> = HostsByEnd::default();
    for (position, declared) in virtual_services.iter().enumerate() {
        let index = VirtualServiceIndex(position);
        for name in &declared.hosts {
            if host::is_wildcard(name) {
                wild.entry(name).get_or_insert(index);
            } else {
                exact.entry(name.as_str()).or_insert(index);
            }
        }
    }
    let index = |host: &VisibleHost| {
        let name = lower_case(&host.row.key.hostname);
        // The longest comes last.
        let covering = || wild.covering(&name).into_iter().copied().next_back().flatten();
        exact.get(name.as_str()).copied().or_else(covering)
    };
    services.iter().map(index).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r21_overlapping_services_are_found_as_hosts_are_compared() {
        let names = ["other", "*.test", "a.test", "*", "b.a.test", "*.a.test", "c.test"];
        let services = names.iter().enumerate();
        let services = services.map(|(position, name)| (SmolStr::new(name), ServiceIndex(position)));
        let by_host: BTreeMap<SmolStr, ServiceIndex> = services.collect();
        let wildcards = by_host.iter().filter(|(name, _)| host::is_wildcard(name));
        let related = RelatedHosts {
            by_host: &by_host,
            by_end: OnceCell::new(),
            wildcards: by_end(wildcards.map(|(name, index)| (name.as_str(), *index))),
        };
        for name in names
            .into_iter()
            .chain(["*.b.test", "*.b.a.test", "x.a.test", "absent"])
        {
            let all = by_host.iter().filter(|(service, _)| host::overlaps(name, service));
            let (exact, others): (Vec<_>, Vec<_>) =
                all.partition(|(service, _)| !host::is_wildcard(name) && **service == name);
            let expected: Vec<usize> = exact.into_iter().chain(others).map(|(_, index)| index.0).collect();
            let found = related.overlapping(name);
            assert_eq!(
                found.iter().map(|index| index.0).collect::<Vec<_>>(),
                expected,
                "{name}"
            );
        }
    }
}
