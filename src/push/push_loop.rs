//! The push loop: pending changes → `World::commit` → the store → publications. One thread, no lock, no `await` in
//! between.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use imbl::OrdSet;
use rustc_hash::FxHashMap;
use tokio::sync::{
    mpsc::{self, error::TryRecvError},
    oneshot, watch,
};

use super::{
    debounce::{DebounceOptions, Taken},
    delivery::{self, ChangedObject, Delivery, Progress, PushRecord, Tracker},
    groups::{Groups, Parallel, ProxyEvent, Publication},
    lanes::{Lane, Lanes},
    precedence::Precedence,
    turns::{Connected, NamespaceTurns},
};
use crate::{
    api::{Kind, access_review::Subject},
    base::Shared,
    generate::{
        Proxy, RequestedResources, ResourceSnapshot,
        store::{self, ConfigStore, ConnectionId, StoreUpdate},
    },
    model::{Batch, Change, MeshSnapshot, World},
    table::ChangeSet,
};

/// The time after which nothing is kept for proxies that connect next: they connect together, or hardly ever.
const QUIET: Duration = Duration::from_secs(1);

/// An observer of pushes, for metrics and logs.
pub trait Observer: Send + 'static {
    /// Called after a batch was committed and published.
    fn pushed(&self, push: &PushReport);
}

/// The report of one push.
#[derive(Clone)]
pub struct PushReport {
    /// The snapshot that was pushed.
    pub mesh: Arc<MeshSnapshot>,
    /// The number of changes in it; 0 if only proxies connected or disconnected.
    pub events: usize,
    /// The number of changed objects by kind, after merging.
    pub kinds: BTreeMap<Kind, usize>,
    /// The changed keys of the model's tables.
    pub changes: ChangeSet,
    /// The wait of the oldest change before the commit.
    pub waited: Duration,
    /// The duration of the commit.
    pub committed: Duration,
    /// The duration of commit and generation.
    pub worked: Duration,
    /// The number of resources that were built.
    pub built: usize,
    /// The number of groups with a new snapshot.
    pub groups: usize,
    /// The number of proxies that got their first configuration.
    pub first: usize,
    /// Descriptions of generators that panicked.
    pub panics: Vec<String>,
    /// The size of the store after the push.
    pub held: store::StoreSize,
    /// The number of recorded dependencies of the model's tables.
    pub model_reads: usize,
}

/// A query that runs on the thread that owns the store, for debug pages. If it changes the world, it restores it.
pub type Inspect = Box<dyn FnOnce(&mut World, &ConfigStore) + Send>;

/// The handles of a running push loop.
pub struct PushHandle {
    /// The queue of changes. Bounded: a source that is faster than the push loop waits.
    pub changes: mpsc::Sender<Vec<Change>>,
    /// The entry point for connections.
    pub groups: Groups,
    /// The latest snapshot whose configuration is published.
    pub mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// The latest snapshot, for readers that need not wait for the generation of configuration.
    pub committed: watch::Receiver<Arc<MeshSnapshot>>,
    /// The subjects whose access to Secrets must be reviewed for the requests of connected proxies.
    pub subjects: watch::Receiver<OrdSet<Subject>>,
    /// The queue of queries of debug pages.
    pub inspect: mpsc::Sender<Inspect>,
    /// The queue of flushes.
    pub flushes: Flushes,
    /// The last pushes, with the answers to them.
    pub tracker: Tracker,
}

/// The queue of flushes. Cheap to clone.
#[derive(Clone)]
pub struct Flushes(mpsc::Sender<FlushRequest>);

impl Flushes {
    /// Creates a queue, and its other end.
    pub fn channel() -> (Self, mpsc::Receiver<FlushRequest>) {
        let (flushes, requests) = mpsc::channel(4);
        (Self(flushes), requests)
    }

    /// Pushes all changes that were sent to [`PushHandle::changes`] before, without debouncing, and waits for the
    /// snapshot. Returns false after shutdown.
    pub async fn flush(&self) -> bool {
        self.request(false).await
    }

