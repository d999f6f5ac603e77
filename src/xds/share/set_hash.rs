//! Hashes of repeated fields that do not depend on the order of the fields: clients send equal sets in orders of their
//! own. Also the maps in which such sets are found again.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hash},
    sync::{Arc, Weak},
};

use prost::{
    DecodeError,
    encoding::{self, DecodeContext},
};
use rustc_hash::FxHashMap;

/// The number of entries below which unused ones are not removed.
pub(super) const FEW: usize = 64;

/// The number of fields, and the sums of two hashes of each. The second is made of the first: hashing is a twentieth of
/// the CPU time when 5,000 sidecars reconnect (bench `scale reconnect`).
pub(super) type SetHash = (usize, u64, u64);

/// Randomly keyed, so that a client cannot create two sets with the same hash.
pub(super) struct SetHasher {
    state: RandomState,
    /// Odd; multiplies a hash to get another one, so that sums of both are equal for equal sets only.
    multiplier: u64,
}

impl Default for SetHasher {
    fn default() -> Self {
        let state = RandomState::new();
        let multiplier = state.hash_one("multiplier") | 1;
        Self { state, multiplier }
    }
}

impl SetHasher {
    /// Hashes encoded fields, including their tags.
    pub(super) fn hash(&self, fields: &[u8]) -> Result<SetHash, DecodeError> {
        let mut hash: SetHash = (0, 0, 0);
        let mut rest = fields;
        while !rest.is_empty() {
            let (tag, wire_type) = encoding::decode_key(&mut rest)?;
            let from = rest;
            encoding::skip_field(wire_type, tag, &mut rest, DecodeContext::default())?;
            // The content with its length prefix.
            let content = &from[..from.len() - rest.len()];
            hash.0 += 1;
            let one = self.state.hash_one(content);
            let product = u128::from(one) * u128::from(self.multiplier);
            let other = (product >> 64) as u64 ^ product as u64;
            hash.1 = hash.1.wrapping_add(one);
            hash.2 = hash.2.wrapping_add(other);
        }
        Ok(hash)
    }
}

/// Adds an entry to a map of entries that live while they are used. Removes unused ones when the map is full.
pub(super) fn insert<K: Eq + Hash, V>(entries: &mut FxHashMap<K, Weak<V>>, key: K, value: &Arc<V>) {
    if entries.len() >= FEW && entries.len() == entries.capacity() {
        entries.retain(|_, entry| entry.strong_count() > 0);
    }
    entries.insert(key, Arc::downgrade(value));
}
