//! HTTP filters of a connection manager, in order.

use std::{
    collections::BTreeMap,
    sync::{LazyLock, OnceLock},
    time::Duration,
};

use prost_types::{Struct, Value};

use super::{
    extension::{self, ExtensionPhase},
    hcm::HttpConnection,
    proxy_view::ListenerClass,
    security_filters::SecurityStage,
    stack::FilterStack,
    stats::STATS_FILTER,
};
use crate::{
    base::Hostname,
    generate::{
        constant::{
            ALPN_FILTER, EXTERNAL_PROCESSING, LOAD_BALANCING, METADATA_EXCHANGE, additional_labels, boolean, duration,
            http_filter, list, object, structure, text,
        },
        proxy::ProxyType,
        proxy_view::Baggage,
        wire::Encoded,
    },
    proto::{
        Any,
        envoy::{
            config::{
                cluster::v3::cluster::DnsLookupFamily,
                common::mutation_rules::v3::{HeaderMutation, header_mutation::Action},
                core::v3::{
                    GrpcService, HeaderValue, HeaderValueOption,
                    grpc_service::{EnvoyGrpc, TargetSpecifier},
                    header_value_option::HeaderAppendAction,
                },
            },
            extensions::{
                common::dynamic_forward_proxy::v3::DnsCacheConfig,
                filters::{
                    http::{
                        cors::v3::Cors,
                        dynamic_forward_proxy::{v3 as dynamic_forward_proxy, v3::filter_config},
                        ext_proc::v3::{
                            ExternalProcessor, MetadataOptions, ProcessingMode, metadata_options::MetadataNamespaces,
                            processing_mode::HeaderSendMode,
                        },
                        fault::v3::HttpFault,
                        grpc_stats::{v3 as grpc_stats_config, v3::filter_config::PerMethodStatSpecifier},
                        grpc_web::v3::GrpcWeb,
                        header_mutation::v3 as header_mutation,
                        router::v3::Router,
                        stateful_session::v3::StatefulSession,
                    },
                    network::http_connection_manager::v3::{HttpConnectionManager, HttpFilter},
                },
            },
        },
        field::http_connection_manager,
        istio::envoy::config::filter::http::alpn::{
            v2alpha1 as alpn_config,
            v2alpha1::filter_config::{AlpnOverride, Protocol as UpstreamProtocol},
        },
        udpa::r#type::v1::TypedStruct,
    },
};

const GRPC_STATS: &str = "envoy.filters.http.grpc_stats";

