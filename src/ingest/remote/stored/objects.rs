//! Live states: the present objects of each remote cluster, as pointers.

use std::collections::{BTreeMap, BTreeSet};

use imbl::OrdMap;

use crate::{
    api::{Kind, Row},
    base::{ClusterId, ObjectKey},
    ingest::kinds::is_stored,
    model::change::Change,
};

/// The stored kinds of one cluster. Cloning it copies no object.
#[derive(Clone, Debug, Default)]
pub(super) struct Objects {
    rows: BTreeMap<Kind, OrdMap<ObjectKey, Row>>,
    /// Number of the last change of all clusters when this one changed.
    pub(super) change: u64,
}

impl Objects {
    /// Applies a batch of the cluster. Returns true if it concerns stored kinds.
    fn apply(&mut self, batch: &[Change]) -> bool {
        let mut concerns = false;
        for change in batch {
            match change {
                Change::Upsert(row) if is_stored(row.kind()) => {
                    let rows = self.rows.entry(row.kind()).or_default();
                    rows.insert(row.key().clone(), row.clone());
                }
                Change::Remove(kind, key) if is_stored(*kind) => {
                    self.rows.entry(*kind).or_default().remove(key);
                }
                Change::Replace(source, rows) if is_stored(source.kind) => {
                    let rows = rows.iter().map(|row| (row.key().clone(), row.clone()));
                    self.rows.insert(source.kind, rows.collect());
                }
                Change::RemoveCluster(_) => self.rows.clear(),
                _ => continue,
            }
            concerns = true;
        }
        concerns
    }

    /// Returns the rows by kind and key.
    pub(super) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.rows.values().flat_map(OrdMap::values)
    }
}

/// The live states of all remote clusters.
#[derive(Clone, Debug, Default)]
pub(in crate::ingest::remote) struct LiveStates {
    /// Clusters that a Secret or file names; `None` while some are unknown.
    pub(in crate::ingest::remote) named: Option<BTreeSet<ClusterId>>,
    /// Synchronised clusters.
    pub(super) clusters: BTreeMap<ClusterId, Objects>,
    changes: u64,
}

impl LiveStates {
    /// Applies a batch of a cluster whose state is complete.
    pub(in crate::ingest::remote) fn apply(&mut self, cluster: &ClusterId, batch: &[Change]) {
        let objects = self.clusters.entry(cluster.clone()).or_default();
        if objects.apply(batch) {
            self.changes += 1;
            objects.change = self.changes;
        }
    }

    /// Removes a cluster.
    pub(in crate::ingest::remote) fn remove(&mut self, cluster: &ClusterId) {
        self.clusters.remove(cluster);
    }
}
