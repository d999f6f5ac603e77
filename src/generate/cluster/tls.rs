//! Upstream TLS: settings of a DestinationRule, automatic mutual TLS, certificates in files.

use std::sync::LazyLock;

use super::builder::ClusterBuilder;
use crate::{
    api::istio::traffic_policy::MAX_SERVER_NAME,
    generate::{
        constant::{
            DEFAULT_SECRET, PEER_EXCHANGE_ALPN, ROOT_SECRET, SecretProvider, TLS_SOCKET, credential_secret,
            file_certificate_name, file_root_name, file_secret, raw_buffer, socket, structure, text, workload_secret,
        },
        proxy_view::SocketProxyView,
        tls::enforce_compliance,
        wire::{Encoded, Writer},
    },
    model::{credential::AUTHORITY_SUFFIX, features::Features, service::Registry, workload::MUTUAL_TLS},
    proto::{
        Any,
        envoy::{
            config::{
                cluster::v3::{
                    Cluster,
                    cluster::{ClusterDiscoveryType, TransportSocketMatch},
                },
                core::v3::{DataSource, ProxyProtocolConfig, TransportSocket, data_source::Specifier},
            },
            extensions::{
                clusters::dynamic_forward_proxy::v3::ClusterConfig,
                transport_sockets::{
                    proxy_protocol::v3::ProxyProtocolUpstreamTransport,
                    raw_buffer::v3::RawBuffer,
                    tls::v3::{
                        CertificateValidationContext, CommonTlsContext, SdsSecretConfig, TlsParameters,
                        UpstreamTlsContext,
                        common_tls_context::{CombinedCertificateValidationContext, ValidationContextType},
                        tls_parameters::TlsProtocol,
                    },
                },
            },
            r#type::matcher::v3::{StringMatcher, string_matcher::MatchPattern},
        },
        field::{
            certificate_validation_context, cluster, combined_certificate_validation_context, common_tls_context,
            string_matcher, transport_socket, transport_socket_match, upstream_tls_context,
        },
        istio::{
            mesh::v1alpha1::mesh_config::TlsConfig,
            networking::v1alpha3::{ClientTlsSettings, client_tls_settings::TlSmode, traffic_policy::ProxyProtocol},
        },
    },
};

const PROXY_PROTOCOL_SOCKET: &str = "envoy.transport_sockets.upstream_proxy_protocol";
/// Value for the CA certificates of the operating system.
const SYSTEM_ROOTS: &str = "system";

/// Inputs of a cluster's TLS, besides the rule.
pub(super) struct TlsInputs<'a> {
    /// Attributes of the proxy.
    pub client: &'a SocketProxyView,
    /// Registry of the service.
    pub registry: Registry,
    /// True if the service is outside the mesh.
    pub mesh_external: bool,
    /// True if a rule for services outside the mesh takes precedence over certificates in files.
    pub prefer_rule: bool,
    /// True if auto mTLS applies: it is enabled, and the servers do not disable mTLS.
    pub auto_mtls: bool,
    /// Identities of the servers.
    pub identities: Vec<String>,
    /// Default SNI of mutual TLS.
    pub default_sni: String,
    /// True if the rule selects its clients, which can then be expected to have access to its credentials.
    pub rule_selects: bool,
    /// True if peers negotiate the TCP metadata exchange by ALPN.
    pub exchange_alpn: bool,
    /// True if the port is declared to be HTTP.
    pub is_http: bool,
    /// `tlsDefaults` of the mesh.
    pub defaults: Option<&'a TlsConfig>,
    /// Feature variables with the compliance policy.
    pub features: &'a Features,
}

/// Settings that apply in the end.
struct EffectiveTls {
    settings: ClientTlsSettings,
    /// True if they follow from auto mTLS, so that endpoints without mutual TLS must be reached too.
    automatic: bool,
}

/// Origin of a cluster's TLS settings, which decides what a tunnel replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TlsOrigin {
    /// There are no settings.
    None,
    /// Auto mTLS with the mesh's certificates.
    Automatic,
    /// A rule with `ISTIO_MUTUAL`.
    MeshRule,
    /// A rule with another mode, or certificates in files that the node names.
    User,
}

