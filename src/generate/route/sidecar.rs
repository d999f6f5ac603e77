//! Outbound routes of sidecars: which route configurations there are, and building one.

mod listing;
pub(crate) mod single;

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    base::{Hashed, Hostname, ObjectKey, Shared, SmolStr},
    generate::{
        EncodedResource, View,
        group::Built,
        name,
        patch::{self, PatchContext, PatchRef, route::RoutePatches},
        select::Selected,
    },
    model::{
        ScopeKey, Service, ServiceKey, destination_rule,
        service::{Protocol, ServicePort},
    },
    proto::envoy::config::route::v3::{Route, VirtualHost, route::Action},
};

use super::{
    Client, configuration,
    destination::{self, PortInference, Target},
    domains::{self, PortForms},
    hash,
    http::{self, MESH_GATEWAY, Translation},
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
    /// The HTTP services of the port, by host; those that no VirtualService takes get a default route.
    services: Vec<ServiceKey>,
    /// For one host only: a client without a proxy asks for each host by itself.
    single: Option<single::Single>,
    /// EnvoyFilter patches that concern it.
    patches: RoutePatches,
}

/// A VirtualService and what it is for in one route configuration.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Binding {
    virtual_service: ObjectKey,
    /// Its hosts that are services.
    services: Vec<ServiceKey>,
    /// Its other hosts, in lower case.
    hosts: Vec<Hostname>,
    /// Where it leads.
    targets: Vec<Target>,
}

/// Virtual hosts of one port that share their routes.
struct Group {
    port: u32,
    services: Vec<Shared<Service>>,
    hosts: Vec<Hostname>,
    routes: Vec<Route>,
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
        let mut by_port: BTreeMap<u32, Vec<VirtualHost>> = BTreeMap::new();
        for group in &groups {
            let forms = if self.port == 0 || self.client.proxyless {
                PortForms::With(group.port)
            } else {
                PortForms::Ignored
            };
            let hosts = by_port.entry(group.port).or_default();
            for host in &group.hosts {
                hosts.extend(collection.of_host(host, group.port, &group.routes));
            }
            for service in &group.services {
                hosts.extend(collection.of_service(service, group.port, forms, &group.routes));
            }
        }
        let mut virtual_hosts = self.merged(by_port);
        virtual_hosts.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(single) = single {
            virtual_hosts.retain(|virtual_host| single.answers(&virtual_host.domains));
            let configuration = super::plain_configuration(&self.name, virtual_hosts);
            return Built::new(configuration).with_notes(collection.notes);
        }
        match &self.catch_all {
            Some(kind) => virtual_hosts.push(virtual_host::catch_all(kind, &self.client)),
            None => self.keep_sniffed(&mut virtual_hosts),
        }
        let routes = configuration(&self.name, virtual_hosts);
        let mut notes = collection.notes;
        let routes = patch::route::apply(view, &self.patches, PatchContext::SidecarOutbound, routes, &mut notes);
        Built::new(EncodedResource::new(routes.name.as_str(), &routes)).with_notes(notes)
    }

    /// Joins the ports. Where all ports stand in one route configuration, names without port mean port 80.
    fn merged(&self, by_port: BTreeMap<u32, Vec<VirtualHost>>) -> Vec<VirtualHost> {
        let mut result = Vec::new();
        for (port, mut virtual_hosts) in by_port {
            if self.port == 0 && port != HTTP_PORT {
                for virtual_host in &mut virtual_hosts {
                    virtual_host.domains.retain(|domain| domain.contains(':'));
                }
                virtual_hosts.retain(|virtual_host| !virtual_host.domains.is_empty());
            }
            result.extend(virtual_hosts);
        }
        result
    }

    /// The listener has one host only, so whatever comes in is for it.
    fn keep_sniffed(&self, virtual_hosts: &mut Vec<VirtualHost>) {
        let host = self.name.rsplit_once(':').map_or(self.name.as_str(), |(host, _)| host);
        let is_meant = |domain: &String| *domain == self.name || domain == host;
        virtual_hosts.retain(|virtual_host| virtual_host.domains.iter().any(is_meant));
        if let [only] = virtual_hosts.as_mut_slice() {
            only.domains = vec!["*".to_owned()];
        }
    }

    /// VirtualServices first, in their order; then the services that none of them took.
    fn groups(&self, view: &View) -> Vec<Group> {
        let mut groups = Vec::new();
        let mut taken = BTreeSet::new();
        for binding in &self.bindings {
            let routes = self.routes(view, binding);
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
        let rest = self.services.iter().filter(|key| !taken.contains(*key));
        for service in rest.filter_map(|key| view.service(key)) {
            groups.extend(self.routed_ports(service).into_iter().map(|port| Group {
                port: port.number,
                services: vec![service.clone()],
                hosts: Vec::new(),
                routes: vec![self.default_route(view, service, port.number)],
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

    fn routes(&self, view: &View, binding: &Binding) -> Vec<Route> {
        let Some(declared) = view.mesh.virtual_services.get(view.cx, &binding.virtual_service) else {
            return Vec::new();
        };
        let client = &*self.client;
        let translation = Translation {
            view,
            client,
            gateway: MESH_GATEWAY,
            port: self.port,
            tls: false,
            advertise_http3: false,
            inference: if self.port == 0 {
                PortInference::SolePort
            } else {
                PortInference::Listener
            },
            targets: &destination::rows(view, &binding.targets, &client.namespace, &client.labels),
        };
        http::routes(&translation, declared)
    }

    fn default_route(&self, view: &View, service: &Service, port: u32) -> Route {
        let host = service.key.hostname.to_ascii_lowercase();
        let cluster = name::outbound_cluster(port, "", &host);
        let mut route = http::default_route(view, cluster, format!("{host}:{port}/*"));
        let client = &*self.client;
        let rule = destination_rule::lookup(view.cx, view.mesh, &client.namespace, &client.labels, service);
        let policy = rule.and_then(|rule| hash::of_service_port(&rule.spec, port).and_then(hash::policy));
        if let (Some(policy), Some(Action::Route(action))) = (policy, &mut route.action) {
            action.hash_policy.push(policy);
        }
        route
    }
}
