//! HTTP filters of a connection manager, in order.

use std::sync::{LazyLock, OnceLock};

use prost::Message;
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
            ALPN_FILTER, METADATA_EXCHANGE, PEER_EXCHANGE_ALPN, boolean, http_filter, list, metadata_exchange, object,
            structure, text,
        },
        proxy::ProxyType,
        wire,
    },
    proto::{
        Any,
        envoy::{
            config::cluster::v3::cluster::DnsLookupFamily,
            extensions::{
                common::dynamic_forward_proxy::v3::DnsCacheConfig,
                filters::{
                    http::{
                        cors::v3::Cors,
                        dynamic_forward_proxy::{v3 as dynamic_forward_proxy, v3::filter_config},
                        fault::v3::HttpFault,
                        grpc_stats::{v3 as grpc_stats, v3::filter_config::PerMethodStatSpecifier},
                        grpc_web::v3::GrpcWeb,
                        router::v3::Router,
                        stateful_session::v3::StatefulSession,
                    },
                    network::http_connection_manager::v3::HttpFilter,
                },
            },
        },
        istio::envoy::config::filter::http::alpn::{
            v2alpha1 as alpn,
            v2alpha1::filter_config::{AlpnOverride, Protocol as UpstreamProtocol},
        },
        udpa::r#type::v1::TypedStruct,
    },
};

