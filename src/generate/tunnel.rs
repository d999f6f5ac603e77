//! Names and TLS settings that both ends of HBONE tunnels share, in listeners and clusters.

use super::{
    BuildContext,
    proxy::{MetadataKey, NodeMetadata},
    tls::{enforce_compliance, trust_domain_matchers},
};
use crate::{
    model::features::Features,
    proto::envoy::{
        config::core::v3::{
            Address, EnvoyInternalAddress, address::Address as AddressKind,
            envoy_internal_address::AddressNameSpecifier,
        },
        extensions::transport_sockets::tls::v3::{
            CertificateValidationContext, CommonTlsContext, SdsSecretConfig, SubjectAltNameMatcher, TlsParameters,
            common_tls_context::{CombinedCertificateValidationContext, ValidationContextType},
            subject_alt_name_matcher::SanType,
            tls_parameters::TlsProtocol,
        },
        r#type::matcher::v3::StringMatcher,
    },
};

/// The HBONE port.
pub const HBONE_PORT: u32 = 15008;
/// The listener that originates tunnels, and its cluster.
pub const CONNECT_ORIGINATE: &str = "connect_originate";
/// The listener that terminates tunnels.
pub const CONNECT_TERMINATE: &str = "connect_terminate";
/// The listener of connections from tunnels, and its cluster.
pub const MAIN_INTERNAL: &str = "main_internal";
/// The cluster of connections that a waypoint sends into tunnels.
pub const ENCAP: &str = "encap";
/// The listener that originates the inner tunnel to a gateway of another network, and its cluster.
pub const INNER_CONNECT_ORIGINATE: &str = "inner_connect_originate";
/// The listener that originates the outer tunnel to that gateway, and its cluster.
pub const OUTER_CONNECT_ORIGINATE: &str = "outer_connect_originate";
/// The listener that forwards inner tunnels to their destinations, and its cluster.
pub const FORWARD_INNER_CONNECT: &str = "forward_inner_connect";
/// The metadata namespace with the destination of a tunnel.
pub const DESTINATION_METADATA: &str = "envoy.filters.listener.original_dst";
/// Filter state with the host and port that a client asked a tunnel for.
pub const CONNECT_AUTHORITY: &str = "io.istio.connect_authority";

/// Filter state with the kind of proxy that originated a tunnel.
pub const REQUEST_SOURCE: &str = "io.istio.source";
/// Header of tunnels with the kind of proxy that originated them.
pub const SOURCE_HEADER: &str = "x-istio-source";
/// Value of [`SOURCE_HEADER`] for waypoints.
pub const FROM_WAYPOINT: &str = "waypoint";
/// Value of [`SOURCE_HEADER`] for gateways.
pub const FROM_GATEWAY: &str = "gateway";

/// Secrets of a tunnel.
pub struct TunnelSecrets {
    /// Certificate of the proxy.
    pub certificate: SdsSecretConfig,
    /// CA certificates for peers.
    pub roots: SdsSecretConfig,
}

/// Returns the TLS context between the peers of a tunnel: HTTP/2 over TLS 1.3. `more` accepts identities besides those
/// of the mesh's trust domains.
///
/// Parity (pilot/pkg/security/model/authentication.go): both ends use the certificates of a server.
pub fn tls_context(ctx: &BuildContext, secrets: TunnelSecrets, more: Option<StringMatcher>) -> CommonTlsContext {
    let features = &ctx.mesh.installation.features;
    let names = trust_domain_matchers(features, ctx.mesh_config())
        .into_iter()
        .chain(more);
    let names = names.map(|matcher| SubjectAltNameMatcher {
        san_type: SanType::Uri as i32,
        matcher: Some(matcher),
        ..Default::default()
    });
    let mut context = CommonTlsContext {
        alpn_protocols: vec!["h2".to_owned()],
        tls_params: Some(TlsParameters {
            tls_minimum_protocol_version: TlsProtocol::TlSv13 as i32,
            tls_maximum_protocol_version: TlsProtocol::TlSv13 as i32,
            ..Default::default()
        }),
        tls_certificate_sds_secret_configs: vec![secrets.certificate],
        validation_context_type: Some(ValidationContextType::CombinedValidationContext(
            CombinedCertificateValidationContext {
                default_validation_context: Some(CertificateValidationContext {
                    match_typed_subject_alt_names: names.collect(),
                    ..Default::default()
                }),
                validation_context_sds_secret_config: Some(secrets.roots),
                ..Default::default()
            },
        )),
        ..Default::default()
    };
    enforce_compliance(features, &mut context);
    context
}

/// Returns the address of an internal listener. `endpoint` distinguishes endpoints behind the same listener.
pub fn internal_address(listener: &str, endpoint: &str) -> Address {
    Address {
        address: Some(AddressKind::EnvoyInternalAddress(EnvoyInternalAddress {
            endpoint_id: endpoint.to_owned(),
            address_name_specifier: Some(AddressNameSpecifier::ServerListenerName(listener.to_owned())),
        })),
    }
}

/// Returns true if a sidecar terminates tunnels: its node enables HBONE and the mesh permits it.
pub fn ends_at_sidecar(features: &Features, proxy: &NodeMetadata) -> bool {
    features.pilot_enable_sidecar_listening_hbone && proxy.has(MetadataKey::EnableHbone)
}
