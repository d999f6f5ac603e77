//! Lists the outbound listeners of a sidecar, with the services that share each.
//!
//! Listing follows the rules for service ports with the same address: HTTP ports share a listener, TCP ports add
//! chains, and ports without a declared protocol make it sniff. Note: the protocol of a listener (HTTP, TCP, sniffing)
//! depends on the order of services, and so decides which ports are ignored.

pub mod listener;
pub mod proxy_view;
mod tcp;
pub mod virtual_listener;

use std::{
    cell::{OnceCell, RefCell},
    collections::{BTreeMap, BTreeSet},
};

use smol_str::SmolStr;

use super::ListenerKey;
use crate::{
    base::{
        Hashed, Hostname, ObjectKey, Shared, cidr,
        host::{self, HostsByEnd},
    },
    generate::{
        BuildContext,
        constant::{loopbacks, wildcards},
        name::{BLACK_HOLE, allowed_cluster},
        proxy::InterceptionMode,
    },
    model::{
        ScopeKey, Service, ServiceKey, SidecarScope,
        destination_rule::{self, RuleRef},
        endpoint::PortAddresses,
        output_limit::RouteBudget,
        service::{Protocol, Registry, Resolution, ScopedService, ServicePort, ServiceRef, UNSPECIFIED_IP},
        sidecar_scope::{EgressListener, OutboundPolicy},
        virtual_service::{self, PortRoutes, VirtualService},
    },
};
use listener::{ChainKind, ListenPort, ListenerService, OutboundListenerKey, StreamRoutes, StreamRoutesPool};
use proxy_view::OutboundListenerProxyView;

/// Outbound listeners of the sidecars of one scope.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutboundListenerPart {
    /// Scope.
    pub scope: ScopeKey,
    /// Further attributes of the proxy.
    pub client: Hashed<OutboundListenerProxyView>,
}

/// The maximum number of VirtualServices with TCP or TLS routes for one service. A tenant may declare thousands for a
/// wildcard, and all services of the mesh have those. Connections to a service with more are closed.
const MAX_VIRTUAL_SERVICES: usize = 1000;

/// The number of services of a row that are merged into a listener if their chains have equal matches. Those of the
/// second add nothing but a note. There may be thousands, whose aliases are all in the matches.
const MOST_MERGED: usize = 2;

/// The attributes of a service that the matches of its chains depend on, besides those of its row: the protocol, the
/// registry, the address, and true if it is resolved for each connection.
type MatchKind = (Protocol, Registry, SmolStr, bool);

/// First address, in its canonical spelling, and port of a listener. Envoy refuses a second listener at an address,
/// however it is spelled.
type BindKey = (SmolStr, u32);

/// A listener while services are added.
struct Entry {
    binds: Vec<SmolStr>,
    bind_to_port: bool,
    port: u32,
    protocol: Protocol,
    /// True if it belongs to an earlier egress listener, so that the catch-all one adds nothing to it.
    locked: bool,
    /// True if its TCP chains depend on attributes of the proxy other than its extensions.
    depends_on_proxy: bool,
    services: Vec<ListenerService>,
    /// The number of services of a row with equal matches that the egress listener merges; of those after the row's
    /// first.
    merged: BTreeMap<(ServiceKey, MatchKind), usize>,
}

/// Adds the services of one egress listener to entries.
struct EntryBuilder<'a> {
    ctx: &'a BuildContext<'a>,
    client: &'a OutboundListenerProxyView,
    scope: &'a SidecarScope,
    wildcards: Vec<SmolStr>,
    entries: BTreeMap<BindKey, Entry>,
    /// Positions of the VirtualServices of the egress listener.
    positions: BTreeMap<&'a ObjectKey, usize>,
    /// Hosts of the VirtualServices of the scope.
    hosts: OnceCell<HostsByEnd<Vec<&'a ObjectKey>>>,
    /// Routes of VirtualServices. One may apply to all services of the mesh, so they are found once.
    routes: RefCell<BTreeMap<ObjectKey, KnownRoutes>>,
    /// Addresses of headless hosts. A host may have thousands of services, each of which has all of them.
    headless: BTreeMap<&'a ServiceKey, PortAddresses<'a>>,
}

