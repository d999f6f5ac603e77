//! The Gateways of one router, merged: its listeners, and the servers of each route configuration.
//!
//! Servers of several Gateways share ports. Plaintext HTTP servers share a listener and a route configuration. TLS
//! servers share a listener and are distinguished by SNI, so no host may occur twice. Any other server on an occupied
//! port is refused, unless it binds another address. The oldest Gateway takes precedence.
//!
//! [`DeclaredGateway`] has what does not depend on the router, derived once per Gateway.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;
use smol_str::{SmolStr, StrExt};

use super::{
    MeshSnapshot,
    service::{Protocol, ServiceKey},
};
use crate::{
    api::Meta,
    base::{Labels, MessageKey, ObjectKey, Shared, select::LabelSelector},
    proto::istio::networking::v1alpha3::{self as networking, ServerTlsSettings, server_tls_settings::TlSmode},
    table::Cx,
};

/// Annotation that restricts a Gateway made from the Gateway API to these services (host names, comma-separated).
pub const SERVICE_ANNOTATION: &str = "internal.istio.io/gateway-service";
/// Annotation with the namespace of the Gateway API object, if it differs from the Gateway's.
pub const PARENT_NAMESPACE_ANNOTATION: &str = "internal.istio.io/parent-namespace";
/// Annotation of Gateways made from the Gateway API.
pub const SEMANTICS_ANNOTATION: &str = "internal.istio.io/gateway-semantics";
/// Annotation of Gateways whose servers accept clients without a valid certificate, too.
pub const ACCEPTS_UNTRUSTED_ANNOTATION: &str = "internal.istio.io/accepts-untrusted-clients";
/// Label of a service that disables the translation of Gateway ports.
pub const NO_TRANSLATION_LABEL: &str = "experimental.istio.io/disable-gateway-port-translation";
/// Stands in the hosts of servers where a namespace does. No namespace has this name.
pub const NO_NAMESPACE: &str = "~";
/// Label of namespaces with their name, which older API servers do not set.
const NAMESPACE_NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// A port of a service that the router serves.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExposedPort {
    /// The service.
    pub service: ServiceKey,
    /// The service's port.
    pub number: u32,
    /// Listening port of the router.
    pub target: u32,
    /// True if the service has the port for UDP (too).
    pub udp: bool,
    /// True if the service has the label that disables translation.
    pub untranslated: bool,
}

/// A Gateway prepared for merging.
#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredGateway {
    /// Its metadata.
    pub meta: Shared<Meta>,
    /// `namespace/name`, as in VirtualServices.
    pub name: SmolStr,
    /// Servers; `None` for a server without a port.
    pub servers: Vec<Option<Shared<DeclaredServer>>>,
}

/// A declared server.
#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredServer {
    /// Server; hosts are `namespace/host` or `host` (any namespace).
    pub server: MessageKey<networking::Server>,
    /// Selector of the namespaces that may use the hosts. With one, the hosts are written with [`NO_NAMESPACE`].
    pub selector: Option<Shared<LabelSelector>>,
    /// The protocol of its port.
    pub protocol: Protocol,
    /// Hosts without namespaces, sorted, for SNI matches.
    pub sni: Shared<[SmolStr]>,
    /// True for a listener of the Gateway API.
    pub is_listener: bool,
    /// True if clients without a valid certificate are accepted, too.
    pub accepts_untrusted: bool,
}

/// A server of a Gateway on a port of the router.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayServer {
    /// `namespace/name` of the Gateway, as in VirtualServices.
    pub gateway: SmolStr,
    /// The server.
    pub declared: Shared<DeclaredServer>,
    /// Route configuration; empty for servers without HTTP.
    pub route: SmolStr,
}

/// A port of a router as declared by servers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerPort {
    /// Listening port.
    pub number: u32,
    /// Protocol as written.
    pub protocol: SmolStr,
    /// Bind address; empty for all.
    pub bind: SmolStr,
}

