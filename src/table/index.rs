//! Rows by another key.

use std::collections::BTreeSet;

use imbl::OrdMap;

use super::{Cx, Key, ReadKey, RelationId, TableWriter, Transaction};
use crate::base::Shared;

/// Rows of a table by an extracted key; a row may stand under several keys.
pub struct Index<I, K, V> {
    id: RelationId,
    entries: OrdMap<I, Rows<K, V>>,
}

/// The rows under one key. Under most keys (an address, a host) stands one row, and a map of its own for each would take
/// more memory than all rows together: a node of a persistent map has room for many entries.
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

    /// Takes out the row; true if nothing is left.
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
    /// An empty index with an identity.
    pub fn new(id: RelationId) -> Self {
        Self {
            id,
            entries: OrdMap::new(),
        }
    }

    /// The rows under a key, in order of their own keys.
    pub fn get<'a>(&'a self, cx: &Cx, key: &I) -> impl Iterator<Item = (&'a K, &'a Shared<V>)> + use<'a, I, K, V> {
        cx.record(ReadKey::of(self.id, key));
        self.entries.get(key).into_iter().flat_map(Rows::iter)
    }

    /// True if some row stands under the key.
    pub fn contains(&self, cx: &Cx, key: &I) -> bool {
        cx.record(ReadKey::of(self.id, key));
        self.entries.contains_key(key)
    }

    /// All keys in order. The reader depends on the index as a whole.
    pub fn keys(&self, cx: &Cx) -> impl Iterator<Item = &I> {
        cx.record(ReadKey::whole(self.id));
        self.entries.keys()
    }
}

/// How an index finds the keys of a row.
pub(super) type Extract<I, K, V> = fn(&K, &V, &mut dyn FnMut(I));

/// The write side of an index.
pub struct IndexWriter<I, K, V> {
    index: Index<I, K, V>,
    extract: Extract<I, K, V>,
    changed: BTreeSet<I>,
}

impl<I: Key, K: Key, V: PartialEq> IndexWriter<I, K, V> {
    /// An empty index that extracts its keys by a function.
    pub fn new(id: RelationId, extract: Extract<I, K, V>) -> Self {
        Self {
            index: Index::new(id),
            extract,
            changed: BTreeSet::new(),
        }
    }

    /// The index as it stands.
    pub fn index(&self) -> &Index<I, K, V> {
        &self.index
    }

    /// The index keys whose rows changed in this transaction.
    pub fn changed(&self) -> &BTreeSet<I> {
        &self.changed
    }

    /// Takes over the row changes of the table.
    pub fn update(&mut self, tx: &mut Transaction, source: &TableWriter<K, V>) {
        self.changed.clear();
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