/// TCP and TLS routes of a VirtualService, with their numbers.
struct KnownRoutes {
    shared: Hashed<StreamRoutes>,
    tcp: PortRoutes,
    tls: PortRoutes,
}

impl KnownRoutes {
    /// Returns the number of routes for TLS or for plain TCP on a port.
    fn number_on(&self, is_tls: bool, port: u32) -> u64 {
        let numbers = if is_tls { &self.tls } else { &self.tcp };
        numbers.on(port)
    }
}

/// A service port that needs a listener.
#[derive(Clone)]
struct Request<'a> {
    service: &'a Service,
    /// Its position among the services of its row.
    position: u32,
    port: ListenPort,
    binds: Vec<SmolStr>,
    bind_to_port: bool,
    egress: &'a EgressListener,
}

impl OutboundListenerPart {
    /// Lists the listeners, by address and port.
    pub fn list(&self, ctx: &BuildContext) -> Vec<ListenerKey> {
        let scope = ctx.tcp_scope(&self.scope);
        let texts = |texts: &[&'static str]| texts.iter().map(|text| SmolStr::new_static(text)).collect();
        let mut builder = EntryBuilder {
            ctx,
            client: &self.client,
            scope: &scope,
            wildcards: texts(wildcards(self.client.vips.ip_mode)),
            entries: BTreeMap::new(),
            positions: BTreeMap::new(),
            hosts: OnceCell::new(),
            routes: RefCell::default(),
            headless: BTreeMap::new(),
        };
        for egress in &scope.egress {
            let bind_to_port = self.client.interception == InterceptionMode::None
                || egress.capture_none
                || egress.bind.starts_with("unix://");
            let binds: Vec<SmolStr> = match &egress.bind {
                bind if !bind.is_empty() => vec![bind.clone()],
                _ if bind_to_port => texts(loopbacks(self.client.vips.ip_mode)),
                _ => Vec::new(),
            };
            builder.add_egress(egress, &binds, bind_to_port);
        }
        builder.refuse_surplus();
        builder.forget_surplus();
        let catch_all = catch_all_cluster(&scope.outbound_policy);
        // Every TCP service has a listener of its own, which is the same for most workloads.
        let without_http = Hashed::new(self.client.without_http());
        let without_routes = Hashed::new(without_http.without_routes());
        let entries = builder.entries.into_values();
        entries
            .map(|mut entry| {
                // Keys are kept, and a list of two members has room for four, of about 200 bytes each.
                entry.services.shrink_to_fit();
                let mut services = entry.services.iter();
                let client = if !services.all(|member| member.kind == ChainKind::Tcp) {
                    &self.client
                } else if entry.depends_on_proxy {
                    &without_http
                } else {
                    &without_routes
                };
                ListenerKey::Outbound(OutboundListenerKey {
                    client: client.clone(),
                    binds: entry.binds,
                    bind_to_port: entry.bind_to_port,
                    port: entry.port,
                    services: entry.services,
                    catch_all: catch_all.clone(),
                })
            })
            .collect()
    }
}

/// Returns the cluster of traffic to unknown destinations.
pub fn catch_all_cluster(policy: &OutboundPolicy) -> SmolStr {
    if policy.registry_only {
        SmolStr::new_static(BLACK_HOLE)
    } else {
        allowed_cluster(policy)
    }
}

impl Entry {
    /// Returns false for a service of whose row the listener has enough with equal matches.
    fn merges(&mut self, member: &ListenerService, kind: impl FnOnce() -> MatchKind) -> bool {
        let further = member.service.as_ref().filter(|service| service.member > 0);
        let Some(service) = further.filter(|_| member.ranges.is_empty()) else {
            return true;
        };
        let count = self.merged.entry((service.key.clone(), kind())).or_default();
        *count += 1;
        *count <= MOST_MERGED
    }
}

impl<'a> EntryBuilder<'a> {
    fn add_egress(&mut self, egress: &'a EgressListener, binds: &[SmolStr], bind_to_port: bool) {
        self.entries.values_mut().for_each(|entry| entry.merged.clear());
        let positions = egress.virtual_services.iter().enumerate();
        self.positions = positions.map(|(position, key)| (key, position)).collect();
        // An alias is served under the service that it refers to.
        let services = egress.services.iter().filter_map(|listed| self.service(listed));
        let services: Vec<(u32, &Service)> = services
            .filter(|(_, service)| service.resolution != Resolution::Alias)
            .collect();
        if let Some(port) = &egress.port {
            let port = ListenPort {
                number: port.number,
                name: port.name.clone(),
                protocol: Protocol::parse(&port.protocol),
            };
            if self.client.can_bind(self.ctx, bind_to_port, binds, &port) {
                for (position, service) in services {
                    self.add(Request {
                        service,
                        position,
                        port: port.clone(),
                        binds: binds.to_vec(),
                        bind_to_port,
                        egress,
                    });
                }
            }
            return;
        }
        self.entries.values_mut().for_each(|entry| entry.locked = true);
        for (position, service) in services {
            for port in &service.ports {
                if binds.is_empty() && self.has_http(port) {
                    continue;
                }
                let port = ListenPort {
                    number: port.number,
                    name: port.name.clone(),
                    protocol: port.protocol,
                };
                if self.client.can_bind(self.ctx, bind_to_port, binds, &port) {
                    self.add_service_port(Request {
                        service,
                        position,
                        port,
                        binds: binds.to_vec(),
                        bind_to_port,
                        egress,
                    });
                }
            }
        }
    }

