//! Several sources of configuration as one (`meshConfig.configSources`).
//!
//! Each source is a store with an order. An object that several stores have counts as the first store has it; when that
//! one removes it, the next one's appears.
//!
//! Parity (pilot/pkg/config/aggregate/config.go): the same rule.

use std::collections::{BTreeMap, BTreeSet};

use futures::{
    FutureExt, StreamExt,
    future::{BoxFuture, join_all},
    stream::{BoxStream, select_all},
};
use tokio::{
    sync::{mpsc, watch},
    task::coop::unconstrained,
};
use tokio_stream::wrappers::ReceiverStream;

use super::source::{Readiness, Source};
use crate::{
    api::{Kind, Row},
    base::{ClusterId, ObjectKey},
    model::change::{Batch, Change, SourceId},
};

/// Queue length of a store, in batches.
const BATCHES: usize = 16;
/// Largest number of changed rows per kind that are sent individually.
const FEW_ROWS: usize = 16;

/// All stores, in order.
pub struct ConfigSources {
    stores: Vec<Store>,
    is_synced: watch::Sender<bool>,
}

/// A started or unstarted store.
struct Store {
    synced: BoxFuture<'static, bool>,
    run: BoxFuture<'static, ()>,
    batches: mpsc::Receiver<Batch>,
}

/// The configuration of a source that also has other rows, such as a cluster.
pub struct SplitSource<S> {
    inner: S,
    config: mpsc::Sender<Batch>,
    is_synced: watch::Sender<bool>,
}

impl Default for ConfigSources {
    fn default() -> Self {
        Self {
            stores: Vec::new(),
            is_synced: watch::Sender::new(false),
        }
    }
}

impl ConfigSources {
    /// Returns the number of stores.
    pub fn len(&self) -> usize {
        self.stores.len()
    }

    /// Returns true without stores.
    pub fn is_empty(&self) -> bool {
        self.stores.is_empty()
    }

    /// Adds a source as the last store.
    pub fn add(&mut self, source: impl Source) {
        let (sender, batches) = mpsc::channel(BATCHES);
        self.stores.push(Store {
            synced: source.readiness().into_synced(),
            run: source.run(sender).boxed(),
            batches,
        });
    }

    /// Inserts the configuration of a source as a store at an index. The result runs the source, and sends its other
    /// rows.
    pub fn split<S: Source>(&mut self, index: usize, inner: S) -> SplitSource<S> {
        let (config, batches) = mpsc::channel(BATCHES);
        let is_synced = watch::Sender::new(false);
        let store = Store {
            synced: Readiness::synced(&is_synced).into_synced(),
            run: std::future::pending().boxed(),
            batches,
        };
        self.stores.insert(index.min(self.stores.len()), store);
        SplitSource {
            inner,
            config,
            is_synced,
        }
    }
}

impl Source for ConfigSources {
    fn name(&self) -> &'static str {
        "config sources"
    }

    fn readiness(&self) -> Readiness {
        Readiness::synced(&self.is_synced)
    }

    /// Runs all stores and sends the changes of what counts.
    async fn run(self, changes: mpsc::Sender<Batch>) {
        let (mut synced, mut running) = (Vec::new(), Vec::new());
        let mut batches: Vec<BoxStream<'static, (usize, Batch)>> = Vec::new();
        let count = self.stores.len();
        for (index, store) in self.stores.into_iter().enumerate() {
            synced.push(store.synced);
            running.push(store.run);
            batches.push(
                ReceiverStream::new(store.batches)
                    .map(move |batch| (index, batch))
                    .boxed(),
            );
        }
        let mut batches = select_all(batches);
        let running = join_all(running);
        // A store that ends before it is synced keeps the start waiting, as its objects are unknown.
        let mut synced = join_all(synced);
        let mut merged = Merged::new(count);
        let mut waits = true;
        let merging = async {
            loop {
                tokio::select! {
                    next = batches.next() => match next {
                        Some((store, batch)) => {
                            if changes.send(merged.apply(store, batch)).await.is_err() {
                                return;
                            }
                        }
                        None => return changes.closed().await,
                    },
                    all = &mut synced, if waits => {
                        waits = false;
                        // Everything that was sent before is forwarded first. Without `unconstrained`, a receiver
                        // appears to be empty when the task has used up its budget.
                        while let Some(Some((store, batch))) = unconstrained(batches.next()).now_or_never() {
                            if changes.send(merged.apply(store, batch)).await.is_err() {
                                return;
                            }
                        }
                        if all.into_iter().all(|synced| synced) {
                            self.is_synced.send_replace(true);
                        }
                    }
                }
            }
        };
        tokio::pin!(merging);
        tokio::select! {
            () = &mut merging => {}
            _ = running => merging.await,
        }
    }
}

