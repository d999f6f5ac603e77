//! Stored states in the place of sources that are not complete yet.

use futures::StreamExt;
use tokio::time::Instant;

use super::{Connection, ConnectionKey, Remote, Storage, stored::StoredState, view::SyncStatus};
use crate::{base::ClusterId, model::change::Change};

impl Remote {
    /// Publishes the named clusters, whose stored states stay. An origin that cannot be read may name any cluster.
    pub(super) fn publish_names(&self) {
        let Some(stored) = &self.stored else { return };
        let is_known = self.is_declared && self.problems.keys().all(|(_, cluster)| cluster.is_some());
        let refused = self.problems.keys().filter_map(|(_, cluster)| cluster.clone());
        let named = is_known.then(|| self.states.keys().cloned().chain(refused).collect());
        stored.publish(|live| live.named = named);
    }

    /// Starts reading the stored state of a new cluster.
    pub(super) fn read_stored(&mut self, cluster: ClusterId) {
        let (Some(stored), Some(state)) = (&self.stored, self.states.get_mut(&cluster)) else {
            return;
        };
        self.number += 1;
        state.storage = Storage::Reading(self.number);
        let (key, read) = ((cluster.clone(), self.number), stored.read(cluster));
        self.reading.push(Box::pin(async move { (key, read.await) }));
    }

    /// Lets a stored state serve until the first source is complete.
    pub(super) fn read(&mut self, (cluster, number): ConnectionKey, read: Option<StoredState>) {
        let state = self.states.get_mut(&cluster);
        let Some(state) = state.filter(|state| state.storage == Storage::Reading(number)) else {
            return;
        };
        self.is_changed = true;
        state.storage = Storage::Unused;
        let (Some(stored), Some(read)) = (&self.stored, read) else {
            return;
        };
        state.storage = Storage::Read(read.since);
        state.serving = Some(Connection {
            number,
            kubeconfig: None,
            began: Instant::now(),
            running: None,
            status: SyncStatus::Closed,
            deadline: read.remaining.map(|remaining| Instant::now() + remaining),
        });
        let changes = stored.changes(&cluster, read).map(Some).boxed();
        self.batches.insert((cluster, number), changes);
    }

    /// Drops stored states that are too old. Returns the removal of their rows.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<Change> {
        let is_due = |source: &mut Connection| source.deadline.is_some_and(|deadline| deadline <= now);
        let mut removals = Vec::new();
        for (cluster, state) in &mut self.states {
            let Some(source) = state.serving.take_if(is_due) else {
                continue;
            };
            self.batches.remove(&(cluster.clone(), source.number));
            state.storage = Storage::Unused;
            state.kinds.clear();
            state.mesh_configs.clear();
            self.is_changed = true;
            tracing::error!(
                %cluster, origin = %state.origin,
                "stored state of remote cluster too old, removing its objects until it is synced"
            );
            removals.push(Change::RemoveCluster(cluster.clone()));
        }
        removals
    }
}