impl FilterStack<'_> {
    /// Encodes the HTTP filters of a connection as fields of its manager.
    pub(crate) fn http_filters(&self, http: &HttpConnection) -> Encoded<HttpConnectionManager> {
        let features = self.features();
        let inbound = self.class == ListenerClass::SidecarInbound;
        let secured = self.http_security(http.peer_source);
        let extensions = |phase| extension::http_filters(self, phase, http.port);
        let mut filters = HttpFilters(Encoded::with_capacity(2048));
        // Policies may refer to the header, so it is set before them.
        if self.client.forwards_client_identity {
            filters.append(&FIXED.client_identity);
        }
        if http.exchanges_metadata && self.has_metadata_exchange() {
            self.add_http_metadata_exchange(&mut filters, http);
        }
        filters.extend(secured.of(SecurityStage::Custom));
        filters.extend(&extensions(ExtensionPhase::Authentication));
        filters.extend(secured.of(SecurityStage::Authentication));
        filters.extend(&extensions(ExtensionPhase::Authorization));
        filters.extend(secured.of(SecurityStage::Authorization));
        // Waypoints change requests before they report them.
        let is_waypoint = self.client.proxy_type == ProxyType::Waypoint;
        if !is_waypoint {
            filters.extend(&extensions(ExtensionPhase::Stats));
            filters.extend(&extensions(ExtensionPhase::Unspecified));
        }
        let fixed = &*FIXED;
        if self.client.picks_endpoints && self.has_extension(EXTERNAL_PROCESSING) {
            filters.append(&fixed.endpoint_picker);
        }
        if http.is_grpc_web() {
            filters.append(&fixed.grpc_web);
        }
        if self.has_extension(GRPC_STATS) {
            filters.append(&fixed.grpc_stats);
        }
        if features.pilot_enable_alpn_filter && !inbound && self.has_extension(ALPN_FILTER) {
            filters.append(&fixed.alpn);
        }
        filters.append(&fixed.fault_and_cors);
        let resolver = http.dynamic_dns.as_ref().map(dynamic_forward_proxy);
        if is_waypoint {
            filters.extend(resolver.as_slice());
            filters.extend(&extensions(ExtensionPhase::Stats));
            filters.extend(&extensions(ExtensionPhase::Unspecified));
            if self.has_extension(METADATA_EXCHANGE) {
                filters.append(&fixed.upstream_peer[Baggage::enabled(features) as usize]);
            }
        }
        for config in &self.stats_configs().value {
            filters.push(&http_filter(STATS_FILTER, config.clone()));
        }
        if features.pilot_enable_persistent_session_filter && !inbound {
            filters.append(&fixed.stateful_session);
        }
        if !is_waypoint {
            filters.extend(resolver.as_slice());
        }
        filters.append(&fixed.router[usize::from(self.client.suppresses_debug_headers())]);
        filters.0
    }

    /// Adds the metadata exchange, encoded once for all proxies unless it carries labels.
    fn add_http_metadata_exchange(&self, filters: &mut HttpFilters, http: &HttpConnection) {
        static USUAL: [OnceLock<Encoded<HttpConnectionManager>>; 4] = [const { OnceLock::new() }; 4];
        if !self.features().pilot_mx_additional_labels.is_empty() {
            filters.push(&self.metadata_exchange(http));
            return;
        }
        let inbound = self.class == ListenerClass::SidecarInbound;
        let usual = &USUAL[usize::from(inbound) + 2 * usize::from(http.mesh_only_exchange)];
        filters.append(usual.get_or_init(|| encoded(vec![self.metadata_exchange(http)])));
    }

    fn metadata_exchange(&self, http: &HttpConnection) -> HttpFilter {
        let direction = if self.class == ListenerClass::SidecarInbound {
            "downstream"
        } else {
            "upstream"
        };
        let skip = http
            .mesh_only_exchange
            .then(|| ("skip_external_clusters".to_owned(), boolean(true)));
        let part = |name: &str, fields: Option<(String, Value)>| {
            let fields = object(fields.into_iter().collect());
            object([(name.to_owned(), fields)].into())
        };
        let discovery = vec![part("istio_headers", None), part("workload_discovery", None)];
        let mut config = vec![
            (format!("{direction}_discovery"), list(discovery)),
            (
                format!("{direction}_propagation"),
                list(vec![part("istio_headers", skip)]),
            ),
        ];
        let labels = additional_labels(&self.features().pilot_mx_additional_labels);
        config.extend(labels.map(|(name, labels)| (name.to_owned(), labels)));
        let config = TypedStruct {
            type_url: PEER_METADATA_URL.to_owned(),
            value: Some(Struct {
                fields: config.into_iter().collect(),
            }),
        };
        http_filter(METADATA_EXCHANGE, Any::pack(&config))
    }
}

/// Peer that a waypoint identifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerSide {
    /// The caller, which is propagated to the following chains.
    Downstream,
    /// The destination.
    Upstream,
}

