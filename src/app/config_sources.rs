//! `meshConfig.configSources`: the stores of configuration in place of `--configDir` or the config cluster. They are
//! read once, at the start.

use std::{
    path::Path,
    sync::{Arc, OnceLock},
};

use ::kube::{Api, Client};
use bytes::Bytes;
use futures::FutureExt;
use k8s_openapi::api::core::v1::Secret;
use rcgen::{CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256};
use smol_str::SmolStr;
use tokio::sync::watch;

use super::identity::Identity;
use crate::{
    base::{Namespace, Sensitive, SpiffeId},
    ca::{
        TrustBundle,
        signing::{Signer, SigningRequest},
    },
    ingest::{
        config_sources::ConfigSources,
        diagnostics::Report,
        file::{FileError, FileSettings, FileSource, Objects},
        mcp::{IssueCertificate, McpSettings, McpSource, MeshCertificate, ReadRoots},
        registry_metrics::RegistryMetrics,
    },
    model::{Installation, MeshSnapshot},
    proto::istio::{mesh::v1alpha1::ConfigSource, networking::v1alpha3::ClientTlsSettings},
    settings::Settings,
    table::Cx,
};

/// The keys of a Secret with roots, the first one that exists counts.
const ROOT_KEYS: [&str; 3] = ["ca.crt", "cacert", "tls.crt"];

/// An invalid config source.
#[derive(Debug, thiserror::Error)]
pub enum ConfigSourceError {
    /// Its address.
    #[error("meshConfig.configSources: address {0:?}: {1}; hint: want xds://host:port, fs:///path or k8s://")]
    Address(String, String),
    /// Its folder.
    #[error("meshConfig.configSources: {0}")]
    Folder(#[from] FileError),
}

/// A parsed config source.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Address {
    /// Another control plane.
    Xds {
        host: String,
        port: u16,
        tls: Option<ClientTlsSettings>,
    },
    /// A folder or a file.
    Files(String),
    /// The config cluster.
    Kubernetes,
}

/// Parses the sources; those of other schemes are ignored with a warning.
pub(super) fn parse(sources: &[ConfigSource]) -> Result<Vec<(String, Address)>, ConfigSourceError> {
    let mut parsed = Vec::new();
    for source in sources {
        let address = source.address.as_str();
        let invalid = |reason: &str| ConfigSourceError::Address(address.to_owned(), reason.to_owned());
        let (scheme, rest) = address.split_once("://").ok_or_else(|| invalid("it has no scheme"))?;
        let found = match scheme.to_ascii_lowercase().as_str() {
            "xds" => {
                let authority = rest.trim_end_matches('/');
                let (host, port) = authority.rsplit_once(':').ok_or_else(|| invalid("it has no port"))?;
                let port = port.parse().map_err(|_| invalid("its port is not a number"))?;
                if host.is_empty() {
                    return Err(invalid("it has no host"));
                }
                Address::Xds {
                    host: host.to_owned(),
                    port,
                    tls: source.tls_settings.clone(),
                }
            }
            "fs" if rest.is_empty() => return Err(invalid("it has no path")),
            "fs" => Address::Files(rest.to_owned()),
            "k8s" if matches!(rest, "" | "/") => Address::Kubernetes,
            _ => {
                tracing::warn!(address, "config source ignored; hint: want xds://, fs:// or k8s://");
                continue;
            }
        };
        parsed.push((address.to_owned(), found));
    }
    Ok(parsed)
}

/// The certificates for this control plane, once its identity is known.
#[derive(Clone, Default)]
pub(super) struct Issuer(Arc<OnceLock<IssueCertificate>>);

impl Issuer {
    /// Sets the function that issues them.
    pub(super) fn set(&self, issue: IssueCertificate) {
        // Set once, at the start.
        let _ = self.0.set(issue);
    }

    fn issue(&self) -> IssueCertificate {
        let issuer = self.0.clone();
        Arc::new(move || match issuer.get() {
            Some(issue) => issue(),
            None => async { Err("the identity of this control plane is not known yet".to_owned()) }.boxed(),
        })
    }
}

/// Inputs of the stores.
pub(super) struct Stores<'a> {
    pub(super) settings: &'a Settings,
    pub(super) installation: &'a Installation,
    pub(super) client: Option<Client>,
    pub(super) issuer: &'a Issuer,
    pub(super) metrics: &'a RegistryMetrics,
    pub(super) report: &'a Report,
}

