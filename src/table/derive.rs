//! Derived tables: rows computed from other tables, evaluated again only when something they read has changed.

use std::panic::AssertUnwindSafe;

use super::{Cx, Key, ReadKey, Reads, RelationId, Table, TableWriter, Transaction};
use crate::base::Shared;

/// A table whose rows are a pure function of other tables.
///
/// The three steps are apart so that the middle one may run on many threads: [`Derived::dirty`] tells the keys to
/// evaluate, [`Evaluated::guarded`] evaluates one, [`Derived::apply`] writes the results.
pub struct Derived<K, V> {
    rows: TableWriter<K, V>,
    reads: Reads<K>,
}

/// The outcome of one evaluation.
pub struct Evaluated<K, V> {
    pub(super) key: K,
    pub(super) outcome: Outcome<V>,
    pub(super) reads: Box<[ReadKey]>,
}

/// What an evaluation came to.
pub enum Outcome<V> {
    /// A row, or that there is none.
    Row(Option<V>),
    /// Nothing: what was there before holds.
    Panicked,
}

impl<K: Key, V> Evaluated<K, V> {
    /// Evaluates one key, recording what is read. A panic of the function keeps the row that was there before; it is
    /// evaluated again when anything changes that it read until then.
    pub fn guarded(key: K, function: impl FnOnce(&Cx, &K) -> Option<V>) -> Self {
        let cx = Cx::recording();
        let attempt = std::panic::catch_unwind(AssertUnwindSafe(|| function(&cx, &key)));
        let outcome = attempt.map_or(Outcome::Panicked, Outcome::Row);
        Self {
            key,
            outcome,
            reads: cx.into_reads(),
        }
    }

    /// True if the function panicked.
    pub fn panicked(&self) -> bool {
        matches!(self.outcome, Outcome::Panicked)
    }

    /// The row, if there is one.
    pub fn row_mut(&mut self) -> Option<&mut V> {
        match &mut self.outcome {
            Outcome::Row(row) => row.as_mut(),
            Outcome::Panicked => None,
        }
    }

    /// The key.
    pub fn key(&self) -> &K {
        &self.key
    }
}

impl<K: Key, V: PartialEq> Derived<K, V> {
    /// An empty derived table with an identity.
    pub fn new(id: RelationId) -> Self {
        Self {
            rows: TableWriter::new(id),
            reads: Reads::default(),
        }
    }

    /// The table as it stands.
    pub fn table(&self) -> &Table<K, V> {
        self.rows.table()
    }

    /// The table with the row changes of this transaction, as a source of indexes.
    pub fn writer(&self) -> &TableWriter<K, V> {
        &self.rows
    }

    /// How many dependencies are recorded in all; a running total.
    pub fn recorded_reads(&self) -> usize {
        self.reads.recorded()
    }

    /// The same, counted.
    #[cfg(test)]
    pub(super) fn counted_reads(&self) -> usize {
        self.reads.counted()
    }

    /// The keys to evaluate: the candidates, and those that read something that has changed. In key order.
    pub fn dirty<'k>(&self, tx: &Transaction, candidates: impl IntoIterator<Item = &'k K>) -> Vec<K> {
        self.reads.dirty(tx, candidates)
    }

    /// Makes room for so many new keys.
    pub fn reserve(&mut self, keys: usize) {
        self.reads.reserve(keys);
    }

    /// Begins a transaction, or ends one: forgets the row changes of the last one.
    pub fn begin(&mut self) {
        self.rows.begin();
    }

    /// Writes one outcome. The reads of an absent row are kept too: it may come to be when they change.
    pub fn apply(&mut self, tx: &mut Transaction, evaluated: Evaluated<K, V>) {
        let (key, outcome) = self.reads.apply(evaluated);
        match outcome {
            Outcome::Row(Some(row)) => self.rows.put(tx, key, Shared::new(row)),
            Outcome::Row(None) => self.rows.remove(tx, &key),
            Outcome::Panicked => false,
        };
    }

    /// Brings the table up to date on this thread. A panic of the function keeps the row that was there before.
    pub fn update<'k>(
        &mut self,
        tx: &mut Transaction,
        candidates: impl IntoIterator<Item = &'k K>,
        function: impl Fn(&Cx, &K) -> Option<V>,
    ) {
        self.begin();
        for key in self.dirty(tx, candidates) {
            let evaluated = Evaluated::guarded(key, &function);
            if evaluated.panicked() {
                tx.note_panic(format!("{:?}", evaluated.key()));
            }
            self.apply(tx, evaluated);
        }
    }

    /// Drops a key that nobody demands any more, without telling anyone.
    pub fn forget(&mut self, tx: &mut Transaction, key: &K) {
        self.reads.forget(key);
        self.rows.remove(tx, key);
    }
}
