//! Networks: which gateways lead into each.

use std::collections::BTreeMap;

use ipnet::IpNet;
use smol_str::SmolStr;

use super::MeshSnapshot;
use crate::{
    base::{ClusterId, Labels, NetworkId, ObjectKey, cidr},
    proto::istio::mesh::v1alpha1::{Network, network::network_endpoints::Ne},
    table::Cx,
};

/// A gateway into a network.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetworkGateway {
    /// Its address (an IP; host names are resolved before).
    pub address: SmolStr,
    /// The mTLS passthrough port, 15443 by default; 0: none.
    pub port: u32,
    /// The HBONE port; 0: none.
    pub hbone_port: u32,
    /// The network that it leads into.
    pub network: NetworkId,
    /// The cluster of the gateway, empty for addresses from meshNetworks.
    pub cluster: ClusterId,
    /// The identity for double HBONE: (namespace, service account), empty when unknown.
    pub service_account: SmolStr,
}

/// All gateways.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Networks {
    /// By network, sorted by address and port.
    pub by_network: BTreeMap<NetworkId, Vec<NetworkGateway>>,
    /// By network and cluster, sorted by address and port.
    pub by_network_and_cluster: BTreeMap<(NetworkId, ClusterId), Vec<NetworkGateway>>,
    /// Least common multiple of all list lengths: every endpoint weight is multiplied by it. 1 without gateways.
    pub scale: u32,
}

impl Networks {
    /// True if any gateway is known.
    pub fn is_multi_network(&self) -> bool {
        !self.by_network.is_empty()
    }
}

/// The label that names the network of a workload, of a cluster (on its system namespace), or of a gateway.
pub const LABEL: &str = "topology.istio.io/network";

/// The network of an endpoint: its label, else that of its cluster's system namespace, else what meshNetworks says of
/// the cluster, else the network whose range holds the address.
pub fn of_endpoint(cx: &Cx, mesh: &MeshSnapshot, cluster: &ClusterId, labels: &Labels, address: &str) -> NetworkId {
    if let Some(network) = labels.get(LABEL).filter(|network| !network.is_empty()) {
        return NetworkId::from(network.clone());
    }
    let system = ObjectKey::new(cluster, "", SmolStr::new(mesh.installation.namespace.as_str()));
    let system = mesh.namespaces.get(cx, &system);
    let label = system.and_then(|namespace| namespace.meta.labels.get(LABEL));
    if let Some(network) = label.filter(|network| !network.is_empty()) {
        return NetworkId::from(network.clone());
    }
    let Some(networks) = mesh.mesh_networks.get(cx, &mesh.installation.mesh_config_key()) else {
        return NetworkId::default();
    };
    let networks = &networks.spec.networks;
    let of_cluster = networks.iter().find(|(_, network)| lists_registry(network, cluster));
    let found = of_cluster.map(|(id, _)| id).or_else(|| by_range(networks, address));
    found.map(NetworkId::new).unwrap_or_default()
}

/// True if endpoints of the cluster belong to the network.
fn lists_registry(network: &Network, cluster: &ClusterId) -> bool {
    network.endpoints.iter().any(|endpoints| match &endpoints.ne {
        Some(Ne::FromRegistry(registry)) => cluster == registry.as_str(),
        _ => false,
    })
}

/// The network with the widest range that holds the address.
fn by_range<'a>(networks: &'a BTreeMap<String, Network>, address: &str) -> Option<&'a String> {
    let ip = cidr::parse_ip(address)?;
    let ranges = networks
        .iter()
        .flat_map(|(id, network)| network.endpoints.iter().map(move |entry| (id, entry)));
    let holding = ranges.filter_map(|(id, entry)| match &entry.ne {
        Some(Ne::FromCidr(range)) => range
            .parse::<IpNet>()
            .ok()
            .filter(|net| net.contains(&ip))
            .map(|net| (net, id)),
        _ => None,
    });
    holding
        .min_by_key(|(net, id)| (net.prefix_len(), *id))
        .map(|(_, id)| id)
}

/// Derives the network gateways.
pub fn networks(_cx: &Cx, _mesh: &MeshSnapshot, _key: &()) -> Option<Networks> {
    None
}