impl<S: Source> Source for SplitSource<S> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn readiness(&self) -> Readiness {
        Readiness::synced(&self.is_synced)
    }

    fn is_vital(&self) -> bool {
        self.inner.is_vital()
    }

    async fn run(self, changes: mpsc::Sender<Batch>) {
        let (sender, mut batches) = mpsc::channel(BATCHES);
        let mut synced = self.inner.readiness().into_synced();
        let running = self.inner.run(sender);
        let (config, is_synced) = (self.config, self.is_synced);
        let send = async |batch: Batch| {
            let (own, other): (Batch, Batch) = batch.into_iter().partition(is_config);
            (own.is_empty() || config.send(own).await.is_ok())
                && (other.is_empty() || changes.send(other).await.is_ok())
        };
        let splitting = async {
            let mut waits = true;
            loop {
                tokio::select! {
                    batch = batches.recv() => match batch {
                        Some(batch) => if !send(batch).await { return },
                        None => return,
                    },
                    ended = &mut synced, if waits => {
                        waits = false;
                        while let Ok(batch) = batches.try_recv() {
                            if !send(batch).await {
                                return;
                            }
                        }
                        is_synced.send_replace(ended);
                    }
                }
            }
        };
        tokio::join!(running, splitting);
    }
}

/// Returns true for changes of the kinds that stores have.
fn is_config(change: &Change) -> bool {
    match change {
        Change::Upsert(row) => row.kind().is_config(),
        Change::Remove(kind, _) => kind.is_config(),
        Change::Replace(source, _) => source.kind.is_config(),
        Change::RemoveCluster(_) => false,
    }
}

/// The rows of all stores, and which of them count.
struct Merged {
    stores: Vec<BTreeMap<(ClusterId, Kind), BTreeMap<ObjectKey, Row>>>,
}

impl Merged {
    fn new(stores: usize) -> Self {
        Self {
            stores: vec![BTreeMap::new(); stores],
        }
    }

    /// Returns the row that counts.
    fn effective(&self, source: &(ClusterId, Kind), key: &ObjectKey) -> Option<&Row> {
        self.stores.iter().find_map(|store| store.get(source)?.get(key))
    }

    /// Applies changes of a store and returns those of the rows that count.
    fn apply(&mut self, store: usize, batch: Batch) -> Batch {
        let mut touched: BTreeMap<(ClusterId, Kind), BTreeMap<ObjectKey, Option<Row>>> = BTreeMap::new();
        let mut whole: BTreeSet<(ClusterId, Kind)> = BTreeSet::new();
        for change in batch {
            match change {
                Change::Upsert(row) => {
                    let source = (row.key().cluster.clone(), row.kind());
                    self.set(store, &source, row.key().clone(), Some(row), &mut touched);
                }
                Change::Remove(kind, key) => {
                    let source = (key.cluster.clone(), kind);
                    self.set(store, &source, key, None, &mut touched);
                }
                Change::Replace(SourceId { cluster, kind }, rows) => {
                    let source = (cluster, kind);
                    let mut rows: BTreeMap<ObjectKey, Row> =
                        rows.into_iter().map(|row| (row.key().clone(), row)).collect();
                    let known = self.stores[store].get(&source);
                    let gone: Vec<ObjectKey> = known.into_iter().flatten().map(|(key, _)| key.clone()).collect();
                    for key in gone.into_iter().filter(|key| !rows.contains_key(key)) {
                        self.set(store, &source, key, None, &mut touched);
                    }
                    while let Some((key, row)) = rows.pop_first() {
                        self.set(store, &source, key, Some(row), &mut touched);
                    }
                    // A kind without rows is known to have none.
                    whole.insert(source);
                }
                Change::RemoveCluster(cluster) => {
                    let rows = self.stores[store]
                        .iter()
                        .filter(|((source_cluster, _), _)| *source_cluster == cluster);
                    let gone: Vec<_> = rows
                        .flat_map(|(source, rows)| rows.keys().map(move |key| (source.clone(), key.clone())))
                        .collect();
                    for (source, key) in gone {
                        self.set(store, &source, key, None, &mut touched);
                    }
                }
            }
        }
        let mut changes = Batch::new();
        for (source, rows) in touched {
            let differs = |(key, before): &(ObjectKey, Option<Row>)| self.effective(&source, key) != before.as_ref();
            let changed: Vec<_> = rows.into_iter().filter(differs).collect();
            if changed.len() > FEW_ROWS {
                whole.insert(source);
                continue;
            }
            whole.remove(&source);
            changes.extend(changed.into_iter().map(|(key, _)| match self.effective(&source, &key) {
                Some(row) => Change::Upsert(row.clone()),
                None => Change::Remove(source.1, key),
            }));
        }
        changes.extend(whole.into_iter().map(|source| {
            let of_source = self.stores.iter().filter_map(|store| store.get(&source));
            let keys: BTreeSet<&ObjectKey> = of_source.flat_map(BTreeMap::keys).collect();
            let rows = keys.into_iter().filter_map(|key| self.effective(&source, key).cloned());
            let rows = rows.collect();
            let (cluster, kind) = source;
            Change::Replace(SourceId { cluster, kind }, rows)
        }));
        changes
    }

