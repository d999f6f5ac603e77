//! Inbound TLS: mutual TLS of the mesh, and TLS of a Sidecar's ingress listener.

use std::{borrow::Cow, sync::LazyLock};

use smol_str::SmolStr;

use super::stack::FilterStack;
use crate::{
    generate::{
        constant::{
            DEFAULT_SECRET, PEER_EXCHANGE_ALPN, ROOT_SECRET, TLS_SOCKET, file_certificate_name, file_root_name,
            file_secret, socket, workload_secret,
        },
        proxy::{MetadataKey, NodeMetadata},
        proxy_view::has_file_socket,
        tls,
        tunnel::TunnelSecrets,
        wire::Encoded,
    },
    proto::{
        Any,
        envoy::{
            config::core::v3::TransportSocket,
            extensions::transport_sockets::tls::v3::{
                CertificateValidationContext, CommonTlsContext, DownstreamTlsContext, SdsSecretConfig, TlsParameters,
                common_tls_context::{CombinedCertificateValidationContext, ValidationContextType},
                tls_parameters::TlsProtocol,
            },
            r#type::matcher::v3::StringMatcher,
        },
        field::{combined_certificate_validation_context, common_tls_context, downstream_tls_context},
        istio::mesh::v1alpha1::mesh_config::{TlsConfig, tls_config::TlsProtocol as MeshTlsProtocol},
    },
};

const CIPHERS: &[&str] = &[
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-RSA-AES256-GCM-SHA384",
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-RSA-AES128-GCM-SHA256",
    "AES256-GCM-SHA384",
    "AES128-GCM-SHA256",
];

/// Certificate files that replace those of the mesh's CA; paths, empty if absent.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct ServerCertificates {
    /// `TLS_SERVER_CERT_CHAIN`.
    pub chain: SmolStr,
    /// `TLS_SERVER_KEY`.
    pub key: SmolStr,
    /// `TLS_SERVER_ROOT_CERT`.
    pub root: SmolStr,
    /// True if another server than the agent serves secrets from files.
    pub own_server: bool,
}

impl ServerCertificates {
    /// Reads the node's metadata.
    pub fn of(proxy: &NodeMetadata) -> Self {
        Self {
            chain: proxy.metadata_value(MetadataKey::TlsServerCertChain),
            key: proxy.metadata_value(MetadataKey::TlsServerKey),
            root: proxy.metadata_value(MetadataKey::TlsServerRootCert),
            own_server: has_file_socket(proxy),
        }
    }

    /// Returns the secret of the certificate: from files, or else of the mesh.
    pub fn certificate(&self) -> SdsSecretConfig {
        if self.chain.is_empty() || self.key.is_empty() {
            return workload_secret(DEFAULT_SECRET);
        }
        file_secret(file_certificate_name(&self.chain, &self.key), self.own_server)
    }

    /// Returns the secrets of a tunnel.
    pub fn secrets(&self) -> TunnelSecrets {
        TunnelSecrets {
            certificate: self.certificate(),
            roots: self.roots(),
        }
    }

    /// Returns the secret of the CA certificates: from a file, or else of the mesh.
    pub fn roots(&self) -> SdsSecretConfig {
        if self.root.is_empty() {
            return workload_secret(ROOT_SECRET);
        }
        file_secret(file_root_name(&self.root), self.own_server)
    }
}

/// Protocol of the bytes in a filter chain, inside TLS if it terminates that. It decides the server's ALPN values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InnerProtocol {
    /// HTTP.
    Http,
    /// Any other protocol.
    Tcp,
}

