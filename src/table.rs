//! The engine: persistent tables, indexes, and derived tables with recorded dependencies and equality cut-off.
//!
//! One thread writes inside a [`Transaction`]. Readers hold persistent maps ([`Table`], [`Index`]) that are cloned in
//! constant time. A read goes through a [`Cx`], which records it, so that a derived row is evaluated again exactly when
//! something that it read has changed. Note: recorded reads are 64-bit hashes, so a collision causes an unnecessary
//! evaluation but never misses one.

mod derive;
mod distinct;
mod evaluated;
mod index;
mod memo;
mod pieces;
mod reads;
mod refcounts;
#[cfg(test)]
mod tests;
mod transaction;
mod union;

use std::{
    cell::RefCell,
    fmt::Debug,
    hash::{Hash, Hasher},
    panic::AssertUnwindSafe,
};

pub use derive::Derived;
pub use distinct::Distinct;
pub use evaluated::{Evaluated, Outcome};
pub use index::{Index, IndexWriter};
pub use memo::{Memo, Memoized};
pub use pieces::{LastPieces, PieceReads};
pub use reads::Reads;
pub use refcounts::{Refcounts, Users};
pub use transaction::{ChangeSet, Transaction};
pub use union::Union;

use imbl::{OrdMap, ordmap::DiffItem};

use crate::base::Shared;

/// A key of a table.
pub trait Key: Ord + Clone + Hash + Debug + Send + Sync + 'static {}
impl<T: Ord + Clone + Hash + Debug + Send + Sync + 'static> Key for T {}

/// Identity of a table or index in a world; part of every recorded read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RelationId(pub u32);

/// A recorded read: the hash of (relation, key), or of the relation as a whole.
///
/// Note: the hash is a fast one without a secret, because reads are by far the most frequent use of keys. Keys that
/// tenants make collide are one read with many readers, which a change of any of them evaluates: as much as a change of
/// all of them, which these tenants can make anyway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReadKey(u64);

impl ReadKey {
    /// Returns a read of one key, present or not.
    pub fn of<K: Hash>(relation: RelationId, key: &K) -> Self {
        let mut hasher = rustc_hash::FxHasher::default();
        relation.hash(&mut hasher);
        key.hash(&mut hasher);
        Self(hasher.finish())
    }

    /// Returns a read of the whole relation.
    pub fn whole(relation: RelationId) -> Self {
        let mut hasher = rustc_hash::FxHasher::default();
        (relation, "whole relation").hash(&mut hasher);
        Self(hasher.finish())
    }
}

/// Read context that records reads. One per evaluation; not shared between threads.
#[derive(Debug, Default)]
pub struct Cx {
    reads: Option<RefCell<Vec<ReadKey>>>,
}

impl Cx {
    /// Returns a context that records.
    pub fn recording() -> Self {
        Self {
            reads: Some(RefCell::default()),
        }
    }

    /// Returns a context that records nothing, for dumps and tests.
    pub fn untracked() -> Self {
        Self { reads: None }
    }

    fn record(&self, read: ReadKey) {
        if let Some(reads) = &self.reads {
            reads.borrow_mut().push(read);
        }
    }

    /// Records the reads of another evaluation.
    pub fn record_all(&self, read: &[ReadKey]) {
        if let Some(reads) = &self.reads {
            reads.borrow_mut().extend_from_slice(read);
        }
    }