impl Stores<'_> {
    /// Returns the stores in order, and the index of the config cluster among them.
    pub(super) fn all(
        &self,
        sources: Vec<(String, Address)>,
    ) -> Result<(ConfigSources, Option<usize>), ConfigSourceError> {
        let (mut stores, mut cluster_at) = (ConfigSources::default(), None);
        for (address, parsed) in sources {
            match parsed {
                Address::Kubernetes if self.client.is_none() || cluster_at.is_some() => {
                    tracing::warn!(
                        address,
                        "config source ignored: no Kubernetes cluster, or listed before"
                    );
                }
                Address::Kubernetes => cluster_at = Some(stores.len()),
                Address::Files(path) => {
                    let settings = self.file_settings(Path::new(&path));
                    stores.add(FileSource::open(settings, self.report.clone())?);
                }
                Address::Xds { host, port, tls } => {
                    let metrics = self.metrics.of(&address);
                    let settings = self.mcp_settings(address, host, port, tls);
                    stores.add(McpSource::new(settings, metrics, self.report.clone()));
                }
            }
        }
        Ok((stores, cluster_at))
    }

    fn mcp_settings(&self, address: String, host: String, port: u16, tls: Option<ClientTlsSettings>) -> McpSettings {
        let flags = &self.settings.flags;
        let folder = flags.remote_state_dir.clone();
        let folder = folder.filter(|folder| !folder.as_os_str().is_empty());
        let variable = |name: &str, default: &str| SmolStr::new(self.settings.variable(name).unwrap_or(default));
        McpSettings {
            address,
            host,
            port,
            tls,
            cluster: self.installation.cluster.clone(),
            revision: self.installation.revision.clone(),
            namespace: self.installation.namespace.text().clone(),
            instance: variable("POD_NAME", "istiod"),
            service_account: variable("SERVICE_ACCOUNT", ""),
            state: folder.map(|folder| (folder, flags.remote_state_max_age)),
            issue: self.issuer.issue(),
            read_roots: read_roots(self.client.clone(), &self.installation.namespace),
        }
    }

    fn file_settings(&self, path: &Path) -> FileSettings {
        let is_file = path.is_file();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        FileSettings {
            folder: Some(match path.parent() {
                Some(parent) if is_file => parent.to_owned(),
                _ => path.to_owned(),
            }),
            only: name.filter(|_| is_file),
            cluster: self.installation.cluster.clone(),
            mesh_key: self.installation.mesh_config_key(),
            objects: if self.client.is_some() {
                Objects::ConfigOnly
            } else {
                Objects::ObjectsOnly
            },
            mesh_file: None,
            networks_file: None,
        }
    }
}

/// Returns a function that reads the roots of a `credentialName` from the namespace of the control plane.
fn read_roots(client: Option<Client>, namespace: &Namespace) -> ReadRoots {
    let namespace = namespace.clone();
    Arc::new(move |name| {
        let secrets = client
            .clone()
            .map(|client| Api::<Secret>::namespaced(client, &namespace));
        async move {
            let missing = || format!("credentialName {name:?} needs a Kubernetes cluster");
            let secret = secrets.ok_or_else(missing)?.get(&name).await;
            let mut data = secret.map_err(|error| error.to_string())?.data.unwrap_or_default();
            let roots = ROOT_KEYS.iter().find_map(|key| data.remove(*key));
            let roots = roots.ok_or_else(|| format!("Secret {name} has no key {}", ROOT_KEYS.join(", ")))?;
            Ok(Bytes::from(roots.0))
        }
        .boxed()
    })
}

/// Returns the service account of this control plane.
pub(super) fn service_account(settings: &Settings) -> SmolStr {
    SmolStr::new(settings.variable("SERVICE_ACCOUNT").unwrap_or("istiod"))
}

/// Returns a function that issues certificates for this control plane's own identity in the mesh.
pub(super) fn issue_certificates(
    settings: &Settings,
    installation: &Installation,
    identity: &Identity,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
) -> IssueCertificate {
    let namespace = installation.namespace.clone();
    let account = service_account(settings);
    let (signer, trust) = (identity.signer.clone(), identity.trust.clone());
    Arc::new(move || {
        let trust_domain = mesh.borrow().mesh_config(&Cx::untracked()).trust_domain.clone();
        let id = SpiffeId::new(&trust_domain, namespace.clone(), account.clone());
        issue(signer.clone(), trust.clone(), SmolStr::from(id.to_string())).boxed()
    })
}

async fn issue(
    signer: Arc<dyn Signer>,
    trust: Option<watch::Receiver<Option<Arc<TrustBundle>>>>,
    identity: SmolStr,
) -> Result<MeshCertificate, String> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|error| error.to_string())?;
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = DistinguishedName::new();
    let csr = parameters.serialize_request(&key).and_then(|request| request.pem());
    let request = SigningRequest {
        csr: csr.map_err(|error| error.to_string())?.into_bytes(),
        identities: vec![identity],
        lifetime: None,
        signer: SmolStr::default(),
    };
    let signed = signer.sign(request).await.map_err(|error| error.to_string())?;
    let roots = trust.and_then(|trust| trust.borrow().as_ref().map(|trust| trust.roots.clone()));
    Ok(MeshCertificate {
        roots: match (roots, signed.chain.last()) {
            (Some(roots), _) => roots,
            // Without roots of its own, the chain ends with them.
            (None, Some(last)) if signed.roots.is_empty() => Bytes::from(last.clone()),
            (None, _) => Bytes::from(signed.roots),
        },
        chain: Bytes::from(signed.chain.concat()),
        key: Sensitive::new(Bytes::from(key.serialize_pem())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Result<Vec<Address>, String> {
        let source = |address: &&str| ConfigSource {
            address: (*address).to_owned(),
            ..ConfigSource::default()
        };
        let sources: Vec<_> = texts.iter().map(source).collect();
        let parsed = parse(&sources).map_err(|error| error.to_string())?;
        Ok(parsed.into_iter().map(|(_, address)| address).collect())
    }

    #[test]
    fn addresses_are_parsed_as_istio_does() {
        let parsed = addresses(&[
            "xds://istiod.other:15010",
            "fs:///etc/mesh",
            "k8s://",
            "k8s:///",
            "mcp://old:1",
        ]);
        let xds = Address::Xds {
            host: "istiod.other".to_owned(),
            port: 15010,
            tls: None,
        };
        let files = Address::Files("/etc/mesh".to_owned());
        assert_eq!(parsed, Ok(vec![xds, files, Address::Kubernetes, Address::Kubernetes]));
        for invalid in [
            "",
            "istiod:15010",
            "xds://istiod",
            "xds://:1",
            "xds://istiod:port",
            "fs://",
        ] {
            assert!(addresses(&[invalid]).is_err(), "{invalid}");
        }
    }
}
