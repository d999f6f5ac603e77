//! Outbound routes of sidecars: which route configurations there are, and building one.

mod listing;
pub(crate) mod single;

use std::collections::{BTreeMap, BTreeSet};

use prost::{Message, Name, encoding};

use crate::{
    base::{Hashed, Hostname, Shared, SmolStr},
    generate::{
        EncodedResource, View,
        group::Built,
        patch::{self, PatchContext, PatchRef, route::RoutePatches},
        select::Selected,
    },
    model::{
        ScopeKey, Service, ServiceKey,
        service::{Protocol, ServicePort},
    },
    proto::envoy::config::route::v3::{RouteConfiguration, VirtualHost},
};

use super::{
    Client, configuration,
    domains::{self, PortForms},
    fragment::{FragmentKey, Routes},
    virtual_host::{self, CatchAll, VirtualHosts},
};

/// The port whose names need no port in `Host`.
const HTTP_PORT: u32 = 80;

/// What the routes of a sidecar are selected by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SidecarPart {
    /// What it can see.
    scope: ScopeKey,
    /// The rest that is read of it.
    client: Hashed<Client>,
    /// It has an HTTP proxy listener by its own metadata (`HTTP_PROXY_PORT`).
    http_proxy: bool,
    /// EnvoyFilter patches of routes that apply, in order.
    patches: Shared<[PatchRef]>,
}

impl SidecarPart {
    pub(super) fn of(selected: &Selected, client: Hashed<Client>) -> Self {
        let port = selected.proxy.text("HTTP_PROXY_PORT");
        Self {
            scope: selected.scope.clone(),
            client,
            http_proxy: !port.is_empty() && port != "0",
            patches: selected.patches.routes.clone(),
        }
    }
}

/// One route configuration of a sidecar.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SidecarRoutes {
    /// The resource name.
    name: SmolStr,
    /// The port of the listener; 0: every port of the services (HTTP proxies and Unix sockets).
    port: u32,
    /// The client.
    client: Hashed<Client>,
    /// What the last virtual host does; `None` for routes of a single sniffed host, which gets all domains.
    catch_all: Option<CatchAll>,
    /// VirtualServices in order.
    bindings: Vec<Binding>,
    /// The HTTP services of the port, by host, that some VirtualService does not take for sure; they get a default route
    /// if none does.
    services: Vec<DefaultHost>,
    /// For one host only: a client without a proxy asks for each host by itself.
    single: Option<single::Single>,
    /// EnvoyFilter patches that concern it.
    patches: RoutePatches,
}

/// A VirtualService and what it is for in one route configuration.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Binding {
    routes: FragmentKey,
    /// Its hosts that are services.
    services: Vec<ServiceKey>,
    /// Its other hosts, in lower case.
    hosts: Vec<Hostname>,
}

/// A port of a service with a route of its own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct DefaultHost {
    service: ServiceKey,
    port: u32,
    routes: FragmentKey,
}

/// Virtual hosts of one port that share their routes.
struct Group {
    port: u32,
    services: Vec<Shared<Service>>,
    hosts: Vec<Hostname>,
    routes: Shared<Routes>,
}

/// A virtual host whose routes stand beside it.
struct Host {
    head: VirtualHost,
    routes: Shared<Routes>,
}

/// Protocols whose routes are sent: HTTP, and what may turn out to be.
fn is_routed(protocol: Protocol) -> bool {
    protocol.is_http() || protocol.is_unsupported()
}

impl SidecarRoutes {
    /// Builds the route configuration.
    pub(super) fn build(&self, view: &View) -> Built {
        let groups = self.groups(view);
        let mut known: BTreeSet<String> = groups
            .iter()
            .flat_map(|group| group.services.iter().map(|service| (group.port, service)))
            .flat_map(|(port, service)| {
                let host = service.key.hostname.to_ascii_lowercase();
                [domains::host_port(&host, port), host]
            })
            .collect();
        let single = self.single.as_ref();
        known.extend(single.iter().flat_map(|single| single.known()));
        let mut collection = VirtualHosts::new(view, &self.client, known);
        let mut by_port: BTreeMap<u32, Vec<Host>> = BTreeMap::new();
        for group in &groups {
            let forms = if self.port == 0 || self.client.routes.proxyless {
                PortForms::With(group.port)
            } else {
                PortForms::Ignored
            };
            let hosts = by_port.entry(group.port).or_default();
            let with_routes = |head: VirtualHost| Host {
                head,
                routes: group.routes.clone(),
            };
            for host in &group.hosts {
                hosts.extend(collection.of_host(host, group.port).map(with_routes));
            }
            for service in &group.services {
                hosts.extend(collection.of_service(service, group.port, forms).map(with_routes));
            }
        }
        let mut hosts = self.merged(by_port);
        hosts.sort_by(|a, b| a.head.name.cmp(&b.head.name));
        if let Some(single) = single {
            hosts.retain(|host| single.answers(&host.head.domains));
            let virtual_hosts = hosts.into_iter().map(Host::message).collect();
            let configuration = super::plain_configuration(&self.name, virtual_hosts);
            return Built::new(configuration).with_notes(collection.notes);
        }
        match &self.catch_all {
            Some(kind) => hosts.push(Host::whole(virtual_host::catch_all(kind, &self.client))),
            None => self.keep_sniffed(&mut hosts),
        }
        let mut notes = collection.notes;
        if self.patches.is_empty() {
            return Built::new(self.assembled(hosts)).with_notes(notes);
        }
        let routes = configuration(&self.name, hosts.into_iter().map(Host::message).collect());
        let routes = patch::route::apply(view, &self.patches, PatchContext::SidecarOutbound, routes, &mut notes);
        Built::new(EncodedResource::new(routes.name.as_str(), &routes)).with_notes(notes)
    }

