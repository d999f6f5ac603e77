//! Dependencies: evaluations by the keys that they have read, to find those that a change affects.

use std::collections::hash_map;

use hashbrown::HashTable;
use rustc_hash::{FxHashMap, FxHashSet};

use super::{Evaluated, Key, Outcome, ReadKey, Transaction};
use crate::base::keyed;

/// Recorded reads of evaluations. Keys without reads are not stored.
pub struct Reads<K> {
    /// Occupied slots, by the keyed hashes of the keys in their entries. A map from keys to slots would hold each key
    /// twice.
    slots: HashTable<u32>,
    entries: Vec<Option<Entry<K>>>,
    free: Vec<u32>,
    readers: FxHashMap<ReadKey, Readers>,
    /// Sum of the lengths of all entries' reads.
    recorded: usize,
}

struct Entry<K> {
    key: K,
    reads: Box<[ReadKey]>,
}

/// Slots that read a key. Most keys have one reader; some (the mesh config) have all.
enum Readers {
    One(u32),
    Many(Box<Many>),
}

/// Slots in insertion order.
struct Many {
    slots: Vec<u32>,
    /// Number of slots that no longer read the key. They are removed when they are the majority.
    gone: usize,
}

impl Many {
    /// Adds a slot. The list grows by a quarter: if it doubled, a third of it would be empty on average, which is about
    /// 1 KiB for each group of proxies.
    fn add(&mut self, slot: u32) {
        if self.slots.len() == self.slots.capacity() {
            self.slots.reserve_exact(self.slots.len() / 4 + 1);
        }
        self.slots.push(slot);
    }
}

impl<K> Default for Reads<K> {
    fn default() -> Self {
        Self {
            slots: HashTable::new(),
            entries: Vec::new(),
            free: Vec::new(),
            readers: FxHashMap::default(),
            recorded: 0,
        }
    }
}

impl<K: Key> Reads<K> {
    /// Returns the total number of reads, kept as they change.
    pub fn recorded(&self) -> usize {
        self.recorded
    }

    /// Returns the total number of reads, counted.
    #[cfg(test)]
    pub(super) fn counted(&self) -> usize {
        self.entries.iter().flatten().map(|entry| entry.reads.len()).sum()
    }

