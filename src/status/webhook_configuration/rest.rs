//! Rests between writes that others revert, such as replicas with other roots.

use std::{collections::BTreeMap, time::Duration};

use smol_str::SmolStr;
use tokio::time::Instant;

/// Rest after the first write; doubled after each write that was reverted.
const FIRST: Duration = Duration::from_secs(1);
/// Longest rest. A write that stays for as long is no longer followed by a longer rest.
const LONGEST: Duration = Duration::from_mins(1);

/// The rests of all configurations, by name.
#[derive(Debug, Default)]
pub(super) struct Rests(BTreeMap<SmolStr, Rest>);

#[derive(Debug)]
struct Rest {
    end: Instant,
    length: Duration,
}

impl Rests {
    /// Returns the end of the rest of a configuration; `None` if it may be written.
    pub(super) fn end(&self, name: &str, now: Instant) -> Option<Instant> {
        let rest = self.0.get(name)?;
        Some(rest.end).filter(|end| *end > now)
    }

    /// Begins the rest after a write.
    pub(super) fn begin(&mut self, name: SmolStr, now: Instant) {
        let before = self.0.get(&name).filter(|before| now < before.end + LONGEST);
        let length = before.map_or(FIRST, |before| (before.length * 2).min(LONGEST));
        let end = now + length;
        self.0.insert(name, Rest { end, length });
    }

    /// Ends the rest of a configuration that no longer exists.
    pub(super) fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// Ends all rests, because something else must be written.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_grow_while_writes_are_reverted() {
        let (mut now, mut rests) = (Instant::now(), Rests::default());
        let mut lengths = Vec::new();
        for _ in 0..8 {
            assert_eq!(rests.end("a", now), None);
            rests.begin("a".into(), now);
            let end = rests.end("a", now).expect("a rest");
            lengths.push((end - now).as_secs());
            now = end;
        }
        assert_eq!(lengths, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(rests.end("b", now), None);
        now += LONGEST;
        rests.begin("a".into(), now);
        assert_eq!(rests.end("a", now), Some(now + FIRST));
        rests.remove("a");
        assert_eq!(rests.end("a", now), None);
    }
}