    fn service(&self, listed: &ServiceRef) -> Option<(u32, &'a Service)> {
        Some((listed.member, self.ctx.member(listed)?))
    }

    /// Returns true for an HTTP port that already has a listener: another one changes nothing.
    fn has_http(&self, port: &ServicePort) -> bool {
        let is_http = port.protocol.is_http() && port.protocol != Protocol::HttpProxy;
        let made = is_http.then(|| self.entries.get(&(self.wildcards[0].clone(), port.number)));
        made.flatten().is_some_and(|made| {
            made.locked || resolve_conflict(Some(made.protocol), port.protocol, ChainKind::Http).is_none()
        })
    }

    /// Adds one port of a service. Headless TCP services get a listener for each address.
    fn add_service_port(&mut self, request: Request<'a>) {
        let service = request.service;
        let protocol = request.port.protocol;
        let by_address = request.binds.is_empty()
            && service.resolution == Resolution::Passthrough
            && (protocol.is_tcp() || protocol.is_unsupported())
            && self.client.vips.address(service) == UNSPECIFIED_IP;
        if !by_address {
            self.add(request);
            return;
        }
        let ctx = self.ctx;
        let all = || {
            let traits = ctx.mesh.endpoint_traits.get(ctx.cx, &service.key);
            let addresses = traits.map(|traits| traits.addresses.as_slice());
            PortAddresses::distinct(addresses.unwrap_or_default())
        };
        let addresses = self.headless.entry(&service.key).or_insert_with(all);
        // A plain ServiceEntry never has endpoints; other services may get some later.
        //
        // Parity (pilot/pkg/networking/core/listener.go): a `workloadSelector` with empty `labels` counts, too. In
        // Istio, one without `labels` does not.
        if !addresses.serves(request.port.number, &request.port.name) {
            if service.registry != Registry::Kubernetes && !service.selects_workloads {
                self.add(request);
            }
            return;
        }
        for address in addresses.take(request.port.number, &request.port.name) {
            let own = self.client.own_address.as_ref() == Some(&address.address);
            let binds: Vec<SmolStr> = std::iter::once(&address.address)
                .chain(&address.extra_addresses)
                .cloned()
                .collect();
            if own || binds.iter().any(|bind| cidr::parse_ip(bind).is_none()) {
                continue;
            }
            self.add(Request {
                binds,
                ..request.clone()
            });
        }
    }

