//! Listeners of gateways: one for each address and port of servers, with a filter chain for each server, or for each
//! route of a passthrough server.

mod listing;
mod reachable;
mod tcp;
#[cfg(test)]
mod tests;

use std::cell::Cell;

use bytes::Bytes;
use prost::Message;

use super::{
    filter_chain::{Chain, Remainder, TakenMatches, max_connections_per_event},
    inspector,
    outbound::{
        listener::{additional_addresses, exact_balance},
        listener_name,
    },
    termination::{self, Transport},
};
use crate::{
    base::{Hashed, Labels, MessageKey, ObjectKey, Shared, SmolStr, cidr::IpMode},
    generate::{
        BuildContext, GatewayView, constant,
        filter::{
            chain_fields::{EncodedListener, NetworkFilters},
            chain_limit::Excess,
            hcm::{HttpConnection, HttpRoutes, ManagerTemplate},
            proxy_view::{FilterProxyView, ListenerClass},
            stack::{FilterStack, LogPosition},
            tls::{InnerProtocol, ServerCertificates},
        },
        labels, name,
        proxy::MetadataKey,
        resource::Built,
        route::destination::Target,
        selected::Selected,
    },
    model::{
        ScopeKey,
        features::Features,
        output_limit,
        service::{Protocol, ScopedService},
        waypoint::ServingRole,
    },
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::{TrafficDirection, UdpSocketConfig, address, socket_address},
                listener::v3::{Listener, ListenerFilter, QuicProtocolOptions, UdpListenerConfig},
            },
            extensions::filters::{
                listener::proxy_protocol::v3::ProxyProtocol,
                network::http_connection_manager::v3::http_connection_manager::{
                    ForwardClientCertDetails as EnvoyForwardClientCert, SetCurrentClientCertDetails,
                },
            },
        },
        istio::{
            mesh::v1alpha1::{ForwardClientCertDetails, Topology},
            networking::v1alpha3 as networking,
        },
    },
};

/// Code of the note of a Gateway with a server, or some names of one, that cannot be served.
const REJECTED: &str = "pilot_total_rejected_configs";

/// The field of a Gateway that notes about its servers name.
const SERVERS: &str = "spec.servers";

/// The size of filters up to which a chain always applies. Those of a gateway without large policies are smaller, and
/// servers and services may be tens of thousands.
const SMALL_CHAIN: usize = 32 << 10;

/// The number of chains of servers with `AUTO_PASSTHROUGH` after which further servers of their namespace share as many
/// once more. Each server has the chains of all services, and a Gateway may have thousands of servers.
const MAX_PASSED_THROUGH: usize = 1 << 18;

/// Inputs of the selection of a gateway's listeners.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GatewayPart {
    /// Scope.
    scope: ScopeKey,
    /// Gateways that the proxy serves.
    gateways: GatewayView,
    /// Attributes of the proxy.
    client: Hashed<GatewayProxyView>,
}

/// Attributes of a router or a gateway between networks that its listeners depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GatewayProxyView {
    /// Attributes that filters depend on.
    filters: Hashed<FilterProxyView>,
    /// Labels that some rule selects by.
    labels: Shared<Labels>,
    /// Address families.
    ip_mode: IpMode,
    /// True if it cannot bind ports below 1024.
    unprivileged: bool,
    /// True if connections are balanced exactly over worker threads.
    exact_balance: bool,
    /// Proxies in front of the gateway (`gatewayTopology`).
    topology: MessageKey<Topology>,
    /// Certificate of its own in files.
    certificates: ServerCertificates,
    /// True if it has the socket of its own SDS provider.
    external_socket: bool,
    /// True for a gateway between networks, whose Gateways only pass connections on by TCP and TLS routes.
    is_east_west: bool,
}

impl GatewayPart {
    pub(super) fn of(ctx: &BuildContext, selected: &Selected, filters: &Hashed<FilterProxyView>) -> Self {
        let proxy = selected.proxy;
        Self {
            scope: selected.scope.clone(),
            gateways: GatewayView::of(ctx, selected),
            client: Hashed::new(GatewayProxyView {
                filters: filters.clone(),
                labels: labels::relevant(ctx, selected),
                ip_mode: proxy.ip_mode,
                unprivileged: proxy.has(MetadataKey::UnprivilegedPod),
                exact_balance: proxy.has(MetadataKey::OutboundExactBalance),
                topology: MessageKey::new(selected.proxy_config.gateway_topology.unwrap_or_default()),
                certificates: ServerCertificates::of(proxy),
                external_socket: proxy.metadata_value(MetadataKey::Credential) == "true",
                is_east_west: selected.serves == ServingRole::EastWest,
            }),
        }
    }
}

