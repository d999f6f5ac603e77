//! Keys with many fields: hashed once, shared, compared by pointer and hash first.

use std::{cell::Cell, cmp::Ordering, fmt, hash, ops};

use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use super::{Shared, scratch};

/// A shared value with its 128-bit hash. The order is that of the hashes: stable within a process, without meaning.
pub struct Hashed<T> {
    digest: u128,
    value: Shared<T>,
}

impl<T: hash::Hash> Hashed<T> {
    /// Hashes and shares a value.
    pub fn new(value: T) -> Self {
        Self {
            digest: digest(&value),
            value: Shared::new(value),
        }
    }
}

thread_local! {
    /// Scratch buffer for hashing; empty between two uses.
    static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Collects the pieces that a value writes: keys write many small ones, and one hash of all of them is cheaper than one
/// each.
struct Pieces<'a>(&'a mut Vec<u8>);

impl hash::Hasher for Pieces<'_> {
    fn write(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn finish(&self) -> u64 {
        xxh3_64(self.0)
    }
}

fn digest(value: &impl hash::Hash) -> u128 {
    scratch::with(&SCRATCH, |buffer| {
        value.hash(&mut Pieces(buffer));
        xxh3_128(buffer)
    })
}

impl<T> Hashed<T> {
    /// Returns true if both are the same allocation.
    pub fn same(&self, other: &Self) -> bool {
        self.value.same(&other.value)
    }

    /// Returns true if there is another reference.
    pub fn is_shared(&self) -> bool {
        self.value.is_shared()
    }
}

impl<T> Clone for Hashed<T> {
    fn clone(&self) -> Self {
        Self {
            digest: self.digest,
            value: self.value.clone(),
        }
    }
}

impl<T> ops::Deref for Hashed<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: PartialEq> PartialEq for Hashed<T> {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest && self.value == other.value
    }
}

impl<T: Eq> Eq for Hashed<T> {}

impl<T: Eq> PartialOrd for Hashed<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T: Eq> Ord for Hashed<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.digest.cmp(&other.digest)
    }
}

impl<T> hash::Hash for Hashed<T> {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        self.digest.hash(state);
    }
}

impl<T: fmt::Debug> fmt::Debug for Hashed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (*self.value).fmt(f)
    }
}