    /// Waits until all changes that were sent to [`PushHandle::changes`] before are pushed, after debouncing. Returns
    /// false after shutdown.
    pub async fn pushed(&self) -> bool {
        self.request(true).await
    }

    async fn request(&self, is_debounced: bool) -> bool {
        let (answer, answered) = oneshot::channel();
        let request = FlushRequest { answer, is_debounced };
        self.0.send(request).await.is_ok() && answered.await.is_ok()
    }
}

/// A request that is answered when all changes sent before it are in a snapshot.
pub struct FlushRequest {
    answer: oneshot::Sender<()>,
    /// True if it waits for the push that is due anyway, instead of causing one.
    is_debounced: bool,
}

/// The push loop, which owns the world and the store.
pub struct PushLoop {
    world: World,
    store: ConfigStore,
    debounce: DebounceOptions,
    changes: mpsc::Receiver<Vec<Change>>,
    proxy_events: mpsc::UnboundedReceiver<ProxyEvent>,
    inspect: mpsc::Receiver<Inspect>,
    flushes: mpsc::Receiver<FlushRequest>,
    mesh: watch::Sender<Arc<MeshSnapshot>>,
    committed: watch::Sender<Arc<MeshSnapshot>>,
    subjects: watch::Sender<OrdSet<Subject>>,
    senders: FxHashMap<ConnectionId, watch::Sender<Publication>>,
    tracker: Tracker,
    pending: Lanes,
    /// Debounced requests with their arrival times. They wait for the push of all earlier changes.
    waiting: Vec<(Instant, oneshot::Sender<()>)>,
    /// Proxies of namespaces whose first configurations take long.
    turns: NamespaceTurns,
    /// Requests of proxies that wait for their turn.
    early_requests: BTreeMap<ConnectionId, Shared<RequestedResources>>,
    precedence: Precedence,
    /// True once all senders of changes are dropped.
    is_closed: bool,
    /// [`QUIET`], except in tests.
    quiet: Duration,
    clock: fn() -> Instant,
}

impl PushHandle {
    /// Creates the handles and the loop, which the caller runs on a separate thread.
    pub fn new(world: World, debounce: DebounceOptions, clock: fn() -> Instant) -> (Self, PushLoop) {
        let (changes, changes_in) = mpsc::channel(64);
        let (inspect, inspect_in) = mpsc::channel(16);
        let (flushes, flushes_in) = Flushes::channel();
        let (groups, proxy_events) = Groups::channel();
        let (mesh_out, mesh) = watch::channel(world.snapshot());
        let (committed_out, committed) = watch::channel(world.snapshot());
        let (subjects_out, subjects) = watch::channel(OrdSet::new());
        let handle = Self {
            changes,
            groups,
            mesh,
            committed,
            subjects,
            inspect,
            flushes,
            tracker: Tracker::new(clock),
        };
        let run = PushLoop {
            world,
            store: ConfigStore::default(),
            debounce,
            changes: changes_in,
            proxy_events,
            inspect: inspect_in,
            flushes: flushes_in,
            mesh: mesh_out,
            committed: committed_out,
            subjects: subjects_out,
            senders: FxHashMap::default(),
            tracker: handle.tracker.clone(),
            pending: Lanes::default(),
            waiting: Vec::new(),
            turns: NamespaceTurns::default(),
            early_requests: BTreeMap::new(),
            precedence: Precedence::default(),
            is_closed: false,
            quiet: QUIET,
            clock,
        };
        (handle, run)
    }