/// Inputs of one gateway listener.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GatewayKey {
    client: Hashed<GatewayProxyView>,
    /// Addresses, the main one first.
    binds: Vec<SmolStr>,
    port: u32,
    transport: Transport,
    /// Inputs of its chains, in order.
    chains: Vec<ServerChain>,
}

/// Contribution of one server, or of all plaintext HTTP servers of a port.
///
/// Its `place` is an upper bound of the number of chains of one namespace up to it, in all listeners of the gateway: a
/// power of two, since it decides only whether the chain is within the limit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ServerChain {
    /// Plaintext HTTP.
    Http {
        /// `namespace/name` of the first Gateway in the namespace that the chain counts for.
        gateway: SmolStr,
        /// Route configuration.
        route: SmolStr,
        /// Protocol of the port.
        protocol: Protocol,
        /// Place among the chains of the namespace, of those with a server, that has the fewest.
        place: usize,
    },
    /// HTTP over terminated TLS.
    Https {
        /// `namespace/name` of the Gateway.
        gateway: SmolStr,
        /// Route configuration.
        route: SmolStr,
        /// Server.
        server: MessageKey<networking::Server>,
        /// Server names.
        sni: Shared<[SmolStr]>,
        /// True if client certificates that are not valid are accepted.
        accepts_untrusted: bool,
        /// Place among the chains of the Gateway's namespace.
        place: usize,
    },
    /// TCP, in plaintext or over terminated TLS.
    Tcp {
        /// Server.
        server: TcpServer,
        /// Place among the chains of the Gateway's namespace.
        place: usize,
    },
    /// TLS passed through by server name.
    Passthrough {
        /// Server.
        server: TcpServer,
        /// Places of the chains of each of its VirtualServices among those of the VirtualService's namespace.
        places: Vec<usize>,
    },
    /// Mutual TLS of the mesh passed through to the cluster in the SNI.
    AutoPassthrough {
        /// `namespace/name` of the Gateway.
        gateway: SmolStr,
        /// Services that can be reached, in order of age.
        services: Vec<ScopedService>,
        /// Place of the first chain among those of such servers of the Gateway's namespace. They count apart, because
        /// all namespaces declare services, and the filters of the other chains have policies.
        place: usize,
        /// True if younger services are left out, because such servers before it have [`MAX_PASSED_THROUGH`] chains.
        is_cut: bool,
    },
}

impl ServerChain {
    /// Returns the namespace of the Gateway; `None` for plaintext HTTP, whose servers share one chain.
    fn namespace(&self) -> Option<&str> {
        let gateway = match self {
            Self::Http { .. } => return None,
            Self::Https { gateway, .. } | Self::AutoPassthrough { gateway, .. } => gateway,
            Self::Tcp { server, .. } | Self::Passthrough { server, .. } => &server.gateway,
        };
        gateway.split_once('/').map(|(namespace, _)| namespace)
    }
}

/// A server with TCP or TLS routes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct TcpServer {
    /// `namespace/name` of the Gateway.
    gateway: SmolStr,
    /// The server, with hosts as `namespace/host` or `host`.
    spec: MessageKey<networking::Server>,
    /// Server names.
    sni: Shared<[SmolStr]>,
    /// True if client certificates that are not valid are accepted.
    accepts_untrusted: bool,
    /// VirtualServices with a host of the server, in order.
    routes: Vec<TcpBinding>,
}

/// A VirtualService of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct TcpBinding {
    virtual_service: ObjectKey,
    targets: Vec<Target>,
}

/// The builder of one listener.
struct ListenerBuilder<'a> {
    key: &'a GatewayKey,
    stack: FilterStack<'a>,
    /// True if the listener may have servers of several namespaces.
    is_shared: bool,
    /// True if some chain is within the limit.
    has_served: Cell<bool>,
}

impl GatewayKey {
    /// Returns the name.
    fn name(&self) -> String {
        let transport = match self.transport {
            Transport::Tcp => "",
            Transport::Quic => "udp_",
        };
        [transport, &listener_name(&self.binds[0], self.port)].concat()
    }

