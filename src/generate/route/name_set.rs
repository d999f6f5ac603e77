//! A set of many names, which are kept in one text.

use std::collections::{BTreeMap, hash_map::Entry};

use rustc_hash::FxHashMap;

use crate::base::keyed;

/// Returns the hash of a name in every set. Tenants choose the names, so it is a keyed one.
pub(super) fn hash(name: &str) -> u64 {
    keyed::hash(name.as_bytes())
}

/// A set of names, without an allocation for each: some route configurations have 100,000 domains.
#[derive(Default)]
pub(super) struct NameSet {
    /// All names, one after the other.
    text: String,
    /// The position of the first name with each hash.
    by_hash: FxHashMap<u64, (u32, u32)>,
    /// The positions of names whose hash another name has, by name.
    others: BTreeMap<String, u32>,
}

impl NameSet {
    /// Returns an empty set with capacity for this number of names.
    pub(super) fn with_capacity(names: usize) -> Self {
        let mut set = Self::default();
        set.reserve(names);
        set
    }

    /// Reserves capacity for this number of names.
    pub(super) fn reserve(&mut self, names: usize) {
        self.by_hash.reserve(names);
    }

    /// Returns the number of names.
    pub(super) fn len(&self) -> usize {
        self.by_hash.len() + self.others.len()
    }

    /// Adds a name. Returns true if it is new.
    #[cfg(test)]
    fn insert(&mut self, name: &str) -> bool {
        self.insert_known(name, hash(name))
    }

    /// Adds a name with its [`hash`]. Returns true if it is new.
    pub(super) fn insert_known(&mut self, name: &str, hash: u64) -> bool {
        let before = self.len();
        self.insert_hashed(name, hash);
        self.len() > before
    }

    /// Adds a name, and returns its position in the text, which no other name has.
    pub(super) fn id_of(&mut self, name: &str) -> u32 {
        self.insert_hashed(name, hash(name))
    }

    /// Returns the position of a name; `None` if the set does not contain it.
    pub(super) fn get(&self, name: &str) -> Option<u32> {
        self.get_hashed(name, hash(name))
    }

    /// Returns true if the set contains a name with this [`hash`].
    pub(super) fn contains_known(&self, name: &str, hash: u64) -> bool {
        self.get_hashed(name, hash).is_some()
    }

    fn insert_hashed(&mut self, name: &str, hash: u64) -> u32 {
        let begin = position(self.text.len());
        match self.by_hash.entry(hash) {
            Entry::Vacant(free) => _ = free.insert((begin, position(self.text.len() + name.len()))),
            Entry::Occupied(first) => {
                let (first, end) = *first.get();
                if self.text[first as usize..end as usize] == *name {
                    return first;
                }
                if let Some(known) = self.others.get(name) {
                    return *known;
                }
                self.others.insert(name.to_owned(), begin);
            }
        }
        self.text.push_str(name);
        begin
    }

    fn get_hashed(&self, name: &str, hash: u64) -> Option<u32> {
        let (begin, end) = *self.by_hash.get(&hash)?;
        if self.text[begin as usize..end as usize] == *name {
            Some(begin)
        } else {
            self.others.get(name).copied()
        }
    }
}

fn position(length: usize) -> u32 {
    u32::try_from(length).expect("because all names of a resource are far shorter than 4 GiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_one_hash_are_different_names() {
        let mut set = NameSet::default();
        let mut add = |name: &str| set.insert_hashed(name, 7);
        let ids = [add("a"), add("b"), add("c")];
        assert_eq!([add("a"), add("b"), add("c")], ids);
        assert_eq!(set.len(), 3);
        assert_eq!(["a", "b", "c"].map(|name| set.get_hashed(name, 7)), ids.map(Some));
        assert_eq!(set.get_hashed("d", 7), None);
        assert_eq!(set.get("a"), None);
    }

    #[test]
    fn a_name_is_added_once() {
        let mut set = NameSet::with_capacity(2);
        assert!(set.insert("a.example.com") && set.insert("b.example.com"));
        assert!(!set.insert("a.example.com"));
        assert_eq!(set.get("b.example.com"), Some(13));
    }
}