    /// The route configuration laid together from bytes: the same as if it were encoded as a whole.
    fn assembled(&self, hosts: Vec<Host>) -> EncodedResource {
        const VIRTUAL_HOSTS: u32 = 2;
        let rest = RouteConfiguration {
            name: String::new(),
            ..configuration("", Vec::new())
        };
        let named = RouteConfiguration {
            name: self.name.to_string(),
            ..Default::default()
        };
        let routes: usize = hosts.iter().map(|host| host.routes.field().len() + 400).sum();
        let mut value = Vec::with_capacity(routes);
        let grows = "because a Vec grows";
        named.encode(&mut value).expect(grows);
        for host in hosts {
            let (before, routes, after) = host.split();
            let routes = routes.field();
            encoding::encode_key(VIRTUAL_HOSTS, encoding::WireType::LengthDelimited, &mut value);
            let len = before.encoded_len() + routes.len() + after.encoded_len();
            encoding::encode_varint(len as u64, &mut value);
            before.encode(&mut value).expect(grows);
            value.extend_from_slice(routes);
            after.encode(&mut value).expect(grows);
        }
        rest.encode(&mut value).expect(grows);
        EncodedResource::from_bytes(self.name.clone(), &RouteConfiguration::type_url(), &value)
    }

    /// The fragments that it is made of.
    pub(super) fn fragments(&self) -> impl Iterator<Item = &FragmentKey> {
        let bindings = self.bindings.iter().map(|binding| &binding.routes);
        bindings.chain(self.services.iter().map(|service| &service.routes))
    }

    /// Joins the ports. Where all ports stand in one route configuration, names without port mean port 80.
    fn merged(&self, by_port: BTreeMap<u32, Vec<Host>>) -> Vec<Host> {
        let mut result = Vec::new();
        for (port, mut hosts) in by_port {
            if self.port == 0 && port != HTTP_PORT {
                for host in &mut hosts {
                    host.head.domains.retain(|domain| domain.contains(':'));
                }
                hosts.retain(|host| !host.head.domains.is_empty());
            }
            result.extend(hosts);
        }
        result
    }

    /// The listener has one host only, so whatever comes in is for it.
    fn keep_sniffed(&self, hosts: &mut Vec<Host>) {
        let name = self.name.rsplit_once(':').map_or(self.name.as_str(), |(host, _)| host);
        let is_meant = |domain: &String| *domain == self.name || domain == name;
        hosts.retain(|host| host.head.domains.iter().any(is_meant));
        if let [only] = hosts.as_mut_slice() {
            only.head.domains = vec!["*".to_owned()];
        }
    }

    /// VirtualServices first, in their order; then the services that none of them took.
    fn groups(&self, view: &View) -> Vec<Group> {
        let mut groups = Vec::new();
        let mut taken = BTreeSet::new();
        for binding in &self.bindings {
            let routes = view.routes(&binding.routes);
            if routes.is_empty() {
                continue;
            }
            let services = binding.services.iter().filter_map(|key| view.service(key));
            let mut by_port: BTreeMap<u32, Vec<Shared<Service>>> = BTreeMap::new();
            for service in services {
                for port in self.routed_ports(service) {
                    by_port.entry(port.number).or_default().push(service.clone());
                    taken.insert(service.key.clone());
                }
            }
            if by_port.is_empty() && self.port == HTTP_PORT {
                by_port.insert(HTTP_PORT, Vec::new());
            }
            groups.extend(by_port.into_iter().map(|(port, services)| Group {
                port,
                services,
                hosts: binding.hosts.clone(),
                routes: routes.clone(),
            }));
        }
        let rest = self.services.iter().filter(|host| !taken.contains(&host.service));
        for host in rest {
            let service = view.service(&host.service);
            let service =
                service.filter(|service| self.routed_ports(service).iter().any(|port| port.number == host.port));
            groups.extend(service.map(|service| Group {
                port: host.port,
                services: vec![service.clone()],
                hosts: Vec::new(),
                routes: view.routes(&host.routes).clone(),
            }));
        }
        groups
    }

    /// The ports of a service that this route configuration is about.
    fn routed_ports<'s>(&self, service: &'s Service) -> Vec<&'s ServicePort> {
        let ports: Vec<_> = match self.port {
            0 => service.ports.iter().collect(),
            number => service.port(number).into_iter().collect(),
        };
        ports.into_iter().filter(|port| is_routed(port.protocol)).collect()
    }
}

impl Host {
    /// A virtual host that has its routes in it.
    fn whole(head: VirtualHost) -> Self {
        Self {
            head,
            routes: Shared::default(),
        }
    }

    fn message(self) -> VirtualHost {
        let mut message = self.head;
        message.routes.extend(self.routes.messages());
        message
    }

    /// What stands before the routes, the routes, and what stands behind them.
    fn split(self) -> (VirtualHost, Shared<Routes>, VirtualHost) {
        let Self { head, routes } = self;
        let mut after = head;
        let before = VirtualHost {
            name: std::mem::take(&mut after.name),
            domains: std::mem::take(&mut after.domains),
            routes: std::mem::take(&mut after.routes),
            ..Default::default()
        };
        (before, routes, after)
    }
}
