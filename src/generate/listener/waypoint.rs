//! Listeners of waypoints. Connections come out of tunnels, are matched by their destination address and port, and
//! continue through tunnels.
//!
//! Note: each service has chains of its own, because policies may refer to services; workloads share two. Chains have
//! no match; a matcher of the listener selects them by name. The chains of a service are a fragment ([`chains`]).

pub mod chains;
mod matcher;
mod tcp;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use prost::Message;

use super::{
    ListenerKey,
    filter_chain::plaintext_http_alpns,
    hbone::{OriginateKey, TerminateKey, added_header, internal, patched, state_value},
    inbound::BLACK_HOLE_CHAIN,
    inspector::{self, original_destination},
    outbound::listener::ChainKind,
};
use crate::{
    base::{Hashed, Hostname, NetworkId, cidr::IpMode},
    generate::{
        BuildContext, VipView,
        constant::network_filter,
        filter::{
            PeerSource,
            chain_fields::{EncodedListener, NetworkFilters},
            hcm::{HttpConnection, HttpRoutes},
            proxy_view::{FilterProxyView, ListenerClass},
            stack::{FilterStack, LogPosition},
            tcp::{TCP_PROXY, TcpChain, plain_proxy},
            tls::ServerCertificates,
        },
        name::{self, BLACK_HOLE, VipTraffic},
        patch::PatchContext,
        proxy::ProxyType,
        proxy_view::{gateway_spans_networks, waypoint_spans_networks},
        resource::Built,
        route::waypoint::{self as route, WaypointHost, WaypointRoutes},
        selected::Selected,
        tunnel::{
            DESTINATION_METADATA, ENCAP, FORWARD_INNER_CONNECT, FROM_GATEWAY, FROM_WAYPOINT, INNER_CONNECT_ORIGINATE,
            MAIN_INTERNAL, OUTER_CONNECT_ORIGINATE, SOURCE_HEADER,
        },
        waypoint::{Served, WaypointView},
    },
    model::{
        policy::Subject,
        service::Protocol,
        waypoint::{ServingRole, workloads},
    },
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::{Http2ProtocolOptions, TrafficDirection, TypedExtensionConfig},
                listener::v3::{Filter, FilterChain, Listener, ListenerFilter},
            },
            extensions::{
                filters::{
                    common::set_filter_state::v3::filter_state_value::{self, SharedWithUpstream},
                    network::{
                        http_connection_manager::v3::http_connection_manager::ForwardClientCertDetails,
                        set_filter_state,
                        tcp_proxy::v3::{TcpProxy, tcp_proxy::TunnelingConfig},
                    },
                },
                formatter::cel::v3::Cel,
            },
        },
        field::filter_chain,
        xds::r#type::matcher::v3::IpMatcher,
    },
};
use chains::{ServiceChains, ServiceChainsKey};
use matcher::PortChain;

/// Chains for connections to workloads, with the traffic that each reads.
const DIRECT: [(&str, VipTraffic); 2] = [("direct-tcp", VipTraffic::Tcp), ("direct-http", VipTraffic::Http)];
/// Filter state with the destination of a connection.
const ORIGINAL_DESTINATION: &str = "envoy.network.transport_socket.original_dst_address";
/// Target of the outer tunnel.
const HBONE_TARGET: &str = "istio.double_hbone.hbone_target_address";

/// Attributes of a waypoint that its listeners depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WaypointProxyView {
    /// Attributes that filters of no service depend on.
    pub filters: Hashed<FilterProxyView>,
    /// Subject of policies.
    pub subject: Subject,
    /// Waypoint, with the services that use it.
    pub waypoint: WaypointView,
    /// Visibility of service addresses.
    pub vip: VipView,
    /// Address families of its addresses.
    pub ip_mode: IpMode,
    /// Network.
    pub network: NetworkId,
    /// Certificates of the waypoint.
    pub certificates: ServerCertificates,
}

/// Listeners of a waypoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WaypointListenerPart {
    /// Attributes of the waypoint.
    pub client: Hashed<WaypointProxyView>,
}

/// Listeners that originate nested tunnels, which lead to other networks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CrossingPart {
    /// Attributes that filters depend on.
    pub filters: Hashed<FilterProxyView>,
    /// Network of the proxy.
    pub network: NetworkId,
}

