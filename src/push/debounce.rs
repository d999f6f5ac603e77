//! Coalesces changes into batches: a batch leaves after a quiet period, or when the oldest change has waited too long.
//!
//! Both times adapt. After a calm, a few changes are not waited for as long as it takes to see whether a storm follows; if one
//! does, it finds the whole quiet period in force. A storm without a pause is not waited for to the ceiling either, but for
//! some quiet periods, and so long that most of the time is not spent on batches.
//!
//! The pending map is bounded by the number of objects: of several changes of one object the last one counts. The clock
//! is passed in, so tests need none.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crate::{
    api::Kind,
    base::{ClusterId, ObjectKey},
    model::{Batch, Change, SourceId},
};

/// When a batch leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// The longest quiet period (`PILOT_DEBOUNCE_AFTER`).
    pub after: Duration,
    /// Ceiling (`PILOT_DEBOUNCE_MAX`).
    pub max: Duration,
    /// Endpoints wait like everything else (`PILOT_ENABLE_EDS_DEBOUNCE`).
    pub endpoints_wait: bool,
}

/// Of a calm, the quiet period is this part of what it may be at most.
const CALM_PART: u32 = 10;
/// It is calm when no batch has left for so many quiet periods.
const CALM_PERIODS: u32 = 10;
/// More changes than this at a time are no calm.
const FEW_EVENTS: usize = 8;

/// A storm that goes on leaves after so many quiet periods,
const STORM_PERIODS: u32 = 5;
/// or so many times what the last batch took, whatever is longer.
const STORM_PART: u32 = 10;

/// Changes that wait.
#[derive(Default)]
pub struct Pending {
    /// Whole sources and clusters, in order of arrival; they come before single objects that arrived later.
    sources: Vec<Change>,
    objects: BTreeMap<(Kind, ObjectKey), Change>,
    events: usize,
    oldest: Option<Instant>,
    newest: Option<Instant>,
    /// The newest change of the last batch.
    last: Option<Instant>,
    /// How long the last batch took to be made.
    took: Duration,
}

impl Pending {
    /// Adds changes that arrived at a time.
    pub fn add(&mut self, changes: impl IntoIterator<Item = Change>, now: Instant) {
        for change in changes {
            self.events += 1;
            self.oldest.get_or_insert(now);
            self.newest = Some(now);
            match &change {
                Change::Upsert(row) => {
                    self.objects.insert((row.kind(), row.key().clone()), change);
                }
                Change::Remove(kind, key) => {
                    self.objects.insert((*kind, key.clone()), change);
                }
                Change::Replace(source, _) => {
                    let source = source.clone();
                    self.drop_older(&source);
                    self.sources.push(change);
                }
                Change::RemoveCluster(cluster) => {
                    let cluster = cluster.clone();
                    self.drop_cluster(&cluster);
                    self.sources.push(change);
                }
            }
        }
    }

    /// How many changes came since the last batch.
    pub fn events(&self) -> usize {
        self.events
    }

    /// When the batch leaves if nothing more arrives; `None` while nothing waits.
    pub fn due(&self, timing: &Timing) -> Option<Instant> {
        let (oldest, newest) = (self.oldest?, self.newest?);
        let only_endpoints =
            self.sources.is_empty() && self.objects.keys().all(|(kind, _)| *kind == Kind::EndpointSlice);
        if only_endpoints && !timing.endpoints_wait {
            return Some(oldest);
        }
        let quiet = if self.is_calm(oldest, timing) {
            timing.after / CALM_PART
        } else {
            timing.after
        };
        let storm = (timing.after * STORM_PERIODS).max(self.took * STORM_PART);
        Some((newest + quiet).min(oldest + storm.min(timing.max)))
    }

    /// The last batch took so long to be made.
    pub fn took(&mut self, took: Duration) {
        self.took = took;
    }

    /// True if little waits and nothing did just before.
    fn is_calm(&self, oldest: Instant, timing: &Timing) -> bool {
        let since_last = |last| oldest.saturating_duration_since(last) >= timing.after * CALM_PERIODS;
        self.sources.is_empty() && self.events <= FEW_EVENTS && self.last.is_some_and(since_last)
    }

    /// Takes the batch, with the arrival time of its oldest change.
    pub fn take(&mut self) -> Option<(Batch, Instant)> {
        let oldest = self.oldest?;
        let rest = Self {
            last: self.newest,
            took: self.took,
            ..Self::default()
        };
        let taken = std::mem::replace(self, rest);
        let batch = taken.sources.into_iter().chain(taken.objects.into_values()).collect();
        Some((batch, oldest))
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

    const TIMING: Timing = Timing {
        after: Duration::from_millis(100),
        max: Duration::from_secs(10),
        endpoints_wait: true,
    };

    fn removal(kind: Kind, name: &str) -> Change {
        Change::Remove(kind, ObjectKey::new(&ClusterId::new("c"), "ns", name))
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "an arbitrary beginning of time")]
    fn waits_for_quiet_but_not_for_ever() {
        let start = Instant::now();
        let mut pending = Pending::default();
        assert_eq!(pending.due(&TIMING), None);
        pending.add([removal(Kind::Pod, "a")], start);
        assert_eq!(pending.due(&TIMING), Some(start + TIMING.after));
        for step in 1..200 {
            pending.add([removal(Kind::Pod, "a")], start + step * Duration::from_millis(90));
        }
        assert_eq!(pending.due(&TIMING), Some(start + TIMING.after * STORM_PERIODS));
        pending.took(Duration::from_millis(300));
        assert_eq!(
            pending.due(&TIMING),
            Some(start + Duration::from_secs(3)),
            "what takes long is done seldom"
        );
        pending.took(Duration::from_secs(30));
        assert_eq!(pending.due(&TIMING), Some(start + TIMING.max));
        let (batch, oldest) = pending.take().expect("a batch");
        assert_eq!((batch.len(), oldest), (1, start), "the last change of an object counts");
        assert!(pending.take().is_none());
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "an arbitrary beginning of time")]
    fn a_lone_change_hardly_waits_and_a_storm_is_merged() {
        let start = Instant::now();
        let mut pending = Pending::default();
        pending.add([removal(Kind::Pod, "a")], start);
        assert_eq!(
            pending.due(&TIMING),
            Some(start + TIMING.after),
            "a beginning is no calm"
        );
        pending.take();
        let soon = start + TIMING.after * 2;
        pending.add([removal(Kind::Pod, "a")], soon);
        assert_eq!(pending.due(&TIMING), Some(soon + TIMING.after), "nor is a storm");
        pending.take();
        let later = soon + TIMING.after * CALM_PERIODS;
        pending.add([removal(Kind::Pod, "a")], later);
        assert_eq!(pending.due(&TIMING), Some(later + TIMING.after / CALM_PART));
        for number in 0..FEW_EVENTS {
            pending.add([removal(Kind::Pod, &number.to_string())], later);
        }
        assert_eq!(
            pending.due(&TIMING),
            Some(later + TIMING.after),
            "many at once are a storm"
        );
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "an arbitrary beginning of time")]
    fn endpoints_need_not_wait() {
        let start = Instant::now();
        let timing = Timing {
            endpoints_wait: false,
            ..TIMING
        };
        let mut pending = Pending::default();
        pending.add([removal(Kind::EndpointSlice, "a")], start);
        assert_eq!(pending.due(&timing), Some(start));
        pending.add([removal(Kind::Service, "a")], start);
        assert_eq!(pending.due(&timing), Some(start + timing.after));
    }
}
