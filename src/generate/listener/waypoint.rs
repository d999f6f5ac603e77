//! The listeners of waypoints: connections come out of tunnels, are told apart by the address and port that they were
//! for, and go on through tunnels.
//!
//! What one would get wrong: each service has chains of its own, since policies may refer to services; chains match
//! nothing by themselves, a matcher of the listener chooses among them by name.

mod matcher;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use prost::Message;

use super::{
    ListenerKey,
    filter_chain::plaintext_http_alpns,
    hbone::{OriginateKey, TerminateKey, internal, state_value},
    inspector::{self, original_destination},
    outbound::listener::MemberKind,
};
use crate::{
    base::{Hashed, NetworkId, cidr::IpMode},
    generate::{
        BuildContext, EncodedResource, VipView,
        constant::network_filter,
        filter::{
            chain_fields::{NetworkFilters, WrittenListener, field},
            hcm::{HttpConnection, HttpRoutes},
            proxy_view::{FilterProxyView, ListenerClass},
            stack::{FilterStack, LogPlace},
            tcp::{TCP_PROXY, TcpChain, plain_proxy},
        },
        name::{self, ClusterMode, VipTraffic},
        patch::PatchContext,
        resource::Built,
        route::waypoint as route,
        selected::Selected,
        tunnel::{DESTINATION_METADATA, ENCAP, INNER_CONNECT_ORIGINATE, MAIN_INTERNAL, OUTER_CONNECT_ORIGINATE},
        waypoint::{Served, WaypointView},
        wire,
    },
    model::{
        Service,
        policy::Subject,
        service::{Protocol, ServicePort},
    },
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::{
                    HeaderValue, HeaderValueOption, Http2ProtocolOptions, TrafficDirection,
                    header_value_option::HeaderAppendAction,
                },
                listener::v3::{Filter, FilterChain, Listener, ListenerFilter},
                route::v3::RouteConfiguration,
            },
            extensions::filters::{
                common::set_filter_state::v3::filter_state_value::SharedWithUpstream,
                network::{
                    set_filter_state,
                    tcp_proxy::v3::{TcpProxy, tcp_proxy::TunnelingConfig},
                },
            },
        },
    },
};
use matcher::PortChain;

/// The chain for connections to workloads, and what it is called where it reads requests.
const DIRECT: [(&str, VipTraffic); 2] = [("direct-tcp", VipTraffic::Tcp), ("direct-http", VipTraffic::Http)];
/// Where the tunnel around a tunnel leads.
const HBONE_TARGET: &str = "istio.double_hbone.hbone_target_address";

/// What the listeners of a waypoint depend on of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WaypointProxyView {
    /// What filters depend on where no service is in question.
    pub filters: Hashed<FilterProxyView>,
    /// What policies are matched against.
    pub subject: Subject,
    /// Which services go through it.
    pub waypoint: WaypointView,
    /// How it sees addresses.
    pub vip: VipView,
    /// The address families that it listens on.
    pub ip_mode: IpMode,
    /// Its network.
    pub network: NetworkId,
}

/// The listeners of a waypoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WaypointPart {
    /// What they depend on.
    pub client: Hashed<WaypointProxyView>,
}

/// What one listener is built from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum WaypointKey {
    /// Takes what comes out of tunnels.
    MainInternal(Hashed<WaypointProxyView>),
    /// Opens the tunnel within a tunnel.
    Inner {
        /// What filters depend on.
        filters: Hashed<FilterProxyView>,
        /// The network that connections come from.
        network: NetworkId,
    },
    /// Opens the tunnel around it.
    Outer(Hashed<FilterProxyView>),
}

impl WaypointPart {
    /// The listeners of a selected waypoint.
    pub fn of(ctx: &BuildContext, selected: &Selected, filters: &Hashed<FilterProxyView>) -> Self {
        let client = Hashed::new(WaypointProxyView {
            filters: filters.clone(),
            subject: selected.subject.clone(),
            waypoint: selected.waypoint_view(),
            vip: VipView::of(selected.proxy, &ctx.mesh.installation.features),
            ip_mode: selected.proxy.ip_mode,
            network: selected.network.clone(),
        });
        Self { client }
    }