    /// Returns the keys to evaluate, in key order: the candidates, and those that read something that has changed.
    pub fn dirty<'k>(&self, tx: &Transaction, candidates: impl IntoIterator<Item = &'k K>) -> Vec<K> {
        let mut slots = FxHashSet::default();
        for read in tx.changed() {
            match self.readers.get(&read) {
                None => {}
                Some(Readers::One(slot)) => {
                    slots.insert(*slot);
                }
                Some(Readers::Many(many)) => {
                    let reading = many.slots.iter().filter(|slot| reads(&self.entries, **slot, read));
                    slots.extend(reading);
                }
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

    /// Reserves capacity for this number of new keys.
    pub fn reserve(&mut self, keys: usize) {
        self.slots.reserve(keys, |slot| hash_of(&self.entries, *slot));
        self.readers.reserve(keys);
        self.entries.reserve(keys.saturating_sub(self.free.len()));
    }

    /// Records the reads of an evaluation and returns its result.
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
        let hash = keyed::hash_one(key);
        let found = self.slots.find(hash, |slot| has_key(&self.entries, *slot, key));
        let slot = match found.copied() {
            Some(slot) => slot,
            None if reads.is_empty() => return,
            None => self.allocate(key.clone(), hash),
        };
        let entry = self.entries[slot as usize]
            .as_mut()
            .expect("because a slot in the table is occupied");
        let old = std::mem::replace(&mut entry.reads, reads);
        let new = &self.entries[slot as usize]
            .as_ref()
            .expect("because it was just written")
            .reads;
        self.recorded = self.recorded + new.len() - old.len();
        for read in only_in_first(&old, new) {
            remove_reader(&mut self.readers, &self.entries, read, slot);
        }
        for read in only_in_first(new, &old) {
            add_reader(&mut self.readers, read, slot);
        }
        if new.is_empty() {
            if let Ok(occupied) = self.slots.find_entry(hash, |other| *other == slot) {
                occupied.remove();
            }
            self.entries[slot as usize] = None;
            self.free.push(slot);
        }
    }

    fn allocate(&mut self, key: K, hash: u64) -> u32 {
        let entry = Some(Entry {
            key,
            reads: Box::default(),
        });
        let slot = if let Some(slot) = self.free.pop() {
            self.entries[slot as usize] = entry;
            slot
        } else {
            self.entries.push(entry);
            u32::try_from(self.entries.len() - 1).expect("because a table has fewer than 2^32 rows")
        };
        self.slots
            .insert_unique(hash, slot, |slot| hash_of(&self.entries, *slot));
        slot
    }
}

/// Returns true if the entry in that slot has the key.
fn has_key<K: Key>(entries: &[Option<Entry<K>>], slot: u32, key: &K) -> bool {
    let entry = entries[slot as usize].as_ref();
    entry.is_some_and(|entry| entry.key == *key)
}

/// Returns the hash of the key in an occupied slot.
fn hash_of<K: Key>(entries: &[Option<Entry<K>>], slot: u32) -> u64 {
    let entry = entries[slot as usize].as_ref();
    keyed::hash_one(&entry.expect("because a slot in the table is occupied").key)
}

/// Returns the reads of the first list that are not in the second one. Both are sorted; some lists have 100,000 reads.
fn only_in_first<'a>(first: &'a [ReadKey], second: &'a [ReadKey]) -> impl Iterator<Item = ReadKey> + 'a {
    let mut rest = second;
    first.iter().copied().filter(move |read| {
        while let [next, later @ ..] = rest
            && next < read
        {
            rest = later;
        }
        rest.first() != Some(read)
    })
}

fn add_reader(readers: &mut FxHashMap<ReadKey, Readers>, read: ReadKey, slot: u32) {
    match readers.entry(read) {
        hash_map::Entry::Vacant(entry) => _ = entry.insert(Readers::One(slot)),
        hash_map::Entry::Occupied(mut entry) => match entry.get_mut() {
            Readers::Many(many) => many.add(slot),
            Readers::One(first) => {
                let slots = vec![*first, slot];
                entry.insert(Readers::Many(Box::new(Many { slots, gone: 0 })));
            }
        },
    }
}

/// Removes a slot that no longer reads the key.
fn remove_reader<K>(readers: &mut FxHashMap<ReadKey, Readers>, entries: &[Option<Entry<K>>], read: ReadKey, slot: u32) {
    match readers.get_mut(&read) {
        Some(Readers::One(one)) if *one == slot => {
            readers.remove(&read);
        }
        Some(Readers::Many(many)) => {
            many.gone += 1;
            if many.gone * 2 <= many.slots.len() {
                return;
            }
            many.slots.retain(|slot| reads(entries, *slot, read));
            // A slot that was removed and added again occurs twice.
            many.slots.sort_unstable();
            many.slots.dedup();
            many.gone = 0;
            if many.slots.is_empty() {
                readers.remove(&read);
            }
        }
        _ => {}
    }
}

/// Returns true if the evaluation in that slot read the key.
fn reads<K>(entries: &[Option<Entry<K>>], slot: u32, read: ReadKey) -> bool {
    let entry = entries[slot as usize].as_ref();
    entry.is_some_and(|entry| entry.reads.binary_search(&read).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_readers_has_little_room() {
        let mut many = Many {
            slots: vec![0, 1],
            gone: 0,
        };
        for slot in 2..10_000 {
            many.add(slot);
            let (len, capacity) = (many.slots.len(), many.slots.capacity());
            assert!(capacity <= len + len / 4 + 1, "{capacity} for {len}");
        }
    }
}