/// Servers of one [`ServerPort`], as indexes into [`MergedGateway::servers`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortServers {
    /// The servers.
    pub servers: Vec<usize>,
    /// Route configuration of plaintext HTTP servers.
    pub route: SmolStr,
    /// Servers that are served over QUIC too.
    pub quic: Vec<usize>,
}

/// Merged servers of a router.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MergedGateway {
    /// All accepted servers. A server that resolves to several ports occurs once per port.
    pub servers: Vec<GatewayServer>,
    /// Ports in the order in which they were opened.
    pub ports: Vec<(ServerPort, PortServers)>,
    /// Servers by route configuration.
    pub routes: BTreeMap<SmolStr, Vec<usize>>,
    /// Route configurations whose responses advertise HTTP/3.
    pub http3_routes: BTreeSet<SmolStr>,
    /// Gateways (`namespace/name`) with refused servers, once per server.
    pub rejected: Vec<SmolStr>,
    /// True if a server passes mutual TLS through to the service in the SNI. Parity (pilot/pkg/model/gateway.go): such
    /// a server counts unless its hosts are taken, even if its port is.
    pub auto_passthrough: bool,
}

/// Derives the part of a Gateway that does not depend on the router.
pub fn declared(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<DeclaredGateway> {
    let gateway = mesh.gateways.get(cx, key)?;
    let namespace = gateway.meta.namespace();
    let has = |name: &str| gateway.meta.annotations.contains_key(name);
    let is_listener = has(SEMANTICS_ANNOTATION);
    let selector = is_listener.then(|| mesh.listener_selectors.get(cx, key)).flatten();
    let servers = gateway.spec.servers.iter().map(|server| {
        let port = server.port.as_ref()?;
        Some(
            DeclaredServer {
                selector: selector.cloned(),
                is_listener,
                accepts_untrusted: has(ACCEPTS_UNTRUSTED_ANNOTATION),
                ..DeclaredServer::new(server.clone(), port, namespace)
            }
            .into(),
        )
    });
    Some(DeclaredGateway {
        meta: gateway.meta.clone(),
        name: [namespace.as_str(), "/", gateway.meta.name()].into_iter().collect(),
        servers: servers.collect(),
    })
}

impl DeclaredServer {
    fn new(mut server: networking::Server, port: &networking::Port, namespace: &str) -> Self {
        qualify_hosts(&mut server.hosts, namespace);
        let bare = server.hosts.iter().map(|host| SmolStr::new(bare_host(host)));
        let sni: Vec<SmolStr> = bare.collect::<BTreeSet<_>>().into_iter().collect();
        Self {
            sni: sni.into(),
            selector: None,
            protocol: Protocol::parse(&port.protocol),
            server: MessageKey::new(server),
            is_listener: false,
            accepts_untrusted: false,
        }
    }

    /// Returns the declared port number.
    pub fn port(&self) -> u32 {
        self.server.port.as_ref().map_or(0, |port| port.number)
    }

    /// Returns the TLS settings.
    pub fn tls(&self) -> Option<&ServerTlsSettings> {
        self.server.tls.as_ref()
    }

    /// Returns true if TLS is passed through.
    pub fn is_passthrough(&self) -> bool {
        is_passthrough(&self.server)
    }

    /// Returns true for HTTPS servers that terminate TLS.
    pub fn terminates_https(&self) -> bool {
        self.server.tls.is_some() && self.protocol == Protocol::Https && !self.is_passthrough()
    }

    /// Returns true for HTTP, in plaintext or terminated.
    pub fn is_http(&self) -> bool {
        self.protocol.is_http() || self.protocol == Protocol::Https && !self.is_passthrough()
    }

    /// Returns true for servers with TLS settings, except HTTP, where these are about redirects.
    pub fn is_tls(&self) -> bool {
        self.server.tls.is_some() && !self.protocol.is_http()
    }

    /// Returns the hosts that VirtualServices of a namespace may use, without namespaces.
    pub fn hosts_for(&self, cx: &Cx, mesh: &MeshSnapshot, namespace: &str) -> Vec<&str> {
        match &self.selector {
            None => hosts_for_namespace(&self.server.hosts, namespace),
            Some(selector) if selects_namespace(cx, mesh, selector, namespace) => {
                self.server.hosts.iter().map(|host| bare_host(host)).collect()
            }
            Some(_) => Vec::new(),
        }
    }
}

impl std::ops::Deref for GatewayServer {
    type Target = DeclaredServer;
    fn deref(&self) -> &DeclaredServer {
        &self.declared
    }
}

impl MergedGateway {
    /// Merges the Gateways, oldest first, for a router with these ports.
    pub fn of(cx: &Cx, mesh: &MeshSnapshot, gateways: &[ObjectKey], exposed: &[ExposedPort]) -> Self {
        let mut merge = Merge {
            cx,
            mesh,
            quic: mesh.installation.features.pilot_enable_quic_listeners,
            result: Self::default(),
            places: BTreeMap::new(),
            occupied: BTreeSet::new(),
            plaintext: BTreeMap::new(),
            tls_hosts: BTreeMap::new(),
        };
        for gateway in gateways.iter().filter_map(|key| mesh.declared_gateways.get(cx, key)) {
            let Some(ports) = PortMap::of(&gateway.meta, exposed) else {
                continue;
            };
            for server in &gateway.servers {
                merge.add_server(gateway, server.as_ref(), &ports);
            }
        }
        merge.result
    }

    /// Returns true if some server uses AUTO_PASSTHROUGH.
    pub fn has_auto_passthrough(&self) -> bool {
        let is_auto = |server: &GatewayServer| server.tls().is_some_and(|tls| tls.mode() == TlSmode::AutoPassthrough);
        self.servers.iter().any(is_auto)
    }

    /// Returns the names of the Gateways, sorted.
    pub fn gateway_names(&self) -> BTreeSet<SmolStr> {
        self.servers.iter().map(|server| server.gateway.clone()).collect()
    }
}

/// Returns the host of `namespace/host` or `host`.
fn bare_host(host: &str) -> &str {
    host.split_once('/').map_or(host, |(_, host)| host)
}

fn hosts_for_namespace<'a>(hosts: &'a [String], namespace: &str) -> Vec<&'a str> {
    let is_offered = |host: &&String| match host.split_once('/') {
        Some((owner, _)) => owner == namespace || owner == "*",
        None => true,
    };
    hosts.iter().filter(is_offered).map(|host| bare_host(host)).collect()
}

