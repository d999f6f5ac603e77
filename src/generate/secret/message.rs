//! Envoy messages of certificates and CA certificates.

use bytes::Bytes;

use super::KeyProvider;
use crate::{
    generate::EncodedResource,
    model::credential::{Authority, Certificate},
    proto::{
        Any,
        envoy::{
            config::core::v3::{DataSource, data_source::Specifier},
            extensions::{
                private_key_providers::{
                    cryptomb::v3alpha::CryptoMbPrivateKeyMethodConfig, qat::v3alpha::QatPrivateKeyMethodConfig,
                },
                transport_sockets::tls::v3::{
                    CertificateValidationContext, PrivateKeyProvider, Secret, TlsCertificate,
                    private_key_provider::ConfigType, secret::Type,
                },
            },
        },
    },
};

/// Returns the name of a provider, as an extension and in secrets.
pub(super) fn provider_name(provider: &KeyProvider) -> &'static str {
    match provider {
        KeyProvider::Cryptomb(_) => "cryptomb",
        KeyProvider::Qat(_) => "qat",
    }
}

/// Returns the secret of a certificate, with its key in a provider if there is one.
pub(super) fn certificate(name: &str, certificate: Certificate, provider: Option<&KeyProvider>) -> Secret {
    let key = inline(certificate.key.reveal().clone());
    let chain = inline(certificate.chain);
    let tls = match provider {
        // Parity (pilot/pkg/xds/sds.go): a stapled OCSP response is not sent together with a provider.
        Some(provider) => TlsCertificate {
            certificate_chain: Some(chain),
            private_key_provider: Some(key_provider(provider, key)),
            ..Default::default()
        },
        None => TlsCertificate {
            certificate_chain: Some(chain),
            private_key: Some(key),
            ocsp_staple: certificate.staple.map(inline),
            ..Default::default()
        },
    };
    secret(name, Type::TlsCertificate(tls))
}

/// Returns the secret of CA certificates.
pub(super) fn authority(name: &str, authority: Authority) -> Secret {
    let context = CertificateValidationContext {
        trusted_ca: Some(inline(authority.roots)),
        crl: authority.revoked.map(inline),
        ..Default::default()
    };
    secret(name, Type::ValidationContext(context))
}

/// Returns the certificates of a secret, as PEM.
pub(super) fn certificates(secret: &EncodedResource) -> Option<Bytes> {
    let secret: Secret = secret.any().unpack().ok()??;
    let source = match secret.r#type? {
        Type::TlsCertificate(certificate) => certificate.certificate_chain,
        Type::ValidationContext(context) => context.trusted_ca,
        _ => None,
    };
    match source?.specifier? {
        Specifier::InlineBytes(bytes) => Some(bytes),
        _ => None,
    }
}

fn secret(name: &str, content: Type) -> Secret {
    Secret {
        name: name.to_owned(),
        r#type: Some(content),
    }
}

fn key_provider(provider: &KeyProvider, key: DataSource) -> PrivateKeyProvider {
    // Parity (pilot/pkg/xds/sds.go): the delay loses its whole seconds, and none is zero.
    let poll_delay = |delay: &Option<prost_types::Duration>| {
        let nanos = delay.as_ref().map_or(0, |delay| delay.nanos);
        Some(prost_types::Duration { seconds: 0, nanos })
    };
    let private_key = Some(key);
    let (config, fallback) = match provider {
        KeyProvider::Cryptomb(settings) => {
            let config = CryptoMbPrivateKeyMethodConfig {
                private_key,
                poll_delay: poll_delay(&settings.poll_delay),
            };
            (Any::pack(&config), settings.fallback)
        }
        KeyProvider::Qat(settings) => {
            let config = QatPrivateKeyMethodConfig {
                private_key,
                poll_delay: poll_delay(&settings.poll_delay),
            };
            (Any::pack(&config), settings.fallback)
        }
    };
    PrivateKeyProvider {
        provider_name: provider_name(provider).to_owned(),
        config_type: Some(ConfigType::TypedConfig(config)),
        fallback: fallback.unwrap_or_default(),
    }
}

fn inline(bytes: Bytes) -> DataSource {
    DataSource {
        specifier: Some(Specifier::InlineBytes(bytes)),
        ..Default::default()
    }
}