    /// The listeners.
    pub fn list(&self, ctx: &BuildContext) -> Vec<ListenerKey> {
        let features = &ctx.mesh.installation.features;
        let client = &self.client;
        let filters = || client.filters.clone();
        let mut keys = vec![
            ListenerKey::ConnectTerminate(TerminateKey {
                filters: filters(),
                ip_mode: client.ip_mode,
            }),
            ListenerKey::Waypoint(WaypointKey::MainInternal(client.clone())),
            ListenerKey::ConnectOriginate(OriginateKey {
                filters: filters(),
                class: ListenerClass::SidecarInbound,
            }),
        ];
        if features.ambient_enable_multi_network_waypoint {
            keys.push(ListenerKey::Waypoint(WaypointKey::Inner {
                filters: filters(),
                network: client.network.clone(),
            }));
            keys.push(ListenerKey::Waypoint(WaypointKey::Outer(filters())));
        }
        keys
    }
}

impl WaypointKey {
    /// Builds the listener.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        match self {
            Self::MainInternal(client) => main_internal(ctx, client),
            Self::Inner { filters, network } => {
                let stack = FilterStack::new(ctx, filters, ListenerClass::SidecarInbound);
                let header = ("x-forwarded-network", network.as_str());
                let proxy = stack.double_tunnel(INNER_CONNECT_ORIGINATE, header);
                let chain = vec![stack.endpoint_metadata(), proxy];
                finished(stack, INNER_CONNECT_ORIGINATE, chain, Vec::new())
            }
            Self::Outer(filters) => {
                let stack = FilterStack::new(ctx, filters, ListenerClass::SidecarInbound);
                let proxy = stack.double_tunnel(OUTER_CONNECT_ORIGINATE, ("x-istio-source", "waypoint"));
                finished(
                    stack,
                    OUTER_CONNECT_ORIGINATE,
                    vec![proxy],
                    vec![original_destination()],
                )
            }
        }
    }
}

/// A listener inside the proxy with one chain. Patches do not reach it.
fn finished(stack: FilterStack, name: &str, filters: Vec<Filter>, listener_filters: Vec<ListenerFilter>) -> Built {
    let listener = Listener {
        use_original_dst: Some(false),
        listener_filters,
        filter_chains: vec![FilterChain {
            filters,
            ..Default::default()
        }],
        access_log: stack.access_logs(LogPlace::Listener),
        ..internal(name)
    };
    Built::new(EncodedResource::new(name, &listener)).with_notes(stack.into_notes())
}

impl FilterStack<'_> {
    /// The end of a listener that opens one of two tunnels in each other, with a header that goes along.
    fn double_tunnel(&self, cluster: &str, (key, value): (&str, &str)) -> Filter {
        let header = HeaderValueOption {
            header: Some(HeaderValue {
                key: key.to_owned(),
                value: value.to_owned(),
                ..Default::default()
            }),
            append_action: HeaderAppendAction::OverwriteIfExistsOrAdd as i32,
            ..Default::default()
        };
        let proxy = TcpProxy {
            tunneling_config: Some(TunnelingConfig {
                hostname: format!("%FILTER_STATE({HBONE_TARGET}:PLAIN)%"),
                headers_to_add: vec![header],
                ..Default::default()
            }),
            access_log: self.access_logs(LogPlace::HboneOrigination),
            ..plain_proxy(cluster)
        };
        network_filter(TCP_PROXY, Any::pack(&proxy))
    }

    /// Tells the connections further on what the endpoint's metadata say of the way.
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

/// The state that says what a connection in a tunnel is for.
fn local_address() -> String {
    format!("{DESTINATION_METADATA}.local_ip")
}

