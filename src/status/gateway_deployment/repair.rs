//! Rests between repairs. Otherwise, each change of an owned field by another client would cost a read and a write.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use super::{LONGEST_RETRY, RETRY};
use crate::status::NamespacedName;

/// Number of rounds with writes in a row before the first rest.
const FREE: u32 = 5;
/// A series of repairs ends if none follows for this time after its rest.
const CALM: Duration = Duration::from_mins(1);

/// The rounds with writes of each Gateway since its inputs have changed.
#[derive(Default)]
pub(super) struct Repairs {
    by_gateway: BTreeMap<NamespacedName, Repaired>,
}

struct Repaired {
    /// Number of rounds in a row.
    rounds: u32,
    /// End of the rest after the last one.
    rests_until: Instant,
    /// True if an object has changed during the rest.
    is_due: bool,
}

impl Repairs {
    /// Notes a round that has written objects. Returns the time to rest, if any; it doubles with each round.
    pub(super) fn written(&mut self, gateway: &NamespacedName, now: Instant) -> Option<Duration> {
        let row = self.by_gateway.entry(gateway.clone()).or_insert(Repaired {
            rounds: 0,
            rests_until: now,
            is_due: false,
        });
        if now > row.rests_until + CALM {
            row.rounds = 0;
        }
        row.rounds = row.rounds.saturating_add(1);
        let rest = match row.rounds.saturating_sub(FREE) {
            0 => None,
            beyond => Some(RETRY.saturating_mul(1 << (beyond - 1).min(16)).min(LONGEST_RETRY)),
        };
        row.rests_until = now + rest.unwrap_or_default();
        rest
    }

    /// Returns true if a repair may begin. Otherwise it is due when the rest ends.
    pub(super) fn may_begin(&mut self, gateway: &NamespacedName, now: Instant) -> bool {
        let resting = self.by_gateway.get_mut(gateway).filter(|row| now < row.rests_until);
        match resting {
            Some(row) => {
                row.is_due = true;
                false
            }
            None => true,
        }
    }

    /// Returns when the next repair is due.
    pub(super) fn next_at(&self) -> Option<Instant> {
        let due = self.by_gateway.values().filter(|row| row.is_due);
        due.map(|row| row.rests_until).min()
    }

    /// Takes the Gateways whose repairs are due.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<NamespacedName> {
        let due = self.by_gateway.iter_mut();
        let due = due.filter(|(_, row)| row.is_due && row.rests_until <= now);
        due.map(|(key, row)| {
            row.is_due = false;
            key.clone()
        })
        .collect()
    }

    /// Forgets a Gateway whose inputs have changed, or that is gone.
    pub(super) fn forget(&mut self, gateway: &NamespacedName) {
        self.by_gateway.remove(gateway);
    }

    /// Forgets all Gateways.
    pub(super) fn clear(&mut self) {
        self.by_gateway.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> NamespacedName {
        NamespacedName::new("default", name)
    }

    /// Returns how often objects are written in a time if another client changes them after each write.
    fn writes(repairs: &mut Repairs, from: Instant, time: Duration) -> u32 {
        let (mut now, mut writes) = (from, 0);
        while now < from + time {
            writes += 1;
            repairs.written(&key("a"), now);
            now += Duration::from_millis(10);
            if !repairs.may_begin(&key("a"), now) {
                now = repairs.next_at().unwrap();
                assert_eq!(repairs.take_due(now), [key("a")]);
            }
        }
        writes
    }

    #[test]
    fn repairs_rest_if_objects_are_changed_again_and_again() {
        let (mut repairs, start) = (Repairs::default(), Instant::now());
        let hour = Duration::from_hours(1);
        // Five at once, nine with a growing rest, then one in five minutes.
        let first = writes(&mut repairs, start, hour);
        assert!((15..30).contains(&first), "{first}");
        assert!(writes(&mut repairs, start + hour, hour) <= 13);
        // Another Gateway does not rest, and a change of the inputs ends the rest.
        let now = start + 2 * hour;
        assert!(repairs.may_begin(&key("b"), now));
        repairs.forget(&key("a"));
        assert!(repairs.may_begin(&key("a"), now));
        assert_eq!(repairs.next_at(), None);
    }

    #[test]
    fn occasional_repairs_do_not_rest() {
        let (mut repairs, mut now) = (Repairs::default(), Instant::now());
        for _ in 0..100 {
            assert_eq!(repairs.written(&key("a"), now), None);
            assert!(repairs.may_begin(&key("a"), now));
            now += 2 * CALM;
        }
    }
}