/// Inputs of one listener.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum WaypointKey {
    /// The listener of connections out of tunnels.
    MainInternal {
        /// Attributes of the waypoint.
        client: Hashed<WaypointProxyView>,
        /// Chains of the services, oldest service first.
        services: Vec<ServiceChainsKey>,
    },
    /// The listener that originates the inner tunnel.
    Inner {
        /// Attributes that filters depend on.
        filters: Hashed<FilterProxyView>,
        /// Network of the connections' origin.
        network: NetworkId,
    },
    /// The listener that originates the outer tunnel.
    Outer(Hashed<FilterProxyView>),
    /// The listener that forwards inner tunnels, which are connections like others for a gateway between networks.
    Forward(Hashed<FilterProxyView>),
}

impl WaypointListenerPart {
    /// Selects the listeners of a waypoint.
    pub fn of(ctx: &BuildContext, selected: &Selected, filters: &Hashed<FilterProxyView>) -> Self {
        let client = Hashed::new(WaypointProxyView {
            filters: filters.clone(),
            subject: selected.subject.clone(),
            waypoint: selected.waypoint_view(),
            vip: VipView::of(selected.proxy, &ctx.mesh.installation.features),
            ip_mode: selected.proxy.ip_mode,
            network: selected.network.clone(),
            certificates: ServerCertificates::of(selected.proxy),
        });
        Self { client }
    }

    /// Lists the listeners.
    pub fn list(&self, ctx: &BuildContext) -> Vec<ListenerKey> {
        let features = &ctx.mesh.installation.features;
        let client = &self.client;
        let filters = || client.filters.clone();
        let services = Served::of(ctx, &client.waypoint).keys();
        let mut keys = vec![
            ListenerKey::ConnectTerminate(TerminateKey {
                filters: FilterProxyView::for_tunnels(&client.filters, ctx, &client.subject),
                ip_mode: client.ip_mode,
                certificates: client.certificates.clone(),
                keeps_source: client.waypoint.is_east_west(),
            }),
            ListenerKey::Waypoint(WaypointKey::MainInternal {
                client: client.clone(),
                services: services.map(|key| ServiceChains::key(ctx, client, key)).collect(),
            }),
            if client.waypoint.is_east_west() {
                ListenerKey::Waypoint(WaypointKey::Forward(filters()))
            } else {
                ListenerKey::ConnectOriginate(OriginateKey {
                    filters: filters(),
                    class: ListenerClass::SidecarInbound,
                })
            },
        ];
        if waypoint_spans_networks(features, &client.subject.labels) {
            let crossing = CrossingPart {
                filters: filters(),
                network: client.network.clone(),
            };
            keys.extend(crossing.list());
        }
        keys
    }
}

impl CrossingPart {
    /// Selects the listeners of a gateway; `None` if it does not reach other networks by tunnels.
    pub fn of(ctx: &BuildContext, selected: &Selected, filters: &Hashed<FilterProxyView>) -> Option<Self> {
        let features = &ctx.mesh.installation.features;
        gateway_spans_networks(features, selected.proxy, &selected.labels).then(|| Self {
            filters: filters.clone(),
            network: selected.network.clone(),
        })
    }

    /// Lists the listeners.
    pub fn list(&self) -> Vec<ListenerKey> {
        let inner = WaypointKey::Inner {
            filters: self.filters.clone(),
            network: self.network.clone(),
        };
        let outer = WaypointKey::Outer(self.filters.clone());
        [inner, outer].map(ListenerKey::Waypoint).into()
    }
}

impl WaypointKey {
    /// Returns the fragments that the listener consists of.
    pub fn chains(&self) -> &[ServiceChainsKey] {
        match self {
            Self::MainInternal { services, .. } => services,
            Self::Inner { .. } | Self::Outer(_) | Self::Forward(_) => &[],
        }
    }

