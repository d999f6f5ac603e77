//! Two lanes of pending changes. A namespace whose changes take long to generate must not delay those of others, so its
//! changes wait in a lane of their own, with debounce times of its own. The most expensive namespace of that lane is
//! pushed alone, after the others, which also shows what it costs.
//!
//! A change moves between the lanes only by waiting in the other one next time: while changes of a namespace are
//! pending, all of them are in one lane, so their order stays.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use super::debounce::{DebounceOptions, Pending, Taken};
use crate::{base::Namespace, model::Change};

/// The duration of a push after which its namespaces use the slow lane.
const SLOW: Duration = Duration::from_millis(100);
/// The maximum number of slow namespaces that are remembered.
const MAX_SLOW: usize = 1024;

/// A lane of changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lane {
    Fast,
    Slow,
}

/// The measured cost of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    /// False if the push was the namespace's alone.
    is_shared: bool,
    took: Duration,
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Lanes {
    fast: Pending,
    slow: Pending,
    costs: BTreeMap<Namespace, Cost>,
}

impl Lanes {
    /// Adds changes that arrived at this time.
    pub(super) fn add(&mut self, changes: impl IntoIterator<Item = Change>, now: Instant) {
        for change in changes {
            let namespace = match &change {
                Change::Upsert(row) => &row.key().namespace,
                Change::Remove(_, key) => &key.namespace,
                Change::Replace(..) | Change::RemoveCluster(_) => {
                    self.slow.drop_replaced(&change);
                    self.fast.add([change], now);
                    continue;
                }
            };
            let lane = if self.costs.contains_key(namespace) {
                &mut self.slow
            } else {
                &mut self.fast
            };
            lane.add([change], now);
        }
    }

