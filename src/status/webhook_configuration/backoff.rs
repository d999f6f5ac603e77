//! Backoff between writes that others revert, such as replicas with other roots.

use std::{collections::BTreeMap, time::Duration};

use smol_str::SmolStr;
use tokio::time::Instant;

/// Delay after the first write; doubled after each write that was reverted.
const FIRST: Duration = Duration::from_secs(1);
/// Longest delay. A write that stays for as long is no longer followed by a longer delay.
const LONGEST: Duration = Duration::from_mins(1);

/// The backoff of all configurations, by name.
#[derive(Debug, Default)]
pub(super) struct WriteBackoff(BTreeMap<SmolStr, Delay>);

#[derive(Debug)]
struct Delay {
    end: Instant,
    length: Duration,
}

impl WriteBackoff {
    /// Returns the end of the delay of a configuration; `None` if it may be written.
    pub(super) fn end(&self, name: &str, now: Instant) -> Option<Instant> {
        let delay = self.0.get(name)?;
        Some(delay.end).filter(|end| *end > now)
    }

    /// Begins the delay after a write.
    pub(super) fn begin(&mut self, name: SmolStr, now: Instant) {
        let before = self.0.get(&name).filter(|before| now < before.end + LONGEST);
        let length = before.map_or(FIRST, |before| (before.length * 2).min(LONGEST));
        let end = now + length;
        self.0.insert(name, Delay { end, length });
    }

    /// Ends the delay of a configuration that no longer exists.
    pub(super) fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// Ends all delays, because something else must be written.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_while_writes_are_reverted() {
        let (mut now, mut backoff) = (Instant::now(), WriteBackoff::default());
        let mut lengths = Vec::new();
        for _ in 0..8 {
            assert_eq!(backoff.end("a", now), None);
            backoff.begin("a".into(), now);
            let end = backoff.end("a", now).expect("a delay");
            lengths.push((end - now).as_secs());
            now = end;
        }
        assert_eq!(lengths, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(backoff.end("b", now), None);
        now += LONGEST;
        backoff.begin("a".into(), now);
        assert_eq!(backoff.end("a", now), Some(now + FIRST));
        backoff.remove("a");
        assert_eq!(backoff.end("a", now), None);
    }
}
