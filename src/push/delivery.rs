//! Delivery of pushes: which pushes are not answered yet by all proxies that were sent them.
//!
//! The push loop hands one reference to the delivery of a push to each connection with it. A connection drops the
//! reference once it has sent everything and the proxy has answered. The last reference ends the delivery. So tracking
//! costs one reference for each connection and push, whatever the number of objects and resources.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::watch;

use crate::{
    api::Kind,
    base::ObjectKey,
    model::{Batch, Change, Revision},
};

/// The number of pushes that are remembered.
const REMEMBERED: usize = 256;
/// The number of objects that are remembered of one push.
const MAX_OBJECTS: usize = 64;
/// The number of unanswered pushes that one connection may hold. A proxy that does not answer is not waited for.
const MAX_UNANSWERED: usize = 16;

/// A changed object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedObject {
    /// The kind.
    pub kind: Kind,
    /// The object.
    pub key: ObjectKey,
    /// True if the object was removed.
    pub removed: bool,
}

/// A push of changes, for status pages.
#[derive(Debug)]
pub struct PushRecord {
    /// The revision that it published.
    pub revision: Revision,
    /// The number of changes in it.
    pub events: usize,
    /// The number of changed objects by kind.
    pub kinds: BTreeMap<Kind, usize>,
    /// The changed configuration objects, at most [`MAX_OBJECTS`].
    pub objects: Vec<ChangedObject>,
    /// The arrival of the oldest change.
    pub since: Instant,
    /// The wait of the oldest change before the commit.
    pub waited: Duration,
    /// The duration of commit and generation.
    pub worked: Duration,
    /// The number of resources that were built.
    pub built: usize,
    /// The number of groups with a new snapshot.
    pub groups: usize,
    /// The number of connections that it was published to.
    pub connections: usize,
    refused: AtomicU32,
    delivered: OnceLock<Duration>,
    delivery: OnceLock<Weak<Delivery>>,
}

impl PushRecord {
    /// Returns the number of proxies that have not answered yet.
    pub fn outstanding(&self) -> usize {
        self.delivery.get().map_or(0, Weak::strong_count)
    }

    /// Returns the number of responses with this push that proxies refused.
    pub fn refused(&self) -> u32 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns the time from the oldest change to the last answer, if all proxies have answered.
    pub fn delivered(&self) -> Option<Duration> {
        self.delivered.get().copied()
    }

    /// Returns the change of an object, if the push contains one.
    pub fn contains(&self, kind: Kind, key: &ObjectKey) -> Option<&ChangedObject> {
        self.objects
            .iter()
            .find(|object| object.kind == kind && object.key == *key)
    }
}

/// The delivery of one push, which ends when the last reference is dropped.
#[derive(Debug)]
pub struct Delivery {
    record: Arc<PushRecord>,
    tracker: Tracker,
}

impl Delivery {
    /// Records that a proxy refused a response with the push.
    pub fn refuse(&self) {
        self.record.refused.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        let Inner { clock, observer, .. } = &*self.tracker.0;
        let took = clock().saturating_duration_since(self.record.since);
        // Set once: there is one delivery of each record.
        let _ = self.record.delivered.set(took);
        if self.record.connections > 0
            && let Some(observer) = observer.get()
        {
            observer(&self.record, took);
        }
        self.tracker.notify();
    }
}

/// The unanswered pushes of one connection.
#[derive(Debug, Default)]
pub struct Deliveries(Vec<Arc<Delivery>>);

impl Deliveries {
    /// Adds a push.
    pub fn add(&mut self, delivery: Arc<Delivery>) {
        if self.0.len() >= MAX_UNANSWERED {
            self.0.remove(0);
        }
        self.0.push(delivery);
    }

    /// Adds the pushes of another list.
    pub fn append(&mut self, other: Self) {
        other.0.into_iter().for_each(|delivery| self.add(delivery));
    }

    /// Returns true without pushes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records that the proxy refused a response.
    pub fn refuse(&self) {
        self.0.iter().for_each(|delivery| delivery.refuse());
    }

    /// Records that the proxy has answered everything.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

/// An observer of delivered pushes: the push, and the time from its oldest change to the last answer.
pub type DeliveryObserver = Box<dyn Fn(&PushRecord, Duration) + Send + Sync>;

/// The last pushes. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Tracker(Arc<Inner>);

struct Inner {
    clock: fn() -> Instant,
    /// The newest push is last. Locked for one insertion or a copy.
    pushes: Mutex<VecDeque<Arc<PushRecord>>>,
    observer: OnceLock<DeliveryObserver>,
    /// Changes with every push, and when a push is delivered.
    changed: watch::Sender<u64>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tracker").finish_non_exhaustive()
    }
}