/// Returns true if a selector selects a namespace of the config cluster.
pub fn selects_namespace(cx: &Cx, mesh: &MeshSnapshot, selector: &LabelSelector, namespace: &str) -> bool {
    let key = ObjectKey::new(&mesh.installation.cluster, "", SmolStr::new(namespace));
    let labels = mesh.namespace_labels.get(cx, &key);
    labels.is_some_and(|labels| selector.matches(labels))
}

/// Returns the namespaces of the config cluster that a selector selects, or [`NO_NAMESPACE`]. The reader depends on the
/// labels of all of them.
pub fn selected_namespaces(cx: &Cx, mesh: &MeshSnapshot, selector: &LabelSelector) -> Vec<SmolStr> {
    let all = mesh.namespace_labels.iter(cx);
    let selected = all.filter(|(_, labels)| selector.matches(labels));
    let mut names: Vec<SmolStr> = selected.map(|(key, _)| key.name.clone()).collect();
    if names.is_empty() {
        names.push(SmolStr::new_static(NO_NAMESPACE));
    }
    names
}

/// Derives the labels of a namespace of the config cluster, with its name as one. The routes of gateways depend on
/// them, so other changes of a Namespace must leave the row as it is.
pub fn namespace_labels(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<Labels> {
    if key.cluster != mesh.installation.cluster {
        return None;
    }
    let mut labels = Labels::clone(&mesh.namespaces.get(cx, key)?.meta.labels);
    labels.insert(NAMESPACE_NAME_LABEL.into(), key.name.clone());
    Some(labels)
}

fn is_passthrough(server: &networking::Server) -> bool {
    let mode = server.tls.as_ref().map(ServerTlsSettings::mode);
    matches!(mode, Some(TlSmode::Passthrough | TlSmode::AutoPassthrough))
}

/// Port translation of one Gateway.
struct PortMap<'a> {
    exposed: Vec<&'a ExposedPort>,
    /// True if the Gateway refers to its services, so that its ports are always theirs.
    by_service: bool,
}

