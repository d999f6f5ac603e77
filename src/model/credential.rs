//! Credentials: names, and their content in Secrets and ConfigMaps.
//!
//! A `credentialName` becomes a resource name (`kubernetes://…`), which a proxy requests. Note: CA certificates are
//! looked up in a Secret of their own (`NAME-cacert`), and then in `NAME`. A Secret of their own without them is an
//! error, not a reason to look further.

pub mod pem;
pub mod references;
#[cfg(test)]
mod tests;

use bytes::Bytes;
use smol_str::SmolStr;

use super::MeshSnapshot;
pub use crate::api::credential::{CONFIG_MAP, GATEWAY_SECRET, SECRET, is_served};
use crate::{
    api::kube::{
        Secret,
        secret::{DOCKER_CONFIG, DOCKER_CONFIG_TYPE},
    },
    base::{ClusterId, Namespace, ObjectKey, Sensitive},
    table::Cx,
};

/// Suffix of the name of a credential's CA certificates.
pub const AUTHORITY_SUFFIX: &str = "-cacert";
/// Scheme of the workload's own certificate.
pub const BUILTIN: &str = "builtin://";
/// Scheme of a certificate that is never valid.
pub const INVALID: &str = "invalid://";

/// Returns the resource name of a `credentialName`; one without a scheme is a Secret.
pub fn resource_name(credential: &str) -> SmolStr {
    if credential.starts_with(BUILTIN) {
        return SmolStr::new_static("default");
    }
    if credential.starts_with(INVALID) {
        return SmolStr::new_static(INVALID);
    }
    if is_served(credential) {
        return SmolStr::new(credential);
    }
    SmolStr::from(format!("{SECRET}{credential}"))
}

/// Kind of object that holds a credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Store {
    /// A Secret of the proxy's own cluster, or else of the config cluster.
    Secret,
    /// A Secret of the config cluster.
    GatewaySecret,
    /// A ConfigMap of the config cluster.
    ConfigMap,
}

/// A parsed resource name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    /// Kind of object.
    pub store: Store,
    /// The namespace.
    pub namespace: Namespace,
    /// Name, with [`AUTHORITY_SUFFIX`] for CA certificates.
    pub name: SmolStr,
}

/// Reason why a name is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// It has no known scheme.
    #[error("the name has no scheme that is known, want kubernetes://, kubernetes-gateway:// or configmap://")]
    Scheme,
    /// The namespace or the name is missing.
    #[error("the name needs a namespace and a name, as in scheme://namespace/name")]
    Parts,
}

impl Reference {
    /// Parses a name. `own` is the namespace of the requester, for names without one.
    pub fn parse(resource: &str, own: &Namespace) -> Result<Self, NameError> {
        if let Some(rest) = resource.strip_prefix(SECRET) {
            let (namespace, name) = parts(rest).map_or((own.clone(), rest), |(namespace, name)| {
                (Namespace::new(namespace), name)
            });
            return Ok(Self {
                store: Store::Secret,
                namespace,
                name: SmolStr::new(name),
            });
        }
        let (store, rest) = match (resource.strip_prefix(CONFIG_MAP), resource.strip_prefix(GATEWAY_SECRET)) {
            (Some(rest), _) => (Store::ConfigMap, rest),
            (_, Some(rest)) => (Store::GatewaySecret, rest),
            (None, None) => return Err(NameError::Scheme),
        };
        let given = parts(rest).filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty());
        let (namespace, name) = given.ok_or(NameError::Parts)?;
        Ok(Self {
            store,
            namespace: Namespace::new(namespace),
            name: SmolStr::new(name),
        })
    }

    /// Returns true for CA certificates, which are not secret.
    pub fn is_authority(&self) -> bool {
        self.store == Store::ConfigMap || self.name.ends_with(AUTHORITY_SUFFIX)
    }
}

/// Splits namespace and name; text after a further slash is ignored.
fn parts(rest: &str) -> Option<(&str, &str)> {
    let (namespace, name) = rest.split_once('/')?;
    Some((namespace, name.split('/').next().unwrap_or(name)))
}

/// A certificate with its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Certificate and intermediates, as PEM.
    pub chain: Bytes,
    /// Private key, as PEM.
    pub key: Sensitive,
    /// Stapled OCSP response.
    pub staple: Option<Bytes>,
}

/// CA certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authority {
    /// CA certificates, as PEM.
    pub roots: Bytes,
    /// Revocation list, as PEM.
    pub revoked: Option<Bytes>,
}

/// Secrets for credentials of proxies in one cluster: those of that cluster, then of the config cluster.
pub struct Secrets<'a> {
    cx: &'a Cx,
    mesh: &'a MeshSnapshot,
    clusters: Vec<&'a ClusterId>,
}

impl<'a> Secrets<'a> {
    /// Returns the Secrets for proxies of a cluster.
    pub fn of(cx: &'a Cx, mesh: &'a MeshSnapshot, cluster: &'a ClusterId) -> Self {
        let config = &mesh.installation.cluster;
        let clusters = if cluster == config {
            vec![config]
        } else {
            vec![cluster, config]
        };
        Self { cx, mesh, clusters }
    }