/// The facts of a push that are known before it is published.
pub(super) struct NewPush {
    pub(super) revision: Revision,
    pub(super) events: usize,
    pub(super) kinds: BTreeMap<Kind, usize>,
    pub(super) objects: Vec<ChangedObject>,
    pub(super) since: Instant,
    pub(super) waited: Duration,
    pub(super) worked: Duration,
    pub(super) built: usize,
    pub(super) groups: usize,
    pub(super) connections: usize,
}

impl Tracker {
    /// Creates a tracker without pushes.
    pub fn new(clock: fn() -> Instant) -> Self {
        Self(Arc::new(Inner {
            clock,
            pushes: Mutex::default(),
            observer: OnceLock::new(),
            changed: watch::Sender::default(),
        }))
    }

    /// Sets the observer of delivered pushes, once.
    pub fn observe(&self, observer: DeliveryObserver) {
        // Only the composition root calls this.
        let _ = self.0.observer.set(observer);
    }

    /// Returns a receiver that changes with every push, and when a push is delivered.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }

    /// Returns the last pushes, the newest last.
    pub fn pushes(&self) -> Vec<Arc<PushRecord>> {
        self.lock().iter().cloned().collect()
    }

    /// Records a push. The caller hands the delivery to the connections and drops it.
    pub(super) fn push(&self, new: NewPush) -> Arc<Delivery> {
        let record = Arc::new(PushRecord {
            revision: new.revision,
            events: new.events,
            kinds: new.kinds,
            objects: new.objects,
            since: new.since,
            waited: new.waited,
            worked: new.worked,
            built: new.built,
            groups: new.groups,
            connections: new.connections,
            refused: AtomicU32::new(0),
            delivered: OnceLock::new(),
            delivery: OnceLock::new(),
        });
        let delivery = Arc::new(Delivery {
            record: record.clone(),
            tracker: self.clone(),
        });
        // The record is new.
        let _ = record.delivery.set(Arc::downgrade(&delivery));
        let mut pushes = self.lock();
        if pushes.len() >= REMEMBERED {
            pushes.pop_front();
        }
        pushes.push_back(record);
        delivery
    }

    pub(super) fn notify(&self) {
        if self.0.changed.receiver_count() > 0 {
            self.0.changed.send_modify(|changed| *changed += 1);
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<PushRecord>>> {
        self.0.pushes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the changed objects that configure traffic, at most [`MAX_OBJECTS`]. Whole sources are not listed.
pub(super) fn objects(batch: &Batch) -> Vec<ChangedObject> {
    let object = |change: &Change| match change {
        Change::Upsert(row) if row.kind().is_config() => Some(ChangedObject {
            kind: row.kind(),
            key: row.key().clone(),
            removed: false,
        }),
        Change::Remove(kind, key) if kind.is_config() => Some(ChangedObject {
            kind: *kind,
            key: key.clone(),
            removed: true,
        }),
        _ => None,
    };
    batch.iter().filter_map(object).take(MAX_OBJECTS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment;

    fn push(tracker: &Tracker, revision: u64) -> Arc<Delivery> {
        tracker.push(NewPush {
            revision: Revision(revision),
            events: 1,
            kinds: BTreeMap::new(),
            objects: Vec::new(),
            since: environment::now(),
            waited: Duration::ZERO,
            worked: Duration::ZERO,
            built: 1,
            groups: 1,
            connections: 2,
        })
    }

    #[test]
    fn the_last_answer_ends_a_delivery() {
        let tracker = Tracker::new(environment::now);
        let observed = Arc::new(AtomicU32::new(0));
        let counter = observed.clone();
        tracker.observe(Box::new(move |push, _| {
            assert_eq!(push.refused(), 1);
            counter.fetch_add(1, Ordering::Relaxed);
        }));
        let delivery = push(&tracker, 1);
        let (mut first, mut second) = (Deliveries::default(), Deliveries::default());
        first.add(delivery.clone());
        second.add(delivery);
        let record = tracker.pushes()[0].clone();
        assert_eq!((record.outstanding(), record.delivered()), (2, None));
        first.clear();
        assert_eq!((record.outstanding(), record.delivered()), (1, None));
        second.refuse();
        second.clear();
        assert_eq!(record.outstanding(), 0);
        assert!(record.delivered().is_some());
        assert_eq!(observed.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn memory_is_bounded() {
        let tracker = Tracker::new(environment::now);
        let mut connection = Deliveries::default();
        for revision in 0..1000 {
            connection.add(push(&tracker, revision));
        }
        assert_eq!(connection.0.len(), MAX_UNANSWERED);
        assert_eq!(tracker.pushes().len(), REMEMBERED);
    }
}
