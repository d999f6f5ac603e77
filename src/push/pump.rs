//! The loop: pending changes → `World::commit` → the store → publications. One thread, no lock, no `await` in between.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use imbl::OrdSet;
use rustc_hash::FxHashMap;
use tokio::sync::{mpsc, oneshot, watch};

use super::{
    debounce::{Pending, Timing},
    groups::{Groups, Membership, Parallel, Publication},
};
use crate::{
    api::{Kind, access_review::Subject},
    generate::{
        ResourceSnapshot,
        store::{self, MemberId, Store},
    },
    model::{Batch, Change, MeshSnapshot, World},
    table::ChangeSet,
};

/// How the pump works.
#[derive(Clone, Copy, Debug)]
pub struct PushOptions {
    /// When batches leave.
    pub timing: Timing,
}

/// What the pump tells about its work; counted and logged by whoever built it.
pub trait Observer: Send + 'static {
    /// A batch was committed and published.
    fn pushed(&self, push: &PushReport);
}

/// One push.
#[derive(Clone)]
pub struct PushReport {
    /// The snapshot.
    pub mesh: Arc<MeshSnapshot>,
    /// Changes that were merged into it; 0 when only proxies came or went.
    pub events: usize,
    /// The kinds of the objects that changed, with their number after merging.
    pub kinds: BTreeMap<Kind, usize>,
    /// How long the oldest of them waited before the commit began.
    pub waited: Duration,
    /// How long commit and generation took.
    pub worked: Duration,
    /// Evaluations of resources.
    pub built: usize,
    /// Groups with a new snapshot.
    pub groups: usize,
    /// Proxies that got their first configuration.
    pub first: usize,
    /// Generators that panicked, described.
    pub panics: Vec<String>,
    /// How much the store holds afterwards.
    pub held: store::Size,
    /// Recorded dependencies of the model's tables.
    pub model_reads: usize,
}

/// A question to the thread that owns the store, for debug pages.
pub type Inspect = Box<dyn FnOnce(&World, &Store) + Send>;

/// The handles of a running pump.
pub struct Pump {
    /// Where sources send changes. Bounded: a source that is faster than the pump waits.
    pub changes: mpsc::Sender<Vec<Change>>,
    /// Where connections join.
    pub groups: Groups,
    /// The latest snapshot.
    pub mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// Those whose access to Secrets has to be reviewed for what connected proxies ask for.
    pub subjects: watch::Receiver<OrdSet<Subject>>,
    /// Where debug pages ask.
    pub inspect: mpsc::Sender<Inspect>,
    barriers: mpsc::Sender<Barrier>,
}

/// Answered when everything that was sent before it is in a snapshot.
type Barrier = oneshot::Sender<()>;

/// What the pump's thread reads.
pub struct PumpLoop {
    world: World,
    store: Store,
    options: PushOptions,
    changes: mpsc::Receiver<Vec<Change>>,
    membership: mpsc::UnboundedReceiver<Membership>,
    inspect: mpsc::Receiver<Inspect>,
    barriers: mpsc::Receiver<Barrier>,
    mesh: watch::Sender<Arc<MeshSnapshot>>,
    subjects: watch::Sender<OrdSet<Subject>>,
    members: FxHashMap<MemberId, watch::Sender<Publication>>,
    pending: Pending,
    clock: fn() -> Instant,
}

impl Pump {
    /// Makes a pump and its loop, which the caller runs on a thread of its own.
    pub fn new(world: World, options: PushOptions, clock: fn() -> Instant) -> (Self, PumpLoop) {
        let (changes, changes_in) = mpsc::channel(64);
        let (inspect, inspect_in) = mpsc::channel(16);
        let (barriers, barriers_in) = mpsc::channel(4);
        let (groups, membership) = Groups::channel();
        let (mesh_out, mesh) = watch::channel(world.snapshot());
        let (subjects_out, subjects) = watch::channel(OrdSet::new());
        let pump = Self {
            changes,
            groups,
            mesh,
            subjects,
            inspect,
            barriers,
        };
        let run = PumpLoop {
            world,
            store: Store::default(),
            options,
            changes: changes_in,
            membership,
            inspect: inspect_in,
            barriers: barriers_in,
            mesh: mesh_out,
            subjects: subjects_out,
            members: FxHashMap::default(),
            pending: Pending::default(),
            clock,
        };
        (pump, run)
    }

    /// Waits until everything that was sent to [`Self::changes`] before is in the latest snapshot, without the wait for
    /// more of it. False after shutdown.
    pub async fn settle(&self) -> bool {
        let (answer, answered) = oneshot::channel();
        self.barriers.send(answer).await.is_ok() && answered.await.is_ok()
    }

    /// Asks the thread that owns the store; `None` after shutdown.
    pub async fn ask<R: Send + 'static>(
        inspect: &mpsc::Sender<Inspect>,
        question: impl FnOnce(&World, &Store) -> R + Send + 'static,
    ) -> Option<R> {
        let (answer, answered) = oneshot::channel();
        let ask: Inspect = Box::new(move |world, store| {
            let _ = answer.send(question(world, store));
        });
        inspect.send(ask).await.ok()?;
        answered.await.ok()
    }
}

enum Event {
    Changes(Vec<Change>),
    Membership(Membership),
    Inspect(Inspect),
    Barrier(Barrier),
    Due,
    Closed,
}

