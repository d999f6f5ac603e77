//! Listeners of gRPC: targets of clients, by all names that a client may use for a service, and sockets of servers.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{GrpcKey, GrpcProxyView, tls};
use crate::{
    base::{ObjectKey, Shared, address::host_port},
    generate::{
        BuildContext, EncodedResource, VipView,
        constant::{self, http_filter},
        filter::security,
        listener::outbound::listener::additional_addresses,
        name,
        requested::has_room,
        resource::Built,
        route::filters::{STATEFUL_SESSION, session},
    },
    model::{Service, ServiceKey, SidecarScope, authentication::MtlsMode, service::ScopedService},
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::Address,
                listener::v3::{AdditionalAddress, ApiListener, Filter, FilterChain, Listener, filter::ConfigType},
                route::v3::{
                    NonForwardingAction, Route, RouteConfiguration, RouteMatch, VirtualHost, route::Action,
                    route_match::PathSpecifier,
                },
            },
            extensions::filters::{
                http::{fault::v3::HttpFault, router::v3::Router},
                network::http_connection_manager::v3::{
                    HttpConnectionManager, HttpFilter, Rds, http_connection_manager::RouteSpecifier,
                },
            },
        },
    },
};

/// Prefix of the names of server listeners; `address:port` follows.
const INBOUND: &str = "xds.istio.io/grpc/lds/inbound/";

/// Inputs of the listener of one target.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TargetListenerKey {
    /// Host as requested.
    host: SmolStr,
    /// Service as the client sees it.
    service: ScopedService,
    /// Service port.
    port: u32,
    /// Visibility of service addresses.
    vip: VipView,
}

/// Inputs of the listener of one server socket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServerListenerKey {
    /// Requested name.
    name: SmolStr,
    /// Address in the name.
    address: SmolStr,
    /// Port in the name.
    port: u32,
    /// Service behind it, which may have further addresses.
    service: ServiceKey,
    /// Visibility of service addresses.
    vip: VipView,
    /// True if it accepts only mutual TLS; otherwise only plaintext.
    mtls: bool,
    /// AuthorizationPolicies that apply, in order.
    authorization: Shared<[ObjectKey]>,
    /// Upper bound of the listeners of the server, which repeat the policies; a power of two.
    listeners: usize,
}

/// Requested names of one host.
#[derive(Debug, Default, PartialEq, Eq)]
struct RequestedHost {
    hosts: BTreeSet<SmolStr>,
    /// Ports as written.
    ports: BTreeSet<SmolStr>,
    /// True if a name without a port, which means all ports, was requested.
    all_ports: bool,
}

/// Lists the listeners of the names.
pub(super) fn list(
    ctx: &BuildContext,
    scope: &SidecarScope,
    client: &GrpcProxyView,
    names: &BTreeSet<SmolStr>,
) -> Vec<GrpcKey> {
    let (inbound, outbound): (Vec<&SmolStr>, Vec<&SmolStr>) = names.iter().partition(|name| name.starts_with(INBOUND));
    let mut keys = Vec::new();
    for (host, requested) in requested_hosts(client, &outbound) {
        let Some(scoped) = scope.service(&host).map(|key| scope.scoped(key)) else {
            continue;
        };
        let Some(service) = ctx.scoped(&scoped) else { continue };
        // Parity (pilot/pkg/networking/grpcgen/lds.go): every name of the host is served on every port that one of them
        // requests.
        for host in &requested.hosts {
            let ports = service.ports.iter().map(|port| port.number);
            let shown = ports.filter(|port| scope.shows_port(&scoped.key, *port) && requested.has_port(*port));
            keys.extend(shown.map(|port| {
                GrpcKey::Outbound(TargetListenerKey {
                    host: host.clone(),
                    service: scoped.clone(),
                    port,
                    vip: client.vip.clone(),
                })
            }));
        }
    }
    // The address in the name may be any text.
    let mut copies = BTreeMap::new();
    let sockets = inbound
        .into_iter()
        .filter_map(|name| ServerListenerKey::of(client, name));
    let sockets: Vec<ServerListenerKey> = sockets.filter(|key| has_room(&mut copies, key.port)).collect();
    let listeners = sockets.len().next_power_of_two();
    let sockets = sockets.into_iter();
    keys.extend(sockets.map(|key| GrpcKey::Inbound(ServerListenerKey { listeners, ..key })));
    keys
}

impl RequestedHost {
    fn has_port(&self, port: u32) -> bool {
        self.all_ports || self.ports.contains(port.to_string().as_str())
    }
}

/// Returns the requested hosts, including completed short names.
fn requested_hosts(client: &GrpcProxyView, names: &[&SmolStr]) -> BTreeMap<SmolStr, RequestedHost> {
    let mut hosts: BTreeMap<SmolStr, RequestedHost> = BTreeMap::new();
    for name in names {
        let (host, port) = match split_host_port(name) {
            Some((host, port)) => (host, Some(port)),
            None => (name.as_str(), None),
        };
        let complete = completed(host, &client.namespace, &client.dns_domain);
        for meant in std::iter::once(SmolStr::new(host)).chain(complete) {
            let requested = hosts.entry(meant).or_default();
            requested.hosts.insert(host.into());
            requested.all_ports |= port.is_none();
            requested.ports.extend(port.map(SmolStr::new));
        }
    }
    hosts
}

/// Returns the full name of `service`, `service.namespace` or `service.namespace.svc`; the latter two only in the
/// client's own namespace.
fn completed(host: &str, namespace: &str, dns_domain: &str) -> Option<SmolStr> {
    if !host.contains('.') {
        return Some(SmolStr::from(format!("{host}.{dns_domain}")));
    }
    let qualified = format!("{namespace}.svc");
    [namespace, &qualified].into_iter().find_map(|suffix| {
        let short = host.strip_suffix(suffix)?.strip_suffix('.')?;
        dns_domain
            .starts_with(suffix)
            .then(|| SmolStr::from(format!("{short}.{dns_domain}")))
    })
}

