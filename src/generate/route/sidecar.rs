//! Outbound routes of sidecars: the list of route configurations, and the building of one.

mod common;
mod egress_view;
mod listing;
pub(crate) mod single;
mod visible_host;

use std::{
    borrow::Cow,
    cell::LazyCell,
    collections::{BTreeMap, BTreeSet},
};

use bytes::Bytes;
use prost::Message;

use super::{
    RouteConfigProxyView,
    assembly::{self, Host},
    configuration,
    domains::{self, lower_case},
    fragment::{self, FragmentKey},
    hash, http,
    routes::Routes,
    surplus,
    virtual_host::{self, CatchAll, ServiceNames, VirtualHosts},
};
pub use common::CommonRouteList;
pub(crate) use common::CommonRoutesMemo;

use crate::{
    base::{Hashed, Hostname, Shared, SmolStr, pool::SharedPool},
    generate::{
        BuildContext, EncodedResource,
        block::{Block, BlockPool},
        name,
        patch::{
            self, PatchContext, PatchRef,
            route::{RoutePatchList, RoutePatches},
        },
        proxy::{InterceptionMode, MetadataKey},
        resource::{Built, Note, RouteNameKind, RoutePlaceholders},
        selected::Selected,
    },
    model::{
        ScopeKey, Service, ServiceKey,
        destination_rule::{self, RuleRef},
        output_limit,
        service::{Protocol, ServicePort, ServiceRef},
        sidecar_scope::{AliasFilters, OutboundPolicy},
    },
};

/// Port whose hosts need no port in the `Host` header.
const HTTP_PORT: u32 = 80;

/// Inputs of the selection of a sidecar's routes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SidecarPart {
    /// Scope.
    scope: ScopeKey,
    /// Attributes of the proxy.
    client: Hashed<RouteConfigProxyView>,
    /// True if its own metadata enables an HTTP proxy listener (`HTTP_PROXY_PORT`).
    http_proxy: bool,
    /// True if its listeners bind their own sockets because connections are not intercepted.
    own_sockets: bool,
    /// EnvoyFilter patches of routes that apply, in order.
    patches: Shared<[PatchRef]>,
}

impl SidecarPart {
    pub(super) fn of(selected: &Selected, client: Hashed<RouteConfigProxyView>) -> Self {
        let port = selected.proxy.metadata_value(MetadataKey::HttpProxyPort);
        Self {
            scope: selected.scope.clone(),
            client,
            own_sockets: selected.proxy.interception_mode == InterceptionMode::None,
            http_proxy: !port.is_empty() && port != "0",
            patches: selected.patches.routes.clone(),
        }
    }
}

/// One route configuration of a sidecar.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SidecarRoutes {
    /// Resource name.
    name: SmolStr,
    /// Port of the listener; 0 means every port of the services (HTTP proxies and Unix sockets).
    port: u32,
    /// Attributes of the proxy.
    client: Hashed<RouteConfigProxyView>,
    /// Last virtual host; `None` for routes of a single sniffed host, which gets all domains.
    catch_all: Option<CatchAll>,
    /// VirtualServices in order.
    bindings: Hashed<Vec<Hashed<Binding>>>,
    /// HTTP services of the port by host, except those that a VirtualService takes unconditionally. They get a default
    /// route if no VirtualService takes them.
    services: Hashed<Vec<DefaultHost>>,
    /// Services that the egress listener does not show under all their names.
    alias_filters: AliasFilters,
    /// Set for a single host: a proxyless client subscribes to each host separately.
    single: Option<single::Single>,
    /// EnvoyFilter patches that apply.
    patches: RoutePatches,
}

/// The bindings of all sidecars. Most namespaces have the same ones: sharing them saves 17 MB with 1,000
/// VirtualServices and 50 namespaces (bench `scale sotw`).
pub(crate) type BindingPool = SharedPool<Binding>;

/// A VirtualService and its hosts in one route configuration.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Binding {
    /// Its routes; `None` to refuse requests, because they do not apply on this port of the services.
    routes: Option<FragmentKey>,
    /// The number of ports of a service on which they apply, if the configuration has all ports; otherwise 0.
    most_ports: u32,
    /// Hosts that are services.
    services: Vec<ServiceRef>,
    /// Other hosts, in lower case.
    hosts: Vec<Hostname>,
}