    /// Runs a query on the thread that owns the store; `None` after shutdown.
    pub async fn ask<R: Send + 'static>(
        inspect: &mpsc::Sender<Inspect>,
        query: impl FnOnce(&World, &ConfigStore) -> R + Send + 'static,
    ) -> Option<R> {
        Self::ask_what_if(inspect, move |world, store| query(world, store)).await
    }

    /// As [`Self::ask`], for queries about another mesh ([`World::without`]).
    pub async fn ask_what_if<R: Send + 'static>(
        inspect: &mpsc::Sender<Inspect>,
        query: impl FnOnce(&mut World, &ConfigStore) -> R + Send + 'static,
    ) -> Option<R> {
        let (answer, answered) = oneshot::channel();
        let ask: Inspect = Box::new(move |world, store| {
            // The caller may be gone, such as a scrape after its timeout.
            if !answer.is_closed() {
                let _ = answer.send(query(world, store));
            }
        });
        inspect.send(ask).await.ok()?;
        answered.await.ok()
    }
}

/// An event that the loop waits for.
enum Event {
    Changes(Vec<Change>),
    Proxy(ProxyEvent),
    /// A namespace whose first configurations take long.
    Turn,
    Inspect(Inspect),
    Flush(FlushRequest),
    /// The push of a lane is due.
    Due(Lane),
    /// Nothing has happened for a while.
    Quiet,
    /// All senders of changes are dropped.
    Closed,
}

impl Event {
    fn is_of_proxies(&self) -> bool {
        matches!(self, Self::Proxy(_) | Self::Turn)
    }
}

impl PushLoop {
    /// Runs until all senders of changes are dropped and all proxies have left: at shutdown, connections are drained
    /// one after the other, and their proxies are served until then. The work between two waits is synchronous and
    /// blocks the thread.
    pub async fn run(mut self, observer: impl Observer) {
        while !self.is_closed || !self.senders.is_empty() {
            let event = self.next().await;
            let (is_of_proxies, started) = (event.is_of_proxies(), (self.clock)());
            self.handle(event, &observer);
            let worked = (self.clock)().saturating_duration_since(started);
            if is_of_proxies {
                self.precedence.record_proxies(worked);
            } else {
                self.precedence.record_others(worked);
            }
        }
    }

    fn handle(&mut self, event: Event, observer: &impl Observer) {
        match event {
            Event::Changes(changes) => self.pending.add(changes, (self.clock)()),
            Event::Proxy(first) => self.apply_proxy_events(first, observer),
            Event::Turn => {
                if let Some(connected) = self.turns.next() {
                    self.connect(connected, observer);
                }
            }
            Event::Inspect(query) => query(&mut self.world, &self.store),
            Event::Flush(request) => self.flush(request, observer),
            Event::Due(lane) => {
                let taken = self.pending.take(lane);
                self.push(taken, lane, observer);
            }
            Event::Quiet => self.store.release_common_routes(),
            Event::Closed => self.is_closed = true,
        }
    }

    /// Waits for the next event. Proxies go first, except when [`Precedence`] decides otherwise.
    async fn next(&mut self) -> Event {
        let due = self.pending.due(&self.debounce);
        let lane = due.map_or(Lane::Fast, |(_, lane)| lane);
        let wait = due.map(|(due, _)| due.saturating_duration_since((self.clock)()));
        let is_due = wait.is_some_and(|wait| wait.is_zero());
        if self.precedence.are_others_first()
            && let Some(event) = self.waiting_event(is_due.then_some(lane))
        {
            return event;
        }
        tokio::select! {
            biased;
            () = std::future::ready(()), if self.turns.is_due() => Event::Turn,
            Some(event) = self.proxy_events.recv() => Event::Proxy(event),
            () = std::future::ready(()), if self.turns.is_waiting() => Event::Turn,
            Some(query) = self.inspect.recv() => Event::Inspect(query),
            Some(request) = self.flushes.recv() => Event::Flush(request),
            () = std::future::ready(()), if is_due => Event::Due(lane),
            changes = self.changes.recv(), if !self.is_closed => changes.map_or(Event::Closed, Event::Changes),
            () = tokio::time::sleep(wait.unwrap_or_default()), if wait.is_some() => Event::Due(lane),
            () = tokio::time::sleep(self.quiet), if self.store.keeps_common_routes() => Event::Quiet,
            else => Event::Closed,
        }
    }