fn main_internal(ctx: &BuildContext, client: &WaypointProxyView) -> Built {
    let making = MainInternal {
        stack: FilterStack::new(ctx, &client.filters, ListenerClass::SidecarInbound),
        client,
        served: Served::of(ctx, &client.waypoint),
    };
    let mut listener = WrittenListener::default();
    let mut ports: BTreeMap<u32, Vec<Protocol>> = BTreeMap::new();
    let mut matched = Vec::new();
    for service in &making.served.services {
        let filters = making.filters_for(service);
        let stack = FilterStack::new(ctx, &filters, ListenerClass::SidecarInbound);
        let mut chains = Vec::new();
        for port in &service.ports {
            let Some(chain) = making.add_port(&mut listener, &stack, service, port) else {
                continue;
            };
            chains.push((port.number, chain));
            ports.entry(port.number).or_default().push(port.protocol);
        }
        for note in stack.into_notes() {
            making.stack.note(note.code, note.detail);
        }
        let addresses = client.vip.virtual_addresses(service);
        matched.extend(matcher::service(&addresses, chains));
    }
    for (name, traffic) in DIRECT {
        making.add_direct(&mut listener, name, traffic);
    }
    listener.rest = Listener {
        traffic_direction: TrafficDirection::Inbound as i32,
        filter_chain_matcher: Some(matcher::by_address(matched)),
        listener_filters: inspectors(&ports),
        access_log: making.stack.access_logs(LogPlace::Listener),
        ..internal(MAIN_INTERNAL)
    };
    listener.finish(ctx, making.stack, PatchContext::SidecarInbound)
}

/// The listener in the making.
struct MainInternal<'a> {
    stack: FilterStack<'a>,
    client: &'a WaypointProxyView,
    served: Served<'a>,
}

impl MainInternal<'_> {
    /// What the filters of a service's chains depend on.
    fn filters_for(&self, service: &Service) -> Hashed<FilterProxyView> {
        let subject = self.client.subject.clone().with_service(service);
        FilterProxyView::for_service(&self.client.filters, &self.stack.ctx, &subject)
    }

    /// Adds the chains of a service port; nothing for UDP.
    fn add_port(
        &self,
        listener: &mut WrittenListener,
        stack: &FilterStack,
        service: &Service,
        port: &ServicePort,
    ) -> Option<PortChain> {
        let mut chains = VipTraffic::of(port.protocol).iter().map(|traffic| {
            let name = ClusterMode::Vip(*traffic).cluster_name(port.number, "", &service.key.hostname);
            let filters = match traffic {
                VipTraffic::Tcp => tcp_filters(stack, port, &name),
                VipTraffic::Http => {
                    let forwarded = stack.client.proxy_headers.x_forwarded_host.as_ref();
                    let forwarded = forwarded.and_then(|forwarded| forwarded.enabled) == Some(true);
                    let target = (service, port.number);
                    let routes = route::of_port(&stack.ctx, &self.served, target, &name, forwarded);
                    http_filters(stack, NetworkFilters::new(), port.protocol, port.number, routes)
                }
            };
            add_chain(listener, &name, &filters);
            name
        });
        let first = chains.next()?;
        Some(match chains.next() {
            Some(http) => PortChain::Sniffed {
                tcp: first,
                http,
                alpns: plaintext_http_alpns(stack.features()),
            },
            None => PortChain::One(first),
        })
    }

    /// Adds a chain for connections to workloads themselves, which no service's policies concern.
    fn add_direct(&self, listener: &mut WrittenListener, name: &str, traffic: VipTraffic) {
        let mut filters = NetworkFilters::new();
        filters.push(&connect_authority());
        let filters = match traffic {
            VipTraffic::Tcp => {
                let rest = self.stack.complete_tcp_chain(VIP_CHAIN, None, |filters| {
                    self.stack.add_tcp_proxy(filters, plain_proxy(ENCAP));
                });
                filters.append(&rest);
                filters
            }
            VipTraffic::Http => {
                let routes = route::to_cluster(&self.stack.ctx, ENCAP, 0, ":0/*");
                http_filters(&self.stack, filters, Protocol::Http, 0, routes)
            }
        };
        add_chain(listener, name, &filters);
    }
}

