//! HBONE on sidecars and gateways: the listener that originates tunnels, the one that terminates them, and the internal
//! listener for connections out of tunnels.

use smol_str::SmolStr;

use super::{
    ListenerKey,
    inbound::{InboundListenerBuilder, InboundProxyView},
    inspector::original_destination,
    outbound::listener::{additional_addresses, exact_balance},
};
use crate::{
    base::{Hashed, Shared, cidr::IpMode},
    generate::{
        BuildContext, EncodedResource,
        constant::{
            self, HTTP_CONNECTION_MANAGER, METADATA_EXCHANGE, cidr_range, http_filter, network_filter, structure, text,
            wildcards,
        },
        filter::{
            SecurityStage,
            http_filters::{self, PeerSide},
            proxy_view::{FilterProxyView, ListenerClass},
            security::denied_routes,
            stack::{FilterStack, LogPosition},
            tcp::{TCP_PROXY, plain_proxy},
            tls::ServerCertificates,
        },
        patch::{self, PatchContext},
        proxy::{IstioVersion, ProxyType},
        proxy_view::Baggage,
        resource::Built,
        selected::Selected,
        tunnel::{
            self, CONNECT_AUTHORITY, CONNECT_ORIGINATE, CONNECT_TERMINATE, HBONE_PORT, MAIN_INTERNAL, REQUEST_SOURCE,
            SOURCE_HEADER, tls_context,
        },
    },
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::{
                    DataSource, HeaderValue, HeaderValueOption, Http2ProtocolOptions, KeepaliveSettings,
                    SubstitutionFormatString, TrafficDirection, TransportSocket, data_source,
                    header_value_option::HeaderAppendAction, substitution_format_string::Format,
                },
                listener::v3::{
                    Filter, FilterChain, Listener,
                    listener::{InternalListenerConfig, ListenerSpecifier},
                },
                route::v3::{
                    Route, RouteAction, RouteConfiguration, RouteMatch, VirtualHost, route,
                    route_action::{ClusterSpecifier, UpgradeConfig as RouteUpgrade, upgrade_config::ConnectConfig},
                    route_match::{ConnectMatcher, PathSpecifier},
                },
            },
            extensions::{
                filters::{
                    common::set_filter_state::v3::{
                        FilterStateValue,
                        filter_state_value::{Key, SharedWithUpstream, Value},
                    },
                    http::{router::v3::Router, set_filter_state},
                    network::{
                        http_connection_manager::v3::{
                            HttpConnectionManager, HttpFilter,
                            http_connection_manager::{RouteSpecifier, SetCurrentClientCertDetails, UpgradeConfig},
                        },
                        tcp_proxy::v3::{TcpProxy, tcp_proxy::TunnelingConfig},
                    },
                },
                transport_sockets::tls::v3::DownstreamTlsContext,
            },
        },
        udpa::r#type::v1::TypedStruct,
    },
};

/// Filter state with the baggage that describes the workload.
const BAGGAGE: &str = "io.istio.baggage";
/// Factory of strings that are part of the connection pool key.
const HASHABLE_STRING: &str = "istio.hashable_string";
/// First release whose proxies support it.
const HASHABLE_SINCE: IstioVersion = IstioVersion {
    major: 1,
    minor: 29,
    patch: 2,
};

/// HBONE listeners of a proxy.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HbonePart {
    /// Attributes of the originating listener, if there is one.
    pub origin: Option<OriginateKey>,
    /// Attributes of the terminating listener, if there is one.
    pub end: Option<InternalKey>,
}

/// Inputs of the listener that originates tunnels.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OriginateKey {
    /// Attributes that filters depend on.
    pub filters: Hashed<FilterProxyView>,
    /// Direction of its traffic.
    pub class: ListenerClass,
}

/// Inputs of the listener that terminates tunnels.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TerminateKey {
    /// Attributes that filters depend on.
    pub filters: Hashed<FilterProxyView>,
    /// Address families of its addresses.
    pub ip_mode: IpMode,
    /// Certificates of the proxy.
    pub certificates: ServerCertificates,
    /// True if the connections inside depend on what kind of proxy originated the tunnel.
    pub keeps_source: bool,
}

/// Inputs of a sidecar's internal listener behind the terminating one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InternalKey {
    /// Attributes of the sidecar.
    pub client: Hashed<InboundProxyView>,
    /// Addresses of the sidecar: tunnels to other addresses are not served.
    pub addresses: Shared<[SmolStr]>,
}

