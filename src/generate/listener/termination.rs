//! TLS termination by the settings of a server, on gateways and on ingress listeners of Sidecars.

use crate::{
    base::{cipher_suite, fingerprint},
    generate::{
        constant::{self, SDS_CREDENTIAL, SecretProvider, TLS_SOCKET, credential_secret},
        filter::{
            stack::FilterStack,
            tls::{InnerProtocol, ServerCertificates},
        },
        tls::enforce_compliance,
    },
    model::credential::AUTHORITY_SUFFIX,
    proto::{
        Any,
        envoy::{
            config::core::v3::{DataSource, TransportSocket, data_source},
            extensions::transport_sockets::{
                quic::v3::QuicDownstreamTransport,
                tls::v3::{
                    CertificateValidationContext, CommonTlsContext, DownstreamTlsContext, SdsSecretConfig,
                    TlsParameters,
                    certificate_validation_context::TrustChainVerification,
                    common_tls_context::{CombinedCertificateValidationContext, ValidationContextType},
                },
            },
            r#type::matcher::v3::{StringMatcher, string_matcher::MatchPattern},
        },
        istio::{
            mesh::v1alpha1::mesh_config::extension_provider::Provider,
            networking::v1alpha3::{ServerTlsSettings, server_tls_settings::TlSmode},
        },
    },
};

const QUIC_SOCKET: &str = "envoy.transport_sockets.quic";
/// SHA-256 that no certificate is known to have.
const NO_CERTIFICATE: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Transport of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Transport {
    /// TCP.
    Tcp,
    /// QUIC over UDP.
    Quic,
}

/// Inputs of a server's TLS, besides its settings.
pub(super) struct Context<'a> {
    /// Proxy's own certificates, for mutual TLS within the mesh.
    pub(super) certificates: &'a ServerCertificates,
    /// True if the proxy has the socket of its own SDS provider.
    pub(super) external_socket: bool,
    /// Mesh and features.
    pub(super) stack: &'a FilterStack<'a>,
    /// Transport.
    pub(super) transport: Transport,
    /// Protocol inside TLS.
    pub(super) inside: InnerProtocol,
    /// True if client certificates that are not valid are accepted; the application decides about them.
    pub(super) accepts_untrusted: bool,
    /// True if the listener has servers of several namespaces.
    pub(super) is_shared: bool,
}