/// Applies TLS to a cluster.
pub(super) fn apply(
    builder: &mut ClusterBuilder,
    inputs: &TlsInputs,
    settings: Option<&ClientTlsSettings>,
) -> TlsOrigin {
    if settings.is_none() && inputs.is_plain(builder) {
        if inputs.mesh_external || !inputs.auto_mtls {
            return TlsOrigin::None;
        }
        if builder.is_original_dst() {
            let context = Encoded::write(USUAL_LENGTH, |out| inputs.write_mesh_context(out, builder));
            builder.cluster.transport_socket = Some(socket(TLS_SOCKET, context.into_any()));
        } else {
            builder.set_sockets(inputs.mesh_sockets(builder));
        }
        return TlsOrigin::Automatic;
    }
    let Some(EffectiveTls { settings, automatic }) = inputs.effective(settings) else {
        return TlsOrigin::None;
    };
    let origin = match settings.mode() {
        TlSmode::IstioMutual if automatic => TlsOrigin::Automatic,
        TlSmode::IstioMutual => TlsOrigin::MeshRule,
        TlSmode::Disable | TlSmode::Simple | TlSmode::Mutual => TlsOrigin::User,
    };
    let Some(tls) = inputs.socket(builder, &settings) else {
        return origin;
    };
    if origin == TlsOrigin::Automatic && !builder.is_original_dst() {
        builder.cluster.transport_socket_matches = vec![
            TransportSocketMatch {
                name: "tlsMode-istio".to_owned(),
                r#match: Some(structure([("tlsMode", text(MUTUAL_TLS))])),
                transport_socket: Some(tls),
            },
            plaintext_match(),
        ];
    } else {
        builder.cluster.transport_socket = Some(tls);
    }
    origin
}

/// Applies the settings of a rule as they are.
pub(super) fn apply_rule(builder: &mut ClusterBuilder, inputs: &TlsInputs, settings: &ClientTlsSettings) {
    builder.cluster.transport_socket = inputs.socket(builder, settings);
}

/// Wraps every transport socket of a cluster, so that connections begin with the PROXY protocol.
pub(super) fn apply_proxy_protocol(builder: &mut ClusterBuilder, settings: &ProxyProtocol) {
    let wrap = |inner: Option<TransportSocket>| {
        let transport = ProxyProtocolUpstreamTransport {
            config: Some(ProxyProtocolConfig {
                version: settings.version,
                ..Default::default()
            }),
            transport_socket: inner,
            ..Default::default()
        };
        Some(socket(PROXY_PROTOCOL_SOCKET, Any::pack(&transport)))
    };
    let cluster = builder.sockets_in_message();
    if cluster.transport_socket.is_some() || cluster.transport_socket_matches.is_empty() {
        let inner = cluster.transport_socket.take();
        cluster.transport_socket = wrap(inner.or_else(|| Some(socket("raw_buffer", Any::pack(&RawBuffer {})))));
    }
    for choice in &mut cluster.transport_socket_matches {
        choice.transport_socket = wrap(choice.transport_socket.take());
    }
}

/// Encoded fields of mutual TLS with the mesh's certificates, equal for all services.
struct MeshTlsFields {
    /// Parameters of a TLS context.
    parameters: Encoded<CommonTlsContext>,
    /// Proxy's own certificate of a TLS context.
    certificate: Encoded<CommonTlsContext>,
    /// Roots of a validation context.
    roots: Encoded<CombinedCertificateValidationContext>,
    /// Plaintext match of a cluster.
    plaintext: Encoded<Cluster>,
}

static MESH_FIELDS: LazyLock<MeshTlsFields> = LazyLock::new(|| MeshTlsFields {
    parameters: Encoded::of(&common_context()),
    certificate: Encoded::of(&CommonTlsContext {
        tls_certificate_sds_secret_configs: vec![workload_secret(DEFAULT_SECRET)],
        ..Default::default()
    }),
    roots: Encoded::of(&CombinedCertificateValidationContext {
        validation_context_sds_secret_config: Some(workload_secret(ROOT_SECRET)),
        ..Default::default()
    }),
    plaintext: Encoded::of(&Cluster {
        transport_socket_matches: vec![plaintext_match()],
        ..Default::default()
    }),
});

/// Typical length of a cluster's encoded transport sockets, in bytes.
const USUAL_LENGTH: usize = 1024;

/// Returns the match for plaintext, which applies if no other match does.
pub(super) fn plaintext_match() -> TransportSocketMatch {
    TransportSocketMatch {
        name: "tlsMode-disabled".to_owned(),
        r#match: Some(structure([])),
        transport_socket: Some(raw_buffer()),
    }
}