    /// Returns true if the listener may have servers of several namespaces. Plaintext HTTP beside TLS counts as one of
    /// another namespace.
    fn is_shared(&self) -> bool {
        let mut namespaces = self.chains.iter().map(ServerChain::namespace);
        let first = namespaces.next();
        namespaces.any(|namespace| Some(namespace) != first)
    }

    /// Builds the listener; none without chains.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let builder = ListenerBuilder {
            key: self,
            stack: FilterStack::new(ctx, &self.client.filters, ListenerClass::Gateway),
            is_shared: self.is_shared(),
            has_served: Cell::new(false),
        };
        let mut chains = Chains::default();
        builder.add_chains(&mut chains);
        if chains.listener.has_no_chains() {
            return Built::none().with_notes(builder.stack.into_notes());
        }
        let listener = builder.listener(chains);
        listener.finish(ctx, builder.stack, self.client.filters.gateway_patch_context())
    }
}

/// Chains of a listener under construction. Each is encoded before the next is built, since there may be thousands.
#[derive(Default)]
struct Chains {
    listener: EncodedListener,
    /// True if some chain matches the client hello.
    needs_hello: bool,
    /// Matches of the chains.
    taken: TakenMatches,
}

impl Chains {
    /// Adds a chain for the server names that no earlier chain matches. Names that Envoy refuses do not remain either.
    ///
    /// Unlike Istio, which compares the hosts of servers together with their namespaces: two tenants who declare one
    /// host would take the listener from everyone.
    fn add(&mut self, mut chain: Chain, features: &Features) -> Remainder {
        let remainder = self.taken.take(&mut chain);
        if remainder != Remainder::Nothing {
            self.needs_hello |= !chain.sni.is_empty() || chain.transport_socket.is_some();
            self.listener.add_chain(|out| chain.write(out, features));
        }
        remainder
    }
}

