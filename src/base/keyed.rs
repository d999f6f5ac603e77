//! Hashes with a random key of this process, for names that tenants choose.
//!
//! An attacker who knows the hash function can find tens of thousands of names that collide, and a map of them takes
//! time quadratic in their number. This holds for FxHash and for xxh3 without a secret. Note: the next process has
//! another key, so nothing that leaves this one may depend on such a hash, or on the order of such a map.

use std::{
    hash::{BuildHasher, Hash, RandomState},
    sync::LazyLock,
};

use xxhash_rust::xxh3::xxh3_64_with_secret;

/// A map of names that tenants choose, for hot paths: its hasher (SipHash) is slower than FxHash, but a lookup is still
/// faster than in a tree of many names.
#[expect(
    clippy::disallowed_types,
    reason = "tenants could find many names with one hash of a faster hasher"
)]
pub type KeyedMap<K, V> = std::collections::HashMap<K, V, RandomState>;

/// A set of names that tenants choose, see [`KeyedMap`].
#[expect(
    clippy::disallowed_types,
    reason = "tenants could find many names with one hash of a faster hasher"
)]
pub type KeyedSet<K> = std::collections::HashSet<K, RandomState>;

/// The secret of xxh3, which replaces its public one.
static SECRET: LazyLock<[u8; 192]> = LazyLock::new(|| {
    let random = RandomState::new();
    let mut secret = [0; 192];
    for (number, part) in secret.chunks_exact_mut(size_of::<u64>()).enumerate() {
        part.copy_from_slice(&random.hash_one(number).to_ne_bytes());
    }
    secret
});

/// Returns the secret for xxh3: as fast as without one, and collisions cannot be found beforehand.
pub fn secret() -> &'static [u8; 192] {
    &SECRET
}

/// Returns the xxh3 hash of bytes.
pub fn hash(bytes: &[u8]) -> u64 {
    xxh3_64_with_secret(bytes, secret())
}

/// Returns the hash of a value, by SipHash.
pub fn hash_one(value: &impl Hash) -> u64 {
    static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    STATE.hash_one(value)
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        hash::{BuildHasherDefault, DefaultHasher},
    };

    use rustc_hash::FxHasher;
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;

    #[test]
    fn r21_hashes_are_not_those_that_anyone_can_compute() {
        let names: Vec<String> = (0..100).map(|number| format!("{number}.example.com")).collect();
        assert!(
            names
                .iter()
                .all(|name| hash(name.as_bytes()) != xxh3_64(name.as_bytes()))
        );
        let (sip, fx): (BuildHasherDefault<DefaultHasher>, BuildHasherDefault<FxHasher>) = Default::default();
        assert!(names.iter().all(|name| hash_one(name) != sip.hash_one(name)));
        assert!(names.iter().all(|name| hash_one(name) != fx.hash_one(name)));
        let hashes: BTreeSet<u64> = names.iter().map(hash_one).collect();
        assert_eq!(hashes.len(), names.len());
        assert_eq!(hashes, names.iter().map(hash_one).collect());
    }

    #[test]
    fn r21_parts_of_the_secret_differ() {
        let parts: BTreeSet<&[u8]> = secret().chunks(size_of::<u64>()).collect();
        assert_eq!(parts.len(), secret().len() / size_of::<u64>());
    }
}
