//! A cache of bounded size, from which the least recently used entries are dropped.

use rustc_hash::FxHashMap;

/// The size of an entry in addition to that of its content.
const ENTRY_BYTES: usize = 256;

/// See the module's documentation. The size in bytes is `LIMIT` at most.
#[derive(Debug)]
pub(super) struct Recent<E, const LIMIT: usize> {
    /// By a hash of what identifies them. Of two with the same hash the later one is kept.
    entries: FxHashMap<u64, Used<E>>,
    bytes: usize,
    uses: u64,
}

#[derive(Debug)]
struct Used<E> {
    entry: E,
    bytes: usize,
    last_use: u64,
}

impl<E, const LIMIT: usize> Default for Recent<E, LIMIT> {
    fn default() -> Self {
        Self {
            entries: FxHashMap::default(),
            bytes: 0,
            uses: 0,
        }
    }
}

impl<E, const LIMIT: usize> Recent<E, LIMIT> {
    /// Returns the entry with this hash if it is the one that is looked for.
    pub(super) fn find(&mut self, hash: u64, is_same: impl FnOnce(&E) -> bool) -> Option<&E> {
        let used = self.entries.get_mut(&hash).filter(|used| is_same(&used.entry))?;
        self.uses += 1;
        used.last_use = self.uses;
        Some(&used.entry)
    }

    /// Adds an entry whose content has this size. When all exceed the limit, the less recently used half is dropped.
    pub(super) fn insert(&mut self, hash: u64, entry: E, bytes: usize) {
        let bytes = bytes + ENTRY_BYTES;
        if bytes > LIMIT / 2 {
            return;
        }
        self.uses += 1;
        let used = Used {
            entry,
            bytes,
            last_use: self.uses,
        };
        self.bytes += bytes;
        if let Some(replaced) = self.entries.insert(hash, used) {
            self.bytes -= replaced.bytes;
        }
        if self.bytes > LIMIT {
            let mut uses: Vec<(u64, usize)> = self.entries.values().map(|used| (used.last_use, used.bytes)).collect();
            uses.sort_unstable();
            let mut kept = 0;
            let first = uses.iter().rev().take_while(|(_, bytes)| {
                kept += bytes;
                kept <= LIMIT / 2
            });
            let first = first.last().map_or(u64::MAX, |(last_use, _)| *last_use);
            self.drop_unless(|used| used.last_use >= first);
        }
    }

    /// Drops entries.
    pub(super) fn retain(&mut self, keeps: impl Fn(&E) -> bool) {
        self.drop_unless(|used| keeps(&used.entry));
    }

    /// Drops all entries.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    fn drop_unless(&mut self, keeps: impl Fn(&Used<E>) -> bool) {
        let Self { entries, bytes, .. } = self;
        entries.retain(|_, used| {
            let is_kept = keeps(used);
            *bytes -= if is_kept { 0 } else { used.bytes };
            is_kept
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 8 * ENTRY_BYTES;

    #[test]
    fn recently_used_entries_are_kept() {
        let mut recent = Recent::<u64, LIMIT>::default();
        for number in 0..8 {
            recent.insert(number, number, 0);
        }
        assert_eq!(recent.find(0, |entry| *entry == 0), Some(&0));
        assert_eq!(recent.find(1, |entry| *entry == 0), None, "another one with this hash");
        recent.insert(8, 8, 0);
        let kept = (0..9).filter(|number| recent.find(*number, |_| true).is_some());
        assert_eq!(kept.collect::<Vec<_>>(), [0, 6, 7, 8]);
        recent.retain(|entry| entry % 2 == 0);
        assert_eq!(recent.bytes, 3 * ENTRY_BYTES);
        recent.insert(8, 9, ENTRY_BYTES);
        assert_eq!(recent.bytes, 4 * ENTRY_BYTES);
        assert_eq!(recent.find(8, |entry| *entry == 9), Some(&9));
        recent.insert(9, 9, LIMIT);
        assert_eq!(recent.find(9, |_| true), None, "too large to displace others");
        recent.clear();
        assert_eq!((recent.bytes, recent.entries.len()), (0, 0));
    }
}