/// Splits `host:port` or `[address]:port`; the port may be empty.
fn split_host_port(name: &str) -> Option<(&str, &str)> {
    let (host, port) = name.rsplit_once(':')?;
    match host.strip_prefix('[') {
        Some(bracketed) => bracketed.strip_suffix(']').filter(|host| !host.contains(['[', ']'])),
        None => Some(host).filter(|host| !host.contains([':', '[', ']'])),
    }
    .filter(|_| !port.contains(['[', ']']))
    .map(|host| (host, port))
}

impl TargetListenerKey {
    pub(super) fn build(&self, ctx: &BuildContext) -> Built {
        let Some(service) = ctx.scoped(&self.service) else {
            return Built::none();
        };
        let manager = HttpConnectionManager {
            http_filters: Self::filters(ctx, &service),
            route_specifier: Some(RouteSpecifier::Rds(Rds {
                config_source: Some(constant::plain_ads_source()),
                route_config_name: name::outbound_cluster(self.port, "", &self.service.key.hostname),
            })),
            ..Default::default()
        };
        let listener = Listener {
            address: Some(address(&self.vip.address(&service), self.port)),
            additional_addresses: further_addresses(&self.vip, &service, self.port),
            api_listener: Some(ApiListener {
                api_listener: Some(Any::pack(&manager)),
            }),
            name: host_port(&self.host, self.port),
            ..Default::default()
        };
        Built::new(EncodedResource::new(listener.name.as_str(), &listener))
    }

    fn filters(ctx: &BuildContext, service: &Service) -> Vec<HttpFilter> {
        let session = session(service, &ctx.mesh.installation.features);
        let session = session.map(|session| http_filter(STATEFUL_SESSION, Any::pack(&session)));
        let fault = http_filter("envoy.filters.http.fault", Any::pack(&HttpFault::default()));
        session.into_iter().chain([fault, router()]).collect()
    }
}

impl ServerListenerKey {
    /// Returns the socket of a name; `None` if the server has no such port.
    fn of(client: &GrpcProxyView, name: &SmolStr) -> Option<Self> {
        let (address, port) = split_host_port(name.strip_prefix(INBOUND)?)?;
        let port: u32 = port.parse().ok()?;
        let server = &client.server;
        let target = server.targets.iter().rfind(|target| target.target_port == port)?;
        // gRPC cannot accept both. Clients use mutual TLS if the label announces it.
        let mtls = match server.peers.mode_on(port) {
            MtlsMode::Strict => true,
            MtlsMode::Permissive => server.announces_mtls,
            MtlsMode::Disable => false,
        };
        Some(Self {
            name: name.clone(),
            address: address.into(),
            port,
            service: target.service.clone(),
            vip: client.vip.clone(),
            mtls,
            authorization: server.authorization.clone(),
            listeners: 1,
        })
    }

    pub(super) fn build(&self, ctx: &BuildContext) -> Built {
        let (mut filters, notes) = security::proxyless_filters(ctx, &self.authorization, self.listeners);
        filters.push(router());
        let service = ctx.service(&self.service);
        let further = service.map(|service| further_addresses(&self.vip, service, self.port));
        let listener = Listener {
            name: self.name.to_string(),
            address: Some(address(&self.address, self.port)),
            additional_addresses: further.unwrap_or_default(),
            filter_chains: vec![self.chain(filters)],
            ..Default::default()
        };
        Built::new(EncodedResource::new(self.name.as_str(), &listener)).with_notes(notes)
    }

    fn chain(&self, http_filters: Vec<HttpFilter>) -> FilterChain {
        let manager = HttpConnectionManager {
            http_filters,
            route_specifier: Some(RouteSpecifier::RouteConfig(local_routes())),
            ..Default::default()
        };
        let kind = if self.mtls { "mtls" } else { "plaintext" };
        FilterChain {
            name: format!("inbound-{kind}"),
            filters: vec![Filter {
                name: format!("inbound-hcm{kind}"),
                config_type: Some(ConfigType::TypedConfig(Any::pack(&manager))),
            }],
            transport_socket: self.mtls.then(tls::server_socket),
            ..Default::default()
        }
    }
}

/// Routes all requests to the server itself.
fn local_routes() -> RouteConfiguration {
    let route = Route {
        r#match: Some(RouteMatch {
            path_specifier: Some(PathSpecifier::Prefix("/".to_owned())),
            ..Default::default()
        }),
        action: Some(Action::NonForwardingAction(NonForwardingAction {})),
        ..Default::default()
    };
    RouteConfiguration {
        name: "inbound".to_owned(),
        virtual_hosts: vec![VirtualHost {
            domains: vec!["*".to_owned()],
            routes: vec![route],
            ..Default::default()
        }],
        ..Default::default()
    }
}

fn router() -> HttpFilter {
    http_filter("envoy.filters.http.router", Any::pack(&Router::default()))
}

/// Returns an IP address, or any other text of a name, as an address.
fn address(address: &str, port: u32) -> Address {
    Address {
        address: Some(crate::proto::envoy::config::core::v3::address::Address::SocketAddress(
            constant::socket_address(address, port),
        )),
    }
}

fn further_addresses(vip: &VipView, service: &Service, port: u32) -> Vec<AdditionalAddress> {
    let addresses = vip.addresses(service);
    additional_addresses(addresses.get(1..).unwrap_or_default(), port)
}
