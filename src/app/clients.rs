//! The API server clients of all clusters that are served.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

use crate::{
    base::ClusterId,
    environment::Environment,
    ingest::remote::RemoteClusters,
    kube::{
        client::Rate,
        clients::{ClientMap, Clients},
    },
    settings::Settings,
};

/// Returns the rate limit of each API server client.
pub(super) fn rate(settings: &Settings) -> Rate {
    Rate {
        per_second: settings.flags.kubernetes_api_qps,
        burst: settings.flags.kubernetes_api_burst,
    }
}

/// Follows the remote clusters; `own` is the config cluster.
pub(super) fn follow(
    environment: &Environment,
    own: ClusterId,
    client: ::kube::Client,
    remote: watch::Receiver<Arc<RemoteClusters>>,
) -> Clients {
    let (out, map) = watch::channel(Arc::new(ClientMap::from([(own.clone(), client.clone())])));
    let aliases = environment.settings.flags.aliases();
    environment
        .tasks
        .spawn_until_shutdown("clients of clusters", publish(own.clone(), client, remote, out));
    Clients::new(own, aliases, map)
}

/// Publishes the clients whenever a cluster is added, removed or read with another client, synced or not.
async fn publish(
    own: ClusterId,
    client: ::kube::Client,
    mut remote: watch::Receiver<Arc<RemoteClusters>>,
    out: watch::Sender<Arc<ClientMap>>,
) {
    let mut published: BTreeMap<ClusterId, u64> = BTreeMap::new();
    loop {
        let now = remote.borrow_and_update().clone();
        let reached = now.clusters.iter().filter(|(_, cluster)| cluster.client.is_some());
        let sources: BTreeMap<ClusterId, u64> = reached.map(|(id, cluster)| (id.clone(), cluster.source)).collect();
        if sources != published {
            let clients = now.clusters.iter();
            let clients = clients.filter_map(|(id, cluster)| Some((id.clone(), cluster.client.clone()?)));
            // The config cluster keeps its own client, even if a Secret declares a cluster of its name.
            let all: ClientMap = clients.chain([(own.clone(), client.clone())]).collect();
            out.send_replace(Arc::new(all));
            published = sources;
        }
        if remote.changed().await.is_err() {
            return;
        }
    }
}
