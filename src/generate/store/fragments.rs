//! Memos of fragments: values that live while a resource consists of them.

use super::{Evaluator, Executor};
use crate::table::{Cx, Derived, Key, Refcounts, RelationId, Table, Transaction};

/// Fragments of one kind, with the number of resources that each is part of.
pub(super) struct FragmentMemo<K, V> {
    rows: Derived<K, V>,
    resources: Refcounts<K>,
}

impl<K: Key, V: PartialEq + Send> FragmentMemo<K, V> {
    /// Returns an empty memo with an identity.
    pub(super) fn new(id: RelationId) -> Self {
        Self {
            rows: Derived::new(id),
            resources: Refcounts::default(),
        }
    }

    /// Returns the present fragments.
    pub(super) fn table(&self) -> Table<K, V> {
        self.rows.table().clone()
    }

    /// Returns the memo, which has what the fragments were built from.
    pub(super) fn rows(&self) -> &Derived<K, V> {
        &self.rows
    }

    /// Returns the number of recorded dependencies.
    pub(super) fn recorded_reads(&self) -> usize {
        self.rows.recorded_reads()
    }

    /// Adds the fragments of new resources, and brings all up to date. Returns the number of evaluations.
    pub(super) fn update<'k>(
        &mut self,
        evaluator: &mut Evaluator<impl Executor>,
        fragments: impl IntoIterator<Item = &'k K>,
        build: impl Fn(&Cx, &K) -> Option<V> + Sync + Send,
    ) -> usize {
        let new = fragments.into_iter().filter(|key| self.resources.add(key));
        let new: Vec<K> = new.cloned().collect();
        evaluator.update(&mut self.rows, &new, build)
    }

    /// Removes a resource that consists of these fragments.
    pub(super) fn release<'k>(&mut self, tx: &mut Transaction, fragments: impl IntoIterator<Item = &'k K>) {
        for key in fragments {
            if self.resources.remove(key) {
                self.rows.forget(tx, key);
            }
        }
    }

    /// Ends an update.
    pub(super) fn forget_changes(&mut self) {
        self.rows.begin();
    }
}