/// Peers are known from their tunnels.
const VIP_CHAIN: TcpChain = TcpChain {
    port: 0,
    exchanges_metadata: true,
    tunneled: true,
    secured_elsewhere: false,
};

fn add_chain(listener: &mut WrittenListener, name: &str, filters: &NetworkFilters) {
    listener.add_chain(|out| {
        out.extend_from_slice(filters.fields());
        wire::text(out, field::NAME, name);
    });
}

/// Keeps what the connection is for.
fn connect_authority() -> Filter {
    let local = local_address();
    let value = format!("%FILTER_STATE({local}:PLAIN)%");
    let config = set_filter_state::v3::Config {
        on_new_connection: vec![state_value(&local, &value, "", SharedWithUpstream::Once)],
        ..Default::default()
    };
    network_filter("connect_authority", Any::pack(&config))
}

fn tcp_filters(stack: &FilterStack, port: &ServicePort, cluster: &str) -> NetworkFilters {
    let chain = TcpChain {
        port: port.number,
        ..VIP_CHAIN
    };
    stack.complete_tcp_chain(chain, None, |filters| {
        stack.add_protocol_filters(filters, port.protocol, plain_proxy(cluster), cluster);
    })
}

/// Adds a connection manager with these routes to filters.
fn http_filters(
    stack: &FilterStack,
    mut filters: NetworkFilters,
    protocol: Protocol,
    port: u32,
    routes: Vec<u8>,
) -> NetworkFilters {
    let client = stack.client;
    let stat_prefix = name::delimited_stat(&["inbound_0.0.0.0_", itoa::Buffer::new().format(port)].concat());
    let routes = if client.route_patches.is_empty() {
        HttpRoutes::Written(routes)
    } else {
        let read = RouteConfiguration::decode(&*routes).expect("because it was written according to the message");
        HttpRoutes::Inline(Box::new(stack.patched_routes(read)))
    };
    let mut http = HttpConnection::new(stat_prefix, routes, protocol, port);
    http.tunneled = true;
    client.apply_headers(ListenerClass::SidecarInbound, &mut http.base);
    http.base.http_protocol_options = client.http10_options(stack.features().pilot_http10);
    if protocol.is_http2() {
        http.base.http2_protocol_options = Some(Http2ProtocolOptions::default());
    }
    stack.add_http_connection(&mut filters, &http);
    filters
}

/// What has to be found out of connections by ports of services: HTTP on those that may carry it or something else, TLS on
/// those that are declared to carry it.
fn inspectors(ports: &BTreeMap<u32, Vec<Protocol>>) -> Vec<ListenerFilter> {
    let is_single = |protocols: &[Protocol]| {
        let mut kinds: Vec<_> = protocols.iter().map(|protocol| MemberKind::of(*protocol)).collect();
        kinds.dedup();
        kinds.len() == 1 && kinds[0] != Some(MemberKind::Auto)
    };
    let is_tls = |protocols: &[Protocol]| protocols.iter().any(|protocol| protocol.is_tls());
    let where_not = |wanted: &dyn Fn(&[Protocol]) -> bool| {
        let others = ports.iter().filter(|(_, protocols)| !wanted(protocols));
        inspector::on_ports(others.map(|(port, _)| *port).collect())
    };
    let mut filters = vec![
        original_destination(),
        ListenerFilter {
            filter_disabled: where_not(&|protocols| !is_single(protocols)),
            ..inspector::http_inspector()
        },
    ];
    if ports.values().any(|protocols| is_tls(protocols)) {
        filters.push(ListenerFilter {
            filter_disabled: where_not(&is_tls),
            ..inspector::tls_inspector()
        });
    }
    filters
}
