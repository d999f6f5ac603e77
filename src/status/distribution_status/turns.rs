//! The turns of objects: which of them are followed now, and which one is next.
//!
//! Objects that have changed come first. Few are followed at a time, and the next one begins only after the effects of
//! the last one were computed and the thread of the model has rested. An object whose proxies do not answer gives way
//! to those that wait.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::model::gateway_api::status::StatusKey;

/// The number of objects that are followed at a time. Each may compute its effects again when the mesh changes.
pub(super) const MAX_FOLLOWED: usize = 4;
/// The time after which an object gives way to one that waits.
const TURN: Duration = Duration::from_secs(5);
/// The rest after a computation of effects, as a multiple of its duration, before the next object has its turn: one
/// that has changed, or another. So pushes have most of the time of their thread.
const REST: u32 = 4;
const REST_OF_OTHERS: u32 = 20;
const MAX_REST: Duration = Duration::from_secs(10);
/// The time that proxies have to connect before a new leader follows objects that have not changed. Without it, a
/// restart of all replicas would make objects unused.
const CONNECT_TIME: Duration = Duration::from_mins(1);

/// The rank of an object that waits. The first one comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// It has changed.
    Changed,
    /// Its last answer was not final, or no success.
    Unfinished,
    /// It was not followed by this leader.
    Other,
}

/// An object that is followed.
pub(super) struct Turn {
    /// The number of the turn.
    pub(super) number: u64,
    /// Its start.
    pub(super) since: Instant,
    /// Cancelled at its end.
    pub(super) stop: CancellationToken,
    has_report: bool,
    /// The start of the computation of effects.
    computes_since: Instant,
    is_computed: bool,
}

/// See the module documentation.
pub(super) struct ObjectTurns {
    started: Instant,
    /// The last number that was given to an object.
    last: u64,
    waiting: BTreeSet<(Rank, u64, StatusKey)>,
    /// The places of the same objects.
    places: BTreeMap<StatusKey, (Rank, u64)>,
    followed: BTreeMap<StatusKey, Turn>,
    /// The end and the duration of the last computation of effects.
    computed: Option<(Instant, Duration)>,
}

