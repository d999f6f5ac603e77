//! Derived tables: rows computed from other tables, evaluated again only when something they read has changed.

use super::{
    Cx, Evaluated, Key, Outcome, Reads, RelationId, RowChange, Table, TableWriter, Transaction, filling_order,
};
use crate::base::Shared;

/// A table whose rows are a pure function of other tables.
///
/// The three steps are separate, so that the second one may run on many threads: [`Derived::dirty`] returns the keys to
/// evaluate, [`Evaluated::guarded`] evaluates one, [`Derived::apply`] writes the results.
pub struct Derived<K, V> {
    rows: TableWriter<K, V>,
    reads: Reads<K>,
}

impl<K: Key, V: PartialEq> Derived<K, V> {
    /// Returns an empty derived table with an identity.
    pub fn new(id: RelationId) -> Self {
        Self {
            rows: TableWriter::new(id),
            reads: Reads::default(),
        }
    }

    /// Returns the present table.
    pub fn table(&self) -> &Table<K, V> {
        self.rows.table()
    }

    /// Returns the table with the row changes of this transaction, as a source of indexes.
    pub fn writer(&self) -> &TableWriter<K, V> {
        &self.rows
    }

    /// Returns the total number of recorded dependencies, kept as they change.
    pub fn recorded_reads(&self) -> usize {
        self.reads.recorded()
    }

    /// Returns the total number of recorded dependencies, counted.
    #[cfg(test)]
    pub(super) fn counted_reads(&self) -> usize {
        self.reads.counted()
    }

    /// Returns the keys to evaluate, in key order: the candidates, and those that read something that has changed.
    pub fn dirty<'k>(&self, tx: &Transaction, candidates: impl IntoIterator<Item = &'k K>) -> Vec<K> {
        self.reads.dirty(tx, candidates)
    }

    /// Reserves capacity for this number of new keys.
    pub fn reserve(&mut self, keys: usize) {
        self.reads.reserve(keys);
    }

    /// Starts or ends a transaction: drops the row changes.
    pub fn begin(&mut self) {
        self.rows.begin();
    }

    /// Writes one result. The reads of an absent row are kept too, because it may appear when they change.
    pub fn apply(&mut self, tx: &mut Transaction, evaluated: Evaluated<K, V>) {
        let (key, outcome) = self.reads.apply(evaluated);
        match outcome {
            Outcome::Row(Some(row)) => self.rows.put(tx, key, Shared::new(row)),
            Outcome::Row(None) => self.rows.remove(tx, &key),
            Outcome::Panicked => false,
        };
    }

    /// Updates the table on this thread. If the function panics, the previous row stays, or the one before the
    /// transaction that this one undoes.
    pub fn update<'k>(
        &mut self,
        tx: &mut Transaction,
        candidates: impl IntoIterator<Item = &'k K>,
        function: impl Fn(&Cx, &K) -> Option<V>,
    ) {
        let undone = if tx.undoes_last() {
            self.rows.take_changes()
        } else {
            Vec::new()
        };
        self.begin();
        let mut keys = self.dirty(tx, candidates);
        if self.table().is_empty() {
            keys = filling_order(keys);
        }
        for key in keys {
            let evaluated = Evaluated::guarded(key, &function);
            if evaluated.panicked() {
                tx.note_panic(format!("{:?}", evaluated.key()));
                self.undo(tx, &undone, evaluated.key());
            }
            self.apply(tx, evaluated);
        }
    }

    /// Brings back the row of a key that these changes have replaced, if they have.
    fn undo(&mut self, tx: &mut Transaction, changes: &[RowChange<K, V>], key: &K) {
        let Some((key, old, _)) = changes.iter().find(|(changed, ..)| changed == key) else {
            return;
        };
        match old {
            Some(row) => self.rows.put(tx, key.clone(), row.clone()),
            None => self.rows.remove(tx, key),
        };
    }

    /// Returns the table as it would be with these results, with the changes of its rows. Nothing is recorded: the
    /// present table and its reads stay.
    pub fn preview(
        &self,
        tx: &mut Transaction,
        results: impl IntoIterator<Item = Evaluated<K, V>>,
    ) -> TableWriter<K, V> {
        let mut rows = TableWriter::after(self.table().clone());
        for Evaluated { key, outcome, .. } in results {
            match outcome {
                Outcome::Row(Some(row)) => rows.put(tx, key, Shared::new(row)),
                Outcome::Row(None) => rows.remove(tx, &key),
                Outcome::Panicked => false,
            };
        }
        rows
    }

    /// Drops a key without dependents.
    pub fn forget(&mut self, tx: &mut Transaction, key: &K) {
        self.reads.forget(key);
        self.rows.remove(tx, key);
    }
}