    /// Calls a function with a context of its own, and returns the reads of that context. They are recorded here too,
    /// also if the function panics: the evaluation that fails by it depends on them.
    fn nested<R>(&self, function: impl FnOnce(&Self) -> R) -> (R, Box<[ReadKey]>) {
        let own = Self::recording();
        let attempt = std::panic::catch_unwind(AssertUnwindSafe(|| function(&own)));
        let reads = own.into_reads();
        self.record_all(&reads);
        match attempt {
            Ok(result) => (result, reads),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Returns the reads that were recorded until now, sorted and without duplicates.
    fn reads(&self) -> Box<[ReadKey]> {
        let recorded = self.reads.as_ref().map(|reads| reads.borrow().clone());
        sorted(recorded.unwrap_or_default())
    }

    /// Returns the recorded reads, sorted and without duplicates.
    pub fn into_reads(self) -> Box<[ReadKey]> {
        sorted(self.reads.map(RefCell::into_inner).unwrap_or_default())
    }
}

fn sorted(mut reads: Vec<ReadKey>) -> Box<[ReadKey]> {
    reads.sort_unstable();
    reads.dedup();
    reads.into_boxed_slice()
}

/// Returns items, sorted by key, in the order in which they fill the nodes of an empty persistent map: every second
/// one, then the others. In their own order, each node would stay half empty: when it is full, it is split in two, and
/// only the second half gets more.
pub fn filling_order<T>(sorted: Vec<T>) -> Vec<T> {
    let mut order = Vec::with_capacity(sorted.len());
    let mut others = Vec::with_capacity(sorted.len() / 2);
    for (position, item) in sorted.into_iter().enumerate() {
        if position.is_multiple_of(2) {
            order.push(item);
        } else {
            others.push(item);
        }
    }
    order.append(&mut others);
    order
}

/// A persistent ordered map of shared rows. Cloning takes constant time; the clone never changes.
pub struct Table<K, V> {
    id: RelationId,
    rows: OrdMap<K, Shared<V>>,
}

impl<K, V> Clone for Table<K, V> {
    fn clone(&self) -> Self {
        Self {
            id: self.id,
            rows: self.rows.clone(),
        }
    }
}

impl<K: Key, V> Table<K, V> {
    /// Returns an empty table with an identity.
    pub fn new(id: RelationId) -> Self {
        Self {
            id,
            rows: OrdMap::new(),
        }
    }

    /// Returns the row of a key.
    pub fn get(&self, cx: &Cx, key: &K) -> Option<&Shared<V>> {
        cx.record(ReadKey::of(self.id, key));
        self.rows.get(key)
    }

    /// Returns the row of a key, with the key as stored in the table.
    pub fn get_key_value(&self, cx: &Cx, key: &K) -> Option<(&K, &Shared<V>)> {
        cx.record(ReadKey::of(self.id, key));
        self.rows.get_key_value(key)
    }

    /// Looks up the row of a key once for many readers.
    pub fn prefetch(&self, key: &K) -> PrefetchedRow<V> {
        PrefetchedRow {
            read: ReadKey::of(self.id, key),
            row: self.rows.get(key).cloned(),
        }
    }

    /// Iterates over all rows in key order. The reader depends on the table as a whole.
    pub fn iter(&self, cx: &Cx) -> impl Iterator<Item = (&K, &Shared<V>)> {
        cx.record(ReadKey::whole(self.id));
        self.rows.iter()
    }

    /// Returns all keys in order. The reader depends on the table as a whole.
    pub fn keys(&self, cx: &Cx) -> impl Iterator<Item = &K> {
        self.iter(cx).map(|(key, _)| key)
    }

    /// Returns the persistent map; the reader depends on the table as a whole.
    pub fn rows(&self, cx: &Cx) -> &OrdMap<K, Shared<V>> {
        cx.record(ReadKey::whole(self.id));
        &self.rows
    }

    /// Returns the keys of rows that differ from those of an earlier version of the table, untracked. Parts that both
    /// share are skipped.
    pub fn differences<'a>(&'a self, earlier: &'a Self) -> impl Iterator<Item = &'a K>
    where
        V: PartialEq,
    {
        earlier.rows.diff(&self.rows).map(|item| match item {
            DiffItem::Add(key, _) | DiffItem::Remove(key, _) => key,
            DiffItem::Update { new: (key, _), .. } => key,
        })
    }

    /// Marks the keys of rows that differ from those of an earlier version of the table as changed.
    pub fn mark_differences(&self, earlier: &Self, tx: &mut Transaction)
    where
        V: PartialEq,
    {
        self.differences(earlier).for_each(|key| tx.mark(self.id, key));
    }

    /// Returns the number of rows, untracked: for metrics and dumps.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns true without rows, untracked.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// A row that was looked up beforehand, or its absence. A reader depends on the row all the same.
pub struct PrefetchedRow<V> {
    read: ReadKey,
    row: Option<Shared<V>>,
}

impl<V> Clone for PrefetchedRow<V> {
    fn clone(&self) -> Self {
        Self {
            read: self.read,
            row: self.row.clone(),
        }
    }
}

impl<V> PrefetchedRow<V> {
    /// Returns the row.
    pub fn get(&self, cx: &Cx) -> Option<&Shared<V>> {
        cx.record(self.read);
        self.row.as_ref()
    }
}

/// A change of a row: the key, the previous row, the new row.
pub type RowChange<K, V> = (K, Option<Shared<V>>, Option<Shared<V>>);

/// Write side of a table, with the row changes of the current transaction.
pub struct TableWriter<K, V> {
    table: Table<K, V>,
    changes: Vec<RowChange<K, V>>,
}

impl<K: Key, V: PartialEq> TableWriter<K, V> {
    /// Returns an empty table with an identity.
    pub fn new(id: RelationId) -> Self {
        Self {
            table: Table::new(id),
            changes: Vec::new(),
        }
    }

    /// Returns a writer of a table that exists already.
    fn after(table: Table<K, V>) -> Self {
        Self {
            table,
            changes: Vec::new(),
        }
    }

    /// Returns the present table.
    pub fn table(&self) -> &Table<K, V> {
        &self.table
    }

    /// Returns the row changes of this transaction, in the order of writing.
    pub fn changes(&self) -> &[RowChange<K, V>] {
        &self.changes
    }

    /// Puts a row, unless an equal one exists, which keeps its allocation. Returns true on a change.
    pub fn put(&mut self, tx: &mut Transaction, key: K, row: Shared<V>) -> bool {
        let old = self.table.rows.get(&key);
        if old.is_some_and(|old| *old == row) {
            return false;
        }
        let old = self.table.rows.insert(key.clone(), row.clone());
        tx.mark(self.table.id, &key);
        self.changes.push((key, old, Some(row)));
        true
    }

    /// Removes a row. Returns true if it existed.
    pub fn remove(&mut self, tx: &mut Transaction, key: &K) -> bool {
        let Some(old) = self.table.rows.remove(key) else {
            return false;
        };
        tx.mark(self.table.id, key);
        self.changes.push((key.clone(), Some(old), None));
        true
    }

    /// Takes the row changes of the last transaction.
    fn take_changes(&mut self) -> Vec<RowChange<K, V>> {
        std::mem::take(&mut self.changes)
    }

    /// Starts or ends a transaction: drops the row changes, with their memory.
    pub fn begin(&mut self) {
        self.changes = Vec::new();
    }
}