impl ObjectTurns {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            started: now,
            last: 0,
            waiting: BTreeSet::new(),
            places: BTreeMap::new(),
            followed: BTreeMap::new(),
            computed: None,
        }
    }

    /// Queues an object that is not followed. A better rank replaces the present one.
    pub(super) fn queue(&mut self, key: &StatusKey, rank: Rank) {
        let present = self.places.get(key);
        if self.followed.contains_key(key) || present.is_some_and(|(present, _)| *present <= rank) {
            return;
        }
        self.leave(key);
        self.last += 1;
        self.places.insert(key.clone(), (rank, self.last));
        self.waiting.insert((rank, self.last, key.clone()));
    }

    fn leave(&mut self, key: &StatusKey) {
        if let Some((rank, number)) = self.places.remove(key) {
            self.waiting.remove(&(rank, number, key.clone()));
        }
    }

    /// Ends the turn of an object.
    pub(super) fn stop(&mut self, key: &StatusKey) {
        if let Some(turn) = self.followed.remove(key) {
            turn.stop.cancel();
        }
    }

    /// Forgets an object.
    pub(super) fn forget(&mut self, key: &StatusKey) {
        self.leave(key);
        self.stop(key);
    }

    /// Returns when the next object may be followed; `None` if none waits, or if this depends on a report.
    pub(super) fn next_time(&self) -> Option<Instant> {
        let (rank, ..) = self.waiting.first()?;
        if self.followed.values().any(|turn| !turn.has_report) {
            return None;
        }
        let (earliest, rest) = match rank {
            Rank::Changed => (self.started, REST),
            Rank::Unfinished => (self.started, REST_OF_OTHERS),
            Rank::Other => (self.started + CONNECT_TIME, REST_OF_OTHERS),
        };
        let rested = self.computed.map(|(at, took)| at + (took * rest).min(MAX_REST));
        let free = (self.followed.len() >= MAX_FOLLOWED).then(|| self.oldest()).flatten();
        let free = free.map(|(_, since)| since + TURN);
        [Some(earliest), rested, free].into_iter().flatten().max()
    }

    fn oldest(&self) -> Option<(StatusKey, Instant)> {
        let oldest = self.followed.iter().min_by_key(|(_, turn)| turn.number);
        oldest.map(|(key, turn)| (key.clone(), turn.since))
    }

    /// Begins the next turn, if its time has come. At the limit, the oldest one ends, and its object waits again.
    pub(super) fn begin(&mut self, now: Instant) -> Option<(StatusKey, &Turn)> {
        if self.next_time()? > now {
            return None;
        }
        let (_, _, key) = self.waiting.pop_first()?;
        self.places.remove(&key);
        if self.followed.len() >= MAX_FOLLOWED
            && let Some((oldest, _)) = self.oldest()
        {
            self.stop(&oldest);
            self.queue(&oldest, Rank::Unfinished);
        }
        self.last += 1;
        let turn = Turn {
            number: self.last,
            since: now,
            stop: CancellationToken::new(),
            has_report: false,
            computes_since: now,
            is_computed: false,
        };
        Some((key.clone(), self.followed.entry(key).or_insert(turn)))
    }

    /// Records a report, which may have taken a computation of effects. Returns the start of the turn, if it goes on.
    pub(super) fn report(&mut self, key: &StatusKey, number: u64, now: Instant, is_computed: bool) -> Option<Instant> {
        let turn = self.followed.get_mut(key).filter(|turn| turn.number == number)?;
        turn.has_report = true;
        if !is_computed {
            turn.computes_since = now;
        } else if !std::mem::replace(&mut turn.is_computed, true) {
            self.computed = Some((now, now - turn.computes_since));
        }
        Some(turn.since)
    }

    /// Records that the time of a turn was over before its answer was final. The object waits for another turn.
    pub(super) fn ended(&mut self, key: &StatusKey, number: u64) {
        if self.followed.get(key).is_some_and(|turn| turn.number == number) {
            self.followed.remove(key);
            self.queue(key, Rank::Unfinished);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::Kind,
        base::{ClusterId, ObjectKey},
    };

    const TOOK: Duration = Duration::from_millis(10);

    fn key(name: &str) -> StatusKey {
        StatusKey {
            kind: Kind::VirtualService,
            object: ObjectKey::new(&ClusterId::new("c"), "shop", name),
        }
    }

    /// Returns the turns of a leader since a time at which all proxies have connected.
    fn turns() -> (ObjectTurns, Instant) {
        let now = Instant::now();
        (ObjectTurns::new(now), now + CONNECT_TIME)
    }

    /// Begins the next turn, and returns the name of its object and its number.
    fn begin(turns: &mut ObjectTurns, now: Instant) -> Option<(String, u64)> {
        let (key, turn) = turns.begin(now)?;
        Some((key.object.name.to_string(), turn.number))
    }

    /// Follows the next object until it has a report. Returns its name and the end of the rest that follows.
    fn pass(turns: &mut ObjectTurns, now: Instant) -> Option<(String, Instant)> {
        let (name, number) = begin(turns, now)?;
        turns.report(&key(&name), number, now + TOOK, true)?;
        Some((name, now + TOOK))
    }

    #[test]
    fn changed_objects_come_first() {
        let (mut turns, now) = turns();
        for (name, rank) in [
            ("a", Rank::Other),
            ("b", Rank::Other),
            ("c", Rank::Changed),
            ("b", Rank::Changed),
        ] {
            turns.queue(&key(name), rank);
        }
        let (first, computed) = pass(&mut turns, now).expect("a turn");
        assert_eq!(first, "c");
        assert_eq!(begin(&mut turns, computed), None, "the thread of the model rests");
        assert_eq!(turns.next_time(), Some(computed + TOOK * REST));
        let (second, computed) = pass(&mut turns, computed + TOOK * REST).expect("a turn");
        assert_eq!(second, "b");
        assert_eq!(turns.next_time(), Some(computed + TOOK * REST_OF_OTHERS));
        turns.forget(&key("a"));
        assert_eq!(turns.next_time(), None);
    }

    #[test]
    fn a_wait_is_no_computation() {
        let (mut turns, now) = turns();
        turns.queue(&key("a"), Rank::Changed);
        let (_, number) = begin(&mut turns, now).expect("a turn");
        turns.queue(&key("b"), Rank::Changed);
        turns.report(&key("a"), number, now, false).expect("a turn");
        assert_eq!(turns.next_time(), Some(turns.started), "others need not wait for it");
        let waited = now + TURN / 2;
        turns.report(&key("a"), number, waited, false).expect("a turn");
        turns.report(&key("a"), number, waited + TOOK, true).expect("a turn");
        assert_eq!(turns.next_time(), Some(waited + TOOK + TOOK * REST));
    }

    #[test]
    fn effects_are_computed_one_after_the_other() {
        let (mut turns, now) = turns();
        turns.queue(&key("a"), Rank::Changed);
        turns.queue(&key("b"), Rank::Changed);
        let (_, number) = begin(&mut turns, now).expect("a turn");
        assert_eq!(turns.next_time(), None);
        assert_eq!(
            turns.report(&key("a"), number + 1, now, true),
            None,
            "a report of an earlier turn"
        );
        turns.report(&key("a"), number, now, false).expect("the turn goes on");
        assert_eq!(begin(&mut turns, now).map(|(name, _)| name), Some("b".to_owned()));
    }

    #[test]
    fn objects_give_way_to_those_that_wait() {
        let (mut turns, mut now) = turns();
        let names: Vec<String> = (0..=MAX_FOLLOWED).map(|number| number.to_string()).collect();
        for name in &names {
            turns.queue(&key(name), Rank::Changed);
        }
        let start = now;
        for name in &names[..MAX_FOLLOWED] {
            now = turns.next_time().expect("a turn").max(now);
            let (next, computed) = pass(&mut turns, now).expect("a turn");
            assert_eq!(next, *name);
            now = computed;
        }
        let next = turns.next_time().expect("a turn");
        assert_eq!(next, start + TURN);
        assert_eq!(begin(&mut turns, now), None);
        let (last, _) = pass(&mut turns, next).expect("a turn");
        assert_eq!(last, names[MAX_FOLLOWED]);
        assert_eq!(turns.followed.len(), MAX_FOLLOWED);
        assert!(!turns.followed.contains_key(&key("0")));
        assert_eq!(
            turns.places.get(&key("0")).map(|(rank, _)| *rank),
            Some(Rank::Unfinished)
        );
        // A turn whose time is over waits, too.
        let number = turns.followed[&key("1")].number;
        turns.ended(&key("1"), number);
        assert!(turns.places.contains_key(&key("1")));
    }

    #[test]
    fn other_objects_wait_until_proxies_have_connected() {
        let now = Instant::now();
        let mut turns = ObjectTurns::new(now);
        turns.queue(&key("a"), Rank::Other);
        assert_eq!(begin(&mut turns, now), None);
        assert_eq!(turns.next_time(), Some(now + CONNECT_TIME));
        for (name, rank) in [("b", Rank::Unfinished), ("c", Rank::Changed)] {
            turns.queue(&key(name), rank);
            assert_eq!(turns.next_time(), Some(now));
            assert_eq!(begin(&mut turns, now).map(|(name, _)| name), Some(name.to_owned()));
            turns.stop(&key(name));
        }
    }
}
