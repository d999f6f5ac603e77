//! Delivery of pushes: which pushes are not answered yet by all proxies that were sent them.
//!
//! The push loop hands one reference to the delivery of a push to each connection with it. A connection drops the
//! reference once it has sent everything and the proxy has answered. The last reference ends the delivery. So tracking
//! costs one reference for each connection and push, whatever the number of objects and resources.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
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
    /// True if it changed other configuration objects, too.
    pub is_partial: bool,
    /// The arrival of the oldest change.
    pub since: Instant,
    /// The wait of the oldest change before the commit.
    pub waited: Duration,
    /// The duration of commit and generation.
    pub worked: Duration,
    /// The duration of the commit.
    pub committed: Duration,
    /// The number of resources that were built.
    pub built: usize,
    /// The number of groups with a new snapshot.
    pub groups: usize,
    /// The number of connections that it was published to.
    pub connections: usize,
    /// The progress of its delivery.
    pub(super) progress: Progress,
}

/// The progress of a delivery. The default is that of a new one.
#[derive(Debug, Default)]
pub(super) struct Progress {
    refused: AtomicU32,
    delivered: OnceLock<Duration>,
    delivery: OnceLock<Weak<Delivery>>,
}

impl PushRecord {
    /// Returns the number of proxies that have not answered yet.
    pub fn outstanding(&self) -> usize {
        self.progress.delivery.get().map_or(0, Weak::strong_count)
    }

    /// Returns the number of responses with this push that proxies refused.
    pub fn refused(&self) -> u32 {
        self.progress.refused.load(Ordering::Relaxed)
    }

    /// Returns the time from the oldest change to the last answer, if all proxies have answered.
    pub fn delivered(&self) -> Option<Duration> {
        self.progress.delivered.get().copied()
    }

    /// Returns true if the push lists the object.
    pub fn contains(&self, kind: Kind, key: &ObjectKey) -> bool {
        let mut objects = self.objects.iter();
        objects.any(|object| object.kind == kind && object.key == *key)
    }
}

/// A tracer of pushes.
pub trait PushTracer: Send + Sync {
    /// Begins the trace of a push, before the connections receive it; `None` if it is not traced.
    fn published(&self, push: &PushRecord) -> Option<Box<dyn PushTrace>>;
}

/// The trace of one push.
pub trait PushTrace: fmt::Debug + Send + Sync {
    /// Called when a connection has sent the push and its proxy has answered.
    fn answered(&self, answer: &Answer<'_>);
    /// Called after the last answer, with the time from the oldest change until now.
    fn ended(&self, push: &PushRecord, took: Duration);
}

/// The answer of a proxy to a push.
#[derive(Debug)]
pub struct Answer<'a> {
    /// The id of the connection.
    pub connection: &'a str,
    /// The time when the first response was written.
    pub sent: Instant,
    /// The time of the answer to the last response.
    pub answered: Instant,
    /// True if the proxy refused a response.
    pub refused: bool,
    /// True if no other proxy has yet to answer.
    pub is_last: bool,
}

/// The delivery of one push, which ends when the last reference is dropped.
#[derive(Debug)]
pub struct Delivery {
    record: Arc<PushRecord>,
    tracker: Tracker,
    trace: Option<Box<dyn PushTrace>>,
}

impl Delivery {
    /// Records that a proxy refused a response with the push.
    fn refuse(&self) {
        self.record.progress.refused.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        let Inner { clock, observer, .. } = &*self.tracker.0;
        let took = clock().saturating_duration_since(self.record.since);
        // Set once: there is one delivery of each record.
        let _ = self.record.progress.delivered.set(took);
        if self.record.connections > 0
            && let Some(observer) = observer.get()
        {
            observer(&self.record, took);
        }
        if let Some(trace) = &self.trace {
            trace.ended(&self.record, took);
        }
        self.tracker.notify();
    }
}

/// The unanswered pushes of one connection.
#[derive(Debug, Default)]
pub struct Deliveries {
    pushes: Vec<Arc<Delivery>>,
    /// The time when the first response after them was written.
    sent: Option<Instant>,
    /// True if the proxy refused a response after them.
    refused: bool,
}

impl Deliveries {
    /// Adds a push.
    pub fn add(&mut self, delivery: Arc<Delivery>) {
        if self.pushes.len() >= MAX_UNANSWERED {
            self.pushes.remove(0);
        }
        self.pushes.push(delivery);
    }

    /// Adds the pushes of another list.
    pub fn append(&mut self, other: Self) {
        other.pushes.into_iter().for_each(|delivery| self.add(delivery));
    }

    /// Returns true without pushes.
    pub fn is_empty(&self) -> bool {
        self.pushes.is_empty()
    }

    /// Records that a response was written.
    pub fn sent(&mut self, at: Instant) {
        if !self.is_empty() {
            self.sent.get_or_insert(at);
        }
    }