    fn add(&mut self, mut request: Request<'_>) {
        let protocol = request.port.protocol;
        let Some(kind) = ChainKind::of(protocol) else {
            return;
        };
        let ranges = self.bind(&mut request, kind);
        let Some(first) = request.binds.first() else {
            return;
        };
        let key = (cidr::canonical(first), request.port.number);
        let current = self.entries.get(&key);
        if current.is_some_and(|entry| entry.locked) {
            return;
        }
        let Some((action, state)) = resolve_conflict(current.map(|entry| entry.protocol), protocol, kind) else {
            return;
        };
        // A listener at the wildcard address falls through to TCP, so it sniffs.
        let sniffs = kind == ChainKind::Http && protocol != Protocol::HttpProxy && *first == self.wildcards[0];
        let member = self.member(&request, kind, sniffs, ranges);
        // Routes may apply to some proxies only, and short names of aliases depend on the proxy's domain.
        let depends_on_proxy = !(member.virtual_services.is_empty() && request.service.aliases.is_empty());
        match action {
            ConflictAction::Replace => {
                let entry = Entry {
                    binds: request.binds,
                    bind_to_port: request.bind_to_port,
                    port: request.port.number,
                    protocol: if sniffs { Protocol::Unsupported } else { state },
                    locked: false,
                    depends_on_proxy,
                    services: vec![member],
                    merged: BTreeMap::new(),
                };
                self.entries.insert(key, entry);
            }
            ConflictAction::Merge => {
                let entry = self.entries.get_mut(&key).expect("because merging needs an entry");
                entry.protocol = state;
                entry.depends_on_proxy |= depends_on_proxy;
                let (client, service) = (self.client, request.service);
                let kind = || {
                    let address = client.vips.address(service);
                    (protocol, service.registry, address, resolves_on_demand(service))
                };
                if entry.merges(&member, kind) {
                    entry.services.push(member);
                }
            }
        }
    }

    /// Determines the addresses of a request without one. Returns the ranges to match if an address is a range.
    fn bind(&self, request: &mut Request, kind: ChainKind) -> Vec<SmolStr> {
        if !request.binds.is_empty() {
            return Vec::new();
        }
        if kind == ChainKind::Http {
            request.binds.clone_from(&self.wildcards);
            return Vec::new();
        }
        let addresses = self.client.vips.listen_addresses(request.service);
        if addresses.first().is_some_and(|first| first.contains('/')) {
            request.binds.clone_from(&self.wildcards);
            return addresses;
        }
        request.binds = addresses;
        Vec::new()
    }

    fn member(&self, request: &Request, kind: ChainKind, sniffs: bool, ranges: Vec<SmolStr>) -> ListenerService {
        let mut member = ListenerService {
            service: Some(ServiceRef {
                key: request.service.key.clone(),
                member: request.position,
            }),
            port: request.port.clone(),
            kind,
            sniffs,
            ranges,
            rule: None,
            aliases: None,
            virtual_services: Vec::new(),
            is_surplus: false,
        };
        if kind == ChainKind::Http {
            // An HTTP listener does not depend on the service, unless the service uses dynamic DNS.
            if !resolves_on_demand(request.service) {
                member.service = None;
                member.port.name = SmolStr::default();
            }
            return member;
        }
        member.rule = self.rule(&request.service.key);
        member.aliases = request.egress.alias_filters.get(&request.service.key).cloned();
        match self.virtual_services(request.service, &request.port) {
            Some(found) => member.virtual_services = found,
            None => member.is_surplus = true,
        }
        member
    }

    fn rule(&self, service: &ServiceKey) -> Option<RuleRef> {
        let client = &self.client;
        let (namespace, labels) = (&client.filters.namespace, Some(&*client.labels));
        let found = destination_rule::find(self.ctx.cx, self.ctx.mesh, namespace, labels, service);
        found.map(|(rule, _)| rule)
    }