    /// Returns the Secrets of the config cluster alone.
    pub fn of_config_cluster(cx: &'a Cx, mesh: &'a MeshSnapshot) -> Self {
        Self::of(cx, mesh, &mesh.installation.cluster)
    }

    /// Returns a certificate, or the reason why there is none.
    pub fn certificate(&self, namespace: &Namespace, name: &str) -> Result<Certificate, String> {
        self.first(|cluster| certificate(self.secret(cluster, namespace, name)?))
    }

    /// Returns CA certificates; `name` ends with [`AUTHORITY_SUFFIX`].
    pub fn authority(&self, namespace: &Namespace, name: &str) -> Result<Authority, String> {
        let shared = name.strip_suffix(AUTHORITY_SUFFIX).unwrap_or(name);
        self.first(|cluster| {
            let secret = self
                .secret(cluster, namespace, name)
                .or_else(|_| self.secret(cluster, namespace, shared))?;
            let value = |key: &str| secret.data.get(key).map(|value| value.reveal().clone());
            authority(value, &secret.keys)
        })
    }

    /// Returns the image registry credentials in a Secret.
    pub fn docker_config(&self, namespace: &Namespace, name: &str) -> Result<Sensitive, String> {
        self.first(|cluster| {
            let secret = self.secret(cluster, namespace, name)?;
            if secret.secret_type != DOCKER_CONFIG_TYPE {
                return Err(format!("the Secret is not of type {DOCKER_CONFIG_TYPE}"));
            }
            let config = secret.data.get(DOCKER_CONFIG).cloned();
            config.ok_or_else(|| format!("the Secret has no key {DOCKER_CONFIG}"))
        })
    }

    /// Returns the result of the first cluster that has one, or else the error of the first cluster.
    fn first<T>(&self, look: impl Fn(&ClusterId) -> Result<T, String>) -> Result<T, String> {
        let mut reason = None;
        for cluster in &self.clusters {
            match look(cluster) {
                Ok(found) => return Ok(found),
                Err(error) => reason = reason.or(Some(error)),
            }
        }
        Err(reason.unwrap_or_default())
    }

    fn secret(&self, cluster: &ClusterId, namespace: &Namespace, name: &str) -> Result<&'a Secret, String> {
        let key = ObjectKey::new(cluster, namespace.clone(), name);
        let found = self.mesh.secrets.get(self.cx, &key);
        found
            .map(|secret| &**secret)
            .ok_or_else(|| "there is no such Secret".to_owned())
    }
}

/// Returns CA certificates in a ConfigMap of the config cluster. `name` is that of the object; the name of a resource
/// has [`AUTHORITY_SUFFIX`] after it.
pub fn config_map_authority(
    cx: &Cx,
    mesh: &MeshSnapshot,
    namespace: &Namespace,
    name: &str,
) -> Result<Authority, String> {
    let key = ObjectKey::new(&mesh.installation.cluster, namespace.clone(), name);
    let row = mesh.config_maps.get(cx, &key).ok_or("there is no such ConfigMap")?;
    authority(|key| row.data.get(key).cloned(), &row.keys)
}

/// Returns a certificate, or why there is none, in the words of Istio's statuses.
///
/// Parity (pilot/pkg/credentials/kube/secrets.go, `ExtractCertInfo`).
fn certificate(secret: &Secret) -> Result<Certificate, String> {
    let value = |key: &str| secret.data.get(key);
    // Empty values count as absent.
    let filled = |key: &str| value(key).filter(|value| !value.is_empty());
    for (chain, key, staple) in [("cert", "key", None), ("tls.crt", "tls.key", Some("tls.ocsp-staple"))] {
        if let (Some(chain), Some(key)) = (filled(chain), filled(key)) {
            return Ok(Certificate {
                chain: chain.reveal().clone(),
                key: key.clone(),
                staple: staple.and_then(value).map(|staple| staple.reveal().clone()),
            });
        }
    }
    let has_empty = |names: [&str; 2]| names.iter().all(|name| value(name).is_some());
    Err(
        match [["cert", "key"], ["tls.crt", "tls.key"]]
            .into_iter()
            .find(|names| has_empty(*names))
        {
            Some([chain, key]) => format!("found keys {chain:?} and {key:?}, but they were empty"),
            None => format!(
                "found secret, but didn't have expected keys (cert and key) or (tls.crt and tls.key); found: {}",
                secret.keys
            ),
        },
    )
}

/// Returns CA certificates, or why there are none, as [`certificate`] does.
fn authority(value: impl Fn(&str) -> Option<Bytes>, keys: &str) -> Result<Authority, String> {
    for (roots, revoked) in [("cacert", "crl"), ("ca.crt", "ca.crl")] {
        if let Some(roots) = value(roots).filter(|value| !value.is_empty()) {
            return Ok(Authority {
                roots,
                revoked: value(revoked),
            });
        }
    }
    Err(
        match ["cacert", "ca.crt"].into_iter().find(|key| value(key).is_some()) {
            Some(key) => format!("found key {key:?}, but it was empty"),
            None => format!("found secret, but didn't have expected keys cacert or ca.crt; found: {keys}"),
        },
    )
}