    /// Returns an event that is not of proxies, if one waits.
    fn waiting_event(&mut self, due: Option<Lane>) -> Option<Event> {
        if let Ok(query) = self.inspect.try_recv() {
            return Some(Event::Inspect(query));
        }
        if let Ok(request) = self.flushes.try_recv() {
            return Some(Event::Flush(request));
        }
        if let Some(lane) = due {
            return Some(Event::Due(lane));
        }
        match self.changes.try_recv() {
            Ok(changes) => Some(Event::Changes(changes)),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => (!self.is_closed).then_some(Event::Closed),
        }
    }

    /// Applies an event of a proxy, together with all that wait behind it.
    fn apply_proxy_events(&mut self, first: ProxyEvent, observer: &impl Observer) {
        let mut proxy_events = store::ProxyEvents::default();
        // By id, because thousands may leave in the events in which they have joined.
        let mut joined = BTreeMap::new();
        let mut next = Some(first);
        while let Some(event) = next {
            match event {
                ProxyEvent::Join { id, proxy, sender } => {
                    self.senders.insert(id, sender);
                    joined.insert(id, proxy);
                }
                ProxyEvent::Request { id, latest } => {
                    let requested = latest.take();
                    proxy_events
                        .requested
                        .extend(requested.map(|requested| (id, requested)));
                }
                ProxyEvent::Leave(id) => {
                    if self.leave(id, &mut joined) {
                        proxy_events.disconnected.push(id);
                    }
                }
            }
            next = self.proxy_events.try_recv().ok();
        }
        proxy_events.connected = joined.into_iter().collect();
        self.turns.defer(&mut proxy_events.connected);
        let requested = &mut proxy_events.requested;
        let early = requested.extract_if(.., |(id, _)| self.turns.is_waiting_for(*id));
        self.early_requests.extend(early);
        self.apply(proxy_events, observer);
    }

    /// Removes a proxy, which may have joined in the same events, or wait for its turn. Returns true if it is in the
    /// store.
    fn leave(&mut self, id: ConnectionId, joined: &mut BTreeMap<ConnectionId, Arc<Proxy>>) -> bool {
        self.senders.remove(&id);
        if self.turns.remove(id) {
            self.early_requests.remove(&id);
            return false;
        }
        joined.remove(&id).is_none()
    }

    /// Generates the first configurations of proxies.
    fn connect(&mut self, connected: Connected, observer: &impl Observer) {
        let ids = connected.iter().map(|(id, _)| *id);
        let requested = ids.filter_map(|id| Some((id, self.early_requests.remove(&id)?)));
        let proxy_events = store::ProxyEvents {
            requested: requested.collect(),
            connected,
            ..store::ProxyEvents::default()
        };
        self.apply(proxy_events, observer);
    }

    /// Generates for proxies that have connected, or request something else, without a change of the mesh.
    fn apply(&mut self, proxy_events: store::ProxyEvents, observer: &impl Observer) {
        let started = (self.clock)();
        let mesh = self.world.snapshot();
        let connected = proxy_events.connected.iter();
        let namespaces = connected.map(|(_, proxy)| proxy.node.namespace.clone()).collect();
        self.regenerate(
            &mesh,
            proxy_events,
            Timeline {
                started,
                committed: Duration::ZERO,
                since: None,
                events: 0,
                kinds: BTreeMap::new(),
                changes: ChangeSet::default(),
                objects: Vec::new(),
                is_partial: false,
                panics: Vec::new(),
            },
            observer,
        );
        let worked = (self.clock)().saturating_duration_since(started);
        self.turns.record(namespaces, worked);
    }

