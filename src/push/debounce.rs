//! Debouncing: merges changes into batches. A batch is pushed after a quiet period, or when its oldest change has
//! waited for the maximum time.
//!
//! Both times adapt. After a pause, a few changes wait for a part of the quiet period only. If a burst follows, it
//! waits for the whole quiet period. A burst without a pause does not wait for the maximum time either. It waits for
//! some quiet periods, but long enough that pushes take a small part of the time.
//!
//! The pending map is bounded by the number of objects, since only the last change of an object counts. The time is
//! passed in, so tests need no clock.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use crate::{
    api::Kind,
    base::{ClusterId, Namespace, ObjectKey},
    model::{Batch, Change, SourceId},
};

/// The debounce times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DebounceOptions {
    /// The maximum quiet period (`PILOT_DEBOUNCE_AFTER`).
    pub after: Duration,
    /// The maximum wait of a change (`PILOT_DEBOUNCE_MAX`).
    pub max: Duration,
    /// True if endpoints are debounced too (`PILOT_ENABLE_EDS_DEBOUNCE`).
    pub endpoints_wait: bool,
}

/// After a pause, the quiet period is the maximum divided by this.
const IDLE_PART: u32 = 10;
/// A pause is at most this many quiet periods.
const LONGEST_PAUSE: u32 = 10;
/// More pending changes than this are not idle.
const FEW_EVENTS: usize = 8;

/// The kinds that change with endpoints. In a cluster, the Pods do.
const ENDPOINT_KINDS: [Kind; 2] = [Kind::EndpointSlice, Kind::Pod];

/// The number of quiet periods after which a burst is pushed, but not before [`BURST_PART`].
const BURST_PERIODS: u32 = 5;
/// The same number for a burst that changes only endpoints, which affect single resources.
const ENDPOINT_BURST_PERIODS: u32 = 1;
/// The multiple of the duration of the last push after which a burst is pushed at the earliest.
const BURST_PART: u32 = 10;

/// The changes of a push.
#[derive(Debug)]
pub struct Taken {
    /// The changes.
    pub batch: Batch,
    /// The arrival time of the oldest one.
    pub since: Instant,
    /// Their number before merging.
    pub events: usize,
    /// The namespaces of changed objects.
    pub namespaces: BTreeSet<Namespace>,
}

/// Pending changes.
#[derive(Default)]
pub struct Pending {
    /// Changes of whole sources and clusters, in order of arrival. They precede changes of single objects that arrived
    /// later.
    sources: Vec<Change>,
    objects: BTreeMap<(Kind, ObjectKey), Change>,
    events: usize,
    oldest: Option<Instant>,
    newest: Option<Instant>,
    /// The arrival time of the newest change of the last batch.
    last: Option<Instant>,
    /// The duration of the last push.
    took: Duration,
}

impl Pending {
    /// Adds changes that arrived at this time.
    pub fn add(&mut self, changes: impl IntoIterator<Item = Change>, now: Instant) {
        for change in changes {
            match &change {
                Change::Upsert(row) => {
                    self.objects.insert((row.kind(), row.key().clone()), change);
                }
                Change::Remove(kind, key) => {
                    self.objects.insert((*kind, key.clone()), change);
                }
                Change::Replace(..) | Change::RemoveCluster(_) => {
                    // The replaced changes have waited since then, so the new one must not wait longer.
                    let oldest = self.oldest;
                    self.drop_replaced(&change);
                    self.oldest = oldest;
                    self.sources.push(change);
                }
            }
            self.events += 1;
            self.oldest.get_or_insert(now);
            self.newest = Some(now);
        }
    }

    /// Returns the arrival time of the oldest change.
    pub fn oldest(&self) -> Option<Instant> {
        self.oldest
    }

    /// Returns true if a whole source or cluster has changed.
    pub fn has_sources(&self) -> bool {
        !self.sources.is_empty()
    }

    /// Returns the namespaces of changed objects.
    pub fn namespaces(&self) -> BTreeSet<Namespace> {
        self.objects.keys().map(|(_, key)| key.namespace.clone()).collect()
    }

