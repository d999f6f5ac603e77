//! Messages that many resources contain: config sources, SDS secrets, sockets, addresses and filters, and constructors
//! for `google.protobuf.Struct`.

use std::{collections::BTreeMap, sync::LazyLock, time::Duration};

use prost_types::{Struct, Value, value::Kind};

use crate::{
    api::Meta,
    base::{
        SmolStr,
        cidr::{self, IpMode},
    },
    model::credential::{self, AUTHORITY_SUFFIX, BUILTIN},
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::{
                    Address, AggregatedConfigSource, ApiConfigSource, ApiVersion, CidrRange, ConfigSource, GrpcService,
                    Metadata, Pipe, SocketAddress, TransportSocket, TypedExtensionConfig, address,
                    api_config_source::ApiType,
                    config_source::ConfigSourceSpecifier,
                    grpc_service::{EnvoyGrpc, TargetSpecifier},
                    http1_protocol_options::{HeaderKeyFormat, header_key_format::HeaderFormat},
                    socket_address::PortSpecifier,
                    transport_socket::ConfigType,
                },
                listener::v3::{Filter, filter},
                route::v3::RouteConfiguration,
            },
            extensions::{
                filters::network::http_connection_manager::v3::{
                    HttpFilter, http_filter::ConfigType as HttpFilterConfig,
                },
                http::header_formatters::preserve_case::v3::PreserveCaseFormatterConfig,
                transport_sockets::{raw_buffer::v3::RawBuffer, tls::v3::SdsSecretConfig},
            },
        },
        udpa::r#type::v1::TypedStruct,
    },
};

/// The filter of HTTP connection managers.
pub const HTTP_CONNECTION_MANAGER: &str = "envoy.filters.network.http_connection_manager";
/// The TCP metadata exchange: a filter of clusters and listeners, and an extension.
pub const METADATA_EXCHANGE: &str = "istio.metadata_exchange";
/// The HTTP filter that sets the ALPN of upstream connections, and its extension.
pub const ALPN_FILTER: &str = "istio.alpn";
/// The ALPN by which peers negotiate TCP metadata exchange.
pub const PEER_EXCHANGE_ALPN: &str = "istio-peer-exchange";
/// The HTTP filter that consults a server about each request.
pub const EXTERNAL_PROCESSING: &str = "envoy.filters.http.ext_proc";
/// The metadata namespace in which load balancing finds the endpoint of a request.
pub const LOAD_BALANCING: &str = "envoy.lb";
/// TLS sockets.
pub const TLS_SOCKET: &str = "envoy.transport_sockets.tls";
/// Plaintext sockets.
pub const RAW_BUFFER_SOCKET: &str = "envoy.transport_sockets.raw_buffer";
/// The workload's own certificate.
pub const DEFAULT_SECRET: &str = "default";
/// The mesh's roots.
pub const ROOT_SECRET: &str = "ROOTCA";
/// The namespace of filter metadata that Istio's extensions read.
pub const ISTIO_METADATA: &str = "istio";
/// The metadata namespace of peer metadata.
pub const PEER_METADATA: &str = "istio.peer_metadata";

const SDS_CLUSTER: &str = "sds-grpc";
const FILE_SDS_CLUSTER: &str = "sds-files-grpc";
/// The cluster of the SDS provider next to the proxy.
pub const EXTERNAL_SDS_CLUSTER: &str = "sds-external";
/// The prefix of credentials that an external SDS provider serves.
pub const SDS_CREDENTIAL: &str = "sds://";

/// Converts a duration to protobuf.
pub fn duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: duration.as_secs().cast_signed(),
        nanos: duration.subsec_nanos().cast_signed(),
    }
}

/// Returns the config source of EDS, RDS and ECDS over the ADS stream.
pub fn ads_source() -> ConfigSource {
    ConfigSource {
        initial_fetch_timeout: Some(prost_types::Duration::default()),
        ..secret_ads_source()
    }
}

/// Returns the ADS config source for proxyless gRPC clients.
pub fn plain_ads_source() -> ConfigSource {
    ConfigSource {
        config_source_specifier: Some(ConfigSourceSpecifier::Ads(AggregatedConfigSource {})),
        ..Default::default()
    }
}

fn secret_ads_source() -> ConfigSource {
    ConfigSource {
        resource_api_version: ApiVersion::V3 as i32,
        config_source_specifier: Some(ConfigSourceSpecifier::Ads(AggregatedConfigSource {})),
        ..Default::default()
    }
}

fn grpc_source(cluster: &str) -> ConfigSource {
    ConfigSource {
        resource_api_version: ApiVersion::V3 as i32,
        config_source_specifier: Some(ConfigSourceSpecifier::ApiConfigSource(ApiConfigSource {
            api_type: ApiType::Grpc as i32,
            set_node_on_first_message_only: true,
            transport_api_version: ApiVersion::V3 as i32,
            grpc_services: vec![GrpcService {
                target_specifier: Some(TargetSpecifier::EnvoyGrpc(EnvoyGrpc {
                    cluster_name: cluster.to_owned(),
                    ..Default::default()
                })),
                ..Default::default()
            }],
            ..Default::default()
        })),
        ..Default::default()
    }
}

