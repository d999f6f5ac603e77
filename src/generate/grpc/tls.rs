//! TLS by certificate providers, gRPC's name for the source of the workload's own certificate.

use crate::{
    generate::constant::{self, DEFAULT_SECRET, ROOT_SECRET, TLS_SOCKET},
    proto::{
        Any,
        envoy::{
            config::core::v3::TransportSocket,
            extensions::transport_sockets::tls::v3::{
                CertificateProviderPluginInstance, CertificateValidationContext, CommonTlsContext,
                DownstreamTlsContext, UpstreamTlsContext,
                common_tls_context::{
                    CertificateProviderInstance, CombinedCertificateValidationContext, ValidationContextType,
                },
            },
            r#type::matcher::v3::{StringMatcher, string_matcher::MatchPattern},
        },
    },
};

/// Label by which a workload announces mutual TLS.
pub(super) const MODE_LABEL: &str = "security.istio.io/tlsMode";

/// Certificate provider in the bootstrap configuration.
const PROVIDER: &str = "default";

/// Returns the transport socket of a client that expects one of these identities; none means any identity of the mesh.
pub(super) fn client_socket(identities: Vec<String>) -> TransportSocket {
    let context = UpstreamTlsContext {
        common_tls_context: Some(common_context(identities)),
        ..Default::default()
    };
    constant::socket(TLS_SOCKET, Any::pack(&context))
}

/// Returns the transport socket of a server, which cannot match identities.
pub(super) fn server_socket() -> TransportSocket {
    let context = DownstreamTlsContext {
        common_tls_context: Some(common_context(Vec::new())),
        require_client_certificate: Some(true),
        ..Default::default()
    };
    constant::socket(TLS_SOCKET, Any::pack(&context))
}

/// Sets both the present fields and those that older clients read.
#[allow(deprecated, reason = "older clients read nothing else")]
fn common_context(identities: Vec<String>) -> CommonTlsContext {
    let present = |certificate: &str| CertificateProviderPluginInstance {
        instance_name: PROVIDER.to_owned(),
        certificate_name: certificate.to_owned(),
    };
    let former = |certificate: &str| CertificateProviderInstance {
        instance_name: PROVIDER.to_owned(),
        certificate_name: certificate.to_owned(),
    };
    let exactly = |identity| StringMatcher {
        match_pattern: Some(MatchPattern::Exact(identity)),
        ..Default::default()
    };
    let validation = CombinedCertificateValidationContext {
        default_validation_context: Some(CertificateValidationContext {
            match_subject_alt_names: identities.into_iter().map(exactly).collect(),
            ca_certificate_provider_instance: Some(present(ROOT_SECRET)),
            ..Default::default()
        }),
        validation_context_certificate_provider_instance: Some(former(ROOT_SECRET)),
        ..Default::default()
    };
    CommonTlsContext {
        tls_certificate_provider_instance: Some(present(DEFAULT_SECRET)),
        tls_certificate_certificate_provider_instance: Some(former(DEFAULT_SECRET)),
        validation_context_type: Some(ValidationContextType::CombinedValidationContext(validation)),
        ..Default::default()
    }
}