impl<'a> PortMap<'a> {
    /// Returns `None` if the Gateway refers to services and the router serves none of them.
    fn of(gateway: &Meta, exposed: &'a [ExposedPort]) -> Option<Self> {
        let Some(services) = gateway.annotations.get(SERVICE_ANNOTATION) else {
            return Some(Self {
                exposed: exposed.iter().collect(),
                by_service: false,
            });
        };
        let parent = gateway.annotations.get(PARENT_NAMESPACE_ANNOTATION);
        let namespace = parent.map_or(gateway.namespace().as_str(), SmolStr::as_str);
        let hosts: BTreeSet<&str> = services.split(',').collect();
        let is_named =
            |port: &&ExposedPort| port.service.namespace == namespace && hosts.contains(port.service.hostname.as_str());
        let exposed: Vec<_> = exposed.iter().filter(is_named).collect();
        (!exposed.is_empty()).then_some(Self {
            exposed,
            by_service: true,
        })
    }

    /// Returns the listening ports for a server port.
    fn resolve(&self, number: u32) -> Vec<u32> {
        let mut same = self.exposed.iter().filter(|port| port.number == number);
        if self.by_service {
            let targets: BTreeSet<u32> = same.map(|port| port.target).collect();
            return targets.into_iter().collect();
        }
        let first = same.find(|port| !port.untranslated);
        vec![first.map_or(number, |port| port.target)]
    }

    fn exposes_udp(&self, number: u32) -> bool {
        self.exposed.iter().any(|port| port.number == number && port.udp)
    }
}

/// The users of a host, as servers write them before it: a namespace, `*` or [`NO_NAMESPACE`]; `None` without one.
#[derive(Default)]
struct HostUsers {
    /// The address on which each last used the host.
    binds: FxHashMap<Option<SmolStr>, SmolStr>,
    /// The selector of the only server with the host until now, and the server's address. Its namespaces may be all of
    /// the cluster, so they are listed only if another server has the host.
    sole: Option<(Shared<LabelSelector>, SmolStr)>,
}

impl HostUsers {
    fn list(&mut self, cx: &Cx, mesh: &MeshSnapshot) {
        if let Some((selector, bind)) = self.sole.take() {
            let users = selected_namespaces(cx, mesh, &selector).into_iter();
            self.binds.extend(users.map(|user| (Some(user), bind.clone())));
        }
    }
}

/// State of merging.
struct Merge<'a> {
    cx: &'a Cx,
    mesh: &'a MeshSnapshot,
    quic: bool,
    result: MergedGateway,
    /// Positions of the ports in the result. One Gateway may have thousands.
    places: BTreeMap<ServerPort, usize>,
    /// Ports with a server.
    occupied: BTreeSet<u32>,
    /// Plaintext server that determines a port.
    plaintext: BTreeMap<u32, ServerPort>,
    /// Hosts of TLS servers by port, without namespaces and in lower case.
    tls_hosts: BTreeMap<u32, FxHashMap<SmolStr, HostUsers>>,
}

