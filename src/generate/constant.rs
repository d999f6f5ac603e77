//! Pieces that stand in many resources and are always the same: config sources, SDS secrets, sockets, the TCP metadata
//! exchange filter, and short forms for messages that are tedious to write.

use std::{collections::BTreeMap, time::Duration};

use prost_types::{Struct, Value, value::Kind};

use crate::{
    api::Meta,
    base::cidr::IpMode,
    proto::{
        Any,
        envoy::{
            config::core::v3::{
                Address, AggregatedConfigSource, ApiConfigSource, ApiVersion, ConfigSource, GrpcService, Metadata,
                Pipe, SocketAddress, TransportSocket, address,
                api_config_source::ApiType,
                config_source::ConfigSourceSpecifier,
                grpc_service::{EnvoyGrpc, TargetSpecifier},
                socket_address::PortSpecifier,
                transport_socket::ConfigType,
            },
            extensions::transport_sockets::{raw_buffer::v3::RawBuffer, tls::v3::SdsSecretConfig},
        },
        udpa::r#type::v1::TypedStruct,
    },
};

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
const EXTERNAL_SDS_CLUSTER: &str = "sds-external";
const BUILTIN_CREDENTIAL: &str = "builtin://";
const SDS_CREDENTIAL: &str = "sds://";
const INVALID_CREDENTIAL: &str = "invalid://";
/// What the name of a credential's certificate authority ends with.
pub const CA_SUFFIX: &str = "-cacert";

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

/// A secret that the agent beside the proxy reads from files.
pub fn file_secret(name: String) -> SdsSecretConfig {
    SdsSecretConfig {
        name,
        sds_config: Some(grpc_source(SDS_CLUSTER)),
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

/// A secret by the `credentialName` of a DestinationRule or Gateway; `suffix` is [`CA_SUFFIX`] or empty.
/// `external_socket`: the proxy has a socket of an SDS provider of its own.
pub fn credential_secret(credential: &str, suffix: &str, external_socket: bool) -> SdsSecretConfig {
    if credential.starts_with(BUILTIN_CREDENTIAL) {
        return workload_secret(if suffix == CA_SUFFIX {
            ROOT_SECRET
        } else {
            DEFAULT_SECRET
        });
    }
    if external_socket && credential.starts_with(SDS_CREDENTIAL) {
        return SdsSecretConfig {
            name: format!("{credential}{suffix}"),
            sds_config: Some(grpc_source(EXTERNAL_SDS_CLUSTER)),
        };
    }
    // Without a provider the control plane serves it, as an ordinary secret.
    let credential = external_credential(credential).unwrap_or(credential);
    let name = if credential.starts_with(INVALID_CREDENTIAL) {
        INVALID_CREDENTIAL.to_owned()
    } else {
        format!("{}{suffix}", credential_resource(credential))
    };
    SdsSecretConfig {
        name,
        sds_config: Some(secret_ads_source()),
    }
}

/// What a credential of an SDS provider outside of Istio is called there; `None` for other credentials.
pub fn external_credential(credential: &str) -> Option<&str> {
    credential.strip_prefix(SDS_CREDENTIAL)
}

/// A secret that an SDS provider behind a cluster serves.
pub fn external_secret(name: String, cluster: &str) -> SdsSecretConfig {
    SdsSecretConfig {
        name,
        sds_config: Some(grpc_source(cluster)),
    }
}

/// The resource name of a credential: a bare name is a Kubernetes Secret.
fn credential_resource(credential: &str) -> String {
    let typed = ["kubernetes://", "kubernetes-gateway://", "configmap://"];
    if typed.iter().any(|prefix| credential.starts_with(prefix)) {
        credential.to_owned()
    } else {
        format!("kubernetes://{credential}")
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
    Any::pack(&TypedStruct {
        type_url: "type.googleapis.com/envoy.tcp.metadataexchange.config.MetadataExchange".to_owned(),
        value: Some(structure([
            ("enable_discovery", boolean(true)),
            ("protocol", text(PEER_EXCHANGE_ALPN)),
        ])),
    })
}

/// A struct from its fields.
pub fn structure<const N: usize>(fields: [(&str, Value); N]) -> Struct {
    Struct {
        fields: fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
    }
}

/// Metadata that names the object a part of the configuration was made from.
pub fn config_metadata(meta: &Meta) -> Metadata {
    let config = structure([("config", text(meta.config_path()))]);
    Metadata {
        filter_metadata: [(ISTIO_METADATA.to_owned(), config)].into(),
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
