//! A cluster in the making: the message, and apart from it the HTTP options, which are packed at the end.

use crate::{
    generate::{
        constant::{self, ISTIO_METADATA},
        name,
    },
    proto::{
        Any,
        envoy::{
            config::{
                cluster::v3::{
                    Cluster,
                    cluster::{ClusterDiscoveryType, DiscoveryType},
                },
                core::v3::{
                    Http1ProtocolOptions, Http2ProtocolOptions, HttpProtocolOptions as CommonOptions, Metadata,
                    UpstreamHttpProtocolOptions,
                },
            },
            extensions::upstreams::http::v3::{
                HttpProtocolOptions,
                http_protocol_options::{
                    ExplicitHttpConfig, UpstreamProtocolOptions, UseDownstreamHttpConfig,
                    explicit_http_config::ProtocolConfig,
                },
            },
        },
    },
};
use prost_types::Value;

const HTTP_OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

/// See the module's text.
pub(super) struct Draft {
    /// The cluster without its HTTP options.
    pub cluster: Cluster,
    /// The HTTP options; present only if something sets one.
    pub http: Option<HttpProtocolOptions>,
}

impl Draft {
    /// A cluster of a kind under a name, with the statistics name that it has by default.
    pub(super) fn new(name: String, kind: DiscoveryType) -> Self {
        Self::of(name, ClusterDiscoveryType::Type(kind as i32))
    }

    /// A cluster of any kind, one of an extension too.
    pub(super) fn of(name: String, kind: ClusterDiscoveryType) -> Self {
        Self {
            cluster: Cluster {
                alt_stat_name: name::delimited_stat(&name),
                name,
                cluster_discovery_type: Some(kind),
                ..Default::default()
            },
            http: None,
        }
    }

    /// True for clusters whose addresses come with the request.
    pub(super) fn is_original_dst(&self) -> bool {
        self.cluster.cluster_discovery_type == Some(ClusterDiscoveryType::Type(DiscoveryType::OriginalDst as i32))
    }

    /// True for clusters that resolve the host of each request.
    pub(super) fn is_dynamic(&self) -> bool {
        matches!(
            self.cluster.cluster_discovery_type,
            Some(ClusterDiscoveryType::ClusterType(_))
        )
    }

    /// True for clusters whose endpoints are told by EDS.
    pub(super) fn is_eds(&self) -> bool {
        self.cluster.cluster_discovery_type == Some(ClusterDiscoveryType::Type(DiscoveryType::Eds as i32))
    }

    /// True if the upstream is spoken to in HTTP/2, whatever the client speaks.
    pub(super) fn is_http2(&self) -> bool {
        let protocol = self
            .http
            .as_ref()
            .and_then(|http| http.upstream_protocol_options.as_ref());
        matches!(
            protocol,
            Some(UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig {
                protocol_config: Some(ProtocolConfig::Http2ProtocolOptions(_)),
            }))
        )
    }

    fn http(&mut self) -> &mut HttpProtocolOptions {
        self.http.get_or_insert_default()
    }

    /// Speaks HTTP/2 to the upstream, unless a protocol is chosen already.
    pub(super) fn use_http2(&mut self) {
        let options = &mut self.http().upstream_protocol_options;
        options.get_or_insert_with(|| {
            UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig {
                protocol_config: Some(ProtocolConfig::Http2ProtocolOptions(Http2ProtocolOptions::default())),
            })
        });
    }

    /// Speaks HTTP/1.1 to the upstream, with header names as the client wrote them.
    pub(super) fn keep_header_case(&mut self) {
        let options = Http1ProtocolOptions {
            header_key_format: Some(constant::keep_header_case()),
            ..Default::default()
        };
        self.http().upstream_protocol_options = Some(UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig {
            protocol_config: Some(ProtocolConfig::HttpProtocolOptions(options)),
        }));
    }

    /// Speaks to the upstream what the client speaks. The options of HTTP/1.1 are kept if that was chosen before.
    pub(super) fn use_client_protocol(&mut self) {
        let options = &mut self.http().upstream_protocol_options;
        let http1 = match options.take() {
            Some(UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig {
                protocol_config: Some(ProtocolConfig::HttpProtocolOptions(http1)),
            })) => http1,
            _ => Http1ProtocolOptions::default(),
        };
        *options = Some(UpstreamProtocolOptions::UseDownstreamProtocolConfig(
            UseDownstreamHttpConfig {
                http_protocol_options: Some(http1),
                http2_protocol_options: Some(Http2ProtocolOptions::default()),
                http3_protocol_options: None,
            },
        ));
    }

    /// The options that all HTTP versions share.
    pub(super) fn common_http(&mut self) -> &mut CommonOptions {
        self.http().common_http_protocol_options.get_or_insert_default()
    }

    /// The options of HTTP/2, if that is what the upstream is spoken to in.
    pub(super) fn http2(&mut self) -> Option<&mut Http2ProtocolOptions> {
        match &mut self.http.as_mut()?.upstream_protocol_options {
            Some(UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig {
                protocol_config: Some(ProtocolConfig::Http2ProtocolOptions(options)),
            })) => Some(options),
            _ => None,
        }
    }

    /// The options about SNI and names in certificates.
    pub(super) fn upstream_http(&mut self) -> &mut UpstreamHttpProtocolOptions {
        self.http().upstream_http_protocol_options.get_or_insert_default()
    }

    /// Sets a field of the metadata that Istio's extensions read.
    pub(super) fn set_metadata(&mut self, key: &str, value: Value) {
        let metadata: &mut Metadata = self.cluster.metadata.get_or_insert_default();
        let istio = metadata.filter_metadata.entry(ISTIO_METADATA.to_owned()).or_default();
        istio.fields.insert(key.to_owned(), value);
    }

    /// The finished cluster. Envoy wants the protocol named wherever there are HTTP options: HTTP/1.1 by default.
    pub(super) fn finish(mut self) -> Cluster {
        if let Some(mut http) = self.http.take() {
            http.upstream_protocol_options.get_or_insert_with(|| {
                UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig {
                    protocol_config: Some(ProtocolConfig::HttpProtocolOptions(Http1ProtocolOptions::default())),
                })
            });
            let options = &mut self.cluster.typed_extension_protocol_options;
            options.insert(HTTP_OPTIONS.to_owned(), Any::pack(&http));
        }
        self.cluster
    }
}
