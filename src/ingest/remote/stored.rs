//! Stored states of remote clusters: the last known objects of each cluster, in a folder (`--remoteStateDir`).
//!
//! istiod may start while the API server of a remote cluster is unreachable. The objects of its file then count until
//! its first complete list, so that proxies keep its endpoints. Note: Secrets are never stored. A file that cannot be
//! used is logged and counted, and the cluster starts without it.

mod file;
mod folder;
mod metrics;
mod objects;
mod writer;

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::{
    FutureExt, StreamExt,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use prometheus::Registry;
use tokio::sync::watch;

pub(super) use self::objects::LiveStates;
pub use self::writer::StateWriter;
use self::{
    file::FileError,
    folder::Folder,
    metrics::{ReadResult, StoredMetrics},
};
use crate::{
    api::Kind,
    base::{ClusterId, SmolStr},
    environment::wall_clock,
    ingest::{
        discovery_filter::{DiscoveryFilter, FilterOutput, Filters, WatchedObject},
        kinds::{Role, Rules, is_stored},
    },
    kube::health::WatchMetrics,
    model::change::Batch,
};

/// Settings of stored states.
#[derive(Clone, Debug)]
pub struct StoredSettings {
    /// `--remoteStateDir`.
    pub folder: PathBuf,
    /// `--remoteStateMaxAge`: age at which a stored state no longer counts; zero for no limit.
    pub max_age: Duration,
}

/// Reader of stored states.
pub struct StoredStates {
    folder: Arc<Folder>,
    max_age: Duration,
    /// Kinds that are read from remote clusters.
    kinds: BTreeSet<Kind>,
    revision: SmolStr,
    filters: watch::Receiver<Option<Filters>>,
    metrics: StoredMetrics,
    live: watch::Sender<LiveStates>,
}

/// A state as read from its file.
pub(super) struct StoredState {
    /// Time at which it was known to be current.
    pub(super) since: SystemTime,
    /// Time until it is too old; `None` without a limit.
    pub(super) remaining: Option<Duration>,
    objects: Vec<WatchedObject>,
}

impl StoredStates {
    /// Returns the reader, and the task that writes the files.
    pub fn new(
        registry: &Registry,
        settings: StoredSettings,
        rules: &Rules,
        filters: watch::Receiver<Option<Filters>>,
        watches: WatchMetrics,
    ) -> Result<(Self, StateWriter), prometheus::Error> {
        let metrics = StoredMetrics::new(registry)?;
        let folder = Arc::new(Folder::new(settings.folder));
        let live = watch::Sender::default();
        let writer = StateWriter::new(folder.clone(), live.subscribe(), watches, metrics.clone());
        let states = Self {
            folder,
            max_age: settings.max_age,
            kinds: rules.kinds(Role::Remote),
            revision: rules.revision.clone(),
            filters,
            metrics,
            live,
        };
        Ok((states, writer))
    }

    /// Reads the state of a cluster. `None` if there is none that counts.
    pub(super) fn read(&self, cluster: ClusterId) -> BoxFuture<'static, Option<StoredState>> {
        let (folder, metrics, max_age) = (self.folder.clone(), self.metrics.clone(), self.max_age);
        async move {
            let (reader, id) = (folder.clone(), cluster.clone());
            let read = tokio::task::spawn_blocking(move || reader.read(&id)).await;
            let path = folder.file(&cluster);
            let path = path.display();
            match read.unwrap_or_else(|panic| Err(FileError::Panic(panic.to_string()))) {
                Ok(Some((since, objects))) => {
                    let age = wall_clock().duration_since(since).unwrap_or_default();
                    let remaining = (!max_age.is_zero()).then(|| max_age.saturating_sub(age));
                    if remaining.is_some_and(|remaining| remaining.is_zero()) {
                        tracing::warn!(%cluster, %path, ?age, limit = ?max_age, "stored state of remote cluster too old, ignoring it");
                        metrics.read(ReadResult::Expired);
                        return None;
                    }
                    tracing::info!(%cluster, %path, ?age, objects = objects.len(), "stored state of remote cluster read");
                    metrics.read(ReadResult::Success);
                    Some(StoredState {
                        since,
                        remaining,
                        objects,
                    })
                }
                Ok(None) => {
                    metrics.read(ReadResult::Absent);
                    None
                }
                Err(error) => {
                    tracing::error!(%cluster, %path, %error, "failed to read stored state of remote cluster, ignoring it");
                    metrics.read(ReadResult::Invalid);
                    None
                }
            }
        }
        .boxed()
    }

    /// Returns the changes of a stored state: all visible objects once the filters are known, then what changes with
    /// the filters.
    pub(super) fn changes(&self, cluster: &ClusterId, state: StoredState) -> BoxStream<'static, Batch> {
        let mut filter = DiscoveryFilter::new(cluster.clone(), self.revision.clone());
        let kinds: BTreeSet<Kind> = self.kinds.iter().copied().filter(|kind| is_stored(*kind)).collect();
        for object in state.objects {
            if kinds.contains(&object.kind) {
                filter.apply(object, &mut FilterOutput::default());
            }
        }
        let start = (self.filters.clone(), filter, Some(kinds));
        stream::unfold(start, |(mut filters, mut filter, first)| async move {
            match first {
                Some(_) => drop(filters.wait_for(Option::is_some).await.ok()?),
                None => filters.changed().await.ok()?,
            }
            let present = filters.borrow_and_update().clone().unwrap_or_default();
            let mut output = FilterOutput::default();
            filter.set_filters(present, &mut output);
            if let Some(kinds) = first {
                output = filter.everything(kinds);
            }
            Some((output.changes, (filters, filter, None)))
        })
        .boxed()
    }

    /// Updates the states to write.
    pub(super) fn publish(&self, update: impl FnOnce(&mut LiveStates)) {
        self.live.send_modify(update);
    }
}

#[cfg(test)]
mod tests;
