//! Pools: equal values, each held once.

use std::{
    hash::Hash,
    sync::{Mutex, PoisonError},
};

use rustc_hash::FxHashSet;

use super::{Hashed, Shared};

/// The number of values below which unused ones are not collected.
pub const MIN_COLLECTED: usize = 64;

/// A reference to a value that may have other references.
pub trait Reference: Clone + Eq + Hash {
    /// Returns true if there is another reference.
    fn is_shared(&self) -> bool;
}

impl<T: ?Sized + Eq + Hash> Reference for Shared<T> {
    fn is_shared(&self) -> bool {
        Self::is_shared(self)
    }
}

impl<T: Eq + Hash> Reference for Hashed<T> {
    fn is_shared(&self) -> bool {
        Self::is_shared(self)
    }
}

/// Distinct values. Values without other users are dropped when the number of values has doubled.
#[derive(Debug)]
pub struct Pool<V> {
    values: FxHashSet<V>,
    collect_at: usize,
}

impl<V> Default for Pool<V> {
    fn default() -> Self {
        Self {
            values: FxHashSet::default(),
            collect_at: MIN_COLLECTED,
        }
    }
}

impl<V: Reference> Pool<V> {
    /// Returns the equal value that is held, if there is one.
    pub fn get(&self, value: &V) -> Option<V> {
        self.values.get(value).cloned()
    }

    /// Returns the equal value that is held, which is this one if there was none.
    pub fn share(&mut self, value: &V) -> V {
        if let Some(held) = self.get(value) {
            return held;
        }
        if self.values.len() >= self.collect_at {
            self.values.retain(V::is_shared);
            self.collect_at = MIN_COLLECTED.max(2 * self.values.len());
        }
        self.values.insert(value.clone());
        value.clone()
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns true without values.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}

/// A pool of hashed values that threads share.
pub struct SharedPool<T>(Mutex<Pool<Hashed<T>>>);

impl<T> Default for SharedPool<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Eq + Hash> SharedPool<T> {
    /// Returns the equal value that is held, which is this one if there was none.
    pub fn share(&self, value: T) -> Hashed<T> {
        // Large values take time to hash, so other threads do not wait for it.
        let value = Hashed::new(value);
        // Nothing can panic while it is locked.
        let mut pool = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pool.share(&value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_held_once_while_they_are_used() {
        let mut pool = Pool::default();
        let held = pool.share(&Shared::new("held".to_owned()));
        for number in 0..10 * MIN_COLLECTED {
            pool.share(&Shared::new(format!("gone{number}")));
        }
        assert!(pool.share(&Shared::new("held".to_owned())).ptr_eq(&held));
        assert!(pool.len() <= MIN_COLLECTED + 1, "{}", pool.len());
    }
}