/// Returns the filter that identifies a peer by the proxy's workload information, and by the baggage of its tunnel if
/// that is enabled.
pub fn peer_discovery(side: PeerSide, baggage: Baggage) -> HttpFilter {
    let method = |name: &str, config: BTreeMap<String, Value>| object([(name.to_owned(), object(config))].into());
    let workload = method("workload_discovery", BTreeMap::new());
    let with = |method: Value| {
        list(
            std::iter::once(workload.clone())
                .chain(baggage.is_exchanged().then_some(method))
                .collect(),
        )
    };
    let (name, fields) = match side {
        PeerSide::Downstream => {
            let by_baggage = method("baggage", BTreeMap::new());
            let mut fields = vec![
                ("downstream_discovery", with(by_baggage.clone())),
                ("shared_with_upstream", boolean(true)),
            ];
            if baggage.is_exchanged() {
                fields.push(("downstream_propagation", list(vec![by_baggage])));
            }
            ("waypoint_downstream_peer_metadata", fields)
        }
        PeerSide::Upstream => {
            let key = ("peer_metadata_key".to_owned(), text("upstream_peer"));
            let by_state = method("upstream_filter_state", [key].into());
            (
                "waypoint_upstream_peer_metadata",
                vec![("upstream_discovery", with(by_state))],
            )
        }
    };
    let config = TypedStruct {
        type_url: PEER_METADATA_URL.to_owned(),
        value: Some(structure(fields)),
    };
    http_filter(name, Any::pack(&config))
}

/// Type of the configuration of filters that identify peers.
const PEER_METADATA_URL: &str = "type.googleapis.com/io.istio.http.peer_metadata.Config";

/// HTTP filters under construction, encoded as fields of their connection manager.
struct HttpFilters(Encoded<HttpConnectionManager>);

impl HttpFilters {
    fn push(&mut self, filter: &HttpFilter) {
        self.0
            .append(|out| out.message(http_connection_manager::HTTP_FILTERS, filter));
    }

    fn extend(&mut self, filters: &[HttpFilter]) {
        for filter in filters {
            self.push(filter);
        }
    }

    /// Adds encoded filters.
    fn append(&mut self, filters: &Encoded<HttpConnectionManager>) {
        self.0.append(|out| out.fields(filters));
    }
}

/// Encoded filters without inputs. Listeners of a sidecar with one port take a fifth longer if each encodes these
/// (bench `suite`, case `disabled`).
struct StaticFilters {
    client_identity: Encoded<HttpConnectionManager>,
    endpoint_picker: Encoded<HttpConnectionManager>,
    grpc_web: Encoded<HttpConnectionManager>,
    grpc_stats: Encoded<HttpConnectionManager>,
    alpn: Encoded<HttpConnectionManager>,
    fault_and_cors: Encoded<HttpConnectionManager>,
    stateful_session: Encoded<HttpConnectionManager>,
    /// The index is a [`Baggage`].
    upstream_peer: [Encoded<HttpConnectionManager>; 2],
    /// The second router suppresses debug headers.
    router: [Encoded<HttpConnectionManager>; 2],
}

static FIXED: LazyLock<StaticFilters> = LazyLock::new(|| {
    let fault = http_filter("envoy.filters.http.fault", Any::pack(&HttpFault::default()));
    let cors = http_filter("envoy.filters.http.cors", Any::pack(&Cors {}));
    let grpc_web = http_filter("envoy.filters.http.grpc_web", Any::pack(&GrpcWeb {}));
    let session = Any::pack(&StatefulSession::default());
    let session = http_filter("envoy.filters.http.stateful_session", session);
    StaticFilters {
        client_identity: encoded(vec![client_identity()]),
        endpoint_picker: encoded(vec![endpoint_picker()]),
        grpc_web: encoded(vec![grpc_web]),
        grpc_stats: encoded(vec![grpc_stats()]),
        alpn: encoded(vec![alpn()]),
        fault_and_cors: encoded(vec![fault, cors]),
        stateful_session: encoded(vec![session]),
        upstream_peer: Baggage::ALL.map(|baggage| encoded(vec![peer_discovery(PeerSide::Upstream, baggage)])),
        router: [false, true].map(|suppress_envoy_headers| {
            let router = Router {
                suppress_envoy_headers,
                ..Default::default()
            };
            encoded(vec![http_filter("envoy.filters.http.router", Any::pack(&router))])
        }),
    }
});