impl Merge<'_> {
    fn add_server(&mut self, gateway: &DeclaredGateway, declared: Option<&Shared<DeclaredServer>>, ports: &PortMap) {
        let Some(declared) = declared else {
            self.result.rejected.push(gateway.name.clone());
            return;
        };
        for number in ports.resolve(declared.port()) {
            let server = GatewayServer {
                gateway: gateway.name.clone(),
                declared: declared.clone(),
                route: route_name(&gateway.meta, declared, number),
            };
            let at = ServerPort {
                number,
                protocol: SmolStr::new(declared.server.port.as_ref().map_or("", |port| &port.protocol)),
                bind: SmolStr::new(&declared.server.bind),
            };
            let http3 = self.quic
                && declared.protocol == Protocol::Https
                && !declared.is_passthrough()
                && ports.exposes_udp(declared.port());
            if !self.place(server, at, http3) {
                self.result.rejected.push(gateway.name.clone());
            }
        }
    }

    /// Places a server; returns false if that is impossible.
    fn place(&mut self, server: GatewayServer, at: ServerPort, http3: bool) -> bool {
        if server.server.tls.is_some() && !self.take_hosts(&server, &at) {
            return false;
        }
        let mode = server.server.tls.as_ref().map(ServerTlsSettings::mode);
        self.result.auto_passthrough |= mode == Some(TlSmode::AutoPassthrough);
        if self.occupied.insert(at.number) {
            let is_http = server.is_http();
            self.open(server, at, is_http && http3);
            return true;
        }
        match self.plaintext.get(&at.number).cloned() {
            Some(current) => self.join_plaintext(server, at, &current, http3),
            None if !server.is_tls() => {
                self.open(server, at, false);
                true
            }
            None => self.join_tls(server, at, http3),
        }
    }

    /// Records the hosts of a TLS server; returns false if one of them is used on the same address.
    fn take_hosts(&mut self, server: &DeclaredServer, at: &ServerPort) -> bool {
        let (cx, mesh) = (self.cx, self.mesh);
        let known = self.tls_hosts.entry(at.number).or_default();
        // Names of the client hello are compared in lower case.
        let hosts = server.server.hosts.iter().map(|host| host.to_ascii_lowercase_smolstr());
        let mut hosts: Vec<(SmolStr, Option<SmolStr>)> = hosts
            .map(|host| match host.split_once('/') {
                Some((user, bare)) => (SmolStr::new(bare), Some(SmolStr::new(user))),
                None => (host, None),
            })
            .collect();
        if let Some(selector) = &server.selector {
            if hosts.iter().all(|(host, _)| !known.contains_key(host)) {
                let unlisted = || HostUsers {
                    sole: Some((selector.clone(), at.bind.clone())),
                    ..HostUsers::default()
                };
                known.extend(hosts.into_iter().map(|(host, _)| (host, unlisted())));
                return true;
            }
            let users = selected_namespaces(cx, mesh, selector);
            let of_host = |(host, _): (SmolStr, _)| users.iter().map(move |user| (host.clone(), Some(user.clone())));
            hosts = hosts.into_iter().flat_map(of_host).collect();
        }
        let is_used = |(host, user): &(SmolStr, Option<SmolStr>)| {
            known.get_mut(host).is_some_and(|users| {
                users.list(cx, mesh);
                users.binds.get(user) == Some(&at.bind)
            })
        };
        if hosts.iter().any(is_used) {
            return false;
        }
        for (host, user) in hosts {
            known.entry(host).or_default().binds.insert(user, at.bind.clone());
        }
        true
    }

    /// Opens a port for a server.
    fn open(&mut self, server: GatewayServer, at: ServerPort, http3: bool) {
        if !server.is_tls() {
            self.plaintext.insert(at.number, at.clone());
        }
        let route = server.route.clone();
        let is_http = server.is_http();
        let index = self.push(server);
        if is_http {
            self.result.routes.insert(route.clone(), vec![index]);
        }
        let servers = PortServers {
            servers: vec![index],
            route: route.clone(),
            quic: Vec::new(),
        };
        match self.port_mut(&at) {
            Some(existing) => *existing = servers,
            None => self.push_port(at.clone(), servers),
        }
        if http3 {
            self.advertise(index, &at, route);
        }
    }

    /// Merges a server with a plaintext one.
    fn join_plaintext(&mut self, server: GatewayServer, at: ServerPort, current: &ServerPort, http3: bool) -> bool {
        let same_bind = current.bind == at.bind;
        let both_http = server.protocol.is_http() && Protocol::parse(&current.protocol).is_http();
        if same_bind && (!both_http || server.route.is_empty()) {
            return false;
        }
        let route = server.route.clone();
        if same_bind {
            let index = self.push(server);
            if let Some(port) = self.port_mut(current) {
                port.servers.push(index);
            }
            self.result.routes.entry(route).or_default().push(index);
            return true;
        }
        let is_http = server.is_http();
        if self.port_mut(&at).is_none() {
            self.open(server, at, is_http && http3);
            return true;
        }
        let index = self.push(server);
        if let Some(port) = self.port_mut(&at) {
            port.servers.push(index);
            port.route = route.clone();
        }
        if !route.is_empty() {
            self.result.routes.entry(route.clone()).or_default().push(index);
        }
        if is_http && http3 {
            self.advertise(index, &at, route);
        }
        true
    }

    /// Merges a TLS server with others.
    fn join_tls(&mut self, server: GatewayServer, at: ServerPort, http3: bool) -> bool {
        let route = server.route.clone();
        let is_http = server.is_http();
        // Two HTTPS servers of one route configuration could not be distinguished.
        if is_http && (route.is_empty() || self.result.routes.contains_key(&route)) {
            return false;
        }
        let index = self.push(server);
        if is_http {
            self.result.routes.insert(route.clone(), vec![index]);
        }
        match self.port_mut(&at) {
            Some(port) => port.servers.push(index),
            None => {
                let servers = PortServers {
                    servers: vec![index],
                    ..Default::default()
                };
                self.push_port(at.clone(), servers);
            }
        }
        if http3 {
            self.advertise(index, &at, route);
        }
        true
    }

    fn advertise(&mut self, index: usize, at: &ServerPort, route: SmolStr) {
        if let Some(port) = self.port_mut(at) {
            port.quic.push(index);
        }
        self.result.http3_routes.insert(route);
    }

    fn push(&mut self, server: GatewayServer) -> usize {
        self.result.servers.push(server);
        self.result.servers.len() - 1
    }

    fn push_port(&mut self, at: ServerPort, servers: PortServers) {
        self.places.insert(at.clone(), self.result.ports.len());
        self.result.ports.push((at, servers));
    }

    fn port_mut(&mut self, at: &ServerPort) -> Option<&mut PortServers> {
        let place = *self.places.get(at)?;
        Some(&mut self.result.ports[place].1)
    }
}