/// Returns a secret that the agent next to the proxy serves: [`DEFAULT_SECRET`] or [`ROOT_SECRET`].
pub fn workload_secret(name: &str) -> SdsSecretConfig {
    SdsSecretConfig {
        name: name.to_owned(),
        sds_config: Some(ConfigSource {
            initial_fetch_timeout: Some(prost_types::Duration::default()),
            ..grpc_source(SDS_CLUSTER)
        }),
    }
}

/// Returns a secret from files, served by the agent next to the proxy or, if `own_server`, by another SDS server there.
pub fn file_secret(name: String, own_server: bool) -> SdsSecretConfig {
    SdsSecretConfig {
        name,
        sds_config: Some(grpc_source(if own_server { FILE_SDS_CLUSTER } else { SDS_CLUSTER })),
    }
}

/// Returns the formatter that preserves the case of HTTP/1.1 header names.
pub fn keep_header_case() -> HeaderKeyFormat {
    HeaderKeyFormat {
        header_format: Some(HeaderFormat::StatefulFormatter(TypedExtensionConfig {
            name: "preserve_case".to_owned(),
            typed_config: Some(Any::pack(&PreserveCaseFormatterConfig::default())),
        })),
    }
}

/// Returns the name of the secret of a certificate and its key in files.
pub fn file_certificate_name(certificate: &str, key: &str) -> String {
    format!("file-cert:{certificate}~{key}")
}

/// Returns the name of the secret of CA certificates in a file; `system` means those of the system.
pub fn file_root_name(path: &str) -> String {
    format!("file-root:{path}")
}

/// The source from which a proxy fetches a credential.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CredentialSource {
    /// The agent next to the proxy, by this name of a workload secret.
    Agent(&'static str),
    /// The socket of the proxy's SDS provider, by the unchanged name.
    Socket,
    /// The SDS provider of the mesh by this name; the control plane if there is no provider.
    Provider(SmolStr),
    /// The control plane, by this name.
    Ads(SmolStr),
}

/// Returns the source of a credential by the `credentialName` of a DestinationRule or Gateway, with
/// [`AUTHORITY_SUFFIX`] for its CA certificates. `has_socket`: the proxy has the socket of its own SDS provider.
pub fn credential_source(name: &str, has_socket: bool) -> CredentialSource {
    match name.strip_prefix(BUILTIN) {
        Some("") => return CredentialSource::Agent(DEFAULT_SECRET),
        Some(AUTHORITY_SUFFIX) => return CredentialSource::Agent(ROOT_SECRET),
        _ => {}
    }
    match name.strip_prefix(SDS_CREDENTIAL) {
        Some(_) if has_socket => CredentialSource::Socket,
        Some(provided) => CredentialSource::Provider(SmolStr::new(provided)),
        None => CredentialSource::Ads(credential::resource_name(name)),
    }
}

/// The SDS provider of the mesh for a proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretProvider {
    /// No provider.
    None,
    /// A provider behind this cluster.
    Cluster(String),
    /// A provider whose service cannot be resolved.
    Unresolved,
}

/// Returns the secret of a `credentialName` in a DestinationRule or Gateway; see [`credential_source`].
pub fn credential_secret(name: &str, has_socket: bool, provider: &SecretProvider) -> SdsSecretConfig {
    let secret = |name: &str, source| SdsSecretConfig {
        name: name.to_owned(),
        sds_config: Some(source),
    };
    match credential_source(name, has_socket) {
        CredentialSource::Agent(name) => workload_secret(name),
        CredentialSource::Socket => secret(name, grpc_source(EXTERNAL_SDS_CLUSTER)),
        CredentialSource::Provider(provided) => match provider {
            SecretProvider::None => secret(&credential::resource_name(&provided), secret_ads_source()),
            SecretProvider::Cluster(cluster) if !provided.is_empty() => secret(&provided, grpc_source(cluster)),
            // No proxy receives this secret. Envoy refuses one without a name, and with it the whole listener.
            SecretProvider::Cluster(_) | SecretProvider::Unresolved => secret(credential::INVALID, secret_ads_source()),
        },
        CredentialSource::Ads(name) => secret(&name, secret_ads_source()),
    }
}

/// Returns a transport socket with its configuration.
pub fn socket(name: &str, config: Any) -> TransportSocket {
    TransportSocket {
        name: name.to_owned(),
        config_type: Some(ConfigType::TypedConfig(config)),
    }
}

/// Returns a plaintext transport socket.
pub fn raw_buffer() -> TransportSocket {
    socket(RAW_BUFFER_SOCKET, Any::pack(&RawBuffer {}))
}

/// Returns the configuration of the TCP metadata exchange, as a `TypedStruct`: upstream Envoy lacks its message.
/// `labels` are exchanged in addition.
pub fn metadata_exchange(labels: &[SmolStr]) -> Any {
    static USUAL: LazyLock<Any> = LazyLock::new(|| exchange_of(&[]));
    if labels.is_empty() {
        USUAL.clone()
    } else {
        exchange_of(labels)
    }
}