    /// Returns the arrival time of the oldest change.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.fast.oldest().into_iter().chain(self.slow.oldest()).min()
    }

    /// Returns the time of the next push if no more changes arrive, and its lane.
    pub(super) fn due(&self, options: &DebounceOptions) -> Option<(Instant, Lane)> {
        let fast = self.fast.due(options).map(|at| (at, Lane::Fast));
        // Changes of the slow lane may be newer than those of whole sources.
        let slow = self.slow.due(options).filter(|_| !self.fast.has_sources());
        fast.into_iter().chain(slow.map(|at| (at, Lane::Slow))).min()
    }

    /// Takes the changes of a push.
    pub(super) fn take(&mut self, lane: Lane) -> Option<Taken> {
        match lane {
            Lane::Fast if self.fast.has_sources() => self.take_all(),
            Lane::Fast => self.fast.take(),
            Lane::Slow => match self.most_expensive() {
                Some(last) => self.slow.take_except(&last),
                None => self.slow.take(),
            },
        }
    }

    /// Takes all changes.
    pub(super) fn take_all(&mut self) -> Option<Taken> {
        let fast = self.fast.take();
        let Some(slow) = self.slow.take() else { return fast };
        let Some(mut all) = fast else { return Some(slow) };
        all.batch.extend(slow.batch);
        all.events += slow.events;
        all.since = all.since.min(slow.since);
        all.namespaces.extend(slow.namespaces);
        Some(all)
    }

    /// Returns the namespace of the slow lane that costs most, if several wait. One that was never measured alone
    /// counts as more expensive.
    fn most_expensive(&self) -> Option<Namespace> {
        let namespaces = self.slow.namespaces();
        let several = namespaces.len() > 1;
        let cost = |namespace: &Namespace| (self.costs.get(namespace).copied(), namespace.clone());
        let most = namespaces.into_iter().max_by_key(cost);
        most.filter(|_| several)
    }

    /// Records how long a push took.
    pub(super) fn record(&mut self, lane: Lane, namespaces: &BTreeSet<Namespace>, took: Duration) {
        match lane {
            Lane::Fast => self.fast.record_duration(took),
            Lane::Slow => self.slow.record_duration(took),
        }
        if took < SLOW {
            self.costs.retain(|namespace, _| !namespaces.contains(namespace));
            return;
        }
        let is_shared = namespaces.len() > 1;
        for namespace in namespaces {
            let known = self
                .costs
                .get(namespace)
                .is_some_and(|cost| is_shared && !cost.is_shared);
            if !known && (self.costs.len() < MAX_SLOW || self.costs.contains_key(namespace)) {
                self.costs.insert(namespace.clone(), Cost { is_shared, took });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::Kind,
        base::{ClusterId, ObjectKey},
        environment,
        model::SourceId,
    };

    const OPTIONS: DebounceOptions = DebounceOptions {
        after: Duration::from_millis(100),
        max: Duration::from_secs(10),
        endpoints_wait: true,
    };

    fn removal(namespace: &str, name: &str) -> Change {
        Change::Remove(Kind::Service, ObjectKey::new(&ClusterId::new("c"), namespace, name))
    }

    fn taken(lanes: &mut Lanes, lane: Lane) -> (Vec<String>, BTreeSet<Namespace>) {
        let taken = lanes.take(lane).expect("changes are pending");
        let name = |change: &Change| match change {
            Change::Remove(_, key) => format!("{}/{}", key.namespace, key.name),
            _ => "source".to_owned(),
        };
        (taken.batch.iter().map(name).collect(), taken.namespaces)
    }

    #[test]
    fn r21_expensive_namespaces_do_not_delay_others() {
        let (mut lanes, now) = (Lanes::default(), environment::now());
        lanes.add(["a", "b", "c"].map(|namespace| removal(namespace, "x")), now);
        let (names, namespaces) = taken(&mut lanes, Lane::Fast);
        assert_eq!(names, ["a/x", "b/x", "c/x"]);
        lanes.record(Lane::Fast, &namespaces, 3 * SLOW);
        // It is not known which of them is expensive.
        lanes.add(["a", "b", "c", "d"].map(|namespace| removal(namespace, "y")), now);
        assert_eq!(taken(&mut lanes, Lane::Fast).0, ["d/y"]);
        let (names, namespaces) = taken(&mut lanes, Lane::Slow);
        assert_eq!(names, ["a/y", "b/y"], "the last one waits");
        lanes.record(Lane::Slow, &namespaces, SLOW / 2);
        let (names, namespaces) = taken(&mut lanes, Lane::Slow);
        assert_eq!(names, ["c/y"]);
        lanes.record(Lane::Slow, &namespaces, 3 * SLOW);
        // Now it is.
        lanes.add(["c", "a", "b"].map(|namespace| removal(namespace, "z")), now);
        let due = lanes.due(&OPTIONS).expect("changes are pending");
        assert_eq!(due.1, Lane::Fast);
        assert_eq!(taken(&mut lanes, Lane::Fast).0, ["a/z", "b/z"]);
        assert_eq!(lanes.due(&OPTIONS).map(|(_, lane)| lane), Some(Lane::Slow));
        assert_eq!(taken(&mut lanes, Lane::Slow).0, ["c/z"]);
        assert!(lanes.due(&OPTIONS).is_none() && lanes.take(Lane::Slow).is_none());
    }

    #[test]
    fn changes_of_whole_sources_keep_their_order() {
        let (mut lanes, now) = (Lanes::default(), environment::now());
        lanes.record(Lane::Fast, &[Namespace::new("a")].into(), SLOW);
        let source = SourceId {
            kind: Kind::Service,
            cluster: ClusterId::new("c"),
        };
        lanes.add([removal("a", "older")], now);
        lanes.add([Change::Replace(source, Vec::new())], now);
        lanes.add([removal("a", "newer")], now);
        assert_eq!(lanes.due(&OPTIONS).map(|(_, lane)| lane), Some(Lane::Fast));
        assert_eq!(taken(&mut lanes, Lane::Fast).0, ["source", "a/newer"]);
        assert!(lanes.take_all().is_none());
    }
}
