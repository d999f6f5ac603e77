//! Derived tables: rows computed from other tables, evaluated again only when something they read has changed.

use std::panic::AssertUnwindSafe;

use rustc_hash::{FxHashMap, FxHashSet};

use super::{Cx, Key, ReadKey, RelationId, Table, TableWriter, Transaction};
use crate::base::Shared;

/// A table whose rows are a pure function of other tables.
///
/// The three steps are apart so that the middle one may run on many threads: [`Derived::dirty`] tells the keys to
/// evaluate, [`Evaluated::guarded`] evaluates one, [`Derived::apply`] writes the results.
pub struct Derived<K, V> {
    rows: TableWriter<K, V>,
    slots: FxHashMap<K, u32>,
    entries: Vec<Option<Entry<K>>>,
    free: Vec<u32>,
    readers: FxHashMap<ReadKey, Readers>,
    /// The sum of the lengths of all entries' reads.
    recorded: usize,
}

struct Entry<K> {
    key: K,
    reads: Box<[ReadKey]>,
}

/// The slots that read a key; most keys have one reader, some (the mesh config) have all.
enum Readers {
    One(u32),
    Many(FxHashSet<u32>),
}

/// The outcome of one evaluation.
pub struct Evaluated<K, V> {
    key: K,
    outcome: Outcome<V>,
    reads: Box<[ReadKey]>,
}

enum Outcome<V> {
    Row(Option<V>),
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
            slots: FxHashMap::default(),
            entries: Vec::new(),
            free: Vec::new(),
            readers: FxHashMap::default(),
            recorded: 0,
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
        self.recorded
    }

    /// The same, counted.
    #[cfg(test)]
    pub(super) fn counted_reads(&self) -> usize {
        self.entries.iter().flatten().map(|entry| entry.reads.len()).sum()
    }

    /// The keys to evaluate: the candidates, and those that read something that has changed. In key order.
    pub fn dirty<'k>(&self, tx: &Transaction, candidates: impl IntoIterator<Item = &'k K>) -> Vec<K> {
        let mut slots = FxHashSet::default();
        for read in tx.changed() {
            match self.readers.get(&read) {
                None => {}
                Some(Readers::One(slot)) => {
                    slots.insert(*slot);
                }
                Some(Readers::Many(many)) => slots.extend(many.iter().copied()),
            }
        }
        let mut keys: Vec<K> = slots
            .into_iter()
            .filter_map(|slot| self.entries[slot as usize].as_ref().map(|entry| entry.key.clone()))
            .collect();
        keys.extend(candidates.into_iter().cloned());
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// Makes room for so many new keys.
    pub fn reserve(&mut self, keys: usize) {
        self.slots.reserve(keys);
        self.readers.reserve(keys);
        self.entries.reserve(keys.saturating_sub(self.free.len()));
    }

    /// Begins a transaction: forgets the row changes of the last one.
    pub fn begin(&mut self) {
        self.rows.begin();
    }

    /// Writes one outcome. The reads of an absent row are kept too: it may come to be when they change.
    pub fn apply(&mut self, tx: &mut Transaction, evaluated: Evaluated<K, V>) {
        let Evaluated { key, outcome, reads } = evaluated;
        self.record(&key, reads);
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
        self.record(key, Box::default());
        self.rows.remove(tx, key);
    }

    fn record(&mut self, key: &K, reads: Box<[ReadKey]>) {
        let slot = match self.slots.get(key) {
            Some(slot) => *slot,
            None if reads.is_empty() => return,
            None => self.allocate(key.clone()),
        };
        let entry = self.entries[slot as usize]
            .as_mut()
            .expect("because a slot in the map is occupied");
        let old = std::mem::replace(&mut entry.reads, reads);
        let new = &self.entries[slot as usize]
            .as_ref()
            .expect("because it was just written")
            .reads;
        self.recorded = self.recorded + new.len() - old.len();
        for read in old.iter().filter(|read| new.binary_search(read).is_err()) {
            remove_reader(&mut self.readers, *read, slot);
        }
        for read in new.iter().filter(|read| old.binary_search(read).is_err()) {
            add_reader(&mut self.readers, *read, slot);
        }
        if new.is_empty() {
            self.entries[slot as usize] = None;
            self.slots.remove(key);
            self.free.push(slot);
        }
    }

    fn allocate(&mut self, key: K) -> u32 {
        let entry = Some(Entry {
            key: key.clone(),
            reads: Box::default(),
        });
        let slot = if let Some(slot) = self.free.pop() {
            self.entries[slot as usize] = entry;
            slot
        } else {
            self.entries.push(entry);
            u32::try_from(self.entries.len() - 1).expect("because a table has fewer than 2^32 rows")
        };
        self.slots.insert(key, slot);
        slot
    }
}

fn add_reader(readers: &mut FxHashMap<ReadKey, Readers>, read: ReadKey, slot: u32) {
    match readers.get_mut(&read) {
        None => {
            readers.insert(read, Readers::One(slot));
        }
        Some(Readers::Many(many)) => {
            many.insert(slot);
        }
        Some(one @ Readers::One(_)) => {
            let Readers::One(first) = *one else { return };
            *one = Readers::Many([first, slot].into_iter().collect());
        }
    }
}

fn remove_reader(readers: &mut FxHashMap<ReadKey, Readers>, read: ReadKey, slot: u32) {
    match readers.get_mut(&read) {
        Some(Readers::One(one)) if *one == slot => {
            readers.remove(&read);
        }
        Some(Readers::Many(many)) => {
            many.remove(&slot);
            if many.is_empty() {
                readers.remove(&read);
            }
        }
        _ => {}
    }
}
