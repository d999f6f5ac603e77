//! A cluster under construction. It consists of the message, the HTTP options, which are packed at the end, and fields
//! that nearly every cluster has, which are encoded without a message.

use std::{borrow::Cow, sync::LazyLock};

use bytes::Bytes;
use prost::Message;
use prost_types::Struct;
use smol_str::SmolStr;

use crate::{
    generate::{
        EncodedResource,
        constant::{self, ISTIO_METADATA, METADATA_EXCHANGE, PEER_METADATA},
        name, traffic_policy,
        wire::{Encoded, Writer},
    },
    model::Service,
    proto::{
        Any,
        envoy::{
            config::{
                cluster::v3::{
                    Cluster, Filter,
                    cluster::{ClusterDiscoveryType, DiscoveryType, EdsClusterConfig},
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
        field::{cluster, eds_cluster_config, metadata},
        udpa::r#type::v1::TypedStruct,
    },
};

const HTTP_OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
const SERVICES: &str = "services";

/// A cluster under construction, see the module's documentation.
pub(super) struct ClusterBuilder {
    /// Cluster without its HTTP options. Boxed because it is large and moved often.
    pub cluster: Box<Cluster>,
    /// HTTP options, if something sets one.
    pub http: Option<HttpProtocolOptions>,
    /// Encoded fields of the metadata for Istio's extensions, by name.
    metadata: Vec<(&'static str, Encoded<Struct>)>,
    /// Encoded transport socket matches, unless the message has them.
    sockets: Encoded<Cluster>,
    /// Encoded transport socket, unless the message has it.
    socket: Option<&'static Encoded<Cluster>>,
    /// True if peers do not send baggage.
    disable_baggage: bool,
    /// Encoded filters.
    filters: Cow<'static, Encoded<Cluster>>,
}

/// A finished cluster: the message, and encoded fields in the order of encoding.
pub(super) struct EncodedCluster {
    cluster: Box<Cluster>,
    pieces: Vec<Cow<'static, Encoded<Cluster>>>,
}

impl EncodedCluster {
    /// Returns the whole message.
    pub(super) fn into_message(self) -> Cluster {
        let mut cluster = *self.cluster;
        for piece in &self.pieces {
            let mut fields = Bytes::copy_from_slice(piece.as_bytes());
            let merged = cluster.merge(&mut fields);
            merged.expect("because the encoder wrote it");
        }
        cluster
    }

    /// Returns the resource.
    pub(super) fn encoded(&self) -> EncodedResource {
        EncodedResource::write(self.cluster.name.as_str().into(), |out| {
            out.spliced(&*self.cluster, self.pieces.iter().map(AsRef::as_ref));
        })
    }
}

impl ClusterBuilder {
    /// Returns a cluster of this type and name, with the default statistics name.
    pub(super) fn new(name: String, kind: DiscoveryType) -> Self {
        Self::of(name, ClusterDiscoveryType::Type(kind as i32))
    }

    /// Returns a cluster of any type, including those of extensions.
    pub(super) fn of(name: String, kind: ClusterDiscoveryType) -> Self {
        Self {
            cluster: Box::new(Cluster {
                alt_stat_name: name::delimited_stat(&name),
                name,
                cluster_discovery_type: Some(kind),
                ..Default::default()
            }),
            http: None,
            metadata: Vec::new(),
            sockets: Encoded::empty(),
            socket: None,
            disable_baggage: false,
            filters: Cow::Owned(Encoded::empty()),
        }
    }

    /// Returns true for original-destination clusters.
    pub(super) fn is_original_dst(&self) -> bool {
        self.cluster.cluster_discovery_type == Some(ClusterDiscoveryType::Type(DiscoveryType::OriginalDst as i32))
    }

    /// Returns true for clusters that resolve the host of each request.
    pub(super) fn is_dynamic(&self) -> bool {
        matches!(
            self.cluster.cluster_discovery_type,
            Some(ClusterDiscoveryType::ClusterType(_))
        )
    }

    /// Returns true for EDS clusters.
    pub(super) fn is_eds(&self) -> bool {
        self.cluster.cluster_discovery_type == Some(ClusterDiscoveryType::Type(DiscoveryType::Eds as i32))
    }

    /// Returns true if HTTP/2 is used upstream whatever the client uses.
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

    /// Returns the HTTP options, and creates them if needed.
    pub(super) fn http_mut(&mut self) -> &mut HttpProtocolOptions {
        self.http.get_or_insert_default()
    }

    /// Uses HTTP/2 upstream, unless a protocol is already selected.
    pub(super) fn use_http2(&mut self) {
        let options = &mut self.http_mut().upstream_protocol_options;
        options.get_or_insert_with(|| {
            UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig {
                protocol_config: Some(ProtocolConfig::Http2ProtocolOptions(Http2ProtocolOptions::default())),
            })
        });
    }

    /// Uses HTTP/1.1 upstream, with header names in the client's case.
    pub(super) fn keep_header_case(&mut self) {
        let options = Http1ProtocolOptions {
            header_key_format: Some(constant::keep_header_case()),
            ..Default::default()
        };
        self.http_mut().upstream_protocol_options =
            Some(UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig {
                protocol_config: Some(ProtocolConfig::HttpProtocolOptions(options)),
            }));
    }

    /// Uses the client's protocol upstream. Options of HTTP/1.1 that were set before are kept.
    pub(super) fn use_client_protocol(&mut self) {
        let options = &mut self.http_mut().upstream_protocol_options;
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

    /// Returns the options common to all HTTP versions.
    pub(super) fn common_http(&mut self) -> &mut CommonOptions {
        self.http_mut().common_http_protocol_options.get_or_insert_default()
    }

    /// Returns the HTTP/2 options, if HTTP/2 is used upstream.
    pub(super) fn http2(&mut self) -> Option<&mut Http2ProtocolOptions> {
        match &mut self.http.as_mut()?.upstream_protocol_options {
            Some(UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig {
                protocol_config: Some(ProtocolConfig::Http2ProtocolOptions(options)),
            })) => Some(options),
            _ => None,
        }
    }

    /// Returns the options of SNI and names in certificates.
    pub(super) fn upstream_http(&mut self) -> &mut UpstreamHttpProtocolOptions {
        self.http_mut().upstream_http_protocol_options.get_or_insert_default()
    }

    /// Sets a metadata field for Istio's extensions to a text.
    pub(super) fn set_text(&mut self, key: &'static str, value: &str) {
        self.set_metadata(key, |out| out.text_field(key, value));
    }

    /// Sets a metadata field for Istio's extensions to true.
    pub(super) fn set_true(&mut self, key: &'static str) {
        self.set_metadata(key, |out| out.true_field(key));
    }

    /// Sets the services of the cluster in the metadata for Istio's extensions.
    pub(super) fn set_services<'s>(&mut self, services: impl IntoIterator<Item = &'s Service>) {
        self.set_metadata(SERVICES, |out| {
            out.list_field(SERVICES, services, |out, service: &Service| {
                out.text_field("host", &service.key.hostname);
                out.text_field("name", traffic_policy::service_name(service));
                out.text_field("namespace", &service.key.namespace);
            });
        });
    }

    fn set_metadata(&mut self, key: &'static str, write: impl FnOnce(&mut Writer<Struct>)) {
        let field = Encoded::write(128, write);
        match self.metadata.binary_search_by_key(&key, |(key, _)| key) {
            Ok(at) => self.metadata[at].1 = field,
            Err(at) => self.metadata.insert(at, (key, field)),
        }
    }

    /// Returns true if there is metadata for Istio's extensions.
    pub(super) fn has_metadata(&self) -> bool {
        !self.metadata.is_empty()
    }

    /// Sets the encoded transport socket of all endpoints.
    pub(super) fn set_socket(&mut self, socket: &'static Encoded<Cluster>) {
        self.socket = Some(socket);
    }

    /// Sets the encoded transport socket matches.
    pub(super) fn set_sockets(&mut self, sockets: Encoded<Cluster>) {
        self.sockets = sockets;
    }

    /// Adds an encoded transport socket match before the others.
    pub(super) fn prefer_socket(&mut self, first: &Encoded<Cluster>) {
        let further = if self.sockets.is_empty() {
            Encoded::of(&Cluster {
                transport_socket_matches: std::mem::take(&mut self.cluster.transport_socket_matches),
                ..Default::default()
            })
        } else {
            std::mem::take(&mut self.sockets)
        };
        self.sockets = Encoded::write(first.len() + further.len(), |out| {
            out.fields(first);
            out.fields(&further);
        });
    }

    /// Moves the transport socket matches into the message, for callers that change them.
    pub(super) fn sockets_in_message(&mut self) -> &mut Cluster {
        let sockets = std::mem::take(&mut self.sockets);
        let mut fields = Bytes::copy_from_slice(sockets.as_bytes());
        let merged = self.cluster.merge(&mut fields);
        merged.expect("because the encoder wrote it");
        &mut self.cluster
    }

    /// Adds the filter that reads the peer's metadata from the baggage of a tunnel.
    pub(super) fn read_baggage(&mut self) {
        static FILTER: LazyLock<Encoded<Cluster>> = LazyLock::new(|| {
            let config = TypedStruct {
                type_url: "type.googleapis.com/envoy.extensions.network_filters.peer_metadata.UpstreamConfig"
                    .to_owned(),
                value: Some(constant::structure([])),
            };
            filter_field("upstream_hbone_peer_metadata", Any::pack(&config))
        });
        self.filters.to_mut().append(|out| out.fields(&FILTER));
    }

    /// Declares that the servers do not send baggage.
    pub(super) fn disable_baggage(&mut self) {
        self.disable_baggage = true;
    }

    /// Adds the filter that exchanges metadata over TCP, with additional labels.
    pub(super) fn exchange_metadata(&mut self, labels: &[SmolStr]) {
        static USUAL: LazyLock<Encoded<Cluster>> = LazyLock::new(|| exchange_filter(&[]));
        self.filters = if labels.is_empty() {
            Cow::Borrowed(&USUAL)
        } else {
            Cow::Owned(exchange_filter(labels))
        };
    }

    fn write_metadata(&self, out: &mut Writer<Metadata>) {
        if !self.metadata.is_empty() {
            out.entry(metadata::FILTER_METADATA, ISTIO_METADATA, |out| {
                for (_, field) in &self.metadata {
                    out.fields(field);
                }
            });
        }
        if self.disable_baggage {
            out.entry(metadata::FILTER_METADATA, PEER_METADATA, |out| {
                out.true_field("disable_baggage_discovery");
            });
        }
    }

    /// Returns the finished cluster. Envoy requires a protocol in HTTP options; the default is HTTP/1.1.
    pub(super) fn finish(mut self) -> EncodedCluster {
        let mut pieces = Vec::with_capacity(6);
        if self.is_eds() {
            pieces.push(Cow::Owned(eds_config(&self.cluster.name)));
        }
        pieces.extend(self.socket.map(Cow::Borrowed));
        if !self.metadata.is_empty() || self.disable_baggage {
            let length: usize = self.metadata.iter().map(|(_, field)| field.len()).sum();
            pieces.push(Cow::Owned(Encoded::write(length + 24, |out| {
                out.nested(cluster::METADATA, |out| self.write_metadata(out));
            })));
        }
        if let Some(mut http) = self.http.take() {
            http.upstream_protocol_options.get_or_insert_with(|| {
                UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig {
                    protocol_config: Some(ProtocolConfig::HttpProtocolOptions(Http1ProtocolOptions::default())),
                })
            });
            pieces.push(Cow::Owned(Encoded::write(192, |out| {
                out.entry(cluster::TYPED_EXTENSION_PROTOCOL_OPTIONS, HTTP_OPTIONS, |out| {
                    out.pack(|out| out.whole(&http));
                });
            })));
        }
        if !self.filters.is_empty() {
            pieces.push(self.filters);
        }
        if !self.sockets.is_empty() {
            pieces.push(Cow::Owned(self.sockets));
        }
        EncodedCluster {
            cluster: self.cluster,
            pieces,
        }
    }
}

/// Encodes the filter that exchanges metadata over TCP as a field of a cluster.
fn exchange_filter(labels: &[SmolStr]) -> Encoded<Cluster> {
    filter_field(METADATA_EXCHANGE, constant::metadata_exchange(labels))
}

fn filter_field(name: &str, config: Any) -> Encoded<Cluster> {
    let filter = Filter {
        name: name.to_owned(),
        typed_config: Some(config),
        config_discovery: None,
    };
    Encoded::of(&Cluster {
        filters: vec![filter],
        ..Default::default()
    })
}

/// Returns the EDS configuration: the same ADS stream, under the cluster's name.
fn eds_config(name: &str) -> Encoded<Cluster> {
    static SOURCE: LazyLock<Encoded<EdsClusterConfig>> = LazyLock::new(|| {
        Encoded::of(&EdsClusterConfig {
            eds_config: Some(constant::ads_source()),
            ..Default::default()
        })
    });
    Encoded::write(SOURCE.len() + name.len() + 8, |out| {
        out.nested(cluster::EDS_CLUSTER_CONFIG, |out| {
            out.fields(&SOURCE);
            out.text(eds_cluster_config::SERVICE_NAME, name);
        });
    })
}
