//! Clients of all served clusters, updated as clusters appear and disappear.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

use crate::base::ClusterId;

/// Clients by cluster, including the config cluster.
pub type ClientMap = BTreeMap<ClusterId, ::kube::Client>;

/// Finds the client of a cluster by the name in a caller's credentials. Cheap to clone.
#[derive(Clone)]
pub struct Clients {
    own: ClusterId,
    /// `--clusterAliases`: alias to cluster.
    aliases: Arc<BTreeMap<ClusterId, ClusterId>>,
    map: watch::Receiver<Arc<ClientMap>>,
}

/// The cluster is not served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown cluster {cluster}; hint: known clusters are {known}")]
pub struct UnknownCluster {
    /// Requested cluster.
    pub cluster: ClusterId,
    /// Known clusters, comma-separated.
    pub known: String,
}

impl Clients {
    /// Returns a view of `map`, which always has the present state.
    pub fn new(own: ClusterId, aliases: BTreeMap<ClusterId, ClusterId>, map: watch::Receiver<Arc<ClientMap>>) -> Self {
        Self {
            own,
            aliases: Arc::new(aliases),
            map,
        }
    }

    /// Returns the cluster of a name, with its client. An empty name is the config cluster.
    pub fn get(&self, name: &str) -> Result<(ClusterId, ::kube::Client), UnknownCluster> {
        let map = self.map.borrow().clone();
        let asked = if name.is_empty() {
            self.own.clone()
        } else {
            ClusterId::from(name)
        };
        let found = [Some(&asked), self.aliases.get(&asked)]
            .into_iter()
            .flatten()
            .find_map(|id| map.get(id).map(|client| (id.clone(), client.clone())));
        found.ok_or_else(|| UnknownCluster {
            known: map.keys().map(ClusterId::as_str).collect::<Vec<_>>().join(", "),
            cluster: asked,
        })
    }

    /// Returns the config cluster.
    pub fn own(&self) -> &ClusterId {
        &self.own
    }

    /// Completes after a change of the clusters; returns false if there will be none.
    pub async fn changed(&mut self) -> bool {
        self.map.changed().await.is_ok()
    }
}
