//! Groups without a push loop, for tests and fuzz targets of the server. Fuzz targets are another crate, so this is not
//! behind `cfg(test)`.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

use super::groups::{Groups, ProxyEvent, Publication};
use crate::{
    base::Shared,
    environment,
    generate::{RequestedResources, ResourceSnapshot},
    task::Tasks,
};

/// A connection, and the names that it requests.
struct Connection {
    sender: watch::Sender<Publication>,
    requested: Option<Shared<RequestedResources>>,
}

impl Connection {
    fn publish(&self, resources: Option<&Arc<ResourceSnapshot>>) {
        let resources = match &self.requested {
            None => resources.cloned(),
            Some(requested) => resources.map(|all| {
                let all = ResourceSnapshot::clone(all);
                Arc::new(all.with_requested(Some(requested.clone())))
            }),
        };
        self.sender.send_modify(|publication| {
            // The first publication of a connection is not a change.
            let since = publication.resources.is_some().then(environment::now);
            publication.unreceived.add(since, None);
            publication.published_at = Some(environment::now());
            publication.resources = resources;
        });
    }
}

/// Returns groups in which every connection follows the snapshots of the sender, whatever names it requests. They end
/// when the sender is dropped.
pub fn manual_groups(tasks: &Tasks) -> (Groups, watch::Sender<Option<Arc<ResourceSnapshot>>>) {
    let (groups, mut proxy_events) = Groups::channel();
    let (sender, mut snapshots) = watch::channel(None);
    tasks.spawn_until_shutdown("manual groups", async move {
        let mut connections: BTreeMap<u64, Connection> = BTreeMap::new();
        loop {
            let stale = tokio::select! {
                event = proxy_events.recv() => match event {
                    Some(ProxyEvent::Join { id, sender, .. }) => {
                        let requested = None;
                        connections.insert(id.0, Connection { sender, requested });
                        vec![id.0]
                    }
                    Some(ProxyEvent::Leave(id)) => {
                        connections.remove(&id.0);
                        Vec::new()
                    }
                    Some(ProxyEvent::Request { id, latest }) => {
                        let connection = connections.get_mut(&id.0);
                        connection.map_or_else(Vec::new, |connection| {
                            connection.requested = latest.take();
                            vec![id.0]
                        })
                    }
                    None => return,
                },
                changed = snapshots.changed() => match changed {
                    Ok(()) => connections.keys().copied().collect(),
                    Err(_) => return,
                },
            };
            let resources: Option<Arc<ResourceSnapshot>> = snapshots.borrow().clone();
            for id in stale {
                connections[&id].publish(resources.as_ref());
            }
        }
    });
    (groups, sender)
}