impl HbonePart {
    /// Selects the HBONE listeners of a sidecar or gateway; `None` without any.
    pub fn of(
        ctx: &BuildContext,
        selected: &Selected,
        filters: &Hashed<FilterProxyView>,
        inbound: Option<&Hashed<InboundProxyView>>,
    ) -> Option<Self> {
        let features = &ctx.mesh.installation.features;
        let class = match inbound {
            Some(_) => ListenerClass::SidecarOutbound,
            None => ListenerClass::Gateway,
        };
        let origin = features.pilot_enable_sending_hbone.then(|| OriginateKey {
            filters: filters.clone(),
            class,
        });
        let listens = tunnel::ends_at_sidecar(features, selected.proxy);
        let end = inbound.filter(|_| listens).map(|client| InternalKey {
            client: client.clone(),
            addresses: selected.class.addresses.clone(),
        });
        (origin.is_some() || end.is_some()).then_some(Self { origin, end })
    }

    /// Lists the listeners.
    pub fn list(&self) -> Vec<ListenerKey> {
        let mut keys = Vec::new();
        if let Some(end) = &self.end {
            keys.push(ListenerKey::ConnectTerminate(TerminateKey {
                filters: end.client.filters.clone(),
                ip_mode: end.client.ip_mode,
                certificates: end.client.certificates.clone(),
                keeps_source: false,
            }));
            keys.push(ListenerKey::MainInternal(end.clone()));
        }
        keys.extend(self.origin.clone().map(ListenerKey::ConnectOriginate));
        keys
    }
}

impl OriginateKey {
    /// Builds the listener.
    ///
    /// Parity (pilot/pkg/networking/core/listener.go): patches apply to that of a waypoint only.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let stack = FilterStack::new(ctx, &self.filters, self.class);
        let mut tunnel = TunnelingConfig {
            hostname: "%DOWNSTREAM_LOCAL_ADDRESS%".to_owned(),
            ..Default::default()
        };
        let mut filters: Vec<_> = stack.baggage_filter(&mut tunnel).into_iter().collect();
        let proxy = TcpProxy {
            tunneling_config: Some(tunnel),
            access_log: stack.access_logs(LogPosition::HboneOrigination),
            ..plain_proxy(CONNECT_ORIGINATE)
        };
        filters.push(network_filter(TCP_PROXY, Any::pack(&proxy)));
        let listener = Listener {
            use_original_dst: Some(false),
            listener_filters: vec![original_destination()],
            filter_chains: vec![FilterChain {
                filters,
                ..Default::default()
            }],
            access_log: stack.access_logs(LogPosition::Listener),
            ..internal(CONNECT_ORIGINATE)
        };
        if self.class == ListenerClass::SidecarInbound {
            return patched(stack, PatchContext::SidecarInbound, listener);
        }
        Built::new(EncodedResource::new(CONNECT_ORIGINATE, &listener)).with_notes(stack.into_notes())
    }
}

impl TerminateKey {
    /// Builds the listener.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let stack = FilterStack::new(ctx, &self.filters, ListenerClass::SidecarInbound);
        let binds = wildcards(self.ip_mode);
        let listener = Listener {
            name: CONNECT_TERMINATE.to_owned(),
            address: Some(constant::address(binds[0], HBONE_PORT)),
            additional_addresses: additional_addresses(&binds[1..], HBONE_PORT),
            connection_balance_config: Some(exact_balance()),
            filter_chains: vec![FilterChain {
                name: "default".to_owned(),
                filters: vec![stack.terminating_filter(self.keeps_source)],
                transport_socket: Some(self.transport_socket(ctx)),
                ..Default::default()
            }],
            access_log: stack.access_logs(LogPosition::Listener),
            ..Default::default()
        };
        patched(stack, PatchContext::SidecarInbound, listener)
    }
}

/// Patches and encodes a listener.
pub(super) fn patched(stack: FilterStack, context: PatchContext, listener: Listener) -> Built {
    let (ctx, client) = (stack.ctx, stack.client);
    let notes = stack.into_notes();
    let (patches, extensions) = (&client.listener_patches, &client.extensions);
    patch::build_listener(&ctx, patches, extensions, context, listener, notes)
}

