//! Keys with many fields: hashed once, shared, compared by pointer and hash first.

use std::{cell::Cell, cmp::Ordering, fmt, hash, ops};

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_secret, xxh3_128_with_secret};

use super::{Shared, keyed, scratch};

/// A shared value with its 128-bit hash. The order is that of the hashes: stable within a process, without meaning.
///
/// Tenants choose parts of such values. The hash has a [secret](keyed::secret), so that they can find neither different
/// values with one hash, which maps by order could not tell apart, nor many that share a bucket of a faster map.
pub struct Hashed<T> {
    /// The hash in bytes: a `u128` is aligned to 16 bytes, with which a key would have 32 bytes instead of 24, and a
    /// listed resource 48 instead of 32.
    digest: [u8; 16],
    value: Shared<T>,
}

impl<T: hash::Hash> Hashed<T> {
    /// Hashes and shares a value.
    pub fn new(value: T) -> Self {
        Self {
            digest: digest(&value).to_ne_bytes(),
            value: Shared::new(value),
        }
    }
}

thread_local! {
    static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// The number of bytes that are hashed at once.
const PIECE: usize = 4096;

/// A hasher that collects the small pieces of which values consist. Hashing them one by one, a key of 100 bytes takes
/// several times as long.
struct Collector<'a> {
    piece: &'a mut Vec<u8>,
    /// The pieces before.
    before: Option<Box<Xxh3>>,
}

impl hash::Hasher for Collector<'_> {
    fn write(&mut self, bytes: &[u8]) {
        if self.piece.len() + bytes.len() > PIECE {
            let before = self
                .before
                .get_or_insert_with(|| Box::new(Xxh3::with_secret(*keyed::secret())));
            before.update(self.piece);
            before.update(bytes);
            self.piece.clear();
        } else {
            self.piece.extend_from_slice(bytes);
        }
    }

    fn finish(&self) -> u64 {
        match &self.before {
            None => xxh3_64_with_secret(self.piece, keyed::secret()),
            Some(before) => {
                let mut all = before.clone();
                all.update(self.piece);
                all.digest()
            }
        }
    }
}

fn digest(value: &impl hash::Hash) -> u128 {
    scratch::with(&SCRATCH, |piece| {
        let mut collector = Collector { piece, before: None };
        value.hash(&mut collector);
        match collector.before {
            None => xxh3_128_with_secret(collector.piece, keyed::secret()),
            Some(mut before) => {
                before.update(collector.piece);
                before.digest128()
            }
        }
    })
}

impl<T> Hashed<T> {
    fn digest(&self) -> u128 {
        u128::from_ne_bytes(self.digest)
    }

    /// Returns true if both are the same allocation.
    pub fn ptr_eq(&self, other: &Self) -> bool {
        self.value.ptr_eq(&other.value)
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
        self.digest() == other.digest() && self.value == other.value
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
        self.digest().cmp(&other.digest())
    }
}

impl<T> hash::Hash for Hashed<T> {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        self.digest().hash(state);
    }
}

impl<T: fmt::Debug> fmt::Debug for Hashed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (*self.value).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::hash::Hash as _;

    use super::*;

    #[test]
    fn a_key_has_no_padding() {
        assert_eq!(size_of::<Hashed<String>>(), size_of::<u128>() + size_of::<usize>());
    }

    #[test]
    fn values_of_any_length_have_the_hash_of_their_bytes() {
        for length in [0, 1, 100, 2000, 10_000] {
            let value: Vec<String> = (0..length).map(|number: u32| number.to_string()).collect();
            let mut hasher = Xxh3::with_secret(*keyed::secret());
            value.hash(&mut hasher);
            assert_eq!(digest(&value), hasher.digest128(), "{length} texts");
        }
        let long = "x".repeat(3 * PIECE);
        let mut hasher = Xxh3::with_secret(*keyed::secret());
        long.hash(&mut hasher);
        assert_eq!(digest(&long), hasher.digest128());
    }
}