    /// Builds the listener.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        match self {
            Self::MainInternal { client, services } => main_internal(ctx, client, services),
            Self::Inner { filters, network } => {
                let stack = FilterStack::new(ctx, filters, ListenerClass::SidecarInbound);
                let header = ("x-forwarded-network", network.as_str());
                let mut tunnel = double_tunnel(header);
                let mut chain = vec![stack.endpoint_metadata()];
                chain.extend(stack.baggage_filter(&mut tunnel));
                chain.push(stack.tunnel_proxy(INNER_CONNECT_ORIGINATE, tunnel));
                finished(stack, INNER_CONNECT_ORIGINATE, chain, Vec::new())
            }
            Self::Outer(filters) => {
                let stack = FilterStack::new(ctx, filters, ListenerClass::SidecarInbound);
                // The gateway of the other network does not send requests from waypoints through a waypoint again.
                let source = if filters.proxy_type == ProxyType::Waypoint {
                    FROM_WAYPOINT
                } else {
                    FROM_GATEWAY
                };
                let tunnel = double_tunnel((SOURCE_HEADER, source));
                let proxy = stack.tunnel_proxy(OUTER_CONNECT_ORIGINATE, tunnel);
                finished(
                    stack,
                    OUTER_CONNECT_ORIGINATE,
                    vec![proxy],
                    vec![original_destination()],
                )
            }
            Self::Forward(filters) => {
                let stack = FilterStack::new(ctx, filters, ListenerClass::SidecarInbound);
                let proxy = TcpProxy {
                    access_log: stack.access_logs(LogPosition::HboneForwarding),
                    ..plain_proxy(FORWARD_INNER_CONNECT)
                };
                let chain = vec![network_filter(TCP_PROXY, Any::pack(&proxy))];
                finished(stack, FORWARD_INNER_CONNECT, chain, vec![original_destination()])
            }
        }
    }
}

/// Returns an internal listener with one chain.
fn finished(stack: FilterStack, name: &str, filters: Vec<Filter>, listener_filters: Vec<ListenerFilter>) -> Built {
    let listener = Listener {
        use_original_dst: Some(false),
        listener_filters,
        filter_chains: vec![FilterChain {
            filters,
            ..Default::default()
        }],
        access_log: stack.access_logs(LogPosition::Listener),
        ..internal(name)
    };
    let context = stack.client.gateway_patch_context();
    patched(stack, context, listener)
}

impl FilterStack<'_> {
    /// Returns the filter that originates a tunnel.
    fn tunnel_proxy(&self, cluster: &str, tunnel: TunnelingConfig) -> Filter {
        let proxy = TcpProxy {
            tunneling_config: Some(tunnel),
            access_log: self.access_logs(LogPosition::HboneOrigination),
            ..plain_proxy(cluster)
        };
        network_filter(TCP_PROXY, Any::pack(&proxy))
    }

    /// Passes the endpoint's metadata on to the next connection.
    fn endpoint_metadata(&self) -> Filter {
        let shared = SharedWithUpstream::Transitive;
        let local = format!("%DYNAMIC_METADATA({DESTINATION_METADATA}:local)%");
        let target = "%DYNAMIC_METADATA(istio:double_hbone:hbone_target_address)%";
        let config = set_filter_state::v3::Config {
            on_new_connection: vec![
                state_value(&local_address(), &local, "", shared),
                state_value(HBONE_TARGET, target, self.client.hashable_string(), shared),
            ],
            ..Default::default()
        };
        network_filter("propagate_endpoint_metadata", Any::pack(&config))
    }
}

/// Returns one of two nested tunnels, with an additional header.
fn double_tunnel((key, value): (&str, &str)) -> TunnelingConfig {
    TunnelingConfig {
        hostname: format!("%FILTER_STATE({HBONE_TARGET}:PLAIN)%"),
        headers_to_add: vec![added_header(key, value)],
        ..Default::default()
    }
}

/// Returns the format of the address that a connection in a tunnel is for.
fn local_address() -> String {
    format!("{DESTINATION_METADATA}.local_ip")
}