    /// Records that the proxy refused a response.
    pub fn refuse(&mut self) {
        self.refused = true;
        self.pushes.iter().for_each(|delivery| delivery.refuse());
    }

    /// Records that the proxy of this connection has answered everything.
    pub fn clear(&mut self, connection: &str) {
        let Self { pushes, sent, refused } = std::mem::take(self);
        // Without a response, the pushes did not affect this connection.
        let Some(sent) = sent else { return };
        for delivery in pushes {
            let Some(trace) = &delivery.trace else { continue };
            trace.answered(&Answer {
                connection,
                sent,
                answered: (delivery.tracker.0.clock)(),
                refused,
                is_last: Arc::strong_count(&delivery) == 1,
            });
        }
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
    tracer: OnceLock<Box<dyn PushTracer>>,
    /// Changes with every push, and when a push is delivered.
    changed: watch::Sender<u64>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracker").finish_non_exhaustive()
    }
}

impl Tracker {
    /// Creates a tracker without pushes.
    pub fn new(clock: fn() -> Instant) -> Self {
        Self(Arc::new(Inner {
            clock,
            pushes: Mutex::default(),
            observer: OnceLock::new(),
            tracer: OnceLock::new(),
            changed: watch::Sender::default(),
        }))
    }

    /// Sets the observer of delivered pushes, once.
    pub fn observe(&self, observer: DeliveryObserver) {
        // Only the composition root calls this.
        let _ = self.0.observer.set(observer);
    }

    /// Traces pushes from now on. Set once.
    pub fn trace(&self, tracer: Box<dyn PushTracer>) {
        // Only the composition root calls this.
        let _ = self.0.tracer.set(tracer);
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
    pub(super) fn push(&self, record: PushRecord) -> Arc<Delivery> {
        let record = Arc::new(record);
        let tracer = self.0.tracer.get();
        let delivery = Arc::new(Delivery {
            record: record.clone(),
            tracker: self.clone(),
            trace: tracer.and_then(|tracer| tracer.published(&record)),
        });
        // The record is new.
        let _ = record.progress.delivery.set(Arc::downgrade(&delivery));
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

/// Returns the changed objects that configure traffic, at most [`MAX_OBJECTS`], and true if there are others. Whole
/// sources are not listed.
pub(super) fn objects(batch: &Batch) -> (Vec<ChangedObject>, bool) {
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
    let has_source = batch.iter().any(|change| match change {
        Change::Replace(source, _) => source.kind.is_config(),
        // Objects of other clusters than the config cluster configure no traffic.
        Change::RemoveCluster(_) | Change::Upsert(_) | Change::Remove(..) => false,
    });
    let mut objects = batch.iter().filter_map(object);
    let listed = objects.by_ref().take(MAX_OBJECTS).collect();
    (listed, has_source || objects.next().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{base::ClusterId, environment, model::change::SourceId};

    fn push(tracker: &Tracker, revision: u64) -> Arc<Delivery> {
        tracker.push(PushRecord {
            revision: Revision(revision),
            events: 1,
            kinds: BTreeMap::new(),
            objects: Vec::new(),
            is_partial: false,
            since: environment::now(),
            waited: Duration::ZERO,
            worked: Duration::ZERO,
            committed: Duration::ZERO,
            built: 1,
            groups: 1,
            connections: 2,
            progress: Progress::default(),
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
        first.clear("first");
        assert_eq!((record.outstanding(), record.delivered()), (1, None));
        second.refuse();
        second.clear("second");
        assert_eq!(record.outstanding(), 0);
        assert!(record.delivered().is_some());
        assert_eq!(observed.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_push_knows_whether_it_lists_all_objects() {
        let removal = |number: usize| {
            let key = ObjectKey::new(&ClusterId::default(), "shop", format!("v{number:03}"));
            Change::Remove(Kind::VirtualService, key)
        };
        let removals = |number: usize| (0..number).map(removal).collect::<Batch>();
        let listed = |batch: &Batch| {
            let (objects, is_partial) = objects(batch);
            (objects.len(), is_partial)
        };
        assert_eq!(listed(&removals(MAX_OBJECTS)), (MAX_OBJECTS, false));
        assert_eq!(listed(&removals(MAX_OBJECTS + 1)), (MAX_OBJECTS, true));
        let source = |kind| {
            let cluster = ClusterId::default();
            vec![Change::Replace(SourceId { cluster, kind }, Vec::new())]
        };
        assert_eq!(listed(&source(Kind::VirtualService)), (0, true));
        assert_eq!(listed(&source(Kind::Pod)), (0, false));
    }

    #[test]
    fn memory_is_bounded() {
        let tracker = Tracker::new(environment::now);
        let mut connection = Deliveries::default();
        for revision in 0..1000 {
            connection.add(push(&tracker, revision));
        }
        assert_eq!(connection.pushes.len(), MAX_UNANSWERED);
        assert_eq!(tracker.pushes().len(), REMEMBERED);
    }
}