    /// Refuses connections to services whose TCP and TLS routes exceed the limit of a VirtualService or of its
    /// namespace. Each listener has the routes again. Older services come first, so that new ones, which may be those
    /// of another tenant, take nothing from them.
    fn refuse_surplus(&mut self) {
        let ctx = self.ctx;
        let mut members: Vec<(usize, &mut ListenerService)> = Vec::new();
        for (listener, entry) in self.entries.values_mut().enumerate() {
            let all = entry.services.iter_mut();
            let routed = all.filter(|member| !member.virtual_services.is_empty());
            members.extend(routed.map(|member| (listener, member)));
        }
        members.sort_by_cached_key(|(_, member)| {
            let service = member.service.as_ref().and_then(|listed| ctx.member(listed));
            service.map(|service| service.creation)
        });
        let mut budget = RouteBudget::of(ctx.mesh);
        let all = self.routes.borrow();
        let mut counted: BTreeMap<(usize, &ObjectKey, bool), bool> = BTreeMap::new();
        for (listener, member) in members {
            let has_ranges = !member.ranges.is_empty();
            let is_tls = member.port.protocol.is_tls();
            let port = member.port.number;
            for routes in &member.virtual_services {
                let key = &routes.virtual_service;
                // Chains with equal matches occur once in a listener.
                let chains = (listener, key, is_tls);
                let known = counted.get(&chains).filter(|_| !has_ranges);
                let fits = known.copied().unwrap_or_else(|| {
                    let number = all.get(key).map_or(0, |routes| routes.number_on(is_tls, port));
                    budget.take(key, number)
                });
                counted.insert(chains, fits);
                member.is_surplus |= !fits;
            }
        }
    }

    /// Removes the routes of services that are refused: the keys of listeners stay in memory.
    fn forget_surplus(&mut self) {
        let members = self.entries.values_mut().flat_map(|entry| &mut entry.services);
        for member in members.filter(|member| member.is_surplus) {
            member.virtual_services = Vec::new();
        }
    }

    /// Returns the routes of a VirtualService for TLS or for plain TCP; `None` if none is for the port.
    fn routes_on(&self, key: &ObjectKey, is_tls: bool, port: u32) -> Option<Hashed<StreamRoutes>> {
        let mut all = self.routes.borrow_mut();
        let routes = all.entry(key.clone()).or_insert_with(|| self.find_routes(key));
        (routes.number_on(is_tls, port) > 0).then(|| routes.shared.clone())
    }

    fn find_routes(&self, key: &ObjectKey) -> KnownRoutes {
        let row = self.ctx.mesh.virtual_services.get(self.ctx.cx, key);
        let routes = StreamRoutes {
            virtual_service: key.clone(),
            destinations: row.map(|row| self.destinations(row)).unwrap_or_default(),
        };
        KnownRoutes {
            shared: self.ctx.memo.get::<Shared<StreamRoutesPool>>().share(routes),
            tcp: row.map(|row| row.tcp_routes()).unwrap_or_default(),
            tls: row.map(|row| row.tls_routes()).unwrap_or_default(),
        }
    }

    /// Returns the destinations of a VirtualService with their DestinationRules.
    fn destinations(&self, row: &VirtualService) -> Vec<(ScopedService, Option<RuleRef>)> {
        // Many destinations may have the same host.
        let hosts: BTreeSet<&Hostname> = row.destinations.iter().map(|declared| &declared.host).collect();
        let services = hosts.into_iter().filter_map(|host| self.scope.by_host.get(host));
        services
            .map(|service| {
                let destination = self.ctx.as_destination(self.scope.scoped(service));
                (destination, self.rule(service))
            })
            .collect()
    }

    /// Returns the VirtualServices of the egress listener with TCP or TLS routes for a port of a service, in order;
    /// `None` if those of the service are too many.
    fn virtual_services(&self, service: &Service, port: &ListenPort) -> Option<Vec<Hashed<StreamRoutes>>> {
        if self.positions.is_empty() {
            return Some(Vec::new());
        }
        let name = &service.key.hostname;
        let found = if host::is_wildcard(name) {
            self.hosts.get_or_init(|| self.tcp_hosts()).overlapping(name)
        } else {
            virtual_service::tcp_for_host(self.ctx.cx, self.ctx.mesh, name)
        };
        let positions = found.into_iter();
        let positions = positions.filter_map(|key| Some((*self.positions.get(key)?, key)));
        let in_order: BTreeMap<usize, &ObjectKey> = positions.take(MAX_VIRTUAL_SERVICES + 1).collect();
        let is_tls = port.protocol.is_tls();
        let on_port = |key: &ObjectKey| self.routes_on(key, is_tls, port.number);
        (in_order.len() <= MAX_VIRTUAL_SERVICES).then(|| in_order.into_values().filter_map(on_port).collect())
    }