fn main_internal(ctx: &BuildContext, client: &WaypointProxyView, services: &[ServiceChainsKey]) -> Built {
    let builder = MainInternalBuilder {
        stack: FilterStack::new(ctx, &client.filters, ListenerClass::SidecarInbound),
    };
    let mut listener = EncodedListener::default();
    let mut ports: BTreeMap<u32, Vec<Protocol>> = BTreeMap::new();
    let (mut unserved, mut matched, mut by_authority) = (Vec::new(), Vec::new(), Vec::new());
    for key in services {
        let built = chains::built(ctx, key);
        listener.append_chains(&built.chains);
        for (port, protocol) in &built.ports {
            ports.entry(*port).or_default().push(*protocol);
        }
        unserved.extend_from_slice(&built.unserved);
        for note in &built.notes {
            builder.stack.note(note.code, note.detail.clone());
        }
        matched.extend_from_slice(&built.matcher);
        by_authority.extend(built.by_authority.iter().cloned());
    }
    let workloads = match &client.waypoint.role {
        ServingRole::Waypoint(gateways) => {
            for (name, traffic) in DIRECT {
                builder.add_direct(&mut listener, name, traffic);
            }
            workloads::addresses(ctx.cx, ctx.mesh, gateways)
        }
        ServingRole::EastWest => {
            if ports.is_empty() {
                add_refusal(&mut listener);
            }
            None
        }
    };
    let direct = PortChain::Sniffed {
        tcp: DIRECT[0].0.to_owned(),
        http: DIRECT[1].0.to_owned(),
        alpns: plaintext_http_alpns(&ctx.mesh.installation.features),
    };
    let range_matchers = matcher::workloads(workloads.as_deref().unwrap_or_default(), direct).into_iter();
    let direct = IpMatcher {
        range_matchers: range_matchers.collect(),
    };
    matched.extend(direct.encode_to_vec());
    listener.rest = Listener {
        traffic_direction: TrafficDirection::Inbound as i32,
        filter_chain_matcher: Some(matcher::by_authority(by_authority, matcher::by_address(matched))),
        listener_filters: inspectors(&ports, &unserved, workloads.is_some()),
        access_log: builder.stack.access_logs(LogPosition::Listener),
        ..internal(MAIN_INTERNAL)
    };
    listener.finish(ctx, builder.stack, PatchContext::SidecarInbound)
}

/// The builder of the main internal listener.
struct MainInternalBuilder<'a> {
    stack: FilterStack<'a>,
}

impl MainInternalBuilder<'_> {
    /// Adds a chain for connections to workloads, to which no service's policies apply.
    fn add_direct(&self, listener: &mut EncodedListener, name: &str, traffic: VipTraffic) {
        let mut filters = NetworkFilters::new();
        filters.push(&connect_authority());
        let filters = match traffic {
            VipTraffic::Tcp => {
                let rest = self.stack.complete_tcp_chain(VIP_CHAIN, None, |filters| {
                    let proxy = TcpProxy {
                        stat_prefix: tcp::stat_prefix(&self.stack, None, ENCAP),
                        ..plain_proxy(ENCAP)
                    };
                    self.stack.add_tcp_proxy(filters, proxy);
                });
                filters.append(&rest);
                filters
            }
            VipTraffic::Http => {
                let host = WaypointHost {
                    cluster: ENCAP,
                    port: 0,
                    domain: "*",
                };
                let routes = route::to_cluster(&self.stack.ctx, &host, ":0/*");
                http_filters(&self.stack, filters, Protocol::Http, 0, routes, None)
            }
        };
        add_chain(listener, name, &filters);
    }
}

/// Peers are known from their tunnels.
const VIP_CHAIN: TcpChain = TcpChain {
    port: 0,
    exchanges_metadata: true,
    peer_source: PeerSource::Tunnel,
    authorized_by_destination: false,
};

/// Adds a chain that nothing selects, because Envoy requires one.
fn add_refusal(listener: &mut EncodedListener) {
    let mut filters = NetworkFilters::new();
    filters.push(&network_filter(TCP_PROXY, Any::pack(&plain_proxy(BLACK_HOLE))));
    add_chain(listener, BLACK_HOLE_CHAIN, &filters);
}

fn add_chain(listener: &mut EncodedListener, name: &str, filters: &NetworkFilters) {
    listener.add_chain(|out| {
        out.fields(filters.fields());
        out.text(filter_chain::NAME, name);
    });
}

/// Keeps the destination of the connection.
fn connect_authority() -> Filter {
    let local = local_address();
    let value = format!("%FILTER_STATE({local}:PLAIN)%");
    let config = set_filter_state::v3::Config {
        on_new_connection: vec![state_value(&local, &value, "", SharedWithUpstream::Once)],
        ..Default::default()
    };
    network_filter("connect_authority", Any::pack(&config))
}

