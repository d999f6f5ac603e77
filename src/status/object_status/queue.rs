//! The objects to compare with what they should be: by time, one write of each at a time, with rests and retries.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use super::{CALM, FREE_WRITES, MAX_REST, MAX_RETRY, REST, RETRY};
use crate::{api::Kind, model::gateway_api::status::StatusKey};

/// See the module documentation.
#[derive(Default)]
pub(in crate::status) struct Queue {
    waiting: BTreeMap<StatusKey, Instant>,
    /// The same by time, for each rank.
    times: [BTreeSet<(Instant, StatusKey)>; RANKS],
    /// Objects that are being written; true if they changed since.
    writing: BTreeMap<StatusKey, bool>,
    /// Earliest times of further writes. Some have passed.
    rests: BTreeMap<StatusKey, Instant>,
    /// The number of rests at which those that have ended are removed.
    full: usize,
    /// Length of the series of writes that brought an object to the same state, and the end of the rest after the last.
    repeated: BTreeMap<StatusKey, (u32, Instant)>,
    /// Failures since the last success.
    attempts: BTreeMap<StatusKey, u32>,
}

/// Number of ranks.
const RANKS: usize = 3;
/// The number of rests below which none are removed because they have ended.
const FEW_RESTS: usize = 64;

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
        self.succeeded_resting(key, now, REST)
    }

    /// Marks the success of a write, after which the object rests for this time.
    pub(in crate::status) fn succeeded_resting(&mut self, key: &StatusKey, now: Instant, rest: Duration) -> bool {
        self.rests.insert(key.clone(), now + rest);
        // Not after each write, which would read the rests of all objects each time.
        if self.rests.len() > self.full.max(FEW_RESTS) {
            self.rests.retain(|_, rest| *rest > now);
            self.full = 2 * self.rests.len();
        }
        self.ended(key, now)
    }

    /// Returns the rest after a write. It grows with each write that follows another one although the object should
    /// have the same state: two writers would otherwise correct each other without end.
    pub(in crate::status) fn next_rest(&mut self, key: &StatusKey, now: Instant) -> Duration {
        let (writes, rests_until) = self.repeated.entry(key.clone()).or_insert((0, now));
        if now > *rests_until + CALM {
            *writes = 0;
        }
        *writes = writes.saturating_add(1);
        let doublings = writes.saturating_sub(FREE_WRITES).min(16);
        let rest = REST.saturating_mul(1 << doublings).min(MAX_REST);
        *rests_until = now + rest;
        rest
    }

    /// Ends the longer rest of an object that should have another state now.
    pub(in crate::status) fn renew(&mut self, key: &StatusKey, now: Instant) {
        let series = self.repeated.remove(key);
        if series.is_none_or(|(writes, _)| writes <= FREE_WRITES) {
            return;
        }
        let soon = now + REST;
        if let Some(rest) = self.rests.get_mut(key) {
            *rest = soon.min(*rest);
        }
        if let Some(time) = self.waiting.get(key).copied().filter(|time| *time > soon) {
            self.times[rank(key.kind)].remove(&(time, key.clone()));
            self.waiting.remove(key);
            self.insert(key.clone(), soon);
        }
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
        self.repeated.remove(key);
        self.attempts.remove(key);
    }
}

#[cfg(test)]
mod tests {
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

    /// Writes an object that another writer changes after each write. Returns the time of the last write.
    fn write_in_turn(queue: &mut Queue, key: &StatusKey, writes: u32, mut now: Instant) -> Instant {
        for _ in 0..writes {
            queue.offer(key.clone(), now);
            now = now.max(queue.next_time().expect("it waits"));
            assert_eq!(queue.pop(now).as_ref(), Some(key));
            queue.begin(key.clone());
            let rest = queue.next_rest(key, now);
            queue.succeeded_resting(key, now, rest);
        }
        now
    }

    #[test]
    fn writes_that_another_writer_undoes_become_rare() {
        let (start, mut queue) = (Instant::now(), Queue::default());
        let route = key(Kind::HttpRoute, "a");
        let last = write_in_turn(&mut queue, &route, FREE_WRITES, start);
        assert_eq!(last, start + REST * (FREE_WRITES - 1));
        let last = write_in_turn(&mut queue, &route, 20, last);
        assert!(last > start + Duration::from_mins(45), "{:?}", last - start);
        queue.offer(route.clone(), last);
        assert_eq!(queue.next_time(), Some(last + MAX_REST));
        // A change of the status that it should have is written soon.
        queue.renew(&route, last);
        assert_eq!(queue.next_time(), Some(last + REST));
        // Corrections from time to time do not rest.
        let mut now = last + CALM;
        queue.pop(now);
        for _ in 0..20 {
            now += 2 * CALM;
            assert_eq!(queue.next_rest(&route, now), REST);
        }
    }

    #[test]
    fn ended_rests_are_removed_together() {
        let (start, mut queue) = (Instant::now(), Queue::default());
        let write = |queue: &mut Queue, number: usize, now: Instant| {
            queue.succeeded(&key(Kind::HttpRoute, &format!("r{number}")), now);
            queue.rests.len()
        };
        for number in 0..1000 {
            assert_eq!(write(&mut queue, number, start), number + 1, "all rest");
        }
        let later = start + 2 * REST;
        let removals = (1000..10_000).filter(|number| write(&mut queue, *number, later + REST * (*number as u32)) == 1);
        let removals = removals.count();
        assert!((1..200).contains(&removals), "{removals}");
        assert!(queue.rests.len() <= FEW_RESTS);
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
