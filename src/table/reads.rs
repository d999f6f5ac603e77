//! Who read what: the keys of evaluations by what they have read, so that a change finds those that it concerns.

use rustc_hash::{FxHashMap, FxHashSet};

use super::{Evaluated, Key, Outcome, ReadKey, Transaction};

/// The recorded reads of evaluations. A key without reads is not known here.
pub struct Reads<K> {
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

impl<K> Default for Reads<K> {
    fn default() -> Self {
        Self {
            slots: FxHashMap::default(),
            entries: Vec::new(),
            free: Vec::new(),
            readers: FxHashMap::default(),
            recorded: 0,
        }
    }
}

impl<K: Key> Reads<K> {
    /// How many there are in all; a running total.
    pub fn recorded(&self) -> usize {
        self.recorded
    }

    /// The same, counted.
    #[cfg(test)]
    pub(super) fn counted(&self) -> usize {
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

    /// Takes over what an evaluation has read; gives what it came to.
    pub fn apply<V>(&mut self, evaluated: Evaluated<K, V>) -> (K, Outcome<V>) {
        let Evaluated { key, outcome, reads } = evaluated;
        self.record(&key, reads);
        (key, outcome)
    }

    /// Drops a key.
    pub fn forget(&mut self, key: &K) {
        self.record(key, Box::default());
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