impl TerminateKey {
    /// Returns the transport socket of tunnels with peers of the mesh.
    fn transport_socket(&self, ctx: &BuildContext) -> TransportSocket {
        let context = DownstreamTlsContext {
            common_tls_context: Some(tls_context(ctx, self.certificates.secrets(), None)),
            require_client_certificate: Some(true),
            ..Default::default()
        };
        constant::socket("tls", Any::pack(&context))
    }
}

impl InternalKey {
    /// Builds the listener.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let builder = InboundListenerBuilder {
            stack: FilterStack::new(ctx, &self.client.filters, ListenerClass::SidecarInbound),
            client: &self.client,
            sockets: Default::default(),
        };
        let own: Vec<_> = self.addresses.iter().filter_map(|ip| cidr_range(ip)).collect();
        let mut chains = builder.tunnel_chains(&own);
        let mut listener_filters = vec![original_destination()];
        listener_filters.extend(chains.needs.inspectors());
        chains.listener.rest = Listener {
            traffic_direction: TrafficDirection::Inbound as i32,
            continue_on_listener_filters_timeout: true,
            listener_filters,
            access_log: builder.stack.access_logs(LogPosition::Listener),
            ..internal(MAIN_INTERNAL)
        };
        chains.listener.finish(ctx, builder.stack, PatchContext::SidecarInbound)
    }
}

impl FilterProxyView {
    /// Returns the factory of connection pool keys; upstream Envoy has a simpler one.
    pub(super) fn hashable_string(&self) -> &'static str {
        if self.version >= HASHABLE_SINCE && self.extensions.has(HASHABLE_STRING) {
            HASHABLE_STRING
        } else {
            "envoy.string"
        }
    }

    /// Returns the context of patches of the listeners of a gateway or waypoint. A gateway between networks is a
    /// waypoint.
    pub(super) fn gateway_patch_context(&self) -> PatchContext {
        match self.proxy_type {
            ProxyType::Router => PatchContext::Gateway,
            _ => PatchContext::SidecarInbound,
        }
    }
}

impl FilterStack<'_> {
    /// Returns the connection manager that terminates tunnels.
    fn terminating_filter(&self, keeps_source: bool) -> Filter {
        let mut manager = HttpConnectionManager::default();
        self.client.apply_headers(ListenerClass::SidecarInbound, &mut manager);
        self.client.apply_client_certificates(&mut manager);
        manager.set_current_client_cert_details = Some(SetCurrentClientCertDetails {
            subject: Some(true),
            uri: true,
            dns: true,
            ..Default::default()
        });
        CONNECT_TERMINATE.clone_into(&mut manager.stat_prefix);
        manager.use_remote_address = Some(false);
        manager.stream_idle_timeout = Some(prost_types::Duration::default());
        manager.upgrade_configs = vec![UpgradeConfig {
            upgrade_type: "CONNECT".to_owned(),
            ..Default::default()
        }];
        let seconds = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        manager.http2_protocol_options = Some(Http2ProtocolOptions {
            allow_connect: true,
            // One worker serves all streams of a connection.
            max_concurrent_streams: Some(100),
            connection_keepalive: Some(KeepaliveSettings {
                interval: seconds(10),
                timeout: seconds(20),
                ..Default::default()
            }),
            ..Default::default()
        });
        manager.access_log = self.access_logs(LogPosition::HboneTermination);
        let security = self.tunnel_security();
        let router = Router {
            suppress_envoy_headers: self.client.suppresses_debug_headers(),
            ..Default::default()
        };
        manager.http_filters = security.of(SecurityStage::Authorization).to_vec();
        if self.has_extension(METADATA_EXCHANGE) {
            manager.http_filters.push(http_filters::peer_discovery(
                PeerSide::Downstream,
                Baggage::enabled(self.features()),
            ));
        }
        manager.http_filters.push(self.connect_authority());
        manager.http_filters.extend(keeps_source.then(|| self.request_source()));
        manager
            .http_filters
            .push(http_filter("envoy.filters.http.router", Any::pack(&router)));
        manager.route_specifier = Some(RouteSpecifier::RouteConfig(if security.denied {
            denied_routes()
        } else {
            tunnel_routes()
        }));
        network_filter(HTTP_CONNECTION_MANAGER, Any::pack(&manager))
    }

    /// Makes a tunnel exchange peer metadata as baggage, if that is enabled. Returns the filter that reads the
    /// response.
    pub(super) fn baggage_filter(&self, tunnel: &mut TunnelingConfig) -> Option<Filter> {
        if !self.features().ambient_enable_baggage || !self.has_extension(METADATA_EXCHANGE) {
            return None;
        }
        tunnel.propagate_response_headers = true;
        let header = added_header("baggage", &format!("%FILTER_STATE({BAGGAGE}:PLAIN)%"));
        tunnel.headers_to_add.push(header);
        let config = TypedStruct {
            type_url: "type.googleapis.com/envoy.extensions.network_filters.peer_metadata.Config".to_owned(),
            value: Some(structure([("baggage_key", text(BAGGAGE))])),
        };
        Some(network_filter("upstream_hbone_peer_metadata", Any::pack(&config)))
    }

    /// Keeps attributes of the tunnel for the connections inside it.
    fn connect_authority(&self) -> HttpFilter {
        let factory = self.client.hashable_string();
        let values = [
            ("envoy.filters.listener.original_dst.local_ip", "%REQ(:AUTHORITY)%", ""),
            (CONNECT_AUTHORITY, "%REQ(:AUTHORITY)%", factory),
            (
                "envoy.filters.listener.original_dst.remote_ip",
                "%DOWNSTREAM_REMOTE_ADDRESS%",
                "",
            ),
            ("io.istio.peer_principal", "%DOWNSTREAM_PEER_URI_SAN%", factory),
            ("io.istio.local_principal", "%DOWNSTREAM_LOCAL_URI_SAN%", factory),
        ];
        let config = set_filter_state::v3::Config {
            on_request_headers: values
                .into_iter()
                .map(|(key, value, factory)| state_value(key, value, factory, SharedWithUpstream::Once))
                .collect(),
            ..Default::default()
        };
        http_filter("connect_authority", Any::pack(&config))
    }

    /// Keeps the kind of proxy that originated the tunnel for the connections inside it.
    fn request_source(&self) -> HttpFilter {
        let value = format!("%REQ({SOURCE_HEADER})%");
        let factory = self.client.hashable_string();
        let config = set_filter_state::v3::Config {
            on_request_headers: vec![state_value(REQUEST_SOURCE, &value, factory, SharedWithUpstream::Once)],
            ..Default::default()
        };
        http_filter("request_source", Any::pack(&config))
    }
}