    /// Sets a row of a store and notes the row that counted before.
    fn set(
        &mut self,
        store: usize,
        source: &(ClusterId, Kind),
        key: ObjectKey,
        row: Option<Row>,
        touched: &mut BTreeMap<(ClusterId, Kind), BTreeMap<ObjectKey, Option<Row>>>,
    ) {
        let before = self.effective(source, &key).cloned();
        touched
            .entry(source.clone())
            .or_default()
            .entry(key.clone())
            .or_insert(before);
        let rows = self.stores[store].entry(source.clone()).or_default();
        match row {
            Some(row) => rows.insert(key, row),
            None => rows.remove(&key),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::resolved_host::ResolvedHost;

    const CLUSTER: ClusterId = ClusterId::new_static("c");

    fn row(name: &str, last: u8) -> Row {
        let key = ResolvedHost::key(&CLUSTER, name);
        let addresses = vec![std::net::IpAddr::from([10, 0, 0, last])];
        ResolvedHost { key, addresses }.into()
    }

    fn replace(rows: Vec<Row>) -> Batch {
        let source = SourceId {
            cluster: CLUSTER,
            kind: ResolvedHost::KIND,
        };
        vec![Change::Replace(source, rows)]
    }

    /// Applies changes to a plain map, as the model does.
    fn commit(model: &mut BTreeMap<ObjectKey, Row>, batch: Batch) {
        for change in batch {
            match change {
                Change::Upsert(row) => {
                    model.insert(row.key().clone(), row);
                }
                Change::Remove(_, key) => {
                    model.remove(&key);
                }
                Change::Replace(_, rows) => *model = rows.into_iter().map(|row| (row.key().clone(), row)).collect(),
                Change::RemoveCluster(_) => model.clear(),
            }
        }
    }

    #[test]
    fn the_first_store_counts_and_the_next_one_follows_it() {
        let mut merged = Merged::new(2);
        let mut model = BTreeMap::new();
        commit(&mut model, merged.apply(1, replace(vec![row("a", 2), row("b", 2)])));
        commit(&mut model, merged.apply(0, replace(vec![row("a", 1)])));
        let rows = |model: &BTreeMap<ObjectKey, Row>| model.values().cloned().collect::<Vec<_>>();
        assert_eq!(rows(&model), [row("a", 1), row("b", 2)]);
        assert!(
            merged.apply(1, vec![Change::Upsert(row("a", 3))]).is_empty(),
            "it does not count"
        );
        commit(&mut model, merged.apply(0, replace(Vec::new())));
        assert_eq!(rows(&model), [row("a", 3), row("b", 2)]);
    }

    #[test]
    fn any_order_of_batches_leads_to_the_same_rows() {
        let many = |last: u8| {
            (0..40)
                .map(|number| row(&format!("h{number}"), last))
                .collect::<Vec<_>>()
        };
        let batches = [
            (0, replace(many(1)[..30].to_vec())),
            (1, replace(many(2))),
            (2, vec![Change::Upsert(row("h3", 9)), Change::Upsert(row("z", 9))]),
        ];
        let result = |order: [usize; 3]| {
            let mut merged = Merged::new(3);
            let mut model = BTreeMap::new();
            for index in order {
                let (store, batch) = batches[index].clone();
                commit(&mut model, merged.apply(store, batch));
            }
            model
        };
        let first = result([0, 1, 2]);
        assert_eq!(first.len(), 41);
        for order in [[0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            assert_eq!(result(order), first);
        }
    }
}
