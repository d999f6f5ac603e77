//! A client for each cluster that is served, live: clusters come and go.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

use crate::base::ClusterId;

/// The clients, by cluster; the config cluster is among them.
pub type ClientMap = BTreeMap<ClusterId, ::kube::Client>;

/// Finds the client of a cluster by what callers say of where they are. Cheap to clone.
#[derive(Clone)]
pub struct Clients {
    own: ClusterId,
    /// `--clusterAliases`: alias to cluster.
    aliases: Arc<BTreeMap<ClusterId, ClusterId>>,
    map: watch::Receiver<Arc<ClientMap>>,
}

/// No cluster of this name is served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown cluster {cluster}; hint: known clusters are {known}")]
pub struct UnknownCluster {
    /// What was asked for.
    pub cluster: ClusterId,
    /// The clusters that are known, separated by commas.
    pub known: String,
}

impl Clients {
    /// The clients of `map`, which always holds the present state.
    pub fn new(own: ClusterId, aliases: BTreeMap<ClusterId, ClusterId>, map: watch::Receiver<Arc<ClientMap>>) -> Self {
        Self {
            own,
            aliases: Arc::new(aliases),
            map,
        }
    }

    /// The cluster that a name stands for, with its client. No name stands for the config cluster.
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

    /// The config cluster.
    pub fn own(&self) -> &ClusterId {
        &self.own
    }

    /// Completes when clusters came or went; false when that will never be.
    pub async fn changed(&mut self) -> bool {
        self.map.changed().await.is_ok()
    }
}