/// Returns a header that replaces others of its name.
pub(super) fn added_header(key: &str, value: &str) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue {
            key: key.to_owned(),
            value: value.to_owned(),
            ..Default::default()
        }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd as i32,
        ..Default::default()
    }
}

/// Returns an internal listener.
pub(super) fn internal(name: &str) -> Listener {
    Listener {
        name: name.to_owned(),
        listener_specifier: Some(ListenerSpecifier::InternalListener(InternalListenerConfig {})),
        ..Default::default()
    }
}

/// Returns a filter state value for the connections inside.
pub(super) fn state_value(key: &str, value: &str, factory: &str, shared: SharedWithUpstream) -> FilterStateValue {
    FilterStateValue {
        key: Some(Key::ObjectKey(key.to_owned())),
        value: Some(Value::FormatString(SubstitutionFormatString {
            format: Some(Format::TextFormatSource(DataSource {
                specifier: Some(data_source::Specifier::InlineString(value.to_owned())),
                ..Default::default()
            })),
            ..Default::default()
        })),
        factory_key: factory.to_owned(),
        shared_with_upstream: shared as i32,
        ..Default::default()
    }
}

/// Routes every CONNECT request to the internal listener.
fn tunnel_routes() -> RouteConfiguration {
    let action = RouteAction {
        cluster_specifier: Some(ClusterSpecifier::Cluster(MAIN_INTERNAL.to_owned())),
        upgrade_configs: vec![RouteUpgrade {
            upgrade_type: "CONNECT".to_owned(),
            connect_config: Some(ConnectConfig::default()),
            ..Default::default()
        }],
        ..Default::default()
    };
    RouteConfiguration {
        name: "default".to_owned(),
        virtual_hosts: vec![VirtualHost {
            name: "default".to_owned(),
            domains: vec!["*".to_owned()],
            routes: vec![Route {
                r#match: Some(RouteMatch {
                    path_specifier: Some(PathSpecifier::ConnectMatcher(ConnectMatcher {})),
                    ..Default::default()
                }),
                action: Some(route::Action::Route(action)),
                ..Default::default()
            }],
            ..Default::default()
        }],
        ..Default::default()
    }
}
