//! Keys with many fields: hashed once, shared, compared by pointer and hash first.

use std::{cmp::Ordering, fmt, hash, ops};

use xxhash_rust::xxh3::Xxh3;

use super::Shared;

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

fn digest(value: &impl hash::Hash) -> u128 {
    let mut hasher = Xxh3::new();
    value.hash(&mut hasher);
    hasher.digest128()
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
