//! The task that writes stored states.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    folder::Folder,
    metrics::StoredMetrics,
    objects::{LiveStates, Objects},
};
use crate::{base::ClusterId, environment::wall_clock, ingest::defect, kube::health::WatchMetrics};

/// Time between two writes.
const INTERVAL: Duration = Duration::from_secs(30);

/// Writes the states of clusters that changed, and removes those of clusters that no Secret names.
pub struct StateWriter {
    folder: Arc<Folder>,
    live: watch::Receiver<LiveStates>,
    watches: WatchMetrics,
    metrics: StoredMetrics,
    /// Outcome of the last write of each synchronised cluster.
    attempts: BTreeMap<ClusterId, Attempt>,
    /// Clusters that were named at the last removal.
    named: Option<BTreeSet<ClusterId>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Attempt {
    /// This change is on disk.
    Written(u64),
    Failed,
}

impl StateWriter {
    pub(super) fn new(
        folder: Arc<Folder>,
        live: watch::Receiver<LiveStates>,
        watches: WatchMetrics,
        metrics: StoredMetrics,
    ) -> Self {
        Self {
            folder,
            live,
            watches,
            metrics,
            attempts: BTreeMap::new(),
            named: None,
        }
    }

    /// Writes until shutdown, and what is left then.
    pub async fn run(mut self, shutdown: CancellationToken) {
        loop {
            let is_last = shutdown.is_cancelled();
            let saved = tokio::task::spawn_blocking(move || {
                self.save();
                self
            });
            self = match saved.await {
                Ok(writer) => writer,
                Err(error) => {
                    tracing::error!(%error, "failed to store states of remote clusters, no longer storing them");
                    return;
                }
            };
            if is_last {
                return;
            }
            let (attempts, named) = (&self.attempts, &self.named);
            let is_new = |live: &LiveStates| {
                let has_first = live.clusters.keys().any(|cluster| !attempts.contains_key(cluster));
                has_first || live.named.is_some() && live.named != *named
            };
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = sleep(INTERVAL) => {}
                // The first state of a cluster is written at once, and that of a removed one disappears at once. The
                // sender ends at shutdown only.
                Ok(_) = self.live.wait_for(is_new) => {}
            }
        }
    }

    /// Brings the folder up to date.
    pub(in crate::ingest::remote) fn save(&mut self) {
        let live = self.live.borrow_and_update().clone();
        self.attempts.retain(|cluster, _| live.clusters.contains_key(cluster));
        for (cluster, objects) in &live.clusters {
            let attempt = self.write(cluster, objects);
            self.attempts.insert(cluster.clone(), attempt);
        }
        if let Some(named) = live.named.filter(|named| self.named.as_ref() != Some(named)) {
            self.remove_others(named);
        }
    }

    fn write(&self, cluster: &ClusterId, objects: &Objects) -> Attempt {
        let current_at = self.current_at(cluster);
        let done = Attempt::Written(objects.change);
        let result = if self.attempts.get(cluster) == Some(&done) {
            self.folder.confirm(cluster, current_at)
        } else {
            let written = defect::written(|| self.folder.write(cluster, objects, current_at));
            written.map(|bytes| self.metrics.written(cluster, bytes))
        };
        let Err(error) = result else { return done };
        let path = self.folder.file(cluster);
        tracing::error!(%cluster, path = %path.display(), %error, "failed to store state of remote cluster, retrying");
        self.metrics.failed();
        Attempt::Failed
    }

    /// Returns the time at which the live state was current: that of the last event or bookmark of the most silent
    /// watch of stored objects. While the API server is unreachable, it does not advance.
    fn current_at(&self, cluster: &ClusterId) -> SystemTime {
        let silence = self.watches.silence(cluster).unwrap_or_default();
        let now = wall_clock();
        now.checked_sub(silence).unwrap_or(now)
    }

    fn remove_others(&mut self, named: BTreeSet<ClusterId>) {
        for cluster in self.named.iter().flatten().filter(|cluster| !named.contains(*cluster)) {
            self.metrics.gone(cluster);
        }
        match self.folder.keep_only(&named) {
            Ok(removed) => {
                for file in removed {
                    tracing::info!(file, "stored state removed, no Secret names its cluster");
                }
            }
            Err(error) => {
                tracing::error!(%error, "failed to remove stored states of remote clusters");
                self.metrics.failed();
            }
        }
        self.named = Some(named);
    }
}