/// Qualifies hosts: `./h` is in the Gateway's namespace, `*/h` in any. Parity (pilot/pkg/model/gateway.go): `*/*`
/// replaces all other hosts.
fn qualify_hosts(hosts: &mut Vec<String>, namespace: &str) {
    if hosts.iter().any(|host| host == "*/*") {
        *hosts = vec!["*".to_owned()];
        return;
    }
    for host in hosts {
        if let Some(bare) = host.strip_prefix("./") {
            *host = format!("{namespace}/{bare}");
        } else if let Some(bare) = host.strip_prefix("*/") {
            *host = bare.to_owned();
        }
    }
}

/// Returns the route configuration of a server; `number` is the listening port.
fn route_name(gateway: &Meta, declared: &DeclaredServer, number: u32) -> SmolStr {
    let (dot, bind) = match declared.server.bind.as_str() {
        "" => ("", ""),
        bind => (".", bind),
    };
    let mut digits = itoa::Buffer::new();
    if declared.protocol.is_http() {
        return ["http.", digits.format(number), dot, bind].into_iter().collect();
    }
    if declared.protocol == Protocol::Https && !declared.is_passthrough() {
        let port_name = declared.server.port.as_ref().map_or("", |port| port.name.as_str());
        let (name, namespace) = (gateway.name(), gateway.namespace());
        let port = digits.format(declared.port());
        let parts = ["https.", port, ".", port_name, ".", name, ".", namespace, dot, bind];
        return SmolStr::from(parts.concat());
    }
    SmolStr::default()
}
