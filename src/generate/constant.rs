//! Pieces that stand in many resources and are always the same: config sources, SDS secrets, sockets, the TCP metadata
//! exchange filter, and short forms for messages that are tedious to write.

use std::{collections::BTreeMap, sync::LazyLock, time::Duration};

use prost_types::{Struct, Value, value::Kind};

use crate::{
    api::Meta,
    base::{SmolStr, cidr::IpMode},
    model::credential::{self, AUTHORITY_SUFFIX, BUILTIN},
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::{
                    Address, AggregatedConfigSource, ApiConfigSource, ApiVersion, ConfigSource, GrpcService, Metadata,
                    Pipe, SocketAddress, TransportSocket, TypedExtensionConfig, address,
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

/// The name of the filter.
pub const HTTP_CONNECTION_MANAGER: &str = "envoy.filters.network.http_connection_manager";
/// The TCP metadata exchange, as a filter of clusters and of listeners, and as an extension.
pub const METADATA_EXCHANGE: &str = "istio.metadata_exchange";
/// The HTTP filter that chooses the ALPN of upstream connections, and the extension.
pub const ALPN_FILTER: &str = "istio.alpn";
/// The ALPN by which peers agree on TCP metadata exchange.
pub const PEER_EXCHANGE_ALPN: &str = "istio-peer-exchange";
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

const SDS_CLUSTER: &str = "sds-grpc";
const FILE_SDS_CLUSTER: &str = "sds-files-grpc";
const EXTERNAL_SDS_CLUSTER: &str = "sds-external";
/// Credentials that somebody else than the control plane serves.
pub const SDS_CREDENTIAL: &str = "sds://";

/// A duration as protobuf has it.
pub fn duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: duration.as_secs().cast_signed(),
        nanos: duration.subsec_nanos().cast_signed(),
    }
}

/// EDS, RDS and ECDS over this very stream.
pub fn ads_source() -> ConfigSource {
    ConfigSource {
        initial_fetch_timeout: Some(prost_types::Duration::default()),
        ..secret_ads_source()
    }
}

/// The aggregated stream, as gRPC clients are told of it.
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

/// A secret that the agent beside the proxy serves for the workload: [`DEFAULT_SECRET`] or [`ROOT_SECRET`].
pub fn workload_secret(name: &str) -> SdsSecretConfig {
    SdsSecretConfig {
        name: name.to_owned(),
        sds_config: Some(ConfigSource {
            initial_fetch_timeout: Some(prost_types::Duration::default()),
            ..grpc_source(SDS_CLUSTER)
        }),
    }
}

/// A secret that the agent beside the proxy reads from files; `own_server`: somebody else serves such secrets there.
pub fn file_secret(name: String, own_server: bool) -> SdsSecretConfig {
    SdsSecretConfig {
        name,
        sds_config: Some(grpc_source(if own_server { FILE_SDS_CLUSTER } else { SDS_CLUSTER })),
    }
}

/// HTTP/1.1 header names stay as they were written.
pub fn keep_header_case() -> HeaderKeyFormat {
    HeaderKeyFormat {
        header_format: Some(HeaderFormat::StatefulFormatter(TypedExtensionConfig {
            name: "preserve_case".to_owned(),
            typed_config: Some(Any::pack(&PreserveCaseFormatterConfig::default())),
        })),
    }
}

/// The name of a secret made of a certificate and its key in files.
pub fn file_certificate_name(certificate: &str, key: &str) -> String {
    format!("file-cert:{certificate}~{key}")
}

/// The name of a secret made of certificate authorities in a file; `system` stands for those of the system.
pub fn file_root_name(path: &str) -> String {
    format!("file-root:{path}")
}

/// Where a proxy fetches a credential.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CredentialSource {
    /// From the agent beside it, as this secret of the workload.
    Agent(&'static str),
    /// From a socket of its own, by its name as it stands.
    Socket,
    /// From the mesh's provider by this name, without one from the control plane.
    Provider(SmolStr),
    /// From the control plane by this name.
    Ads(SmolStr),
}

/// Where a credential is fetched, by the `credentialName` of a DestinationRule or Gateway, with [`AUTHORITY_SUFFIX`] where
/// its authorities are meant. `has_socket`: the proxy has a socket of an SDS provider of its own.
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