/// Keeps the destination of the connection, or sets this one if it has none.
fn default_destination(address: &str, port: u32) -> Filter {
    let local = local_address();
    let value = format!("%CEL('{local}' in filter_state ? filter_state['{local}']: r'{address}:{port}')%");
    let mut state = state_value(ORIGINAL_DESTINATION, &value, "", SharedWithUpstream::None);
    if let Some(filter_state_value::Value::FormatString(format)) = &mut state.value {
        format.formatters.push(TypedExtensionConfig {
            name: "envoy.formatter.cel".to_owned(),
            typed_config: Some(Any::pack(&Cel::default())),
        });
    }
    let config = set_filter_state::v3::Config {
        on_new_connection: vec![state],
        ..Default::default()
    };
    network_filter("set_dst_address", Any::pack(&config))
}

/// Adds a connection manager with these routes to filters. A `wildcard` host is resolved per request.
fn http_filters(
    stack: &FilterStack,
    mut filters: NetworkFilters,
    protocol: Protocol,
    port: u32,
    routes: WaypointRoutes,
    wildcard: Option<&Hostname>,
) -> NetworkFilters {
    let client = stack.client;
    let stat_prefix = name::delimited_stat(&["inbound_0.0.0.0_", itoa::Buffer::new().format(port)].concat());
    // Parity (pilot/pkg/networking/core/listener_waypoint.go): patches do not apply to routes of VirtualServices.
    let routes = if routes.declared || client.route_patches.is_empty() {
        HttpRoutes::Encoded(routes.configuration)
    } else {
        HttpRoutes::Inline(Box::new(stack.patched_routes(routes.configuration.decode())))
    };
    // Parity (pilot/pkg/networking/core/listener_waypoint.go): extensions for certain ports do not apply to requests.
    let mut http = HttpConnection::new(stat_prefix, routes, protocol, 0);
    http.peer_source = PeerSource::Tunnel;
    http.exchanges_metadata = false;
    http.dynamic_dns = wildcard.cloned();
    client.apply_headers(ListenerClass::SidecarInbound, &mut http.base);
    if client.forwards_client_identity {
        // The connection out of a tunnel has no certificate, so the header would be removed otherwise.
        http.base.forward_client_cert_details = ForwardClientCertDetails::AlwaysForwardOnly.into();
    }
    http.base.http_protocol_options = client.http10_options(stack.features().pilot_http10);
    if protocol.is_http2() {
        http.base.http2_protocol_options = Some(Http2ProtocolOptions::default());
    }
    stack.add_http_connection(&mut filters, &http);
    filters
}

/// Returns the inspectors by ports of services: HTTP on ports that may carry it or another protocol, TLS on ports
/// declared to carry it. Every port of a workload may carry HTTP.
///
/// Parity (pilot/pkg/networking/core/listener_waypoint.go): for TLS, ports without chains count, too, such as those of
/// UDP.
fn inspectors(
    ports: &BTreeMap<u32, Vec<Protocol>>,
    unserved: &[(u32, Protocol)],
    has_workloads: bool,
) -> Vec<ListenerFilter> {
    let is_single = |protocols: &[Protocol]| {
        let mut kinds: Vec<_> = protocols.iter().map(|protocol| ChainKind::of(*protocol)).collect();
        kinds.dedup();
        kinds.len() == 1 && kinds[0] != Some(ChainKind::Auto)
    };
    let of_one_kind = ports
        .iter()
        .filter(|(_, protocols)| !has_workloads && is_single(protocols));
    let mut filters = vec![
        original_destination(),
        ListenerFilter {
            filter_disabled: inspector::on_ports(of_one_kind.map(|(port, _)| *port).collect()),
            ..inspector::http_inspector()
        },
    ];
    let mut carries_tls: BTreeMap<u32, bool> = BTreeMap::new();
    let served = ports
        .iter()
        .flat_map(|(port, protocols)| protocols.iter().map(|protocol| (*port, *protocol)));
    for (port, protocol) in served.chain(unserved.iter().copied()) {
        *carries_tls.entry(port).or_default() |= protocol.is_tls();
    }
    if carries_tls.values().any(|carries| *carries) {
        let others = carries_tls.iter().filter(|(_, carries)| !**carries);
        filters.push(ListenerFilter {
            filter_disabled: inspector::on_ports(others.map(|(port, _)| *port).collect()),
            ..inspector::tls_inspector()
        });
    }
    filters
}
