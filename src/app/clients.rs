//! The clients of all clusters that are served, as they come and go.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

use crate::{
    base::ClusterId,
    environment::Environment,
    ingest::remote::RemoteClusters,
    kube::clients::{ClientMap, Clients},
};

/// Follows the remote clusters; `own` is the config cluster with its client.
pub(super) fn follow(
    environment: &Environment,
    own: (ClusterId, ::kube::Client),
    remote: watch::Receiver<Arc<RemoteClusters>>,
) -> Clients {
    let (cluster, _) = own.clone();
    let (out, map) = watch::channel(Arc::new(ClientMap::from([own.clone()])));
    let aliases = environment.settings.flags.cluster_aliases.iter();
    let aliases = aliases.map(|(alias, cluster)| (ClusterId::from(alias.as_str()), ClusterId::from(cluster.as_str())));
    environment
        .tasks
        .spawn_until_shutdown("clients of clusters", tell(own, remote, out));
    Clients::new(cluster, aliases.collect(), map)
}

/// Tells of clusters that come, go, or are read anew with another client; how far each is read does not matter here.
async fn tell(
    (own, client): (ClusterId, ::kube::Client),
    mut remote: watch::Receiver<Arc<RemoteClusters>>,
    out: watch::Sender<Arc<ClientMap>>,
) {
    let mut told: BTreeMap<ClusterId, u64> = BTreeMap::new();
    loop {
        let now = remote.borrow_and_update().clone();
        let reached = now.clusters.iter().filter(|(_, cluster)| cluster.client.is_some());
        let sources: BTreeMap<ClusterId, u64> = reached.map(|(id, cluster)| (id.clone(), cluster.source)).collect();
        if sources != told {
            let clients = now.clusters.iter();
            let clients = clients.filter_map(|(id, cluster)| Some((id.clone(), cluster.client.clone()?)));
            // The config cluster's own client counts, whatever a Secret says of a cluster of its name.
            let all: ClientMap = clients.chain([(own.clone(), client.clone())]).collect();
            out.send_replace(Arc::new(all));
            told = sources;
        }
        if remote.changed().await.is_err() {
            return;
        }
    }
}