impl TlsInputs<'_> {
    /// Returns true if proxy and cluster have the usual settings of auto mTLS, which are encoded without messages.
    fn is_plain(&self, builder: &ClusterBuilder) -> bool {
        self.client.certificates.is_none() && self.features.compliance_policy.is_empty() && !builder.is_dynamic()
    }

    /// Encodes the transport socket matches of auto mTLS.
    fn mesh_sockets(&self, builder: &ClusterBuilder) -> Encoded<Cluster> {
        Encoded::write(USUAL_LENGTH, |out| {
            out.nested(cluster::TRANSPORT_SOCKET_MATCHES, |out| {
                out.text(transport_socket_match::NAME, "tlsMode-istio");
                out.nested(transport_socket_match::MATCH, |out| out.text_field("tlsMode", "istio"));
                out.nested(transport_socket_match::TRANSPORT_SOCKET, |out| {
                    out.text(transport_socket::NAME, TLS_SOCKET);
                    out.any(transport_socket::TYPED_CONFIG, |out| {
                        self.write_mesh_context(out, builder);
                    });
                });
            });
            out.fields(&MESH_FIELDS.plaintext);
        })
    }

    /// Encodes the context of auto mTLS; the bytes equal those of [`Self::mesh_context`].
    fn write_mesh_context(&self, out: &mut Writer<UpstreamTlsContext>, builder: &ClusterBuilder) {
        out.nested(upstream_tls_context::COMMON_TLS_CONTEXT, |out| {
            out.fields(&MESH_FIELDS.parameters);
            out.nested(common_tls_context::COMBINED_VALIDATION_CONTEXT, |out| {
                out.nested(
                    combined_certificate_validation_context::DEFAULT_VALIDATION_CONTEXT,
                    |out| {
                        for name in &self.identities {
                            out.nested(certificate_validation_context::MATCH_SUBJECT_ALT_NAMES, |out| {
                                out.text(string_matcher::EXACT, name);
                            });
                        }
                    },
                );
                out.fields(&MESH_FIELDS.roots);
            });
            for protocol in self.mesh_alpn(builder.is_http2()) {
                out.text(common_tls_context::ALPN_PROTOCOLS, protocol);
            }
            out.fields(&MESH_FIELDS.certificate);
        });
        let sni = match self.default_sni.as_str() {
            "" => &builder.cluster.name,
            sni => sni,
        };
        out.text(upstream_tls_context::SNI, valid_sni(sni));
    }

    fn effective(&self, settings: Option<&ClientTlsSettings>) -> Option<EffectiveTls> {
        let effective = |settings, automatic| Some(EffectiveTls { settings, automatic });
        let Some(settings) = settings else {
            if self.mesh_external || !self.auto_mtls {
                return None;
            }
            let sni = self.default_sni.clone();
            return effective(
                match self.file_mutual(&self.identities, &sni, None) {
                    Some(files) => files,
                    None => istio_mutual(self.identities.clone(), sni, None),
                },
                true,
            );
        };
        if matches!(settings.mode(), TlSmode::Disable | TlSmode::Simple) || (self.prefer_rule && self.mesh_external) {
            return effective(self.completed(settings), false);
        }
        let skip_verify = settings.insecure_skip_verify;
        if let Some(files) = self.file_mutual(&settings.subject_alt_names, &settings.sni, skip_verify) {
            return effective(files, false);
        }
        effective(self.completed(settings), false)
    }

    /// Fills in the mesh's certificates for mutual TLS; other modes stay unchanged.
    fn completed(&self, settings: &ClientTlsSettings) -> ClientTlsSettings {
        if settings.mode() != TlSmode::IstioMutual || self.client.certificates.is_some() {
            return settings.clone();
        }
        let names = match settings.subject_alt_names.as_slice() {
            [] => self.identities.clone(),
            given => given.to_vec(),
        };
        let sni = if settings.sni.is_empty() {
            &self.default_sni
        } else {
            &settings.sni
        };
        istio_mutual(names, sni.clone(), settings.insecure_skip_verify)
    }

    /// Returns mutual TLS with the certificates in files that the node names.
    fn file_mutual(&self, names: &[String], sni: &str, skip_verify: Option<bool>) -> Option<ClientTlsSettings> {
        let files = self.client.certificates.as_ref()?;
        Some(ClientTlsSettings {
            mode: TlSmode::Mutual as i32,
            client_certificate: files.chain.to_string(),
            private_key: files.key.to_string(),
            ca_certificates: files.root.to_string(),
            subject_alt_names: names.to_vec(),
            sni: sni.to_owned(),
            insecure_skip_verify: skip_verify,
            ..Default::default()
        })
    }

    fn socket(&self, builder: &mut ClusterBuilder, settings: &ClientTlsSettings) -> Option<TransportSocket> {
        let mut context = self.context_of_mode(builder, settings)?;
        enforce_compliance(self.features, context.common_tls_context.get_or_insert_default());
        Some(socket(TLS_SOCKET, Any::pack(&context)))
    }

    fn context_of_mode(
        &self,
        builder: &mut ClusterBuilder,
        settings: &ClientTlsSettings,
    ) -> Option<UpstreamTlsContext> {
        match settings.mode() {
            TlSmode::Disable => None,
            TlSmode::IstioMutual => Some(self.mesh_context(builder, settings)),
            // A rule for all sidecars must not make each of them request a credential that few may read.
            //
            // Parity (pilot/pkg/networking/core/cluster_tls.go): gateways and waypoints request it.
            TlSmode::Simple | TlSmode::Mutual
                if is_guarded(&settings.credential_name) && self.client.is_sidecar && !self.rule_selects =>
            {
                None
            }
            TlSmode::Simple | TlSmode::Mutual => self.user_context(builder, settings),
        }
    }

    fn mesh_context(&self, builder: &mut ClusterBuilder, settings: &ClientTlsSettings) -> UpstreamTlsContext {
        let mut context = UpstreamTlsContext {
            common_tls_context: Some(common_context()),
            sni: settings.sni.clone(),
            ..Default::default()
        };
        if builder.is_dynamic() {
            set_automatic_names(builder, settings);
        } else if context.sni.is_empty() {
            context.sni.clone_from(&builder.cluster.name);
        }
        context.sni.truncate(valid_sni(&context.sni).len());
        let common = context.common_tls_context.get_or_insert_default();
        common.tls_certificate_sds_secret_configs = vec![workload_secret(DEFAULT_SECRET)];
        common.validation_context_type = Some(combined(&settings.subject_alt_names, "", workload_secret(ROOT_SECRET)));
        let protocols = self.mesh_alpn(builder.is_http2());
        common.alpn_protocols = protocols.map(str::to_owned).collect();
        context
    }

    /// Returns the ALPN between peers, by which the receiving sidecar distinguishes HTTP from TCP. Normally the HTTP
    /// filter `istio.alpn` sets it per request.
    fn mesh_alpn(&self, is_http2: bool) -> impl Iterator<Item = &'static str> + use<> {
        let exchange = self.exchange_alpn.then_some(PEER_EXCHANGE_ALPN);
        let rest: &'static [&'static str] = match (self.is_http || is_http2, self.client.alpn_filter) {
            (true, false) if is_http2 => &["istio-h2", "istio", "h2"],
            (true, false) => &["istio-http/1.1", "istio", "http/1.1"],
            _ if is_http2 => &["istio", "h2"],
            _ => &["istio"],
        };
        let exchange = exchange.filter(|_| !rest[0].starts_with("istio-"));
        exchange.into_iter().chain(rest.iter().copied())
    }

    fn user_context(&self, builder: &mut ClusterBuilder, settings: &ClientTlsSettings) -> Option<UpstreamTlsContext> {
        set_automatic_names(builder, settings);
        let mut settings = settings.clone();
        if self.registry == Registry::External && settings.subject_alt_names.is_empty() {
            settings.subject_alt_names.clone_from(&self.identities);
        }
        let skip_verify = settings.insecure_skip_verify.unwrap_or(false);
        let mutual = settings.mode() == TlSmode::Mutual;
        let mut common = common_context();
        if settings.credential_name.is_empty() {
            if mutual {
                if settings.client_certificate.is_empty() || settings.private_key.is_empty() {
                    return None;
                }
                let name = file_certificate_name(&settings.client_certificate, &settings.private_key);
                common.tls_certificate_sds_secret_configs = vec![file_secret(name, self.client.file_socket)];
            }
            let root = match settings.ca_certificates.as_str() {
                "" => SYSTEM_ROOTS,
                path => path,
            };
            common.validation_context_type = Some(if skip_verify {
                ValidationContextType::ValidationContext(CertificateValidationContext::default())
            } else {
                let roots = file_secret(file_root_name(root), self.client.file_socket);
                combined(&settings.subject_alt_names, &settings.ca_crl, roots)
            });
        } else {
            // Parity (pilot/pkg/networking/core/cluster_tls.go): clients do not use the mesh's private key provider.
            let secret = |suffix: &str| {
                let name = format!("{}{suffix}", settings.credential_name);
                credential_secret(&name, self.client.credential_socket, &SecretProvider::None)
            };
            if mutual {
                common.tls_certificate_sds_secret_configs = vec![secret("")];
            }
            if !skip_verify {
                // The revocation list is part of the credential.
                let roots = secret(AUTHORITY_SUFFIX);
                common.validation_context_type = Some(combined(&settings.subject_alt_names, "", roots));
            }
        }
        let backend_certificate = &self.client.backend_certificate;
        if !mutual && !backend_certificate.is_empty() {
            let secret = credential_secret(
                backend_certificate,
                self.client.credential_socket,
                &SecretProvider::None,
            );
            common.tls_certificate_sds_secret_configs = vec![secret];
        }
        if let (Some(defaults), Some(params)) = (self.defaults, common.tls_params.as_mut()) {
            params.ecdh_curves.clone_from(&defaults.ecdh_curves);
            params.cipher_suites.clone_from(&defaults.cipher_suites);
        }
        if builder.is_http2() {
            common.alpn_protocols = vec!["h2".to_owned()];
        }
        Some(UpstreamTlsContext {
            common_tls_context: Some(common),
            sni: settings.sni,
            ..Default::default()
        })
    }
}