impl PumpLoop {
    /// Runs until every source of changes is gone. Blocks: the work between two waits is synchronous.
    pub async fn run(mut self, observer: impl Observer) {
        loop {
            match self.next().await {
                Event::Changes(changes) => self.pending.add(changes, (self.clock)()),
                Event::Membership(first) => self.admit(first, &observer),
                Event::Inspect(question) => question(&self.world, &self.store),
                Event::Barrier(answer) => {
                    self.settle(&observer);
                    // Whoever asked may have gone.
                    let _ = answer.send(());
                }
                Event::Due => self.push(&observer),
                Event::Closed => return,
            }
        }
    }

    /// Proxies come before changes: a first configuration is worth more than an update.
    async fn next(&mut self) -> Event {
        let due = self.pending.due(&self.options.timing);
        let wait = due.map(|due| due.saturating_duration_since((self.clock)()));
        tokio::select! {
            biased;
            Some(event) = self.membership.recv() => Event::Membership(event),
            Some(question) = self.inspect.recv() => Event::Inspect(question),
            Some(answer) = self.barriers.recv() => Event::Barrier(answer),
            () = std::future::ready(()), if wait.is_some_and(|wait| wait.is_zero()) => Event::Due,
            changes = self.changes.recv() => changes.map_or(Event::Closed, Event::Changes),
            () = tokio::time::sleep(wait.unwrap_or_default()), if wait.is_some() => Event::Due,
        }
    }

    fn admit(&mut self, first: Membership, observer: &impl Observer) {
        let mut membership = store::Membership::default();
        let mut next = Some(first);
        while let Some(event) = next {
            match event {
                Membership::Join { id, proxy, sender } => {
                    self.members.insert(id, sender);
                    membership.joined.push((id, proxy));
                }
                Membership::Demand { id, asked } => {
                    membership.demanded.extend(asked.take().map(|demand| (id, demand)));
                }
                Membership::Leave(id) => {
                    self.members.remove(&id);
                    match membership.joined.iter().position(|(joined, _)| *joined == id) {
                        Some(index) => drop(membership.joined.swap_remove(index)),
                        None => membership.left.push(id),
                    }
                }
            }
            next = self.membership.try_recv().ok();
        }
        let started = (self.clock)();
        let mesh = self.world.snapshot();
        self.regenerate(
            &mesh,
            &ChangeSet::default(),
            membership,
            Timeline {
                started,
                since: None,
                events: 0,
                kinds: BTreeMap::new(),
                panics: Vec::new(),
            },
            observer,
        );
    }

    fn settle(&mut self, observer: &impl Observer) {
        while let Ok(changes) = self.changes.try_recv() {
            self.pending.add(changes, (self.clock)());
        }
        self.push(observer);
    }

    fn push(&mut self, observer: &impl Observer) {
        let events = self.pending.events();
        let Some((batch, since)) = self.pending.take() else {
            return;
        };
        let started = (self.clock)();
        let kinds = kinds(&batch);
        let commit = self.world.commit(batch);
        let timeline = Timeline {
            started,
            since: Some(since),
            events,
            kinds,
            panics: commit.panics,
        };
        let (mesh, none) = (commit.snapshot, store::Membership::default());
        self.regenerate(&mesh, &commit.changes, none, timeline, observer);
        self.pending.took((self.clock)().saturating_duration_since(started));
        self.mesh.send_replace(mesh);
    }

    fn regenerate(
        &mut self,
        mesh: &Arc<MeshSnapshot>,
        changes: &ChangeSet,
        membership: store::Membership,
        timeline: Timeline,
        observer: &impl Observer,
    ) {
        let first = membership.joined.len();
        let update = self.store.update(mesh, changes, membership, &Parallel);
        if update.subjects_changed {
            self.subjects.send_replace(self.store.subjects().clone());
        }
        for (member, key) in &update.moved {
            if let Some(snapshot) = self.store.snapshot(key) {
                self.publish(*member, snapshot.clone(), timeline.since);
            }
        }
        let changed: FxHashMap<_, _> = update.groups.iter().cloned().collect();
        if !changed.is_empty() {
            for member in self.members.keys().copied().collect::<Vec<_>>() {
                let snapshot = self.store.group_of(member).and_then(|key| changed.get(key));
                if let Some(snapshot) = snapshot {
                    self.publish(member, snapshot.clone(), timeline.since);
                }
            }
        }
        let mut panics = timeline.panics;
        panics.extend(update.panics);
        observer.pushed(&PushReport {
            mesh: mesh.clone(),
            events: timeline.events,
            kinds: timeline.kinds,
            waited: timeline
                .since
                .map(|since| timeline.started.saturating_duration_since(since))
                .unwrap_or_default(),
            worked: (self.clock)().saturating_duration_since(timeline.started),
            built: update.built,
            groups: update.groups.len(),
            first,
            panics,
            held: self.store.size(),
            model_reads: self.world.recorded_reads(),
        });
    }

    fn publish(&self, member: MemberId, resources: Arc<ResourceSnapshot>, since: Option<Instant>) {
        let Some(sender) = self.members.get(&member) else {
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
            publication.since.add(since);
            publication.resources = Some(resources.clone());
            true
        });
    }
}

/// What is known of a push before generation.
struct Timeline {
    started: Instant,
    since: Option<Instant>,
    events: usize,
    kinds: BTreeMap<Kind, usize>,
    panics: Vec<String>,
}

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