    /// Takes all changes that were sent before a flush, and pushes them at once, or lets the request wait for their
    /// push.
    fn flush(&mut self, request: FlushRequest, observer: &impl Observer) {
        while let Ok(changes) = self.changes.try_recv() {
            self.pending.add(changes, (self.clock)());
        }
        let FlushRequest { answer, is_debounced } = request;
        if is_debounced {
            self.waiting.retain(|(_, answer)| !answer.is_closed());
            self.waiting.push(((self.clock)(), answer));
            self.answer_waiting();
            return;
        }
        let taken = self.pending.take_all();
        self.push(taken, Lane::Fast, observer);
        // The requester may have stopped waiting.
        let _ = answer.send(());
    }

    /// Answers the debounced requests whose changes are pushed.
    fn answer_waiting(&mut self) {
        let oldest = self.pending.oldest();
        let is_pushed = |at: Instant| oldest.is_none_or(|oldest| oldest > at);
        for (_, answer) in self.waiting.extract_if(.., |(at, _)| is_pushed(*at)) {
            // The requester may have stopped waiting.
            let _ = answer.send(());
        }
    }

    /// Commits the changes of a lane, if there are any, and publishes what they lead to.
    fn push(&mut self, taken: Option<Taken>, lane: Lane, observer: &impl Observer) {
        let Some(taken) = taken else { return };
        let Taken {
            batch,
            since,
            events,
            namespaces,
        } = taken;
        let is_whole_source = batch
            .iter()
            .any(|change| matches!(change, Change::Replace(..) | Change::RemoveCluster(_)));
        let started = (self.clock)();
        let kinds = kinds(&batch);
        let (objects, is_partial) = delivery::objects(&batch);
        let commit = self.world.commit(batch);
        let timeline = Timeline {
            started,
            committed: (self.clock)().saturating_duration_since(started),
            since: Some(since),
            events,
            kinds,
            changes: commit.changes,
            objects,
            is_partial,
            panics: commit.panics,
        };
        let (mesh, none) = (commit.snapshot, store::ProxyEvents::default());
        self.committed.send_replace(mesh.clone());
        self.regenerate(&mesh, none, timeline, observer);
        let took = (self.clock)().saturating_duration_since(started);
        // The objects of whole sources may be of any namespace.
        let namespaces = if is_whole_source { BTreeSet::new() } else { namespaces };
        self.pending.record(lane, &namespaces, took);
        self.mesh.send_replace(mesh);
        self.tracker.notify();
        self.answer_waiting();
    }

    /// Brings the store up to date, publishes the snapshots that have changed, and reports the push.
    fn regenerate(
        &mut self,
        mesh: &Arc<MeshSnapshot>,
        proxy_events: store::ProxyEvents,
        timeline: Timeline,
        observer: &impl Observer,
    ) {
        let first = proxy_events.connected.len();
        let update = self.store.update(mesh, &timeline.changes, proxy_events, &Parallel);
        if update.subjects_changed {
            self.subjects.send_replace(self.store.subjects().clone());
        }
        let published = self.snapshots(&update);
        let waited = timeline
            .since
            .map(|since| timeline.started.saturating_duration_since(since));
        let waited = waited.unwrap_or_default();
        let worked = (self.clock)().saturating_duration_since(timeline.started);
        let delivery = timeline.since.map(|since| {
            self.tracker.push(PushRecord {
                revision: mesh.revision,
                events: timeline.events,
                kinds: timeline.kinds.clone(),
                objects: timeline.objects,
                is_partial: timeline.is_partial,
                since,
                waited,
                worked,
                committed: timeline.committed,
                built: update.built,
                groups: update.groups.len(),
                connections: published.len(),
                progress: Progress::default(),
            })
        });
        for (id, snapshot) in published {
            self.publish(id, snapshot, timeline.since, delivery.as_ref());
        }
        drop(delivery);
        let mut panics = timeline.panics;
        panics.extend(update.panics);
        observer.pushed(&PushReport {
            mesh: mesh.clone(),
            events: timeline.events,
            kinds: timeline.kinds,
            changes: timeline.changes,
            waited,
            committed: timeline.committed,
            worked: (self.clock)().saturating_duration_since(timeline.started),
            built: update.built,
            groups: update.groups.len(),
            first,
            panics,
            held: self.store.size(),
            model_reads: self.world.recorded_reads(),
        });
    }