/// A service port with a default route.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct DefaultHost {
    service: ServiceRef,
    port: u32,
    /// DestinationRule, if it has a consistent hash. Few have one, so that keys of many hosts are small.
    rule: Option<Shared<RuleRef>>,
}

/// Virtual hosts of one port that share their routes.
struct HostGroup<'a> {
    port: u32,
    services: Vec<Cow<'a, Shared<Service>>>,
    hosts: &'a [Hostname],
    routes: [Block; 2],
    /// True if the routes of a VirtualService do not apply on the port, so that these refuse requests.
    is_refused: bool,
}

/// Returns the route configurations of names without services, patched like all others.
pub(super) fn placeholders(
    ctx: &BuildContext,
    selected: &Selected,
    client: &RouteConfigProxyView,
) -> RoutePlaceholders {
    let policy = OutboundPolicy::of(ctx.cx, ctx.mesh, &selected.scope);
    let catch_all = virtual_host::catch_all(&listing::catch_all(&policy), client);
    let context = PatchContext::SidecarOutbound;
    let patches = RoutePatchList::of(ctx, &selected.patches.routes, context);
    let placeholder = |name: &str, kind: RouteNameKind| -> Bytes {
        let hosts = match kind {
            RouteNameKind::Port => vec![catch_all.clone()],
            RouteNameKind::Host => Vec::new(),
        };
        let concerning = patches.at_once(name, BTreeSet::new);
        let routes = configuration(name, hosts);
        let mut routes = patch::route::apply(ctx, &concerning, context, routes, &mut Vec::new());
        routes.name.clear();
        routes.encode_to_vec().into()
    };
    let named = patches.names().map(SmolStr::new);
    let names = named.chain(
        patches
            .ports()
            .map(|port| SmolStr::new(itoa::Buffer::new().format(port))),
    );
    let by_name = names.filter_map(|name| {
        let patched = placeholder(&name, RouteNameKind::of(&name)?);
        Some((name, patched))
    });
    RoutePlaceholders {
        of_port: placeholder("", RouteNameKind::Port),
        of_host: placeholder("", RouteNameKind::Host),
        by_name: by_name.collect(),
    }
}

/// Returns the creation times of services and the ports that they are listed by.
fn ports_of_services(by_port: &BTreeMap<u32, Vec<Cow<Shared<Service>>>>) -> Vec<(i64, Vec<u32>)> {
    let mut of_services: BTreeMap<&ServiceKey, (i64, Vec<u32>)> = BTreeMap::new();
    for (port, services) in by_port {
        for service in services {
            let of_service = of_services.entry(&service.key);
            let (_, ports) = of_service.or_insert_with(|| (service.creation, Vec::new()));
            ports.push(*port);
        }
    }
    of_services.into_values().collect()
}

/// Returns true for protocols with routes: HTTP, and protocols that sniffing may find to be HTTP.
fn is_routed(protocol: Protocol) -> bool {
    protocol.is_http() || protocol.is_unsupported()
}

impl SidecarRoutes {
    /// Builds the route configuration.
    pub(super) fn build(&self, ctx: &BuildContext) -> Built {
        let Some(built) = self.build_from_common(ctx) else {
            return self.build_alone(ctx);
        };
        debug_assert!(
            {
                let alone = self.build_alone(ctx);
                let content = |built: &Built| built.resource.as_ref().map(|resource| resource.any());
                content(&built) == content(&alone) && built.notes == alone.notes
            },
            "common routes of {} differ from its own",
            self.client.dns_domain
        );
        built
    }

    fn build_alone(&self, ctx: &BuildContext) -> Built {
        let (mut hosts, collection) = self.hosts(ctx);
        if let Some(single) = &self.single {
            hosts.retain(|host| single.answers(host.domains()));
            let virtual_hosts = hosts.into_iter().map(Host::message).collect();
            let configuration = super::plain_configuration(&self.name, virtual_hosts);
            return Built::new(configuration).with_notes(collection.notes);
        }
        match &self.catch_all {
            Some(kind) => hosts.push(virtual_host::last(kind, &self.client)),
            None => self.keep_sniffed(&mut hosts),
        }
        let mut notes = collection.notes;
        if self.patches.is_empty() {
            return Built::new(assembly::assembled(
                ctx.memo.get::<Shared<BlockPool>>(),
                &self.name,
                &hosts,
            ))
            .with_notes(notes);
        }
        let routes = configuration(&self.name, hosts.into_iter().map(Host::message).collect());
        let routes = patch::route::apply(ctx, &self.patches, PatchContext::SidecarOutbound, routes, &mut notes);
        Built::new(EncodedResource::new(routes.name.as_str(), &routes)).with_notes(notes)
    }

