//! External data that the mesh needs: namespaces that count, host names to resolve, JWT keys to fetch.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use smol_str::SmolStr;

use super::{MeshSnapshot, features::RemoteJwks, network};
use crate::{
    api::{fetched_keys::KeySource, mesh_config},
    base::{ObjectKey, Shared, select::LabelSelector},
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
        (*Self::shared(mesh)).clone()
    }

    /// Returns the same as [`ExternalDependencies::of`]. Snapshots with equal dependencies share them.
    pub fn shared(mesh: &MeshSnapshot) -> Shared<Self> {
        let dependencies = mesh.external_dependencies.get(&Cx::untracked(), &());
        dependencies.cloned().unwrap_or_default()
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

/// The key sets that the rules of a RequestAuthentication need and do not contain, each with its longest timeout.
pub type KeyTimeouts = BTreeMap<KeySource, Duration>;

/// Derives the key sets that a RequestAuthentication needs; no row without any.
pub fn key_timeouts(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<KeyTimeouts> {
    let is_envoys = mesh.installation.features.pilot_jwt_enable_remote_jwks == RemoteJwks::Envoy;
    let policy = mesh.request_authentications.get(cx, key)?;
    let mut timeouts = KeyTimeouts::new();
    for rule in &policy.spec.jwt_rules {
        if is_envoys && !rule.jwks_uri.is_empty() {
            continue;
        }
        if let Some(source) = KeySource::of(rule) {
            let longest = timeouts.entry(source).or_default();
            *longest = (*longest).max(timeout(rule));
        }
    }
    (!timeouts.is_empty()).then_some(timeouts)
}

/// Returns the key sets that RequestAuthentications need, with these.
fn keys(cx: &Cx, mesh: &MeshSnapshot) -> BTreeMap<KeySource, RequiredKeys> {
    let mut keys: BTreeMap<KeySource, RequiredKeys> = BTreeMap::new();
    for (key, timeouts) in mesh.key_timeouts.iter(cx) {
        let timeouts = timeouts.iter();
        for (source, timeout) in timeouts {
            let required = keys.entry(source.clone()).or_default();
            required.timeout = required.timeout.max(*timeout);
            required.by.insert(key.clone());
        }
    }
    keys
}

fn timeout(rule: &JwtRule) -> Duration {
    let given = rule.timeout.and_then(|given| Duration::try_from(given).ok());
    let given = given.filter(|given| !given.is_zero()).unwrap_or(KEYS_TIMEOUT);
    given.min(LONGEST_KEYS_TIMEOUT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::Kind,
        model::{
            Change, Installation, World,
            fixture::{config, key},
        },
        proto::istio::security::v1beta1::RequestAuthentication,
    };

    fn policy(name: &str, urls: &[&str], forwards: bool) -> Change {
        let rule = |url: &&str| JwtRule {
            jwks_uri: (*url).to_owned(),
            forward_original_token: forwards,
            ..Default::default()
        };
        let spec = RequestAuthentication {
            jwt_rules: urls.iter().map(rule).collect(),
            ..Default::default()
        };
        Change::Upsert(config(Kind::RequestAuthentication, name, 1, spec).into())
    }

    /// Returns the names of the objects that need the keys of each URL.
    fn required(dependencies: &ExternalDependencies) -> Vec<(String, Vec<String>)> {
        let keys = dependencies.keys.iter();
        keys.map(|(source, required)| {
            assert_eq!(required.timeout, KEYS_TIMEOUT);
            (
                source.url(),
                required.by.iter().map(|key| key.name.to_string()).collect(),
            )
        })
        .collect()
    }

    #[test]
    fn rules_are_read_for_each_object_alone() {
        let mut world = World::new(Installation::default());
        world.commit(vec![
            policy("a/one", &["https://x/keys", "https://y/keys", "https://x/keys"], false),
            policy("b/two", &["https://x/keys"], false),
        ]);
        let shared = |world: &World| ExternalDependencies::shared(&world.snapshot());
        let first = shared(&world);
        let of = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let (x, y) = ("https://x/keys".to_owned(), "https://y/keys".to_owned());
        assert_eq!(
            required(&first),
            [(x.clone(), of(&["one", "two"])), (y.clone(), of(&["one"]))]
        );
        let reads = Cx::recording();
        assert_eq!(key_timeouts(&reads, &world.snapshot(), &key("a/one")).unwrap().len(), 2);
        assert_eq!(reads.into_reads().len(), 1);
        // Other fields of rules change nothing.
        world.commit(vec![policy("b/two", &["https://x/keys"], true)]);
        assert!(first.ptr_eq(&shared(&world)));
        world.commit(vec![Change::Remove(Kind::RequestAuthentication, key("b/two"))]);
        assert_eq!(required(&shared(&world)), [(x, of(&["one"])), (y, of(&["one"]))]);
    }
}
