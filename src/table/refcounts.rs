//! Reference counts of shared values: values live while they have users.

use std::hash::Hash;

use rustc_hash::{FxHashMap, FxHashSet};

/// The number of users of each key.
pub struct Refcounts<K>(FxHashMap<K, usize>);

impl<K> Default for Refcounts<K> {
    fn default() -> Self {
        Self(FxHashMap::default())
    }
}

impl<K: Eq + Hash + Clone> Refcounts<K> {
    /// Adds a user of a key. Returns true if it is the first.
    pub fn add(&mut self, key: &K) -> bool {
        if let Some(count) = self.0.get_mut(key) {
            *count += 1;
            return false;
        }
        self.0.insert(key.clone(), 1);
        true
    }

    /// Removes a user of a key. Returns true if it was the last.
    pub fn remove(&mut self, key: &K) -> bool {
        let Some(count) = self.0.get_mut(key) else { return false };
        *count -= 1;
        let is_last = *count == 0;
        if is_last {
            self.0.remove(key);
        }
        is_last
    }
}

/// The users of each key.
pub struct Users<K, U>(FxHashMap<K, UsersOfKey<U>>);

/// Most keys have one user. A set for it would take another 96 to 160 bytes.
enum UsersOfKey<U> {
    One(U),
    Many(FxHashSet<U>),
}

impl<U: Eq + Hash + Clone> UsersOfKey<U> {
    fn add(&mut self, user: U) {
        match self {
            Self::Many(users) => _ = users.insert(user),
            Self::One(first) if *first == user => {}
            Self::One(first) => *self = Self::Many(FxHashSet::from_iter([first.clone(), user])),
        }
    }

    /// Removes a user. Returns true if it was the last.
    fn remove(&mut self, user: &U) -> bool {
        match self {
            Self::Many(users) => users.remove(user) && users.is_empty(),
            Self::One(one) => one == user,
        }
    }

    fn all(&self) -> impl Iterator<Item = &U> {
        let (one, many) = match self {
            Self::One(one) => (Some(one), None),
            Self::Many(users) => (None, Some(users)),
        };
        one.into_iter().chain(many.into_iter().flatten())
    }
}

impl<K, U> Default for Users<K, U> {
    fn default() -> Self {
        Self(FxHashMap::default())
    }
}

impl<K: Eq + Hash + Clone, U: Eq + Hash + Clone> Users<K, U> {
    /// Adds a user of a key. Returns true if it is the first. Adding it twice counts once.
    pub fn add(&mut self, key: &K, user: U) -> bool {
        if let Some(users) = self.0.get_mut(key) {
            users.add(user);
            return false;
        }
        self.0.insert(key.clone(), UsersOfKey::One(user));
        true
    }

    /// Removes a user of a key. Returns true if it was the last.
    pub fn remove(&mut self, key: &K, user: &U) -> bool {
        let Some(users) = self.0.get_mut(key) else { return false };
        let is_last = users.remove(user);
        if is_last {
            self.0.remove(key);
        }
        is_last
    }

    /// Returns the users of a key, in no particular order.
    pub fn get(&self, key: &K) -> impl Iterator<Item = &U> {
        self.0.get(key).into_iter().flat_map(UsersOfKey::all)
    }

    /// Returns the equal key that is in use, to share its allocation.
    pub fn key(&self, key: &K) -> Option<&K> {
        self.0.get_key_value(key).map(|(key, _)| key)
    }

    /// Returns true if the key has users.
    pub fn contains(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }

    /// Returns the number of keys with users.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if no key has users.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Makes room for keys.
    pub fn reserve(&mut self, keys: usize) {
        self.0.reserve(keys);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_and_last_users_are_reported() {
        let mut counts = Refcounts::default();
        assert!(counts.add(&"a") && !counts.add(&"a"));
        assert!(!counts.remove(&"a") && counts.remove(&"a") && !counts.remove(&"a"));
    }

    #[test]
    fn users_are_sets() {
        let mut users = Users::default();
        assert!(users.add(&"a", 1) && !users.add(&"a", 1) && !users.add(&"a", 2) && users.add(&"b", 1));
        let mut of_a: Vec<_> = users.get(&"a").copied().collect();
        of_a.sort_unstable();
        assert_eq!((of_a, users.len()), (vec![1, 2], 2));
        assert!(!users.remove(&"a", &3) && !users.remove(&"a", &1) && users.remove(&"a", &2));
        assert!(!users.add(&"b", 1) && !users.remove(&"b", &2) && users.contains(&"b"));
        assert_eq!(users.get(&"b").copied().collect::<Vec<_>>(), [1]);
        assert!(users.remove(&"b", &1) && users.is_empty());
    }
}
