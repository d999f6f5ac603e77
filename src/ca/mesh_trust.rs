//! The trust settings of the mesh config.

use std::sync::Arc;

use smol_str::{SmolStr, ToSmolStr};
use tokio::sync::watch;

use crate::{
    environment::Environment,
    model::snapshot::MeshSnapshot,
    proto::istio::mesh::v1alpha1::{
        MeshConfig,
        mesh_config::{CertificateData, certificate_data},
    },
    table::Cx,
    task,
};

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MeshTrust {
    /// The trust domain of the mesh, as written in SPIFFE ids.
    pub trust_domain: SmolStr,
    /// Its aliases, as written in SPIFFE ids.
    pub aliases: Vec<SmolStr>,
    /// The host of `defaultConfig.discoveryAddress`; empty if there is none.
    pub discovery_host: SmolStr,
    /// `caCertificates`, in order.
    pub anchors: Vec<Anchor>,
}

/// Additional trusted roots: an entry of `caCertificates`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Anchor {
    /// The roots, or the endpoint that serves them.
    pub source: AnchorSource,
    /// The Kubernetes signers that these roots belong to.
    pub signers: Vec<SmolStr>,
    /// The trust domains they are valid for, as written in SPIFFE ids; empty: the mesh's own.
    pub trust_domains: Vec<SmolStr>,
}

/// The source of the roots of an [`Anchor`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnchorSource {
    /// Inline PEM.
    Pem(String),
    /// A SPIFFE bundle endpoint.
    Endpoint(SmolStr),
}

impl MeshTrust {
    /// Reads a mesh config.
    pub fn of(config: &MeshConfig) -> Self {
        let address = config.default_config.as_ref().map(|config| &config.discovery_address);
        Self {
            trust_domain: spiffe_form(&config.trust_domain),
            aliases: config
                .trust_domain_aliases
                .iter()
                .map(|alias| spiffe_form(alias))
                .collect(),
            discovery_host: host(address.map_or("", String::as_str)).into(),
            anchors: config.ca_certificates.iter().filter_map(Anchor::of).collect(),
        }
    }

    /// Returns the roots of a Kubernetes signer as PEM, from the first matching entry.
    pub fn signer_roots(&self, signer: &str) -> Option<&str> {
        self.anchors.iter().find_map(|anchor| match &anchor.source {
            AnchorSource::Pem(pem) if anchor.signers.iter().any(|name| name == signer) => Some(pem.as_str()),
            _ => None,
        })
    }
}

impl Anchor {
    fn of(data: &CertificateData) -> Option<Self> {
        let source = match data.certificate_data.as_ref()? {
            certificate_data::CertificateData::Pem(pem) if !pem.is_empty() => AnchorSource::Pem(pem.clone()),
            certificate_data::CertificateData::SpiffeBundleUrl(url) if !url.is_empty() => {
                AnchorSource::Endpoint(url.into())
            }
            _ => return None,
        };
        Some(Self {
            source,
            signers: data.cert_signers.iter().map(SmolStr::new).collect(),
            trust_domains: data.trust_domains.iter().map(|domain| spiffe_form(domain)).collect(),
        })
    }
}

/// Converts a trust domain to its form in SPIFFE ids. Parity (pkg/spiffe/spiffe.go): `@` becomes `.`.
fn spiffe_form(trust_domain: &str) -> SmolStr {
    trust_domain.replace('@', ".").to_smolstr()
}

/// The host of `host:port`.
fn host(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Publishes the trust settings whenever they change. `None` until there is a mesh snapshot.
pub fn follow(
    environment: &Environment,
    mut mesh: watch::Receiver<Arc<MeshSnapshot>>,
) -> watch::Receiver<Option<Arc<MeshTrust>>> {
    let (sender, trust) = watch::channel(None);
    environment.tasks.spawn_until_shutdown("trust of the mesh", async move {
        loop {
            let now = {
                let mesh = mesh.borrow_and_update();
                (mesh.revision.0 > 0).then(|| Arc::new(MeshTrust::of(mesh.mesh_config(&Cx::untracked()))))
            };
            task::publish(&sender, now);
            if mesh.changed().await.is_err() {
                return;
            }
        }
    });
    trust
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::istio::mesh::v1alpha1::ProxyConfig;

    #[test]
    fn the_mesh_config_is_read() {
        let data = |data, signers: &[&str], domains: &[&str]| CertificateData {
            cert_signers: signers.iter().map(ToString::to_string).collect(),
            trust_domains: domains.iter().map(ToString::to_string).collect(),
            certificate_data: Some(data),
        };
        let pem = |text: &str| certificate_data::CertificateData::Pem(text.into());
        let url = certificate_data::CertificateData::SpiffeBundleUrl("https://a/b".into());
        let config = MeshConfig {
            trust_domain: "user@project".into(),
            trust_domain_aliases: vec!["old@project".into()],
            default_config: Some(ProxyConfig {
                discovery_address: "istiod.mesh.svc:15012".into(),
                ..ProxyConfig::default()
            }),
            ca_certificates: vec![
                data(pem(""), &["x"], &[]),
                data(pem("one"), &["x", "y"], &[]),
                data(pem("two"), &["y"], &[]),
                data(url, &[], &["other@project"]),
            ],
            ..MeshConfig::default()
        };
        let trust = MeshTrust::of(&config);
        assert_eq!(trust.trust_domain, "user.project");
        assert_eq!(trust.aliases, ["old.project"]);
        assert_eq!(trust.discovery_host, "istiod.mesh.svc");
        assert_eq!(trust.signer_roots("x"), Some("one"));
        assert_eq!(trust.signer_roots("y"), Some("one"));
        assert_eq!(trust.signer_roots("z"), None);
        assert_eq!(trust.anchors.len(), 3);
        assert_eq!(trust.anchors[2].source, AnchorSource::Endpoint("https://a/b".into()));
        assert_eq!(trust.anchors[2].trust_domains, ["other.project"]);
    }

    #[test]
    fn hosts_have_no_port() {
        assert_eq!(host("istiod.istio-system.svc:15012"), "istiod.istio-system.svc");
        assert_eq!(host("[::1]:15012"), "::1");
        assert_eq!(host(""), "");
    }
}