impl ListenerBuilder<'_> {
    fn add_chains(&self, chains: &mut Chains) {
        let mut passed_on = tcp::TakenNames::default();
        let mut extended = false;
        let features = self.stack.features();
        let mut add = |gateway: &SmolStr, chain| {
            let remainder = chains.add(chain, features);
            if remainder != Remainder::Whole {
                self.stack.note(REJECTED, gateway.clone());
            }
            remainder != Remainder::Nothing
        };
        let unnamed = name::delimited_stat(&["outbound_", &self.key.name()].concat());
        let (mut https, mut denying, mut sockets) = (None, None, None);
        for chain in &self.key.chains {
            match chain {
                ServerChain::Http {
                    gateway,
                    route,
                    protocol,
                    place,
                } => {
                    add(gateway, self.http_chain(gateway, route, *protocol, *place, &unnamed));
                }
                ServerChain::Https {
                    gateway,
                    route,
                    server,
                    sni,
                    accepts_untrusted,
                    place,
                } => {
                    let mut manager = https.get_or_insert_with(|| self.manager(Protocol::Https));
                    let exceeds = self.exceeds_limit(gateway, SERVERS, manager.size(), *place);
                    if exceeds {
                        manager = denying.get_or_insert_with(|| self.denying_manager(Protocol::Https));
                    }
                    let stat_prefix = if server.name.is_empty() { &unnamed } else { &server.name };
                    let chain = Chain {
                        sni: sni.iter().map(|name| name.as_str().to_owned()).collect(),
                        filters: self.http_filters(manager, route, stat_prefix, !extended && !exceeds),
                        transport_socket: self.known_socket(&mut sockets, server, *accepts_untrusted),
                        ..Default::default()
                    };
                    extended |= add(gateway, chain) && !exceeds;
                }
                ServerChain::Tcp { server, place } => {
                    if let Some(chain) = self.tcp_chain(server, *place) {
                        add(&server.gateway, chain);
                    }
                }
                ServerChain::Passthrough { server, places } => {
                    for chain in self.passthrough_chains(server, places, &mut passed_on) {
                        add(&server.gateway, chain);
                    }
                }
                ServerChain::AutoPassthrough {
                    gateway,
                    services,
                    place,
                    is_cut,
                } => {
                    for chain in self.auto_passthrough_chains(gateway, services, *place) {
                        add(gateway, chain);
                    }
                    if *is_cut {
                        let port = self.key.port;
                        let detail = format!(
                            "{gateway}: {SERVERS}: port {port}: servers with AUTO_PASSTHROUGH before it have \
                             {MAX_PASSED_THROUGH} filter chains, so it has those of its oldest services only"
                        );
                        self.stack.note(output_limit::CODE, detail);
                    }
                }
            }
        }
    }

    /// Returns the chain of servers for plaintext HTTP.
    fn http_chain(&self, gateway: &str, route: &str, protocol: Protocol, place: usize, stat_prefix: &str) -> Chain {
        let mut manager = self.manager(protocol);
        let exceeds = self.exceeds_limit(gateway, SERVERS, manager.size(), place);
        if exceeds {
            manager = self.denying_manager(protocol);
        }
        Chain {
            filters: self.http_filters(&manager, route, stat_prefix, !exceeds),
            ..Default::default()
        }
    }

    /// Returns true, with a note about a field of the object that declares the chain, if the chains of a namespace up
    /// to this place would repeat too much. Such a chain denies all traffic: without it, connections might match the
    /// chain of a wildcard.
    fn exceeds_limit(&self, object: &str, field: &str, size: usize, place: usize) -> bool {
        let excess = Excess::of(size, place).filter(|_| size > SMALL_CHAIN);
        match &excess {
            Some(excess) => {
                let detail = format!("{object}: {field}: port {}: {excess}", self.key.port);
                self.stack.note(output_limit::CODE, detail);
            }
            None => self.has_served.set(true),
        }
        excess.is_some()
    }

    /// Returns the filters of an HTTP chain; `first` is true for the first chain of its kind.
    fn http_filters(&self, manager: &ManagerTemplate, route: &str, stat_prefix: &str, first: bool) -> NetworkFilters {
        // Parity (pilot/pkg/networking/core/gateway.go): only the first such chain of a listener has network filters,
        // and QUIC has none.
        let mut filters = if first && self.key.transport == Transport::Tcp {
            self.stack.filters_before_http(self.key.port, false)
        } else {
            NetworkFilters::new()
        };
        manager.add(&mut filters, stat_prefix, route);
        filters
    }

    /// Returns the connection manager of all chains of a protocol.
    fn manager(&self, protocol: Protocol) -> ManagerTemplate {
        ManagerTemplate::of(&self.stack, &self.http_connection(protocol))
    }

    /// Returns the connection manager of chains that deny every request.
    fn denying_manager(&self, protocol: Protocol) -> ManagerTemplate {
        ManagerTemplate::denying(&self.stack, &self.http_connection(protocol))
    }

    /// Returns the inputs of the connection manager.
    fn http_connection(&self, protocol: Protocol) -> HttpConnection {
        let routes = HttpRoutes::Rds(String::new());
        let mut http = HttpConnection::new(String::new(), routes, protocol, self.key.port);
        let client = &self.key.client;
        client.filters.apply_headers(ListenerClass::Gateway, &mut http.base);
        let options = client.filters.http10_options(self.stack.features().pilot_http10);
        http.base.http_protocol_options = Some(options.unwrap_or_default());
        http.base.xff_num_trusted_hops = client.topology.num_trusted_proxies;
        let forwarded = forward_client_certificate(&client.topology);
        http.base.forward_client_cert_details = forwarded.into();
        // Envoy accepts the details only if it sets the header.
        if matches!(
            forwarded,
            EnvoyForwardClientCert::AppendForward | EnvoyForwardClientCert::SanitizeSet
        ) {
            http.base.set_current_client_cert_details = Some(SetCurrentClientCertDetails {
                subject: Some(true),
                cert: true,
                dns: true,
                uri: true,
                ..Default::default()
            });
        }
        http.use_remote_address = true;
        http.mesh_only_exchange = client.filters.exchanges_in_mesh_only();
        http.http3 = self.key.transport == Transport::Quic;
        http
    }

    /// Returns the TLS termination of a server, or the previous one if the settings are equal.
    fn known_socket<'k>(
        &self,
        last: &mut Option<(&'k networking::Server, bool, Option<Bytes>)>,
        server: &'k networking::Server,
        accepts_untrusted: bool,
    ) -> Option<Bytes> {
        let protocol = |server: &'k networking::Server| server.port.as_ref().map(|port| &port.protocol);
        if let Some((known, known_accepts, socket)) = last
            && *known_accepts == accepts_untrusted
            && known.tls == server.tls
            && protocol(known) == protocol(server)
        {
            return socket.clone();
        }
        let socket = self.transport_socket(server, accepts_untrusted);
        *last = Some((server, accepts_untrusted, socket.clone()));
        socket
    }

    /// Returns the TLS termination of a server.
    fn transport_socket(&self, server: &networking::Server, accepts_untrusted: bool) -> Option<Bytes> {
        let settings = server.tls.as_ref()?;
        let context = termination::Context {
            certificates: &self.key.client.certificates,
            external_socket: self.key.client.external_socket,
            stack: &self.stack,
            transport: self.key.transport,
            inside: match Protocol::parse(server.port.as_ref().map_or("", |port| &port.protocol)) {
                Protocol::Https => InnerProtocol::Http,
                _ => InnerProtocol::Tcp,
            },
            accepts_untrusted,
            is_shared: self.is_shared,
        };
        Some(context.socket(settings).encode_to_vec().into())
    }

    fn listener(&self, chains: Chains) -> EncodedListener {
        let key = self.key;
        let features = self.stack.features();
        let is_udp = key.transport == Transport::Quic;
        let direction = if key.client.is_east_west {
            TrafficDirection::Inbound
        } else {
            TrafficDirection::Outbound
        };
        let mut listener = chains.listener;
        listener.rest = Listener {
            name: key.name(),
            address: Some(constant::address(&key.binds[0], key.port)),
            additional_addresses: additional_addresses(&key.binds[1..], key.port),
            traffic_direction: direction.into(),
            listener_filters: if is_udp {
                Vec::new()
            } else {
                self.listener_filters(chains.needs_hello)
            },
            connection_balance_config: (key.client.exact_balance && !is_udp).then(exact_balance),
            max_connections_to_accept_per_socket_event: max_connections_per_event(features),
            // There may be as many listeners as chains.
            access_log: if self.has_served.get() {
                self.stack.access_logs(LogPosition::Listener)
            } else {
                Vec::new()
            },
            ..Default::default()
        };
        if is_udp {
            serve_udp(&mut listener.rest);
        }
        listener
    }

    fn listener_filters(&self, needs_hello: bool) -> Vec<ListenerFilter> {
        let client = &self.key.client;
        let mut filters = Vec::new();
        // The topology is that of proxies in front of ingress gateways. Other networks connect to gateways between
        // networks without a PROXY header.
        if client.topology.proxy_protocol.is_some() && !client.is_east_west {
            let config = Any::pack(&ProxyProtocol::default());
            filters.push(inspector::filter("envoy.filters.listener.proxy_protocol", config));
        }
        if needs_hello {
            filters.push(inspector::tls_inspector());
        }
        filters
    }
}