/// Returns a server name, or an empty one, which is not sent, if Envoy would refuse the cluster: that of a cluster with
/// a long host may be too long. Only gateways that pass mutual TLS through need it.
fn valid_sni(sni: &str) -> &str {
    if sni.len() <= MAX_SERVER_NAME { sni } else { "" }
}

/// Returns true for credentials that need a permission. ConfigMaps are not secret. `invalid://` fails for every proxy;
/// in Istio, sidecars send such requests without TLS.
fn is_guarded(credential: &str) -> bool {
    !credential.is_empty() && !credential.starts_with("configmap://") && credential != "invalid://"
}

fn istio_mutual(names: Vec<String>, sni: String, skip_verify: Option<bool>) -> ClientTlsSettings {
    ClientTlsSettings {
        mode: TlSmode::IstioMutual as i32,
        subject_alt_names: names,
        sni,
        insecure_skip_verify: skip_verify,
        ..Default::default()
    }
}

fn common_context() -> CommonTlsContext {
    CommonTlsContext {
        tls_params: Some(TlsParameters {
            tls_minimum_protocol_version: TlsProtocol::TlSv12 as i32,
            tls_maximum_protocol_version: TlsProtocol::TlSv13 as i32,
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Returns the validation of servers with these names. `crl` is the path of a revocation list; empty without one.
fn combined(names: &[String], crl: &str, roots: SdsSecretConfig) -> ValidationContextType {
    let names = names.iter().map(|name| StringMatcher {
        match_pattern: Some(MatchPattern::Exact(name.clone())),
        ..Default::default()
    });
    ValidationContextType::CombinedValidationContext(CombinedCertificateValidationContext {
        default_validation_context: Some(CertificateValidationContext {
            match_subject_alt_names: names.collect(),
            crl: (!crl.is_empty()).then(|| DataSource {
                specifier: Some(Specifier::Filename(crl.to_owned())),
                ..Default::default()
            }),
            ..Default::default()
        }),
        validation_context_sds_secret_config: Some(roots),
        ..Default::default()
    })
}

/// Takes SNI and the expected certificate name from the request's host if no SNI is set. Clusters that resolve each
/// request's host always check the name.
fn set_automatic_names(builder: &mut ClusterBuilder, settings: &ClientTlsSettings) {
    let skip_verify = settings.insecure_skip_verify.unwrap_or(false);
    let dynamic = builder.is_dynamic();
    let sni = settings.sni.is_empty();
    let names = !skip_verify && (dynamic || sni && settings.subject_alt_names.is_empty());
    if dynamic && (skip_verify || !sni) {
        allow_insecure_options(builder);
    }
    if sni || names {
        let options = builder.upstream_http();
        options.auto_sni |= sni;
        options.auto_san_validation |= names;
    }
}

/// Lets a cluster that resolves each request's host have other names in TLS than that host, or none.
fn allow_insecure_options(builder: &mut ClusterBuilder) {
    if let Some(ClusterDiscoveryType::ClusterType(kind)) = &mut builder.cluster.cluster_discovery_type
        && let Some(Ok(Some(mut config))) = kind.typed_config.as_ref().map(Any::unpack::<ClusterConfig>)
    {
        config.allow_insecure_cluster_options = true;
        kind.typed_config = Some(Any::pack(&config));
    }
}