/// The mesh's provider of secrets, as far as it concerns a proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretProvider {
    /// There is none.
    None,
    /// It is reached by this cluster.
    Cluster(String),
    /// Nobody knows where it is.
    Lost,
}

/// A secret by the `credentialName` of a DestinationRule or Gateway; see [`credential_source`].
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
            SecretProvider::Cluster(cluster) => secret(&provided, grpc_source(cluster)),
            // Parity: Envoy refuses it.
            SecretProvider::Lost => SdsSecretConfig::default(),
        },
        CredentialSource::Ads(name) => secret(&name, secret_ads_source()),
    }
}

/// A transport socket with its configuration.
pub fn socket(name: &str, config: Any) -> TransportSocket {
    TransportSocket {
        name: name.to_owned(),
        config_type: Some(ConfigType::TypedConfig(config)),
    }
}

/// A plaintext socket.
pub fn raw_buffer() -> TransportSocket {
    socket(RAW_BUFFER_SOCKET, Any::pack(&RawBuffer {}))
}

/// The configuration of the TCP metadata exchange, whose message upstream Envoy does not know.
pub fn metadata_exchange() -> Any {
    static CONFIG: LazyLock<Any> = LazyLock::new(|| {
        Any::pack(&TypedStruct {
            type_url: "type.googleapis.com/envoy.tcp.metadataexchange.config.MetadataExchange".to_owned(),
            value: Some(structure([
                ("enable_discovery", boolean(true)),
                ("protocol", text(PEER_EXCHANGE_ALPN)),
            ])),
        })
    });
    CONFIG.clone()
}

/// A struct from its fields.
pub fn structure<'k>(fields: impl IntoIterator<Item = (&'k str, Value)>) -> Struct {
    Struct {
        fields: fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
    }
}

/// The namespace of metadata that [`config_metadata`] stands in, and its field.
pub const CONFIG_METADATA: (&str, &str) = (ISTIO_METADATA, "config");

/// Metadata that names the object a part of the configuration was made from.
pub fn config_metadata(meta: &Meta) -> Metadata {
    let (namespace, field) = CONFIG_METADATA;
    let config = structure([(field, text(meta.config_path()))]);
    Metadata {
        filter_metadata: [(namespace.to_owned(), config)].into(),
        ..Default::default()
    }
}

/// A text value.
pub fn text(text: impl Into<String>) -> Value {
    Value {
        kind: Some(Kind::StringValue(text.into())),
    }
}

/// A boolean value.
pub fn boolean(value: bool) -> Value {
    Value {
        kind: Some(Kind::BoolValue(value)),
    }
}

/// A list value.
pub fn list(values: Vec<Value>) -> Value {
    Value {
        kind: Some(Kind::ListValue(prost_types::ListValue { values })),
    }
}

/// A struct as a value.
pub fn object(fields: BTreeMap<String, Value>) -> Value {
    Value {
        kind: Some(Kind::StructValue(Struct { fields })),
    }
}

/// An IP address and port.
pub fn socket_address(address: &str, port: u32) -> SocketAddress {
    SocketAddress {
        address: address.to_owned(),
        port_specifier: Some(PortSpecifier::PortValue(port)),
        ..Default::default()
    }
}

/// Where a connection goes. Port 0 makes it a pipe whose path is the address (without `unix://`), as in Istio.
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

/// The loopback addresses of a client, the preferred one first.
pub fn loopbacks(mode: IpMode) -> &'static [&'static str] {
    match mode {
        IpMode::V4 => &["127.0.0.1"],
        IpMode::V6 => &["::1"],
        IpMode::Dual => &["127.0.0.1", "::1"],
    }
}

/// The wildcard addresses of a client, the preferred one first.
pub fn wildcards(mode: IpMode) -> &'static [&'static str] {
    match mode {
        IpMode::V4 => &["0.0.0.0"],
        IpMode::V6 => &["::"],
        IpMode::Dual => &["0.0.0.0", "::"],
    }
}

/// The addresses that a sidecar connects to its own workload from, so that interception passes them over.
pub fn passthrough_sources(mode: IpMode) -> &'static [&'static str] {
    match mode {
        IpMode::V4 => &["127.0.0.6"],
        IpMode::V6 => &["::6"],
        IpMode::Dual => &["127.0.0.6", "::6"],
    }
}

/// What gateways are sent for a name that no server has.
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