impl FilterStack<'_> {
    /// Returns the transport socket of mutual TLS with peers of the mesh.
    pub fn mutual_tls(&self, certificates: &ServerCertificates, inside: InnerProtocol) -> TransportSocket {
        let context = Encoded::write(768, |out| {
            out.nested(downstream_tls_context::COMMON_TLS_CONTEXT, |out| {
                out.fields(&self.mesh_params());
                out.nested(common_tls_context::COMBINED_VALIDATION_CONTEXT, |out| {
                    let names = CertificateValidationContext {
                        match_subject_alt_names: tls::trust_domain_matchers(self.features(), self.mesh),
                        ..Default::default()
                    };
                    let validation = combined_certificate_validation_context::DEFAULT_VALIDATION_CONTEXT;
                    out.message(validation, &names);
                    let roots = combined_certificate_validation_context::VALIDATION_CONTEXT_SDS_SECRET_CONFIG;
                    out.message(roots, &certificates.roots());
                });
                for alpn in self.server_alpns(inside) {
                    out.text(common_tls_context::ALPN_PROTOCOLS, &alpn);
                }
                let secrets = common_tls_context::TLS_CERTIFICATE_SDS_SECRET_CONFIGS;
                out.message(secrets, &certificates.certificate());
            });
            out.wrapper(downstream_tls_context::REQUIRE_CLIENT_CERTIFICATE, 1);
        });
        socket(TLS_SOCKET, context.into_any())
    }

    /// Encodes the parameters of mutual TLS; the usual ones are encoded once.
    fn mesh_params(&self) -> Cow<'static, Encoded<CommonTlsContext>> {
        static USUAL: LazyLock<Encoded<CommonTlsContext>> =
            LazyLock::new(|| Encoded::of(&params(TlsProtocol::TlSv12, owned(CIPHERS))));
        let mtls = self.mesh.mesh_m_tls.as_ref();
        let minimum = match mtls.map(TlsConfig::min_protocol_version) {
            Some(MeshTlsProtocol::Tlsv13) => TlsProtocol::TlSv13,
            _ => TlsProtocol::TlSv12,
        };
        let ciphers = mtls.map(|mtls| mtls.cipher_suites.as_slice()).unwrap_or_default();
        if minimum == TlsProtocol::TlSv12 && ciphers.is_empty() && self.features().compliance_policy.is_empty() {
            return Cow::Borrowed(&USUAL);
        }
        let ciphers = if ciphers.is_empty() {
            owned(CIPHERS)
        } else {
            ciphers.to_vec()
        };
        let mut common = params(minimum, ciphers);
        tls::enforce_compliance(self.features(), &mut common);
        Cow::Owned(Encoded::of(&common))
    }

    /// Returns the ALPN values of mutual TLS.
    pub fn server_alpns(&self, inside: InnerProtocol) -> Vec<String> {
        let exchanges =
            inside == InnerProtocol::Tcp && !self.features().pilot_disable_mx_alpn && self.has_metadata_exchange();
        if exchanges {
            owned(&[PEER_EXCHANGE_ALPN, "h2", "http/1.1"])
        } else {
            owned(&["h2", "http/1.1"])
        }
    }
}

fn params(minimum: TlsProtocol, cipher_suites: Vec<String>) -> CommonTlsContext {
    CommonTlsContext {
        tls_params: Some(TlsParameters {
            tls_minimum_protocol_version: minimum as i32,
            tls_maximum_protocol_version: TlsProtocol::TlSv13 as i32,
            cipher_suites,
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Returns the validation of client certificates by these roots and names.
pub fn validation(names: Vec<StringMatcher>, roots: SdsSecretConfig) -> ValidationContextType {
    ValidationContextType::CombinedValidationContext(CombinedCertificateValidationContext {
        default_validation_context: Some(CertificateValidationContext {
            match_subject_alt_names: names,
            ..Default::default()
        }),
        validation_context_sds_secret_config: Some(roots),
        ..Default::default()
    })
}

/// Returns a server's TLS transport socket.
pub fn server_socket(common: CommonTlsContext, requires_certificate: bool) -> TransportSocket {
    let context = DownstreamTlsContext {
        common_tls_context: Some(common),
        require_client_certificate: Some(requires_certificate),
        ..Default::default()
    };
    socket(TLS_SOCKET, Any::pack(&context))
}

fn owned(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}
