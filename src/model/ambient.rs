//! Workloads and services as ztunnels know them (WDS), one row for each resource.
//!
//! The order of the tables: services by the object that declares them, one service for each host of a namespace and
//! cluster, workloads with the services that select them, workloads that represent other networks, and last services
//! over clusters. Without ambient mode all of these are empty. Without its multi-network mode only the config cluster
//! counts.
//!
//! Note: selectors are indexed by their first label, so a changed Service or policy concerns only the workloads with
//! that label, and those with very many labels.

pub mod gateway;
pub mod policy;
pub mod remote;
pub mod service;
pub mod waypoint;
pub mod workload;

use std::net::IpAddr;

use smol_str::SmolStr;
use xxhash_rust::xxh3::xxh3_64;

use super::{MeshSnapshot, policy::root_namespace};
use crate::{
    base::{ClusterId, Labels, Namespace, NetworkId},
    proto::istio::workload::NetworkAddress,
    table::Cx,
};

/// Number of shards of the resources. A changed set of names costs a new list of one shard.
pub const SHARDS: u8 = 64;

/// Returns the shard of a resource.
pub fn shard(name: &str) -> u8 {
    u8::try_from(xxh3_64(name.as_bytes()) % u64::from(SHARDS)).expect("because there are fewer shards than 256")
}

/// Derives the network of a cluster: the label of its system namespace.
///
/// Parity (pilot/pkg/serviceregistry/ambient/networks.go): neither meshNetworks nor labels of pods and nodes matter.
pub fn network_of_cluster(cx: &Cx, mesh: &MeshSnapshot, cluster: &ClusterId) -> Option<NetworkId> {
    if !mesh.installation.is_ambient(cluster) {
        return None;
    }
    let network = mesh.system_networks.get(cx, cluster)?;
    Some(NetworkId::clone(network))
}

/// Returns the network of a cluster; empty if unknown.
fn cluster_network(cx: &Cx, mesh: &MeshSnapshot, cluster: &ClusterId) -> NetworkId {
    let network = mesh.cluster_networks.get(cx, cluster);
    network.map(|network| NetworkId::clone(network)).unwrap_or_default()
}

/// Settings of the mesh that all workloads depend on; they change less often than the mesh config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AmbientMesh {
    /// The trust domain as workloads carry it: empty for the default one.
    trust_domain: SmolStr,
    root_namespace: Namespace,
}

/// Derives the settings.
pub fn settings(cx: &Cx, mesh: &MeshSnapshot, _: &()) -> Option<AmbientMesh> {
    mesh.installation.features.pilot_enable_ambient.then(|| AmbientMesh {
        trust_domain: match mesh.mesh_config(cx).trust_domain.as_str() {
            "cluster.local" => SmolStr::default(),
            other => SmolStr::new(other),
        },
        root_namespace: root_namespace(cx, mesh),
    })
}

fn network_address(network: &NetworkId, address: IpAddr) -> NetworkAddress {
    NetworkAddress {
        network: network.to_string(),
        address: octets(address).into(),
        length: None,
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Returns an address from its bytes; `None` if they are none.
pub fn from_octets(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

fn trust_domain(cx: &Cx, mesh: &MeshSnapshot) -> String {
    let settings = mesh.ambient_mesh.get(cx, &());
    settings
        .map(|settings| settings.trust_domain.to_string())
        .unwrap_or_default()
}

/// The number of labels up to which selectors of a workload are looked up by each. An object has room for a hundred
/// thousand, and each lookup is recorded.
const MOST_LABELS: usize = 256;

/// The index key of a selector: its namespace and its first label, or its namespace alone. Each selector has both.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SelectorKey {
    namespace: Namespace,
    label: Option<(SmolStr, SmolStr)>,
}

impl SelectorKey {
    fn new(namespace: &Namespace, label: Option<(&SmolStr, &SmolStr)>) -> Self {
        Self {
            namespace: namespace.clone(),
            label: label.map(|(name, value)| (name.clone(), value.clone())),
        }
    }
}

/// Returns the index keys of a selector; none if it is empty and selects nothing.
fn selector_keys(namespace: &Namespace, selector: &Labels) -> impl Iterator<Item = SelectorKey> + use<> {
    let first = selector.iter().next();
    let keys = first.map(|pair| [Some(pair), None].map(|label| SelectorKey::new(namespace, label)));
    keys.into_iter().flatten()
}

/// Returns the index keys of the selectors that may match labels.
fn selecting_keys<'a>(namespace: &'a Namespace, labels: &'a Labels) -> impl Iterator<Item = SelectorKey> + 'a {
    let has_many = labels.len() > MOST_LABELS;
    let each = labels.iter().take(if has_many { 0 } else { MOST_LABELS });
    let each = each.map(|pair| SelectorKey::new(namespace, Some(pair)));
    each.chain(has_many.then(|| SelectorKey::new(namespace, None)))
}