/// Converts a listener to QUIC.
fn serve_udp(listener: &mut Listener) {
    let further = listener
        .additional_addresses
        .iter_mut()
        .map(|further| &mut further.address);
    for address in std::iter::once(&mut listener.address).chain(further).flatten() {
        if let Some(address::Address::SocketAddress(socket)) = &mut address.address {
            socket.protocol = socket_address::Protocol::Udp.into();
        }
    }
    listener.udp_listener_config = Some(UdpListenerConfig {
        quic_options: Some(QuicProtocolOptions::default()),
        downstream_socket_config: Some(UdpSocketConfig::default()),
        ..Default::default()
    });
}

/// Returns the handling of the client certificate header; `proxyHeaders` does not apply here.
fn forward_client_certificate(topology: &Topology) -> EnvoyForwardClientCert {
    match topology.forward_client_cert_details() {
        ForwardClientCertDetails::Undefined | ForwardClientCertDetails::SanitizeSet => {
            EnvoyForwardClientCert::SanitizeSet
        }
        ForwardClientCertDetails::Sanitize => EnvoyForwardClientCert::Sanitize,
        ForwardClientCertDetails::ForwardOnly => EnvoyForwardClientCert::ForwardOnly,
        ForwardClientCertDetails::AppendForward => EnvoyForwardClientCert::AppendForward,
        ForwardClientCertDetails::AlwaysForwardOnly => EnvoyForwardClientCert::AlwaysForwardOnly,
    }
}
