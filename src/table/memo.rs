//! A memo for the time in which tables do not change: values that many evaluations share, each built on first use.

use std::{
    hash::Hash,
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{Cx, ReadKey};
use crate::base::keyed::KeyedMap;

/// Values by key, which may contain names that tenants choose. Two threads that miss the same key at the same time both
/// build the value.
///
/// Note: a hit replays the reads that were recorded when the value was built, so that the caller depends on them too.
pub struct Memo<K, V>(Mutex<KeyedMap<K, Memoized<V>>>);

impl<K, V> Default for Memo<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// A shared value of a [`Memo`].
pub struct Memoized<V>(Arc<Entry<V>>);

struct Entry<V> {
    value: V,
    reads: Box<[ReadKey]>,
}

impl<V> Clone for Memoized<V> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<V> Deref for Memoized<V> {
    type Target = V;
    fn deref(&self) -> &V {
        &self.0.value
    }
}

impl<K, V> Memo<K, V> {
    fn lock(&self) -> MutexGuard<'_, KeyedMap<K, Memoized<V>>> {
        // Nothing can panic while it is locked.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the sum of a measure of all values.
    pub fn sum(&self, measure: impl Fn(&V) -> usize) -> usize {
        self.lock().values().map(|value| measure(value)).sum()
    }
}

impl<K: Eq + Hash, V> Memo<K, V> {
    /// Returns the value of a key, built by `build` on first use. Its reads are recorded in `cx`.
    pub fn get(&self, cx: &Cx, key: K, build: impl FnOnce(&Cx) -> V) -> Memoized<V> {
        let known = self.lock().get(&key).cloned();
        if let Some(value) = known {
            cx.record_all(&value.0.reads);
            return value;
        }
        let (value, reads) = cx.nested(build);
        let value = Memoized(Arc::new(Entry { value, reads }));
        self.lock().insert(key, value.clone());
        value
    }
}