    /// Returns the snapshots to publish: of connections that have moved, and of all in changed groups. A connection
    /// that moves to a changed group counts once.
    fn snapshots(&self, update: &StoreUpdate) -> FxHashMap<ConnectionId, Arc<ResourceSnapshot>> {
        let mut snapshots = FxHashMap::default();
        for (id, key) in &update.moved {
            snapshots.extend(self.store.snapshot(key).map(|snapshot| (*id, snapshot.clone())));
        }
        let changed: FxHashMap<_, _> = update.groups.iter().cloned().collect();
        if !changed.is_empty() {
            for id in self.senders.keys().copied() {
                let snapshot = self.store.group_of(id).and_then(|key| changed.get(key));
                snapshots.extend(snapshot.map(|snapshot| (id, snapshot.clone())));
            }
        }
        snapshots
    }

    /// Publishes a snapshot to a connection, unless it has this one.
    fn publish(
        &self,
        id: ConnectionId,
        resources: Arc<ResourceSnapshot>,
        since: Option<Instant>,
        delivery: Option<&Arc<Delivery>>,
    ) {
        let Some(sender) = self.senders.get(&id) else {
            return;
        };
        sender.send_if_modified(|publication| {
            let same = publication
                .resources
                .as_ref()
                .is_some_and(|held| Arc::ptr_eq(held, &resources));
            if same {
                return false;
            }
            publication.unreceived.add(since, delivery);
            publication.published_at = Some((self.clock)());
            publication.resources = Some(resources.clone());
            true
        });
    }
}

/// The part of a push report that is known before generation.
struct Timeline {
    started: Instant,
    committed: Duration,
    since: Option<Instant>,
    events: usize,
    kinds: BTreeMap<Kind, usize>,
    changes: ChangeSet,
    objects: Vec<ChangedObject>,
    is_partial: bool,
    panics: Vec<String>,
}

