//! Host names with wildcards: matching, subset and specificity order, as Istio's `host.Name` defines them.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
};

/// Returns true if the host begins with `*`.
pub fn is_wildcard(host: &str) -> bool {
    host.starts_with('*')
}

/// Returns true if the two hosts have a name in common (either may be a wildcard).
pub fn overlaps(a: &str, b: &str) -> bool {
    match (a.strip_prefix('*'), b.strip_prefix('*')) {
        (Some(a), Some(b)) => a.ends_with(b) || b.ends_with(a),
        (Some(suffix), None) => b.ends_with(suffix),
        (None, Some(suffix)) => a.ends_with(suffix),
        (None, None) => a == b,
    }
}

/// Returns true if `pattern` matches every name that `host` matches.
pub fn subset_of(host: &str, pattern: &str) -> bool {
    match (host.strip_prefix('*'), pattern.strip_prefix('*')) {
        (Some(host), Some(pattern)) => host.len() >= pattern.len() && host.ends_with(pattern),
        (None, Some(pattern)) => host.ends_with(pattern),
        (Some(_), None) => false,
        (None, None) => host == pattern,
    }
}

/// Orders the most specific first: exact names before wildcards, longer before shorter, then alphabetical.
pub fn more_specific(a: &str, b: &str) -> Ordering {
    is_wildcard(a)
        .cmp(&is_wildcard(b))
        .then_with(|| b.len().cmp(&a.len()))
        .then_with(|| a.cmp(b))
}

/// Values by host, to look up the hosts that overlap or contain another one. Users may declare tens of thousands of
/// hosts, so two lists of them must not be compared pair by pair.
#[derive(Debug, PartialEq)]
pub struct HostsByEnd<V> {
    /// By host, backwards.
    exact: BTreeMap<Vec<u8>, V>,
    /// By what follows the `*` of a wildcard, backwards.
    wildcards: BTreeMap<Vec<u8>, V>,
    /// The lengths of the keys of `wildcards`.
    lengths: BTreeSet<usize>,
}

impl<V> Default for HostsByEnd<V> {
    fn default() -> Self {
        Self {
            exact: BTreeMap::new(),
            wildcards: BTreeMap::new(),
            lengths: BTreeSet::new(),
        }
    }
}

impl<V: Default> HostsByEnd<V> {
    /// Returns the value of a host, a new one if it has none.
    pub fn entry(&mut self, name: &str) -> &mut V {
        let values = match name.strip_prefix('*') {
            Some(end) => {
                self.lengths.insert(end.len());
                self.wildcards.entry(backwards(end))
            }
            None => self.exact.entry(backwards(name)),
        };
        values.or_default()
    }

    /// Returns the values of the hosts that contain every name of a host ([`subset_of`]).
    pub fn covering(&self, name: &str) -> Vec<&V> {
        let end = backwards(name.strip_prefix('*').unwrap_or(name));
        let exact = self.exact.get(&end).filter(|_| !is_wildcard(name));
        exact.into_iter().chain(self.wildcards_above(&end)).collect()
    }

    /// Returns the values of the wildcards that a host ends with, given that end backwards.
    fn wildcards_above(&self, end: &[u8]) -> Vec<&V> {
        let lengths = self.lengths.range(..=end.len());
        lengths
            .filter_map(|length| self.wildcards.get(&end[..*length]))
            .collect()
    }
}

impl<V: Ord + Copy> HostsByEnd<Vec<V>> {
    /// Returns an index of hosts with their values.
    pub fn of<'a>(hosts: impl IntoIterator<Item = (&'a str, V)>) -> Self {
        let mut index = Self::default();
        for (name, value) in hosts {
            index.add(name, value);
        }
        index
    }

    /// Adds a value of a host.
    pub fn add(&mut self, name: &str, value: V) {
        self.entry(name).push(value);
    }

    /// Returns the values of the hosts that have a name in common with a host ([`overlaps`]).
    pub fn overlapping(&self, name: &str) -> BTreeSet<V> {
        let mut found = BTreeSet::new();
        self.any_overlapping(name, |value| {
            found.insert(value);
            false
        });
        found
    }

    /// Returns true if one of the values of [`Self::overlapping`] is accepted, after which no further one is looked at.
    pub fn any_overlapping(&self, name: &str, mut accept: impl FnMut(V) -> bool) -> bool {
        let end = backwards(name.strip_prefix('*').unwrap_or(name));
        let mut accepts = |values: &Vec<V>| values.iter().any(|value| accept(*value));
        if self.wildcards_above(&end).into_iter().any(&mut accepts) {
            return true;
        }
        if !is_wildcard(name) {
            return self.exact.get(&end).is_some_and(accepts);
        }
        [&self.exact, &self.wildcards].into_iter().any(|hosts| {
            let from = hosts.range(end.clone()..);
            let mut below = from.take_while(|(other, _)| other.starts_with(&end));
            below.any(|(_, values)| accepts(values))
        })
    }
}

fn backwards(text: &str) -> Vec<u8> {
    text.bytes().rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r21_hosts_are_looked_up_as_they_are_compared() {
        let names = [
            "a.test",
            "b.a.test",
            "*",
            "*.test",
            "*.a.test",
            "*a.test",
            "other",
            "*\u{e9}.test",
            "\u{e9}.test",
            "",
        ];
        let index = HostsByEnd::of(names.iter().enumerate().map(|(position, name)| (*name, position)));
        for name in names {
            let expected = (0..names.len()).filter(|position| overlaps(names[*position], name));
            let expected: BTreeSet<usize> = expected.collect();
            assert_eq!(index.overlapping(name), expected, "{name}");
            let mut seen = 0;
            let is_found = index.any_overlapping(name, |_| {
                seen += 1;
                true
            });
            assert_eq!(
                (is_found, seen),
                (!expected.is_empty(), usize::from(!expected.is_empty())),
                "{name}"
            );
            let expected = (0..names.len()).filter(|position| subset_of(name, names[*position]));
            let covering: BTreeSet<usize> = index.covering(name).into_iter().flatten().copied().collect();
            assert_eq!(covering, expected.collect(), "{name}");
        }
    }

    #[test]
    fn wildcards_match_by_suffix() {
        assert!(overlaps("*.com", "a.example.com"));
        assert!(overlaps("*", "anything"));
        assert!(overlaps("*.example.com", "*.com"));
        assert!(!overlaps("*.example.com", "example.com"));
        assert!(subset_of("a.example.com", "*.example.com"));
        assert!(subset_of("*.a.example.com", "*.example.com"));
        assert!(!subset_of("*.com", "*.example.com"));
        assert!(!subset_of("*.example.com", "a.example.com"));
    }

    #[test]
    fn exact_names_come_before_wildcards() {
        let mut hosts = vec!["*", "*.com", "a.com", "*.a.com", "bb.com"];
        hosts.sort_by(|a, b| more_specific(a, b));
        assert_eq!(hosts, ["bb.com", "a.com", "*.a.com", "*.com", "*"]);
    }
}
