//! Networks: which gateways lead into each.

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::MeshSnapshot;
use crate::base::{ClusterId, NetworkId};
use crate::table::Cx;

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

/// Derives the network gateways.
pub fn networks(_cx: &Cx, _mesh: &MeshSnapshot, _key: &()) -> Option<Networks> {
    None
}
