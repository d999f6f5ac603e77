//! A cluster under construction. It consists of the message, the HTTP options, which are packed at the end, and fields
//! that nearly every cluster has, which are encoded without a message.

use std::{borrow::Cow, sync::LazyLock};

use prost::Message;

use crate::{
    generate::{
        EncodedResource, ResourceType,
        constant::{self, ISTIO_METADATA, METADATA_EXCHANGE},
        name, traffic_policy, wire,
    },
    model::Service,
    proto::envoy::{
        config::{
            cluster::v3::{
                Cluster, Filter,
                cluster::{ClusterDiscoveryType, DiscoveryType, EdsClusterConfig},
            },
            core::v3::{
                Http1ProtocolOptions, Http2ProtocolOptions, HttpProtocolOptions as CommonOptions,
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
};

const HTTP_OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
const HTTP_OPTIONS_URL: &str = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
const SERVICES: &str = "services";

/// A cluster under construction, see the module's documentation.
pub(super) struct ClusterBuilder {
    /// Cluster without its HTTP options. Boxed because it is large and moved often.
    pub cluster: Box<Cluster>,
    /// HTTP options, if something sets one.
    pub http: Option<HttpProtocolOptions>,
    /// Encoded fields of the metadata for Istio's extensions, by name.
    metadata: Vec<(&'static str, Vec<u8>)>,
    /// Encoded transport socket matches, unless the message has them.
    sockets: Vec<u8>,
    /// Encoded transport socket, unless the message has it.
    socket: &'static [u8],
    /// Encoded filters.
    filters: &'static [u8],
}

/// A finished cluster: the message, and encoded fields in the order of their numbers.
pub(super) struct EncodedCluster {
    cluster: Box<Cluster>,
    pieces: Vec<(u32, Cow<'static, [u8]>)>,
}

const EDS_CONFIG: u32 = 3;
const SOCKET: u32 = 24;
const METADATA: u32 = 25;
const EXTENSION_OPTIONS: u32 = 36;
const FILTERS: u32 = 40;
const SOCKETS: u32 = 43;

/// Returns the sort key of a field of clusters: members of a oneof are encoded at the position of its first member.
fn encoding_order(field: u32) -> u32 {
    match field {
        38 => 2,
        34 | 37 | 52 | 56 => 23,
        field => field,
    }
}

impl EncodedCluster {
    /// Returns the whole message.
    pub(super) fn into_message(self) -> Cluster {
        let mut cluster = *self.cluster;
        for (_, piece) in &self.pieces {
            let merged = cluster.merge(&**piece);
            merged.expect("because it was written according to the message");
        }
        cluster
    }

    /// Returns the resource.
    pub(super) fn encoded(&self) -> EncodedResource {
        let pieces = self.pieces.iter().map(|(field, piece)| (*field, &**piece));
        let name = self.cluster.name.as_str().into();
        EncodedResource::written(name, ResourceType::Cluster.url(), |out| {
            wire::spliced_message(out, &*self.cluster, pieces, encoding_order);
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
            sockets: Vec::new(),
            socket: &[],
            filters: &[],
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
        self.set_metadata(key, |out| wire::text_field(out, key, value));
    }

    /// Sets a metadata field for Istio's extensions to true.
    pub(super) fn set_true(&mut self, key: &'static str) {
        self.set_metadata(key, |out| wire::true_field(out, key));
    }

    /// Sets the services of the cluster in the metadata for Istio's extensions.
    pub(super) fn set_services<'s>(&mut self, services: impl IntoIterator<Item = &'s Service>) {
        self.set_metadata(SERVICES, |out| {
            wire::list_field(out, SERVICES, services, |out, service: &Service| {
                wire::text_field(out, "host", &service.key.hostname);
                wire::text_field(out, "name", traffic_policy::service_name(service));
                wire::text_field(out, "namespace", &service.key.namespace);
            });
        });
    }

    fn set_metadata(&mut self, key: &'static str, write: impl FnOnce(&mut Vec<u8>)) {
        let mut field = Vec::with_capacity(128);
        write(&mut field);
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
    pub(super) fn set_socket(&mut self, socket: &'static [u8]) {
        self.socket = socket;
    }

    /// Sets the encoded transport socket matches.
    pub(super) fn set_sockets(&mut self, sockets: Vec<u8>) {
        self.sockets = sockets;
    }

    /// Returns true if the transport socket depends on the endpoint.
    pub(super) fn chooses_sockets(&self) -> bool {
        !self.sockets.is_empty() || !self.cluster.transport_socket_matches.is_empty()
    }

    /// Adds an encoded transport socket match before the others.
    pub(super) fn prefer_socket(&mut self, first: &[u8]) {
        let further = if self.sockets.is_empty() {
            let holder = Cluster {
                transport_socket_matches: std::mem::take(&mut self.cluster.transport_socket_matches),
                ..Default::default()
            };
            holder.encode_to_vec()
        } else {
            std::mem::take(&mut self.sockets)
        };
        self.sockets = [first, &further].concat();
    }

    /// Moves the transport socket matches into the message, for callers that change them.
    pub(super) fn sockets_in_message(&mut self) -> &mut Cluster {
        let sockets = std::mem::take(&mut self.sockets);
        let merged = self.cluster.merge(sockets.as_slice());
        merged.expect("because it was written according to the message");
        &mut self.cluster
    }

    /// Adds the filter that exchanges metadata over TCP.
    pub(super) fn exchange_metadata(&mut self) {
        static ENCODED: LazyLock<Vec<u8>> = LazyLock::new(|| {
            let filter = Filter {
                name: METADATA_EXCHANGE.to_owned(),
                typed_config: Some(constant::metadata_exchange()),
                config_discovery: None,
            };
            let cluster = Cluster {
                filters: vec![filter],
                ..Default::default()
            };
            cluster.encode_to_vec()
        });
        self.filters = &ENCODED;
    }

    /// Returns the finished cluster. Envoy requires a protocol in HTTP options; the default is HTTP/1.1.
    pub(super) fn finish(mut self) -> EncodedCluster {
        let mut pieces: Vec<(u32, Cow<[u8]>)> = Vec::with_capacity(6);
        if self.is_eds() {
            pieces.push((EDS_CONFIG, eds_config(&self.cluster.name).into()));
        }
        if !self.socket.is_empty() {
            pieces.push((SOCKET, self.socket.into()));
        }
        if !self.metadata.is_empty() {
            let length: usize = self.metadata.iter().map(|(_, field)| field.len()).sum();
            let mut metadata = Vec::with_capacity(length + 24);
            wire::nested(&mut metadata, METADATA, |out| {
                wire::entry(out, 1, ISTIO_METADATA, |out| {
                    for (_, field) in &self.metadata {
                        out.extend_from_slice(field);
                    }
                });
            });
            pieces.push((METADATA, metadata.into()));
        }
        if let Some(mut http) = self.http.take() {
            http.upstream_protocol_options.get_or_insert_with(|| {
                UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig {
                    protocol_config: Some(ProtocolConfig::HttpProtocolOptions(Http1ProtocolOptions::default())),
                })
            });
            let mut options = Vec::with_capacity(192);
            wire::entry(&mut options, EXTENSION_OPTIONS, HTTP_OPTIONS, |out| {
                wire::text(out, 1, HTTP_OPTIONS_URL);
                wire::nested(out, 2, |out| http.encode_raw(out));
            });
            pieces.push((EXTENSION_OPTIONS, options.into()));
        }
        if !self.filters.is_empty() {
            pieces.push((FILTERS, self.filters.into()));
        }
        if !self.sockets.is_empty() {
            pieces.push((SOCKETS, self.sockets.into()));
        }
        EncodedCluster {
            cluster: self.cluster,
            pieces,
        }
    }
}

/// Returns the EDS configuration: the same ADS stream, under the cluster's name.
fn eds_config(cluster: &str) -> Vec<u8> {
    static SOURCE: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let config = EdsClusterConfig {
            eds_config: Some(constant::ads_source()),
            ..Default::default()
        };
        config.encode_to_vec()
    });
    let mut config = Vec::with_capacity(SOURCE.len() + cluster.len() + 8);
    wire::nested(&mut config, EDS_CONFIG, |out| {
        out.extend_from_slice(&SOURCE);
        wire::text(out, 2, cluster);
    });
    config
}
