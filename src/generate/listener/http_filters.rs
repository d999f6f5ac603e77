//! The HTTP filters of a connection manager, in order.

use std::sync::LazyLock;

use prost_types::{Struct, Value};

use super::{client::ListenerClass, hcm::HttpConnection, stack::FilterStack, stats::STATS_FILTER};
use crate::{
    base::Hostname,
    generate::{
        constant::{
            ALPN_FILTER, METADATA_EXCHANGE, PEER_EXCHANGE_ALPN, boolean, list, metadata_exchange, object, text,
        },
        extension::{self, ExtensionPhase},
        security::SecurityStage,
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
                        dynamic_forward_proxy::v3::{self as dynamic_forward_proxy, filter_config},
                        fault::v3::HttpFault,
                        grpc_stats::v3::{self as grpc_stats, filter_config::PerMethodStatSpecifier},
                        grpc_web::v3::GrpcWeb,
                        router::v3::Router,
                        stateful_session::v3::StatefulSession,
                    },
                    network::http_connection_manager::v3::{HttpFilter, http_filter},
                },
            },
        },
        istio::envoy::config::filter::http::alpn::v2alpha1::{
            self as alpn,
            filter_config::{AlpnOverride, Protocol as UpstreamProtocol},
        },
        udpa::r#type::v1::TypedStruct,
    },
};

impl FilterStack<'_> {
    /// The HTTP filters of a connection.
    pub(super) fn http_filters(&self, http: &HttpConnection) -> Vec<HttpFilter> {
        let features = self.features();
        let inbound = self.class == ListenerClass::SidecarInbound;
        let extension = |phase| extension::http_filters(self, phase, http.port);
        let secured = self.http_security(http.tunneled);
        let security = |stage| secured.of(stage);
        let mut filters = Vec::new();
        if !http.tunneled && self.has_metadata_exchange() {
            filters.push(self.metadata_exchange(http));
        }
        filters.extend(security(SecurityStage::Custom));
        filters.extend(extension(ExtensionPhase::Authentication));
        filters.extend(security(SecurityStage::Authentication));
        filters.extend(extension(ExtensionPhase::Authorization));
        filters.extend(security(SecurityStage::Authorization));
        filters.extend(extension(ExtensionPhase::Stats));
        filters.extend(extension(ExtensionPhase::Unspecified));
        if http.is_grpc_web() {
            filters.push(filter("envoy.filters.http.grpc_web", Any::pack(&GrpcWeb {})));
        }
        if self.has_extension("envoy.filters.http.grpc_stats") {
            filters.push(grpc_stats());
        }
        if features.pilot_enable_alpn_filter && !inbound && self.has_extension(ALPN_FILTER) {
            filters.push(alpn());
        }
        filters.push(filter("envoy.filters.http.fault", Any::pack(&HttpFault::default())));
        filters.push(filter("envoy.filters.http.cors", Any::pack(&Cors {})));
        filters.extend(
            self.stats_configs()
                .into_iter()
                .map(|config| filter(STATS_FILTER, config)),
        );
        if features.pilot_enable_persistent_session_filter && !inbound {
            let config = Any::pack(&StatefulSession::default());
            filters.push(filter("envoy.filters.http.stateful_session", config));
        }
        filters.extend(http.dynamic_dns.as_ref().map(dynamic_forward_proxy));
        let router = Router {
            suppress_envoy_headers: self.client.suppresses_debug_headers(),
            ..Default::default()
        };
        filters.push(filter("envoy.filters.http.router", Any::pack(&router)));
        filters
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
            type_url: "type.googleapis.com/io.istio.http.peer_metadata.Config".to_owned(),
            value: Some(Struct {
                fields: config.into_iter().collect(),
            }),
        };
        filter(METADATA_EXCHANGE, Any::pack(&config))
    }

    /// The labels that metadata exchange carries beyond the usual ones.
    fn additional_labels(&self) -> Option<(String, Value)> {
        let labels = &self.features().pilot_mx_additional_labels;
        let values = labels.iter().map(|label| text(label.as_str())).collect();
        (!labels.is_empty()).then(|| ("additional_labels".to_owned(), list(values)))
    }

    /// The configuration of the TCP metadata exchange.
    pub(super) fn tcp_metadata_exchange(&self) -> Any {
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

/// An HTTP filter with its configuration.
pub fn filter(name: &str, config: Any) -> HttpFilter {
    HttpFilter {
        name: name.to_owned(),
        config_type: Some(http_filter::ConfigType::TypedConfig(config)),
        ..Default::default()
    }
}

fn grpc_stats() -> HttpFilter {
    static FILTER: LazyLock<HttpFilter> = LazyLock::new(make_grpc_stats);
    FILTER.clone()
}

fn make_grpc_stats() -> HttpFilter {
    let config = grpc_stats::FilterConfig {
        emit_filter_state: true,
        per_method_stat_specifier: Some(PerMethodStatSpecifier::StatsForAllMethods(false)),
        ..Default::default()
    };
    filter("envoy.filters.http.grpc_stats", Any::pack(&config))
}

fn alpn() -> HttpFilter {
    static FILTER: LazyLock<HttpFilter> = LazyLock::new(make_alpn);
    FILTER.clone()
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
    filter(ALPN_FILTER, Any::pack(&config))
}

/// The name of the DNS cache that a wildcard host's filters and cluster share.
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
    filter("envoy.filters.http.dynamic_forward_proxy", Any::pack(&config))
}