    /// Returns the virtual hosts by name, without the last one, and the names that they took.
    fn hosts<'a>(&'a self, ctx: &'a BuildContext<'a>) -> (Vec<Host>, VirtualHosts<'a>) {
        let groups = self.groups(ctx);
        let mut known = ServiceNames::default();
        known.reserve(groups.len());
        for group in &groups {
            for service in &group.services {
                known.add(&lower_case(&service.key.hostname), group.port);
            }
        }
        if let Some(single) = &self.single {
            single.add_known(&mut known);
        }
        let with_ports = self.port == 0 || self.client.routes.proxyless;
        let mut collection = VirtualHosts::new(ctx, &self.client, known, with_ports);
        let mut by_port: BTreeMap<u32, Vec<Host>> = BTreeMap::new();
        for group in &groups {
            let hosts = by_port.entry(group.port).or_default();
            let with_routes = |mut host: Host| {
                let routes = group.routes.iter().filter(|routes| !routes.bytes.is_empty());
                host.routes.extend(routes.cloned());
                host
            };
            for host in group.hosts {
                hosts.extend(collection.of_host(host.text(), group.port).map(with_routes));
            }
            for service in &group.services {
                let host = collection.of_service(service, group.port).map(with_routes);
                // Another VirtualService may have the names.
                if group.is_refused && host.is_some() {
                    collection.notes.push(Note {
                        code: output_limit::CODE,
                        detail: format!("{}: routes of {}:{}", self.name, service.key.hostname, group.port).into(),
                    });
                }
                hosts.extend(host);
            }
        }
        let mut hosts = self.merged(by_port);
        hosts.sort_by(|a, b| a.name().cmp(b.name()));
        (hosts, collection)
    }

    /// Returns the fragments that it consists of.
    pub(super) fn fragments(&self) -> impl Iterator<Item = &FragmentKey> {
        self.bindings.iter().filter_map(|binding| binding.routes.as_ref())
    }

    /// Joins the ports. If one route configuration has all ports, names without a port mean port 80.
    fn merged(&self, by_port: BTreeMap<u32, Vec<Host>>) -> Vec<Host> {
        let mut result = Vec::new();
        for (port, hosts) in by_port {
            if self.port != 0 || port == HTTP_PORT {
                result.extend(hosts);
                continue;
            }
            result.extend(hosts.into_iter().filter_map(|host| {
                let with_port = host.domains().filter(|domain| domain.contains(':'));
                let with_port: Vec<String> = with_port.map(str::to_owned).collect();
                (!with_port.is_empty()).then(|| host.with_domains(with_port))
            }));
        }
        result
    }

    /// Keeps only the sniffed host. The listener serves just this host, so it gets all requests.
    fn keep_sniffed(&self, hosts: &mut Vec<Host>) {
        let name = self.name.rsplit_once(':').map_or(self.name.as_str(), |(host, _)| host);
        let is_meant = |domain: &str| domain == self.name || domain == name;
        hosts.retain(|host| host.domains().any(is_meant));
        if hosts.len() == 1
            && let Some(only) = hosts.pop()
        {
            hosts.push(only.with_domains(vec!["*".to_owned()]));
        }
    }

    /// Returns the virtual hosts of VirtualServices in their order, then of the services that none of them took.
    fn groups<'a>(&'a self, ctx: &BuildContext<'a>) -> Vec<HostGroup<'a>> {
        let mut groups = Vec::with_capacity(self.bindings.len() + self.services.len());
        let mut taken: BTreeSet<&ServiceKey> = BTreeSet::new();
        let refusal = Shared::new(surplus::refusal());
        for binding in self.bindings.iter() {
            let routes = match &binding.routes {
                Some(key) => fragment::routes(ctx, key).clone(),
                None => refusal.clone(),
            };
            if routes.is_empty() {
                continue;
            }
            let services = binding.services.iter().filter_map(|listed| ctx.member(listed));
            let mut by_port: BTreeMap<u32, Vec<Cow<Shared<Service>>>> = BTreeMap::new();
            let mut refused: BTreeMap<u32, Vec<Cow<Shared<Service>>>> = BTreeMap::new();
            for service in services {
                let ports = self.routed_ports(service);
                let last = match self.port {
                    0 => surplus::last_port(ports.iter().map(|port| port.number), binding.most_ports),
                    _ => u32::MAX,
                };
                for port in ports {
                    let served = if port.number <= last {
                        &mut by_port
                    } else {
                        &mut refused
                    };
                    served.entry(port.number).or_default().push(self.shown(service));
                    // Only services with default routes are looked up.
                    if !self.services.is_empty() {
                        taken.insert(&service.key);
                    }
                }
            }
            if by_port.is_empty() && self.port == HTTP_PORT {
                by_port.insert(HTTP_PORT, Vec::new());
            }
            let most = surplus::most_ports_of_hosts(ctx.mesh, binding.hosts.len());
            let is_limited = by_port.len() > most as usize;
            let of_hosts = is_limited.then(|| surplus::first_ports(ports_of_services(&by_port), most));
            let has_hosts =
                |port: u32| port == HTTP_PORT || of_hosts.as_ref().is_none_or(|ports| ports.contains(&port));
            groups.extend(by_port.into_iter().map(|(port, services)| HostGroup {
                port,
                services,
                hosts: if has_hosts(port) { &binding.hosts } else { &[] },
                routes: routes.parts(),
                is_refused: binding.routes.is_none(),
            }));
            groups.extend(refused.into_iter().map(|(port, services)| HostGroup {
                port,
                services,
                hosts: &[],
                routes: refusal.parts(),
                is_refused: true,
            }));
        }
        let routes = LazyCell::new(|| http::DefaultRoutes::shared(ctx));
        let rest = self.services.iter().filter(|host| !taken.contains(&host.service.key));
        for host in rest {
            let service = ctx.member(&host.service);
            groups.extend(
                service
                    .filter(|service| self.is_routed(service, host.port))
                    .map(|service| HostGroup {
                        port: host.port,
                        services: vec![self.shown(service)],
                        hosts: &[],
                        routes: host.routes(ctx, &routes).parts(),
                        is_refused: false,
                    }),
            );
        }
        groups
    }

    /// Returns a service with the aliases that the egress listener shows.
    fn shown<'s>(&self, service: &'s Shared<Service>) -> Cow<'s, Shared<Service>> {
        match self.alias_filters.get(&service.key) {
            None => Cow::Borrowed(service),
            Some(aliases) => Cow::Owned(Shared::new(Service {
                aliases: aliases.clone(),
                ..Service::clone(service)
            })),
        }
    }

    /// Returns true if this route configuration includes the service port with this number.
    fn is_routed(&self, service: &Service, number: u32) -> bool {
        let is_routed = |port: &ServicePort| port.number == number && is_routed(port.protocol);
        match self.port {
            0 => service.ports.iter().any(is_routed),
            own => service.port(own).is_some_and(is_routed),
        }
    }

    /// Returns the ports of a service that this route configuration includes.
    fn routed_ports<'s>(&self, service: &'s Service) -> Vec<&'s ServicePort> {
        let ports: Vec<_> = match self.port {
            0 => service.ports.iter().collect(),
            number => service.port(number).into_iter().collect(),
        };
        ports.into_iter().filter(|port| is_routed(port.protocol)).collect()
    }
}

impl DefaultHost {
    fn routes(&self, ctx: &BuildContext, routes: &http::DefaultRoutes) -> Routes {
        let host = lower_case(&self.service.key.hostname);
        let rule = self.rule.as_deref();
        let rule = rule.and_then(|found| destination_rule::rule(ctx.cx, ctx.mesh, found));
        let hashed_by = rule.and_then(|rule| hash::of_service_port(&rule, self.port).and_then(hash::policy));
        let cluster = name::outbound_cluster(self.port, "", &host);
        let operation = [&host, ":", itoa::Buffer::new().format(self.port), "/*"].concat();
        routes.route(&cluster, &operation, hashed_by)
    }
}