    /// Returns the time of the next push if no more changes arrive; `None` without pending changes.
    pub fn due(&self, options: &DebounceOptions) -> Option<Instant> {
        let (oldest, newest) = (self.oldest?, self.newest?);
        let has_only_endpoints = self.has_only(&ENDPOINT_KINDS);
        if !options.endpoints_wait && has_only_endpoints {
            return Some(oldest);
        }
        let quiet = if self.is_idle(oldest, options) {
            options.after / IDLE_PART
        } else {
            options.after
        };
        let periods = if has_only_endpoints {
            ENDPOINT_BURST_PERIODS
        } else {
            BURST_PERIODS
        };
        let burst = (options.after * periods).max(self.took * BURST_PART);
        Some((newest + quiet).min(oldest + burst.min(options.max)))
    }

    /// Returns true if only objects of these kinds have changed.
    fn has_only(&self, kinds: &[Kind]) -> bool {
        self.sources.is_empty() && self.objects.keys().all(|(kind, _)| kinds.contains(kind))
    }

    /// Sets the duration of the last push.
    pub fn record_duration(&mut self, took: Duration) {
        self.took = took;
    }

    /// Returns true if few changes are pending, after a pause: nothing had changed for a quiet period, and for long
    /// enough that early pushes take a small part of the time. So a burst costs at most one push more.
    fn is_idle(&self, oldest: Instant, options: &DebounceOptions) -> bool {
        let pause = (self.took * BURST_PART).clamp(options.after, options.after * LONGEST_PAUSE);
        let has_paused = |last| oldest.saturating_duration_since(last) >= pause;
        self.sources.is_empty() && self.events <= FEW_EVENTS && self.last.is_some_and(has_paused)
    }

    /// Takes all changes.
    pub fn take(&mut self) -> Option<Taken> {
        let since = self.oldest?;
        let namespaces = self.namespaces();
        let rest = Self {
            last: self.newest,
            took: self.took,
            ..Self::default()
        };
        let taken = std::mem::replace(self, rest);
        Some(Taken {
            batch: taken.sources.into_iter().chain(taken.objects.into_values()).collect(),
            since,
            events: taken.events,
            namespaces,
        })
    }

    /// Takes the changes of all namespaces but one.
    pub fn take_except(&mut self, left: &Namespace) -> Option<Taken> {
        let (oldest, newest) = (self.oldest, self.newest);
        let stays = |(_, key): &(Kind, ObjectKey), _: &mut Change| key.namespace == *left;
        let staying: BTreeMap<_, _> = self.objects.extract_if(.., stays).collect();
        let mut taken = self.take()?;
        if !staying.is_empty() {
            taken.events = taken.events.saturating_sub(staying.len());
            self.events = staying.len();
            self.objects = staying;
            (self.oldest, self.newest) = (oldest, newest);
        }
        Some(taken)
    }

    /// Drops changes that a newer change of their whole source or cluster replaces.
    pub fn drop_replaced(&mut self, by: &Change) {
        match by {
            Change::Replace(source, _) => self.drop_older(source),
            Change::RemoveCluster(cluster) => self.drop_cluster(cluster),
            Change::Upsert(_) | Change::Remove(..) => {}
        }
        if self.objects.is_empty() && self.sources.is_empty() {
            self.oldest = None;
        }
    }

    fn drop_older(&mut self, source: &SourceId) {
        self.objects
            .retain(|(kind, key), _| *kind != source.kind || key.cluster != source.cluster);
        self.sources
            .retain(|change| !matches!(change, Change::Replace(other, _) if other == source));
    }

