//! Rows by an extracted key.

use std::collections::BTreeSet;

use imbl::{OrdMap, ordmap::DiffItem};

use super::{Cx, Key, ReadKey, RelationId, TableWriter, Transaction};
use crate::base::Shared;

/// Rows of a table by an extracted key; a row may have several keys.
pub struct Index<I, K, V> {
    id: RelationId,
    entries: OrdMap<I, Rows<K, V>>,
}

/// Rows of one key. Most keys (an address, a host) have one row. A map for each would take more memory than all rows
/// together, because a node of a persistent map has capacity for many entries.
enum Rows<K, V> {
    One(K, Shared<V>),
    Many(OrdMap<K, Shared<V>>),
}

impl<K: Clone, V> Clone for Rows<K, V> {
    fn clone(&self) -> Self {
        match self {
            Self::One(key, row) => Self::One(key.clone(), row.clone()),
            Self::Many(rows) => Self::Many(rows.clone()),
        }
    }
}

impl<K: Key, V: PartialEq> PartialEq for Rows<K, V> {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::One(key, row), Self::One(other_key, other)) => key == other_key && row == other,
            (Self::Many(rows), Self::Many(others)) => rows.ptr_eq(others) || rows == others,
            _ => false,
        }
    }
}

impl<K: Key, V> Rows<K, V> {
    fn iter(&self) -> impl Iterator<Item = (&K, &Shared<V>)> {
        let (one, many) = match self {
            Self::One(key, row) => (Some((key, row)), None),
            Self::Many(rows) => (None, Some(rows)),
        };
        one.into_iter().chain(many.into_iter().flat_map(OrdMap::iter))
    }

    fn insert(&mut self, key: K, row: Shared<V>) {
        match self {
            Self::One(own, held) if *own == key => *held = row,
            Self::One(own, held) => {
                let both = [(own.clone(), held.clone()), (key, row)];
                *self = Self::Many(both.into_iter().collect());
            }
            Self::Many(rows) => {
                rows.insert(key, row);
            }
        }
    }

    /// Removes the row; returns true if none is left.
    fn remove(&mut self, key: &K) -> bool {
        match self {
            Self::One(own, _) => own == key,
            Self::Many(rows) => {
                rows.remove(key);
                if rows.len() == 1
                    && let Some((key, row)) = rows.get_min().cloned()
                {
                    *self = Self::One(key, row);
                }
                false
            }
        }
    }
}

impl<I, K, V> Clone for Index<I, K, V> {
    fn clone(&self) -> Self {
        Self {
            id: self.id,
            entries: self.entries.clone(),
        }
    }
}

impl<I: Key, K: Key, V> Index<I, K, V> {
    /// Returns an empty index with an identity.
    pub fn new(id: RelationId) -> Self {
        Self {
            id,
            entries: OrdMap::new(),
        }
    }

    /// Returns the rows of a key, in order of their own keys.
    pub fn get<'a>(&'a self, cx: &Cx, key: &I) -> impl Iterator<Item = (&'a K, &'a Shared<V>)> + use<'a, I, K, V> {
        cx.record(ReadKey::of(self.id, key));
        self.entries.get(key).into_iter().flat_map(Rows::iter)
    }

    /// Returns true if the key has a row.
    pub fn contains(&self, cx: &Cx, key: &I) -> bool {
        cx.record(ReadKey::of(self.id, key));
        self.entries.contains_key(key)
    }

    /// Marks the keys whose rows differ from those of an earlier version of the index as changed. Parts that both share
    /// are skipped.
    pub fn mark_differences(&self, earlier: &Self, tx: &mut Transaction)
    where
        V: PartialEq,
    {
        for item in earlier.entries.diff(&self.entries) {
            match item {
                DiffItem::Add(key, _) | DiffItem::Remove(key, _) => tx.mark(self.id, key),
                DiffItem::Update { new: (key, _), .. } => tx.mark(self.id, key),
            }
        }
    }

    /// Returns all keys in order. The reader depends on the index as a whole.
    pub fn keys(&self, cx: &Cx) -> impl Iterator<Item = &I> {
        cx.record(ReadKey::whole(self.id));
        self.entries.keys()
    }
}

/// Function that emits the index keys of a row.
pub(super) type Extract<I, K, V> = fn(&K, &V, &mut dyn FnMut(I));

/// Write side of an index.
pub struct IndexWriter<I, K, V> {
    index: Index<I, K, V>,
    extract: Extract<I, K, V>,
    changed: BTreeSet<I>,
}

impl<I: Key, K: Key, V: PartialEq> IndexWriter<I, K, V> {
    /// Returns an empty index that extracts its keys by a function.
    pub fn new(id: RelationId, extract: Extract<I, K, V>) -> Self {
        Self {
            index: Index::new(id),
            extract,
            changed: BTreeSet::new(),
        }
    }

    /// Returns the present index.
    pub fn index(&self) -> &Index<I, K, V> {
        &self.index
    }

    /// Returns the index keys whose rows changed in this transaction.
    pub fn changed(&self) -> &BTreeSet<I> {
        &self.changed
    }

    /// Starts or ends a transaction: drops the changed keys.
    pub fn begin(&mut self) {
        self.changed.clear();
    }

    /// Applies the row changes of the table.
    pub fn update(&mut self, tx: &mut Transaction, source: &TableWriter<K, V>) {
        self.begin();
        for (key, old, new) in source.changes() {
            if let Some(old) = old {
                (self.extract)(key, old, &mut |entry| {
                    remove(&mut self.index.entries, &entry, key);
                    self.changed.insert(entry);
                });
            }
            if let Some(new) = new {
                (self.extract)(key, new, &mut |entry| {
                    insert(&mut self.index.entries, &entry, key, new);
                    self.changed.insert(entry);
                });
            }
        }
        for entry in &self.changed {
            tx.mark(self.index.id, entry);
        }
    }
}

fn insert<I: Key, K: Key, V>(entries: &mut OrdMap<I, Rows<K, V>>, entry: &I, key: &K, row: &Shared<V>) {
    match entries.get_mut(entry) {
        Some(rows) => rows.insert(key.clone(), row.clone()),
        None => {
            entries.insert(entry.clone(), Rows::One(key.clone(), row.clone()));
        }
    }
}

fn remove<I: Key, K: Key, V>(entries: &mut OrdMap<I, Rows<K, V>>, entry: &I, key: &K) {
    if entries.get_mut(entry).is_some_and(|rows| rows.remove(key)) {
        entries.remove(entry);
    }
}