    fn tcp_hosts(&self) -> HostsByEnd<Vec<&'a ObjectKey>> {
        let mut hosts = HostsByEnd::default();
        let scope: &'a SidecarScope = self.scope;
        for key in scope.virtual_services.iter() {
            let row = self.ctx.mesh.virtual_services.get(self.ctx.cx, key);
            let routed = row.filter(|row| row.routes_tcp());
            for name in routed.into_iter().flat_map(|row| &row.hosts) {
                hosts.add(name, key);
            }
        }
        hosts
    }
}

/// Returns true for wildcard hosts that are resolved per request.
pub fn resolves_on_demand(service: &Service) -> bool {
    service.resolution == Resolution::DynamicDns && host::is_wildcard(&service.key.hostname)
}

/// Result of adding a port to a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConflictAction {
    /// The port replaces the listener, or creates it.
    Replace,
    /// Its chains are merged with those of the listener.
    Merge,
}

/// Resolves a protocol conflict: the action and the listener's resulting protocol, or `None` if the port is ignored.
fn resolve_conflict(
    current: Option<Protocol>,
    incoming: Protocol,
    kind: ChainKind,
) -> Option<(ConflictAction, Protocol)> {
    let Some(current) = current.filter(|_| incoming != Protocol::HttpProxy) else {
        return Some((ConflictAction::Replace, incoming));
    };
    let (action, state) = match kind {
        ChainKind::Http if current.is_tcp() => (ConflictAction::Merge, Protocol::Unsupported),
        ChainKind::Http => return None,
        ChainKind::Tcp if current.is_http() => (ConflictAction::Merge, Protocol::Unsupported),
        ChainKind::Tcp => (ConflictAction::Merge, current),
        ChainKind::Auto if current.is_http() => (ConflictAction::Replace, incoming),
        ChainKind::Auto if current.is_tcp() => (ConflictAction::Merge, Protocol::Unsupported),
        ChainKind::Auto => return None,
    };
    // Sniffing breaks protocols in which the server speaks first.
    let server_first = |protocol| matches!(protocol, Protocol::Mongo | Protocol::Mysql);
    if incoming != current && (server_first(incoming) || server_first(current)) {
        return None;
    }
    Some((action, state))
}

/// Returns the name of a listener by address and port.
pub fn listener_name(bind: &str, port: u32) -> SmolStr {
    [bind, "_", itoa::Buffer::new().format(port)].into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r21_services_of_a_row_are_merged_a_few_times() {
        let mut entry = Entry {
            binds: Vec::new(),
            bind_to_port: false,
            port: 443,
            protocol: Protocol::Tls,
            locked: false,
            depends_on_proxy: false,
            services: Vec::new(),
            merged: BTreeMap::new(),
        };
        let member = |host: &str, position: u32, protocol: Protocol, ranges: &[SmolStr]| ListenerService {
            service: Some(ServiceRef {
                key: ServiceKey {
                    hostname: Hostname::new(host),
                    namespace: "a".into(),
                },
                member: position,
            }),
            port: ListenPort {
                number: 443,
                name: "tls".into(),
                protocol,
            },
            kind: ChainKind::Tcp,
            sniffs: false,
            ranges: ranges.to_vec(),
            rule: None,
            aliases: None,
            virtual_services: Vec::new(),
            is_surplus: false,
        };
        let mut merged = |host: &str, protocol: Protocol, registry: Registry, ranges: &[SmolStr]| -> usize {
            let all = (0..100).map(|position| member(host, position, protocol, ranges));
            let kind = || (protocol, registry, SmolStr::new("10.0.0.1"), false);
            all.filter(|member| entry.merges(member, kind)).count()
        };
        let (external, kube) = (Registry::External, Registry::Kubernetes);
        assert_eq!(merged("one.test", Protocol::Tls, external, &[]), 3);
        assert_eq!(merged("one.test", Protocol::Tls, external, &[]), 1);
        assert_eq!(merged("one.test", Protocol::Tls, kube, &[]), 3);
        assert_eq!(merged("one.test", Protocol::Tcp, external, &[]), 3);
        assert_eq!(merged("other.test", Protocol::Tls, external, &[]), 3);
        assert_eq!(merged("one.test", Protocol::Tls, external, &["10.0.0.0/8".into()]), 100);
    }
}