fn exchange_of(labels: &[SmolStr]) -> Any {
    let usual = [
        ("enable_discovery", boolean(true)),
        ("protocol", text(PEER_EXCHANGE_ALPN)),
    ];
    Any::pack(&TypedStruct {
        type_url: "type.googleapis.com/envoy.tcp.metadataexchange.config.MetadataExchange".to_owned(),
        value: Some(structure(usual.into_iter().chain(additional_labels(labels)))),
    })
}

/// Returns the field of labels that metadata exchange adds to the usual ones.
pub fn additional_labels(labels: &[SmolStr]) -> Option<(&'static str, Value)> {
    let values = labels.iter().map(|label| text(label.as_str())).collect();
    (!labels.is_empty()).then(|| ("additional_labels", list(values)))
}

/// Creates a struct from its fields.
pub fn structure<'k>(fields: impl IntoIterator<Item = (&'k str, Value)>) -> Struct {
    Struct {
        fields: fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
    }
}

/// Field of Istio's metadata that names the source object.
pub const CONFIG_FIELD: &str = "config";

/// Returns metadata that names the source object of a part of the configuration.
pub fn config_metadata(meta: &Meta) -> Metadata {
    let config = structure([(CONFIG_FIELD, text(meta.config_path()))]);
    Metadata {
        filter_metadata: [(ISTIO_METADATA.to_owned(), config)].into(),
        ..Default::default()
    }
}

/// Creates a text value.
pub fn text(text: impl Into<String>) -> Value {
    Value {
        kind: Some(Kind::StringValue(text.into())),
    }
}

/// Creates a boolean value.
pub fn boolean(value: bool) -> Value {
    Value {
        kind: Some(Kind::BoolValue(value)),
    }
}

/// Creates a list value.
pub fn list(values: Vec<Value>) -> Value {
    Value {
        kind: Some(Kind::ListValue(prost_types::ListValue { values })),
    }
}

/// Creates a struct value.
pub fn object(fields: BTreeMap<String, Value>) -> Value {
    Value {
        kind: Some(Kind::StructValue(Struct { fields })),
    }
}

/// Parses a range, or an address as a range of one.
pub fn cidr_range(text: &str) -> Option<CidrRange> {
    let range = cidr::parse(text)?;
    Some(CidrRange {
        address_prefix: range.addr().to_string(),
        prefix_len: Some(u32::from(range.prefix_len())),
    })
}

/// Creates a socket address.
pub fn socket_address(address: &str, port: u32) -> SocketAddress {
    SocketAddress {
        address: address.to_owned(),
        port_specifier: Some(PortSpecifier::PortValue(port)),
        ..Default::default()
    }
}

/// Creates an address. Port 0 makes it a pipe whose path is the address without `unix://`.
pub fn address(address: &str, port: u32) -> Address {
    let path = address.strip_prefix("unix://");
    let specific = match path {
        _ if port != 0 && path.is_none() => address::Address::SocketAddress(socket_address(address, port)),
        path => address::Address::Pipe(Pipe {
            path: path.unwrap_or(address).to_owned(),
            mode: 0,
        }),
    };
    Address {
        address: Some(specific),
    }
}

/// Returns the loopback addresses of a proxy, the preferred one first.
pub fn loopbacks(mode: IpMode) -> &'static [&'static str] {
    match mode {
        IpMode::V4 => &["127.0.0.1"],
        IpMode::V6 => &["::1"],
        IpMode::Dual => &["127.0.0.1", "::1"],
    }
}

/// Returns the wildcard addresses of a proxy, the preferred one first.
pub fn wildcards(mode: IpMode) -> &'static [&'static str] {
    match mode {
        IpMode::V4 => &["0.0.0.0"],
        IpMode::V6 => &["::"],
        IpMode::Dual => &["0.0.0.0", "::"],
    }
}

/// Returns the source addresses of a sidecar's connections to its workload, which are exempt from interception.
pub fn passthrough_sources(mode: IpMode) -> &'static [&'static str] {
    match mode {
        IpMode::V4 => &["127.0.0.6"],
        IpMode::V6 => &["::6"],
        IpMode::Dual => &["127.0.0.6", "::6"],
    }
}

/// Returns the route configuration of a gateway for a name without a server.
pub fn empty_route_configuration(name: &str) -> RouteConfiguration {
    RouteConfiguration {
        name: name.to_owned(),
        validate_clusters: Some(false),
        ..Default::default()
    }
}

/// Returns an HTTP filter with its configuration.
pub fn http_filter(name: &str, config: Any) -> HttpFilter {
    HttpFilter {
        name: name.to_owned(),
        config_type: Some(HttpFilterConfig::TypedConfig(config)),
        ..Default::default()
    }
}

/// Returns a network filter with its configuration.
pub fn network_filter(name: &str, config: Any) -> Filter {
    Filter {
        name: name.to_owned(),
        config_type: Some(filter::ConfigType::TypedConfig(config)),
    }
}