impl Context<'_> {
    /// Returns the transport socket of a server.
    pub(super) fn socket(&self, settings: &ServerTlsSettings) -> TransportSocket {
        let context = self.downstream(settings);
        match self.transport {
            Transport::Tcp => constant::socket(TLS_SOCKET, Any::pack(&context)),
            Transport::Quic => {
                let transport = QuicDownstreamTransport {
                    downstream_tls_context: Some(context),
                    ..Default::default()
                };
                constant::socket(QUIC_SOCKET, Any::pack(&transport))
            }
        }
    }

    fn downstream(&self, settings: &ServerTlsSettings) -> DownstreamTlsContext {
        let mode = settings.mode();
        // Envoy cannot request client certificates over QUIC.
        let required = matches!(mode, TlSmode::Mutual | TlSmode::IstioMutual) && self.transport == Transport::Tcp;
        let validated = required || mode == TlSmode::OptionalMutual;
        let mut common = CommonTlsContext {
            alpn_protocols: self.alpns(mode),
            ..Default::default()
        };
        if mode == TlSmode::IstioMutual {
            apply_files(&mut common, self.certificates, settings, validated);
        } else if !settings.credential_names.is_empty() || !settings.credential_name.is_empty() {
            self.apply_credentials(&mut common, settings);
        } else {
            let (chain, key) = (&settings.server_certificate, &settings.private_key);
            apply_files(
                &mut common,
                &self.files(chain, key, &settings.ca_certificates),
                settings,
                validated,
            );
            if !settings.tls_certificates.is_empty() {
                let several = settings.tls_certificates.iter();
                let secrets = several.map(|certificate| {
                    self.files(&certificate.server_certificate, &certificate.private_key, "")
                        .certificate()
                });
                common.tls_certificate_sds_secret_configs = secrets.collect();
            }
        }
        if matches!(mode, TlSmode::Simple | TlSmode::Mutual | TlSmode::OptionalMutual) {
            common.tls_params = self.parameters(settings);
        }
        enforce_compliance(self.stack.features(), &mut common);
        DownstreamTlsContext {
            common_tls_context: Some(common),
            require_client_certificate: Some(required),
            ..Default::default()
        }
    }

    fn alpns(&self, mode: TlSmode) -> Vec<String> {
        match self.transport {
            Transport::Quic => vec!["h3".to_owned()],
            Transport::Tcp if mode == TlSmode::IstioMutual => self.stack.server_alpns(self.inside),
            Transport::Tcp => self.stack.server_alpns(InnerProtocol::Http),
        }
    }

    /// Applies certificates from SDS. Parity (pilot/pkg/networking/core/listener_builder.go): the mode alone decides
    /// whether client certificates are checked, even over QUIC.
    fn apply_credentials(&self, common: &mut CommonTlsContext, settings: &ServerTlsSettings) {
        let names = if settings.credential_names.is_empty() {
            std::slice::from_ref(&settings.credential_name)
        } else {
            &settings.credential_names
        };
        let provider = self.secret_provider(names.iter().chain([&settings.ca_cert_credential_name]));
        let secret =
            |name: &str, suffix: &str| credential_secret(&format!("{name}{suffix}"), self.external_socket, &provider);
        common.tls_certificate_sds_secret_configs = names.iter().map(|name| secret(name, "")).collect();
        // Envoy refuses names in certificates without CA certificates, and with them the whole listener. Other modes
        // ask for no certificate anyway.
        if matches!(settings.mode(), TlSmode::Mutual | TlSmode::OptionalMutual) {
            // Envoy validates against a single CA, so that of the first certificate counts.
            let authority = match settings.ca_cert_credential_name.as_str() {
                "" => secret(&names[0], AUTHORITY_SUFFIX),
                authority => secret(authority, ""),
            };
            let (verify_certificate_spki, verify_certificate_hash) = self.fingerprints(settings);
            let default = CertificateValidationContext {
                verify_certificate_spki,
                verify_certificate_hash,
                trust_chain_verification: if self.accepts_untrusted {
                    TrustChainVerification::AcceptUntrusted.into()
                } else {
                    TrustChainVerification::VerifyTrustChain.into()
                },
                match_subject_alt_names: exact(&settings.subject_alt_names),
                ..Default::default()
            };
            common.validation_context_type = Some(combined(default, authority));
        }
    }

    /// Returns the first of the mesh's secret providers, if a name refers to one.
    fn secret_provider<'a>(&self, mut names: impl Iterator<Item = &'a String>) -> SecretProvider {
        if self.external_socket || !names.any(|name| name.starts_with(SDS_CREDENTIAL)) {
            return SecretProvider::None;
        }
        let mut providers = self.stack.mesh.extension_providers.iter();
        let found = providers.find_map(|provider| match &provider.provider {
            Some(Provider::Sds(sds)) => Some(sds),
            _ => None,
        });
        let Some(sds) = found else {
            return SecretProvider::None;
        };
        match self.stack.provider_cluster("externalSds", &sds.service, sds.port) {
            Some(found) => SecretProvider::Cluster(found.cluster),
            None => SecretProvider::Unresolved,
        }
    }

    /// Returns the mesh's defaults overridden by the server's settings; `None` if neither sets anything.
    fn parameters(&self, settings: &ServerTlsSettings) -> Option<TlsParameters> {
        let mut parameters = TlsParameters::default();
        if let Some(defaults) = &self.stack.mesh.tls_defaults {
            parameters.ecdh_curves.clone_from(&defaults.ecdh_curves);
            parameters.cipher_suites.clone_from(&defaults.cipher_suites);
            parameters.tls_minimum_protocol_version = match defaults.min_protocol_version {
                0 => 0,
                // The mesh's enumeration starts at TLS 1.2, Envoy's at TLS 1.0.
                version => version + 2,
            };
        }
        // Envoy refuses a listener with an invalid expression, so that it would take the servers of others.
        let suites = if self.is_shared {
            cipher_suite::without_invalid_expressions(&settings.cipher_suites)
        } else {
            cipher_suite::known(&settings.cipher_suites)
        };
        if !suites.is_empty() {
            parameters.cipher_suites = suites;
        }
        if settings.min_protocol_version != 0 {
            parameters.tls_minimum_protocol_version = settings.min_protocol_version;
        }
        if settings.max_protocol_version != 0 {
            parameters.tls_maximum_protocol_version = settings.max_protocol_version;
        }
        (parameters != TlsParameters::default()).then_some(parameters)
    }

    fn files(&self, chain: &str, key: &str, root: &str) -> ServerCertificates {
        ServerCertificates {
            chain: chain.into(),
            key: key.into(),
            root: root.into(),
            own_server: self.certificates.own_server,
        }
    }

    /// Returns the fingerprints of keys and certificates that clients may have; each client needs one of these. Envoy
    /// refuses a listener with an invalid one, so it is omitted where that would take the servers of others. If none is
    /// valid, no client certificate is accepted.
    fn fingerprints(&self, settings: &ServerTlsSettings) -> (Vec<String>, Vec<String>) {
        let valid = |texts: &[String], is_valid: fn(&str) -> bool| -> Vec<String> {
            let texts = texts.iter().filter(|text| !self.is_shared || is_valid(text));
            texts.cloned().collect()
        };
        let keys = valid(&settings.verify_certificate_spki, fingerprint::is_of_key);
        let mut certificates = valid(&settings.verify_certificate_hash, fingerprint::is_of_certificate);
        let is_restricted =
            !settings.verify_certificate_spki.is_empty() || !settings.verify_certificate_hash.is_empty();
        if is_restricted && keys.is_empty() && certificates.is_empty() {
            certificates.push(NO_CERTIFICATE.to_owned());
        }
        (keys, certificates)
    }
}

/// Applies certificates that the gateway's agent serves from files, or the agent's own.
fn apply_files(
    common: &mut CommonTlsContext,
    certificates: &ServerCertificates,
    settings: &ServerTlsSettings,
    validated: bool,
) {
    common.tls_certificate_sds_secret_configs = vec![certificates.certificate()];
    if !validated {
        return;
    }
    let crl = (!settings.ca_crl.is_empty()).then(|| DataSource {
        specifier: Some(data_source::Specifier::Filename(settings.ca_crl.clone())),
        ..Default::default()
    });
    let default = CertificateValidationContext {
        match_subject_alt_names: exact(&settings.subject_alt_names),
        crl,
        ..Default::default()
    };
    common.validation_context_type = Some(combined(default, certificates.roots()));
}

fn combined(default: CertificateValidationContext, authority: SdsSecretConfig) -> ValidationContextType {
    ValidationContextType::CombinedValidationContext(CombinedCertificateValidationContext {
        default_validation_context: Some(default),
        validation_context_sds_secret_config: Some(authority),
        ..Default::default()
    })
}

fn exact(names: &[String]) -> Vec<StringMatcher> {
    let matcher = |name: &String| StringMatcher {
        match_pattern: Some(MatchPattern::Exact(name.clone())),
        ..Default::default()
    };
    names.iter().map(matcher).collect()
}