/// Returns the filter of a waypoint that replaces the header with the identities of the connection out of a tunnel.
fn client_identity() -> HttpFilter {
    let value = "By=%FILTER_STATE(io.istio.local_principal:PLAIN)%;URI=%FILTER_STATE(io.istio.peer_principal:PLAIN)%";
    let header = HeaderValueOption {
        header: Some(HeaderValue {
            key: "x-forwarded-client-cert".to_owned(),
            value: value.to_owned(),
            ..Default::default()
        }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
        ..Default::default()
    };
    let config = header_mutation::HeaderMutation {
        mutations: Some(header_mutation::Mutations {
            request_mutations: vec![HeaderMutation {
                action: Some(Action::Append(header)),
            }],
            ..Default::default()
        }),
        ..Default::default()
    };
    http_filter("istio.waypoint.xfcc_client_identity", Any::pack(&config))
}

/// Returns the filter that asks endpoint pickers. It is inactive, because only the routes to InferencePools name
/// pickers and what these read. The result is metadata by which load balancing selects the endpoint.
///
/// Parity (pilot/pkg/xds/filters/filters.go): the filter needs the name of a cluster, which does not exist.
fn endpoint_picker() -> HttpFilter {
    let namespaces = MetadataNamespaces {
        untyped: vec![LOAD_BALANCING.to_owned()],
        ..Default::default()
    };
    let config = ExternalProcessor {
        grpc_service: Some(GrpcService {
            target_specifier: Some(TargetSpecifier::EnvoyGrpc(EnvoyGrpc {
                cluster_name: "dummy".to_owned(),
                ..Default::default()
            })),
            timeout: Some(duration(Duration::from_secs(10))),
            ..Default::default()
        }),
        failure_mode_allow: true,
        processing_mode: Some(ProcessingMode {
            request_header_mode: HeaderSendMode::Skip.into(),
            response_header_mode: HeaderSendMode::Skip.into(),
            ..Default::default()
        }),
        // Models may take long to answer.
        message_timeout: Some(duration(Duration::from_secs(1000))),
        metadata_options: Some(MetadataOptions {
            forwarding_namespaces: Some(namespaces.clone()),
            receiving_namespaces: Some(namespaces),
            ..Default::default()
        }),
        ..Default::default()
    };
    http_filter(EXTERNAL_PROCESSING, Any::pack(&config))
}

fn encoded(http_filters: Vec<HttpFilter>) -> Encoded<HttpConnectionManager> {
    Encoded::of(&HttpConnectionManager {
        http_filters,
        ..Default::default()
    })
}

fn grpc_stats() -> HttpFilter {
    let config = grpc_stats_config::FilterConfig {
        emit_filter_state: true,
        per_method_stat_specifier: Some(PerMethodStatSpecifier::StatsForAllMethods(false)),
        ..Default::default()
    };
    http_filter(GRPC_STATS, Any::pack(&config))
}

fn alpn() -> HttpFilter {
    let overrides = [
        (UpstreamProtocol::Http10, ["istio-http/1.0", "istio", "http/1.0"]),
        (UpstreamProtocol::Http11, ["istio-http/1.1", "istio", "http/1.1"]),
        (UpstreamProtocol::Http2, ["istio-h2", "istio", "h2"]),
    ];
    let config = alpn_config::FilterConfig {
        alpn_override: overrides
            .into_iter()
            .map(|(protocol, names)| AlpnOverride {
                upstream_protocol: protocol as i32,
                alpn_override: names.map(str::to_owned).to_vec(),
            })
            .collect(),
    };
    http_filter(ALPN_FILTER, Any::pack(&config))
}

/// Returns the name of the DNS cache that filters and cluster of a wildcard host share.
pub fn dns_cache_name(host: &Hostname) -> String {
    format!("{host}_dfp_dns_cache")
}

fn dynamic_forward_proxy(host: &Hostname) -> HttpFilter {
    let config = dynamic_forward_proxy::FilterConfig {
        implementation_specifier: Some(filter_config::ImplementationSpecifier::DnsCacheConfig(DnsCacheConfig {
            name: dns_cache_name(host),
            dns_lookup_family: DnsLookupFamily::V4Only as i32,
            ..Default::default()
        })),
        ..Default::default()
    };
    http_filter("envoy.filters.http.dynamic_forward_proxy", Any::pack(&config))
}