/// Returns the number of changed objects by kind. A whole source counts as its objects, or as one if it has none.
fn kinds(batch: &Batch) -> BTreeMap<Kind, usize> {
    let mut kinds = BTreeMap::new();
    let mut count = |kind, number| *kinds.entry(kind).or_insert(0) += number;
    for change in batch {
        match change {
            Change::Upsert(row) => count(row.kind(), 1),
            Change::Remove(kind, _) => count(*kind, 1),
            Change::Replace(source, rows) => count(source.kind, rows.len().max(1)),
            Change::RemoveCluster(_) => count(Kind::Service, 1),
        }
    }
    kinds
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::FutureExt;

    use super::*;
    use crate::{
        base::{ClusterId, ObjectKey},
        environment,
        generate::fixture,
        model::{Installation, fixture as model},
    };

    struct NoMetrics;

    impl Observer for NoMetrics {
        fn pushed(&self, _: &PushReport) {}
    }

    fn push_loop() -> (PushHandle, PushLoop) {
        push_loop_of(World::new(Installation::default()))
    }

    fn push_loop_of(world: World) -> (PushHandle, PushLoop) {
        let debounce = DebounceOptions {
            after: Duration::from_millis(100),
            max: Duration::from_secs(10),
            endpoints_wait: true,
        };
        PushHandle::new(world, debounce, environment::now)
    }

    fn sidecar() -> Arc<Proxy> {
        let node = "sidecar~10.0.0.1~a-0.default~default.svc.cluster.local";
        Arc::new(fixture::client(node, &serde_json::json!({})))
    }

    #[tokio::test]
    async fn proxies_without_a_pause_do_not_stop_changes() {
        let (push, mut run) = push_loop();
        let proxy = sidecar();
        let _connections = [push.groups.join(proxy.clone()), push.groups.join(proxy)];
        push.changes.try_send(Vec::new()).expect("an empty queue");
        assert!(matches!(run.next().await, Event::Proxy(_)));
        run.precedence.record_proxies(Duration::from_mins(1));
        assert!(matches!(run.next().await, Event::Changes(_)));
        run.precedence.record_others(Duration::ZERO);
        assert!(matches!(run.next().await, Event::Proxy(_)), "nothing else waits");
    }

    #[tokio::test]
    async fn proxies_that_leave_at_once_do_not_reach_the_store() {
        let (push, mut run) = push_loop();
        let mut connections: Vec<_> = (0..5).map(|_| push.groups.join(sidecar())).collect();
        let known = |run: &PushLoop| -> BTreeSet<u64> { run.store.proxies().map(|(id, ..)| id.0).collect() };
        let ids: Vec<u64> = connections.iter().map(|connection| connection.id.0).collect();
        drop((connections.remove(3), connections.remove(0)));
        let event = run.next().await;
        run.handle(event, &NoMetrics);
        assert_eq!(known(&run), BTreeSet::from([ids[1], ids[2], ids[4]]));
        assert_eq!(run.senders.len(), 3);
        drop(connections.remove(1));
        let event = run.next().await;
        run.handle(event, &NoMetrics);
        assert_eq!(known(&run), BTreeSet::from([ids[1], ids[4]]));
    }

    #[tokio::test]
    async fn debounced_requests_cause_no_push() {
        let (push, mut run) = push_loop();
        let key = ObjectKey::new(&ClusterId::default(), "shop", "reviews");
        push.changes
            .try_send(vec![Change::Remove(Kind::VirtualService, key)])
            .expect("an empty queue");
        let mut waiting = pin!(push.flushes.pushed());
        assert!(waiting.as_mut().now_or_never().is_none());
        let Event::Flush(request) = run.next().await else {
            panic!("the request is next");
        };
        run.flush(request, &NoMetrics);
        assert!(push.tracker.pushes().is_empty());
        assert!(waiting.as_mut().now_or_never().is_none(), "the change is pending");
        let taken = run.pending.take(Lane::Fast);
        run.push(taken, Lane::Fast, &NoMetrics);
        assert_eq!(push.tracker.pushes().len(), 1);
        assert_eq!(waiting.now_or_never(), Some(true));
    }

    #[tokio::test]
    async fn common_routes_are_dropped_once_nothing_happens() {
        let config = fixture::crowd(99);
        let world = model::folder_world(Installation::default(), &[("crowd.yaml", &config)]);
        let (push, mut run) = push_loop_of(world);
        run.quiet = Duration::ZERO;
        let _connection = push.groups.join(sidecar());
        let query: Inspect = Box::new(|_, _| {});
        assert!(push.inspect.try_send(query).is_ok(), "an empty queue");

        let event = run.next().await;
        assert!(matches!(event, Event::Proxy(_)));
        run.handle(event, &NoMetrics);
        assert!(run.store.keeps_common_routes());
        let event = run.next().await;
        assert!(matches!(event, Event::Inspect(_)), "what waits goes first");
        run.handle(event, &NoMetrics);
        assert!(run.store.keeps_common_routes());
        let event = run.next().await;
        assert!(matches!(event, Event::Quiet));
        run.handle(event, &NoMetrics);
        assert!(!run.store.keeps_common_routes());
    }

    #[tokio::test]
    async fn proxies_are_served_until_they_leave() {
        let (push, run) = push_loop();
        let groups = push.groups.clone();
        let first = groups.join(sidecar());
        drop(push);
        let mut running = pin!(run.run(NoMetrics));
        assert!(running.as_mut().now_or_never().is_none(), "a proxy is connected");
        let mut second = groups.join(sidecar());
        assert!(running.as_mut().now_or_never().is_none(), "two proxies are connected");
        let received = second.next().now_or_never().flatten();
        assert!(received.is_some_and(|(publication, _)| publication.resources.is_some()));
        drop((first, second));
        assert!(running.now_or_never().is_some(), "all proxies have left");
    }
}
