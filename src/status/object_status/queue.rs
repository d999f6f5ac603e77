//! The objects to compare with what they should be: by time, one write of each at a time, with rests and retries.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use super::{MAX_RETRY, REST, RETRY};
use crate::{api::Kind, model::gateway_api::status::StatusKey};

/// See the module documentation.
#[derive(Default)]
pub(in crate::status) struct Queue {
    waiting: BTreeMap<StatusKey, Instant>,
    /// The same by time, for each rank.
    times: [BTreeSet<(Instant, StatusKey)>; RANKS],
    /// Objects that are being written; true if they changed since.
    writing: BTreeMap<StatusKey, bool>,
    /// Earliest times of further writes.
    rests: BTreeMap<StatusKey, Instant>,
    /// Failures since the last success.
    attempts: BTreeMap<StatusKey, u32>,
}

/// Number of ranks.
const RANKS: usize = 3;

/// Returns the rank of a kind. Of writes that are due, the lowest rank comes first: many objects depend on it.
fn rank(kind: Kind) -> usize {
    match kind {
        Kind::GatewayClass => 0,
        Kind::KubeGateway | Kind::ListenerSet => 1,
        _ => 2,
    }
}

impl Queue {
    /// Returns when the next write is due.
    pub(in crate::status) fn next_time(&self) -> Option<Instant> {
        let first = self.times.iter().filter_map(BTreeSet::first);
        first.map(|(time, _)| *time).min()
    }

    /// Adds an object that has changed. After a write it rests.
    pub(in crate::status) fn offer(&mut self, key: StatusKey, now: Instant) {
        if let Some(again) = self.writing.get_mut(&key) {
            *again = true;
            return;
        }
        let rest = self.rests.get(&key).copied().unwrap_or(now);
        self.insert(key, rest.max(now));
    }

    fn insert(&mut self, key: StatusKey, time: Instant) {
        if self.waiting.contains_key(&key) {
            return;
        }
        self.times[rank(key.kind)].insert((time, key.clone()));
        self.waiting.insert(key, time);
    }

    /// Takes the object of the lowest rank that is due.
    pub(in crate::status) fn pop(&mut self, now: Instant) -> Option<StatusKey> {
        let mut ranks = self.times.iter_mut();
        let due = ranks.find(|times| times.first().is_some_and(|(time, _)| *time <= now))?;
        let (_, key) = due.pop_first()?;
        self.waiting.remove(&key);
        Some(key)
    }

    /// Marks the start of a write.
    pub(in crate::status) fn begin(&mut self, key: StatusKey) {
        self.writing.insert(key, false);
    }

    /// Marks the success of a write. Returns true if the object was offered again in the meantime.
    pub(in crate::status) fn succeeded(&mut self, key: &StatusKey, now: Instant) -> bool {
        self.rests.retain(|_, rest| *rest > now);
        self.rests.insert(key.clone(), now + REST);
        self.ended(key, now)
    }

    /// Marks that an object needs no further write. Returns true if it was offered again in the meantime.
    pub(in crate::status) fn ended(&mut self, key: &StatusKey, now: Instant) -> bool {
        self.attempts.remove(key);
        let again = self.writing.remove(key) == Some(true);
        if again {
            self.offer(key.clone(), now);
        }
        again
    }

    /// Marks a failure of a write that is repeated later.
    pub(in crate::status) fn retry(&mut self, key: StatusKey, now: Instant) {
        self.writing.remove(&key);
        let attempts = self.attempts.entry(key.clone()).or_default();
        let delay = RETRY.saturating_mul(2_u32.saturating_pow(*attempts)).min(MAX_RETRY);
        *attempts += 1;
        self.insert(key, now + delay);
    }

    /// Returns the number of failures since the last success.
    pub(in crate::status) fn failures(&self, key: &StatusKey) -> u32 {
        self.attempts.get(key).copied().unwrap_or_default()
    }

    /// Forgets an object that no longer exists.
    pub(in crate::status) fn forget(&mut self, key: &StatusKey) {
        if let Some(time) = self.waiting.remove(key) {
            self.times[rank(key.kind)].remove(&(time, key.clone()));
        }
        self.rests.remove(key);
        self.attempts.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::base::{ClusterId, ObjectKey};

    fn key(kind: Kind, name: &str) -> StatusKey {
        let object = ObjectKey::new(&ClusterId::new("c"), "ns", name);
        StatusKey { kind, object }
    }

    #[test]
    fn gateways_precede_routes_and_rest_after_a_write() {
        let (now, mut queue) = (Instant::now(), Queue::default());
        let (gateway, route) = (key(Kind::KubeGateway, "a"), key(Kind::HttpRoute, "a"));
        queue.offer(route.clone(), now);
        queue.offer(gateway.clone(), now);
        assert_eq!(queue.pop(now), Some(gateway.clone()));
        queue.begin(gateway.clone());
        // A change during the write is written after the rest.
        queue.offer(gateway.clone(), now);
        assert!(queue.succeeded(&gateway, now));
        assert_eq!(queue.pop(now), Some(route));
        assert_eq!(queue.pop(now), None);
        assert_eq!(queue.pop(now + REST), Some(gateway));
    }

    #[test]
    fn failures_are_retried_with_growing_delays() {
        let (now, mut queue) = (Instant::now(), Queue::default());
        let route = key(Kind::HttpRoute, "a");
        queue.retry(route.clone(), now);
        assert_eq!(queue.pop(now), None);
        assert_eq!(queue.pop(now + RETRY), Some(route.clone()));
        queue.retry(route.clone(), now);
        assert_eq!(queue.next_time(), Some(now + 2 * RETRY));
        assert_eq!(queue.failures(&route), 2);
        queue.forget(&route);
        assert_eq!(queue.pop(now + Duration::from_mins(1)), None);
    }
}