    fn drop_cluster(&mut self, cluster: &ClusterId) {
        self.objects.retain(|(_, key), _| key.cluster != *cluster);
        self.sources
            .retain(|change| !matches!(change, Change::Replace(other, _) if other.cluster == *cluster));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMING: DebounceOptions = DebounceOptions {
        after: Duration::from_millis(100),
        max: Duration::from_secs(10),
        endpoints_wait: true,
    };

    fn removal(kind: Kind, name: &str) -> Change {
        Change::Remove(kind, ObjectKey::new(&ClusterId::new("c"), "ns", name))
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "the test needs an arbitrary start time")]
    fn a_burst_is_pushed_after_a_bounded_time() {
        let start = Instant::now();
        let mut pending = Pending::default();
        assert_eq!(pending.due(&TIMING), None);
        pending.add([removal(Kind::Service, "a")], start);
        assert_eq!(pending.due(&TIMING), Some(start + TIMING.after));
        for step in 1..200 {
            pending.add([removal(Kind::Service, "a")], start + step * Duration::from_millis(90));
        }
        assert_eq!(pending.due(&TIMING), Some(start + TIMING.after * BURST_PERIODS));
        pending.record_duration(Duration::from_millis(300));
        assert_eq!(
            pending.due(&TIMING),
            Some(start + Duration::from_secs(3)),
            "long pushes are rare"
        );
        pending.record_duration(Duration::from_secs(30));
        assert_eq!(pending.due(&TIMING), Some(start + TIMING.max));
        let taken = pending.take().expect("a batch");
        assert_eq!(
            (taken.batch.len(), taken.since),
            (1, start),
            "only the last change of an object counts"
        );
        assert!(pending.take().is_none());
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "the test needs an arbitrary start time")]
    fn a_burst_of_endpoints_is_pushed_sooner() {
        let start = Instant::now();
        let mut pending = Pending::default();
        for step in 0..200 {
            let kind = if step % 2 == 0 { Kind::EndpointSlice } else { Kind::Pod };
            pending.add([removal(kind, "a")], start + step * Duration::from_millis(90));
        }
        assert_eq!(
            pending.due(&TIMING),
            Some(start + TIMING.after * ENDPOINT_BURST_PERIODS)
        );
        pending.record_duration(Duration::from_millis(300));
        assert_eq!(
            pending.due(&TIMING),
            Some(start + Duration::from_secs(3)),
            "long pushes are rare"
        );
        pending.add([removal(Kind::Service, "a")], start);
        pending.record_duration(Duration::ZERO);
        assert_eq!(
            pending.due(&TIMING),
            Some(start + TIMING.after),
            "quiet since the newest change"
        );
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "the test needs an arbitrary start time")]
    fn a_single_change_is_pushed_early_and_a_burst_is_merged() {
        let start = Instant::now();
        let mut pending = Pending::default();
        pending.add([removal(Kind::Pod, "a")], start);
        assert_eq!(
            pending.due(&TIMING),
            Some(start + TIMING.after),
            "the start is not idle"
        );
        pending.take();
        let soon = start + TIMING.after / 2;
        pending.add([removal(Kind::Pod, "a")], soon);
        assert_eq!(pending.due(&TIMING), Some(soon + TIMING.after), "a burst is not idle");
        pending.take();
        let later = soon + TIMING.after;
        pending.add([removal(Kind::Pod, "a")], later);
        assert_eq!(pending.due(&TIMING), Some(later + TIMING.after / IDLE_PART));
        pending.record_duration(Duration::from_millis(50));
        assert_eq!(
            pending.due(&TIMING),
            Some(later + TIMING.after),
            "early pushes take a small part of the time"
        );
        pending.record_duration(Duration::from_millis(10));
        assert_eq!(pending.due(&TIMING), Some(later + TIMING.after / IDLE_PART));
        pending.record_duration(Duration::from_secs(30));
        pending.take();
        let later = later + TIMING.after * LONGEST_PAUSE;
        pending.add([removal(Kind::Pod, "a")], later);
        assert_eq!(pending.due(&TIMING), Some(later + TIMING.after / IDLE_PART));
        for number in 0..FEW_EVENTS {
            pending.add([removal(Kind::Pod, &number.to_string())], later);
        }
        assert_eq!(
            pending.due(&TIMING),
            Some(later + TIMING.after),
            "many changes at once are a burst"
        );
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "the test needs an arbitrary start time")]
    fn endpoints_are_not_debounced_if_disabled() {
        let start = Instant::now();
        let options = DebounceOptions {
            endpoints_wait: false,
            ..TIMING
        };
        let mut pending = Pending::default();
        pending.add([removal(Kind::EndpointSlice, "a"), removal(Kind::Pod, "a")], start);
        assert_eq!(pending.due(&options), Some(start));
        pending.add([removal(Kind::Service, "a")], start);
        assert_eq!(pending.due(&options), Some(start + options.after));
    }
}
