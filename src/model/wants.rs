//! What the mesh asks of ingestion: which namespaces count, and which host names are to be resolved.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use smol_str::SmolStr;

use super::{MeshSnapshot, features::RemoteJwks, network};
use crate::{
    api::fetched_keys::KeySource,
    base::{
        ObjectKey,
        select::{LabelSelector, Requirement},
    },
    proto::istio::{mesh::v1alpha1 as mesh_api, security::v1beta1::JwtRule},
    table::Cx,
};

/// What the mesh asks of ingestion.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Wants {
    /// A namespace counts if one of them matches its labels; all count when there is none.
    pub discovery_selectors: Vec<LabelSelector>,
    /// Host names of network gateways whose addresses are needed.
    pub hosts: BTreeSet<SmolStr>,
    /// Key sets of issuers that are needed.
    pub keys: BTreeMap<KeySource, KeysWanted>,
}

/// How a key set is wanted.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct KeysWanted {
    /// How long fetching it may take: the longest time that a rule allows.
    pub timeout: Duration,
    /// The RequestAuthentications that name it.
    pub by: BTreeSet<ObjectKey>,
}

impl Wants {
    /// What a snapshot asks for; nothing before the first commit.
    pub fn of(mesh: &MeshSnapshot) -> Self {
        let wants = mesh.wants.get(&Cx::untracked(), &());
        wants.map(|wants| (**wants).clone()).unwrap_or_default()
    }
}

/// Derives what the mesh asks for.
pub fn wants(cx: &Cx, mesh: &MeshSnapshot, _key: &()) -> Option<Wants> {
    let selectors = &mesh.mesh_config(cx).discovery_selectors;
    let networks = mesh.networks.get(cx, &());
    let hosts = networks.filter(|_| mesh.installation.features.resolve_hostname_gateways);
    Some(Wants {
        discovery_selectors: selectors.iter().map(selector).collect(),
        hosts: hosts.map(|networks| network::hosts(networks)).unwrap_or_default(),
        keys: keys(cx, mesh),
    })
}

/// The time to fetch keys if nothing else is said.
pub const KEYS_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest time that counts: a rule is no reason to hold connections for hours.
const LONGEST_KEYS_TIMEOUT: Duration = Duration::from_secs(30);

/// The key sets that rules need and do not hold.
fn keys(cx: &Cx, mesh: &MeshSnapshot) -> BTreeMap<KeySource, KeysWanted> {
    let mut keys: BTreeMap<KeySource, KeysWanted> = BTreeMap::new();
    let is_envoys = mesh.installation.features.pilot_jwt_enable_remote_jwks == RemoteJwks::Envoy;
    for (key, policy) in mesh.request_authentications.iter(cx) {
        for rule in &policy.spec.jwt_rules {
            if is_envoys && !rule.jwks_uri.is_empty() {
                continue;
            }
            if let Some(source) = KeySource::of(rule) {
                let wanted = keys.entry(source).or_default();
                wanted.timeout = wanted.timeout.max(timeout(rule));
                wanted.by.insert(key.clone());
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

fn selector(written: &mesh_api::LabelSelector) -> LabelSelector {
    let labels: &BTreeMap<String, String> = &written.match_labels;
    let requirement = |written: &mesh_api::LabelSelectorRequirement| Requirement {
        key: SmolStr::new(&written.key),
        operator: SmolStr::new(&written.operator),
        values: written.values.iter().map(SmolStr::new).collect(),
    };
    LabelSelector {
        match_labels: labels
            .iter()
            .map(|(key, value)| (SmolStr::new(key), SmolStr::new(value)))
            .collect(),
        match_expressions: written.match_expressions.iter().map(requirement).collect(),
    }
}
