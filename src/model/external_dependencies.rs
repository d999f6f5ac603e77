//! External data that the mesh needs: namespaces that count, host names to resolve, JWT keys to fetch.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use smol_str::SmolStr;

use super::{MeshSnapshot, features::RemoteJwks, network};
use crate::{
    api::{fetched_keys::KeySource, mesh_config},
    base::{ObjectKey, select::LabelSelector},
    proto::istio::security::v1beta1::JwtRule,
    table::Cx,
};

/// External data that the mesh needs.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ExternalDependencies {
    /// A namespace counts if one of them matches its labels, or if there are none.
    pub discovery_selectors: Vec<LabelSelector>,
    /// Host names of network gateways to resolve.
    pub hosts: BTreeSet<SmolStr>,
    /// Key sets of issuers to fetch.
    pub keys: BTreeMap<KeySource, RequiredKeys>,
}

/// A required key set.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RequiredKeys {
    /// Timeout of fetching it: the longest that a rule allows.
    pub timeout: Duration,
    /// RequestAuthentications that refer to it.
    pub by: BTreeSet<ObjectKey>,
}

impl ExternalDependencies {
    /// Returns the dependencies of a snapshot; empty before the first commit.
    pub fn of(mesh: &MeshSnapshot) -> Self {
        let dependencies = mesh.external_dependencies.get(&Cx::untracked(), &());
        dependencies
            .map(|dependencies| (**dependencies).clone())
            .unwrap_or_default()
    }
}

/// Derives the dependencies of the mesh.
pub fn external_dependencies(cx: &Cx, mesh: &MeshSnapshot, _key: &()) -> Option<ExternalDependencies> {
    let networks = mesh.networks.get(cx, &());
    let hosts = networks.filter(|_| mesh.installation.features.resolve_hostname_gateways);
    Some(ExternalDependencies {
        discovery_selectors: mesh_config::discovery_selectors(mesh.mesh_config(cx)),
        hosts: hosts.map(|networks| network::hosts(networks)).unwrap_or_default(),
        keys: keys(cx, mesh),
    })
}

/// Default timeout of fetching keys.
pub const KEYS_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest timeout: a rule must not hold connections for hours.
const LONGEST_KEYS_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the key sets that rules need and do not contain.
fn keys(cx: &Cx, mesh: &MeshSnapshot) -> BTreeMap<KeySource, RequiredKeys> {
    let mut keys: BTreeMap<KeySource, RequiredKeys> = BTreeMap::new();
    let is_envoys = mesh.installation.features.pilot_jwt_enable_remote_jwks == RemoteJwks::Envoy;
    for (key, policy) in mesh.request_authentications.iter(cx) {
        for rule in &policy.spec.jwt_rules {
            if is_envoys && !rule.jwks_uri.is_empty() {
                continue;
            }
            if let Some(source) = KeySource::of(rule) {
                let required = keys.entry(source).or_default();
                required.timeout = required.timeout.max(timeout(rule));
                required.by.insert(key.clone());
            }
        }
    }
    keys
}

fn timeout(rule: &JwtRule) -> Duration {
    let given = rule.timeout.and_then(|given| Duration::try_from(given).ok());
    let given = given.filter(|given| !given.is_zero()).unwrap_or(KEYS_TIMEOUT);
    given.min(LONGEST_KEYS_TIMEOUT)
}