impl FilterStack<'_> {
    /// Encodes the HTTP filters of a connection as fields of its manager.
    pub(crate) fn http_filters(&self, http: &HttpConnection) -> Vec<u8> {
        let features = self.features();
        let inbound = self.class == ListenerClass::SidecarInbound;
        let secured = self.http_security(http.tunneled);
        let mut fields = Vec::with_capacity(2048);
        let out = &mut fields;
        let add = |out: &mut Vec<u8>, filters: &[HttpFilter]| filters.iter().for_each(|filter| write(out, filter));
        let extend = |out: &mut Vec<u8>, phase| add(out, &extension::http_filters(self, phase, http.port));
        if !http.tunneled && self.has_metadata_exchange() {
            self.add_http_metadata_exchange(out, http);
        }
        add(out, secured.of(SecurityStage::Custom));
        extend(out, ExtensionPhase::Authentication);
        add(out, secured.of(SecurityStage::Authentication));
        extend(out, ExtensionPhase::Authorization);
        add(out, secured.of(SecurityStage::Authorization));
        // Waypoints change requests before they report them.
        let is_waypoint = self.client.proxy_type == ProxyType::Waypoint;
        if !is_waypoint {
            extend(out, ExtensionPhase::Stats);
            extend(out, ExtensionPhase::Unspecified);
        }
        let fixed = &*FIXED;
        if http.is_grpc_web() {
            out.extend_from_slice(&fixed.grpc_web);
        }
        if self.has_extension("envoy.filters.http.grpc_stats") {
            out.extend_from_slice(&fixed.grpc_stats);
        }
        if features.pilot_enable_alpn_filter && !inbound && self.has_extension(ALPN_FILTER) {
            out.extend_from_slice(&fixed.alpn);
        }
        out.extend_from_slice(&fixed.fault_and_cors);
        if is_waypoint {
            extend(out, ExtensionPhase::Stats);
            extend(out, ExtensionPhase::Unspecified);
            if self.has_extension(METADATA_EXCHANGE) {
                out.extend_from_slice(&fixed.upstream_peer);
            }
        }
        for config in &self.stats_configs().value {
            write(out, &http_filter(STATS_FILTER, config.clone()));
        }
        if features.pilot_enable_persistent_session_filter && !inbound {
            out.extend_from_slice(&fixed.stateful_session);
        }
        if let Some(host) = &http.dynamic_dns {
            write(out, &dynamic_forward_proxy(host));
        }
        out.extend_from_slice(&fixed.router[usize::from(self.client.suppresses_debug_headers())]);
        fields
    }

    /// Adds the metadata exchange, encoded once for all proxies unless it carries labels.
    fn add_http_metadata_exchange(&self, out: &mut Vec<u8>, http: &HttpConnection) {
        static MADE: [OnceLock<Vec<u8>>; 4] = [const { OnceLock::new() }; 4];
        let filter = || written(&self.metadata_exchange(http));
        if !self.features().pilot_mx_additional_labels.is_empty() {
            out.extend_from_slice(&filter());
            return;
        }
        let inbound = self.class == ListenerClass::SidecarInbound;
        let made = &MADE[usize::from(inbound) + 2 * usize::from(http.mesh_only_exchange)];
        out.extend_from_slice(made.get_or_init(filter));
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
        config.extend(self.additional_labels());
        let config = TypedStruct {
            type_url: PEER_METADATA_URL.to_owned(),
            value: Some(Struct {
                fields: config.into_iter().collect(),
            }),
        };
        http_filter(METADATA_EXCHANGE, Any::pack(&config))
    }

    /// Returns the additional labels of metadata exchange.
    fn additional_labels(&self) -> Option<(String, Value)> {
        let labels = &self.features().pilot_mx_additional_labels;
        let values = labels.iter().map(|label| text(label.as_str())).collect();
        (!labels.is_empty()).then(|| ("additional_labels".to_owned(), list(values)))
    }

    /// Returns the configuration of the TCP metadata exchange.
    pub(crate) fn tcp_metadata_exchange(&self) -> Any {
        let Some(labels) = self.additional_labels() else {
            return metadata_exchange();
        };
        let mut fields = vec![
            ("protocol".to_owned(), text(PEER_EXCHANGE_ALPN)),
            ("enable_discovery".to_owned(), boolean(true)),
        ];
        fields.push(labels);
        Any::pack(&TypedStruct {
            type_url: "type.googleapis.com/envoy.tcp.metadataexchange.config.MetadataExchange".to_owned(),
            value: Some(Struct {
                fields: fields.into_iter().collect(),
            }),
        })
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

/// Returns the filter that identifies a peer by the proxy's workload information.
pub fn peer_discovery(side: PeerSide) -> HttpFilter {
    let workload = object([("workload_discovery".to_owned(), object([].into()))].into());
    let discovery = list(vec![workload]);
    let (name, fields) = match side {
        PeerSide::Downstream => (
            "waypoint_downstream_peer_metadata",
            vec![
                ("downstream_discovery", discovery),
                ("shared_with_upstream", boolean(true)),
            ],
        ),
        PeerSide::Upstream => (
            "waypoint_upstream_peer_metadata",
            vec![("upstream_discovery", discovery)],
        ),
    };
    let config = TypedStruct {
        type_url: PEER_METADATA_URL.to_owned(),
        value: Some(structure(fields)),
    };
    http_filter(name, Any::pack(&config))
}

/// Type of the configuration of filters that identify peers.
const PEER_METADATA_URL: &str = "type.googleapis.com/io.istio.http.peer_metadata.Config";

/// Field `http_filters` of connection managers.
const HTTP_FILTERS: u32 = 5;

/// Adds a filter as a field of a connection manager.
fn write(out: &mut Vec<u8>, filter: &HttpFilter) {
    wire::nested(out, HTTP_FILTERS, |out| filter.encode_raw(out));
}

fn written(filter: &HttpFilter) -> Vec<u8> {
    let mut field = Vec::new();
    write(&mut field, filter);
    field
}

/// Encoded filters without inputs.
struct StaticFilters {
    grpc_web: Vec<u8>,
    grpc_stats: Vec<u8>,
    alpn: Vec<u8>,
    fault_and_cors: Vec<u8>,
    stateful_session: Vec<u8>,
    upstream_peer: Vec<u8>,
    /// The second router suppresses debug headers.
    router: [Vec<u8>; 2],
}

static FIXED: LazyLock<StaticFilters> = LazyLock::new(|| {
    let fault = http_filter("envoy.filters.http.fault", Any::pack(&HttpFault::default()));
    let cors = http_filter("envoy.filters.http.cors", Any::pack(&Cors {}));
    let session = Any::pack(&StatefulSession::default());
    StaticFilters {
        grpc_web: written(&http_filter("envoy.filters.http.grpc_web", Any::pack(&GrpcWeb {}))),
        grpc_stats: written(&make_grpc_stats()),
        alpn: written(&make_alpn()),
        fault_and_cors: [written(&fault), written(&cors)].concat(),
        stateful_session: written(&http_filter("envoy.filters.http.stateful_session", session)),
        upstream_peer: written(&peer_discovery(PeerSide::Upstream)),
        router: [false, true].map(|suppress_envoy_headers| {
            let router = Router {
                suppress_envoy_headers,
                ..Default::default()
            };
            written(&http_filter("envoy.filters.http.router", Any::pack(&router)))
        }),
    }
});

fn make_grpc_stats() -> HttpFilter {
    let config = grpc_stats::FilterConfig {
        emit_filter_state: true,
        per_method_stat_specifier: Some(PerMethodStatSpecifier::StatsForAllMethods(false)),
        ..Default::default()
    };
    http_filter("envoy.filters.http.grpc_stats", Any::pack(&config))
}

fn make_alpn() -> HttpFilter {
    let overrides = [
        (UpstreamProtocol::Http10, ["istio-http/1.0", "istio", "http/1.0"]),
        (UpstreamProtocol::Http11, ["istio-http/1.1", "istio", "http/1.1"]),
        (UpstreamProtocol::Http2, ["istio-h2", "istio", "h2"]),
    ];
    let config = alpn::FilterConfig {
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
