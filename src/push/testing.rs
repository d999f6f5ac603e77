//! Groups without a push loop, for tests and fuzz targets of the server. Fuzz targets are another crate, so this is not
//! behind `cfg(test)`.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

use super::groups::{Groups, ProxyEvent};
use crate::{environment, generate::ResourceSnapshot, task::Tasks};

/// Returns groups in which every connection follows the snapshots of the sender. They end when the sender is dropped.
pub fn manual_groups(tasks: &Tasks) -> (Groups, watch::Sender<Option<Arc<ResourceSnapshot>>>) {
    let (groups, mut proxy_events) = Groups::channel();
    let (sender, mut snapshots) = watch::channel(None);
    tasks.spawn_until_shutdown("manual groups", async move {
        let mut connections = BTreeMap::new();
        loop {
            let stale = tokio::select! {
                event = proxy_events.recv() => match event {
                    Some(ProxyEvent::Join { id, sender, .. }) => {
                        connections.insert(id.0, sender);
                        vec![id.0]
                    }
                    Some(ProxyEvent::Leave(id)) => {
                        connections.remove(&id.0);
                        Vec::new()
                    }
                    Some(ProxyEvent::Request { .. }) => Vec::new(),
                    None => return,
                },
                changed = snapshots.changed() => match changed {
                    Ok(()) => connections.keys().copied().collect(),
                    Err(_) => return,
                },
            };
            let resources: Option<Arc<ResourceSnapshot>> = snapshots.borrow().clone();
            for id in stale {
                connections[&id].send_modify(|publication| {
                    // The first publication of a connection is not a change.
                    publication
                        .since
                        .add(publication.resources.is_some().then(environment::now), None);
                    publication.resources.clone_from(&resources);
                });
            }
        }
    });
    (groups, sender)
}
