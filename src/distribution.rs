//! Distribution status: which proxies should run an object, were sent it, acknowledged it, or refused it.
//!
//! Nothing is kept per object. A query asks the thread that owns the model which resources would be different without
//! the object ([`World::without`](crate::model::World::without),
//! [`ConfigStore::effects`](crate::generate::store::ConfigStore::effects)), and compares their versions with what each
//! connection has acknowledged. Answers of proxies, pushes and ingestion wake queries that wait. A query goes to all
//! replicas of the control plane ([`replicas`]), and their reports are merged.

mod blame;
mod changes;
mod merge;
pub mod overview;
mod permits;
pub mod refused;
pub mod replicas;
pub mod report;
mod states;
pub mod views;

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use rustc_hash::FxHashSet;
use smol_str::SmolStr;
use tokio::{
    runtime::Handle,
    sync::{Mutex as Turn, OwnedSemaphorePermit, Semaphore, mpsc, watch},
};

use self::{
    blame::BlameCache,
    changes::Changes,
    overview::Overview,
    permits::QueryPermits,
    refused::RefusedObject,
    replicas::{OwnReplica, Peers},
    report::{ObjectName, ObjectReport, ObjectState},
    views::Views,
};
use crate::{
    api::{Kind, Severity},
    base::{Namespace, ObjectKey},
    environment,
    generate::store::{ConnectionId, effect::GroupEffect},
    ingest::diagnostics::IngestStatus,
    model::{MeshSnapshot, Revision},
    push::{
        delivery::{PushRecord, Tracker},
        groups::Parallel,
        push_loop::{Flushes, Inspect, PushHandle},
    },
    task::{self, Tasks},
    xds::{
        registry::{ConnectionRegistry, RefusedResource},
        share::quarantine::Refusal,
    },
};

/// Answers that arrive within this time are reported together.
const TOGETHER: Duration = Duration::from_millis(50);
/// The mesh is reported at most once in this time.
const PAGE_INTERVAL: Duration = Duration::from_millis(500);
/// A computation that a change repeats rests for this many times the duration of the last one.
const REST: u32 = 20;
/// The number of queries that may wait at a time, and half as many of callers that see one namespace.
const MAX_WAITING: usize = 64;
/// The number of clients that may follow the mesh at a time, such as open pages, and half as many that see one
/// namespace. They do not count as queries, so that `istiod status` is answered however many pages are open.
const MAX_FOLLOWERS: usize = 64;
/// The number of queries of other replicas that may wait at a time.
const MAX_WAITING_REPLICAS: usize = 128;
/// The number of refused objects that may wait for their Event.
const MAX_REFUSED: usize = 64;
/// The number of refusals that may wait for their attribution.
const MAX_REFUSALS: usize = 256;

/// The sources of distribution status.
pub struct DistributionSources {
    /// The latest snapshot.
    pub mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// The thread that owns the model.
    pub inspect: mpsc::Sender<Inspect>,
    /// Pushes that do not wait for debouncing.
    pub flushes: Flushes,
    /// The last pushes.
    pub tracker: Tracker,
    /// The live connections.
    pub connections: Arc<ConnectionRegistry>,
    /// Diagnostics of objects.
    pub ingest_status: Arc<IngestStatus>,
    /// This replica.
    pub replica: OwnReplica,
    /// The other replicas; none if the control plane has no Service.
    pub peers: Option<Arc<dyn Peers>>,
    /// The runtime with low priority that answers clients which follow the mesh.
    pub runtime: Handle,
}

/// Distribution status of all objects.
pub struct Distribution {
    pub(crate) inputs: DistributionSources,
    blame_cache: Mutex<BlameCache>,
    /// The queue of refusals that wait for their attribution.
    refusals: mpsc::Sender<RefusedResource>,
    /// The writer of Events about refused objects, if there is one.
    refused: OnceLock<mpsc::Sender<RefusedObject>>,
    /// Changes when a refusal was attributed.
    attributed: watch::Sender<u64>,
    /// Held while effects are computed: queries take turns, so that pushes wait for one of them at most.
    turn: Turn<()>,
    waiting: QueryPermits,
    followers: QueryPermits,
    waiting_replicas: Arc<Semaphore>,
    /// The addresses by which the Service reaches this replica. Locked for one look-up or insertion.
    own_addresses: Mutex<BTreeSet<SmolStr>>,
    views: Views,
}

/// A query about one object.
#[derive(Clone, Debug)]
pub struct ObjectQuery {
    /// The kinds that the name may be of; the first one with such an object counts.
    pub kinds: Vec<Kind>,
    /// The namespace; empty for cluster-scoped kinds.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// `metadata.resourceVersion` that must be known before the answer is final.
    pub resource_version: Option<u64>,
    /// Text that the ids of proxies must contain; empty for all.
    pub proxy: String,
    /// The namespace whose proxies are visible; `None` for all.
    pub visible: Option<Namespace>,
}

/// The push that a query about an object waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PushTiming {
    /// One that the query causes.
    #[default]
    AtOnce,
    /// The one that is due anyway.
    Debounced,
}

/// The state of a query between two reports.
#[derive(Default)]
struct QueryState {
    /// The effects that were computed last, with their revision.
    effects: Option<(Revision, Arc<Vec<GroupEffect>>)>,
    /// The newest connection before they were computed. They do not include later ones.
    newest: Option<u64>,
    /// Effects are not computed again before this time.
    rests_until: Option<Instant>,
    /// The duration of the last comparison with the state of connections.
    compared: Duration,
    /// Connections that have acknowledged everything once.
    done: FxHashSet<ConnectionId>,
    timing: PushTiming,
    has_flushed: bool,
}

impl Distribution {
    /// Creates the status and starts the attribution of refusals. `refusals` receives what clients refuse.
    pub fn start(tasks: &Tasks, inputs: DistributionSources) -> (Arc<Self>, mpsc::Sender<RefusedResource>) {
        let (sender, receiver) = mpsc::channel(MAX_REFUSALS);
        let views = Views::new(tasks.clone(), inputs.runtime.clone());
        let distribution = Arc::new(Self {
            inputs,
            views,
            blame_cache: Mutex::default(),
            refusals: sender.clone(),
            refused: OnceLock::new(),
            attributed: watch::Sender::default(),
            turn: Turn::new(()),
            waiting: QueryPermits::new(MAX_WAITING),
            followers: QueryPermits::new(MAX_FOLLOWERS),
            waiting_replicas: Arc::new(Semaphore::new(MAX_WAITING_REPLICAS)),
            own_addresses: Mutex::default(),
        });
        let attributing = distribution.clone().attribute(receiver);
        tasks.spawn_until_shutdown("refusals", attributing);
        (distribution, sender)
    }

    /// Returns a receiver of the objects that are blamed for refusals from now on. Only the first receiver gets them.
    pub fn refused_objects(&self) -> mpsc::Receiver<RefusedObject> {
        let (sender, receiver) = mpsc::channel(MAX_REFUSED);
        // A second receiver ends at once.
        let _ = self.refused.set(sender);
        receiver
    }

    /// Reports the status of an object whenever it changes, until the time is over, as far as proxies of this replica
    /// are concerned. Final reports and the last one are complete; others have no rows.
    async fn follow_own(
        &self,
        query: &ObjectQuery,
        timeout: Duration,
        timing: PushTiming,
        reports: mpsc::Sender<ObjectReport>,
    ) {
        let deadline = tokio::time::Instant::now() + timeout;
        let mut state = QueryState {
            timing,
            ..QueryState::default()
        };
        let mut changes = Changes::of(self);
        let mut last: Option<ObjectReport> = None;
        loop {
            changes.mark_seen();
            if !self.await_push(query, &mut state, &reports).await {
                return;
            }
            let is_over = tokio::time::Instant::now() >= deadline;
            let mut report = self.report(query, &mut state, is_over).await;
            report.timed_out = is_over && !report.is_final;
            if is_over {
                // A client that has left needs no report.
                let _ = reports.send(report).await;
                return;
            }
            if !report.is_final {
                report = report.into_summary();
            }
            if last.as_ref() != Some(&report) {
                if reports.send(report.clone()).await.is_err() {
                    return;
                }
                last = Some(report);
            }
            let together = TOGETHER.max(state.compared * REST);
            let rests = state.rests_until.filter(|_| state.effects.is_some());
            let changed = async {
                tokio::select! {
                    () = changes.next() => {}
                    () = reports.closed() => {}
                }
            };
            let stale = self.is_stale(&state);
            tokio::select! {
                () = changed => {
                    let until = tokio::time::Instant::now() + together;
                    tokio::time::sleep_until(until.min(deadline)).await;
                }
                () = task::until(rests.map(Into::into)), if stale => {}
                () = tokio::time::sleep_until(deadline) => {}
            }
            if reports.is_closed() {
                return;
            }
        }
    }

    /// Waits until the version that a debounced query is about was pushed, if it is known. The reports before and after
    /// the wait show that it is no computation. Returns false if the reader has left.
    async fn await_push(
        &self,
        query: &ObjectQuery,
        state: &mut QueryState,
        reports: &mpsc::Sender<ObjectReport>,
    ) -> bool {
        let is_debounced = state.timing == PushTiming::Debounced;
        let is_due = is_debounced && !state.has_flushed && query.resource_version.is_some();
        if !is_due || self.awaits(query) {
            return true;
        }
        state.has_flushed = true;
        let awaited = ObjectReport {
            state: ObjectState::Awaited,
            ..ObjectReport::default()
        };
        if reports.send(awaited.clone()).await.is_err() {
            return false;
        }
        tokio::select! {
            _ = self.inputs.flushes.pushed() => {}
            () = reports.closed() => return false,
        }
        reports.send(awaited).await.is_ok()
    }

    /// Reports the status of the proxies of this replica once.
    async fn report_own_mesh(&self, visible: Option<&Namespace>, reports: mpsc::Sender<Overview>) {
        let overview = task::aside(|| self.own_overview(visible));
        // A client that has left needs no report.
        let _ = reports.send(overview).await;
    }

    /// Reports the status of the proxies of this replica whenever it changes, while there is a reader.
    async fn follow_own_mesh(&self, visible: Option<&Namespace>, reports: mpsc::Sender<Overview>) {
        let mut changes = Changes::of(self);
        let mut last: Option<Overview> = None;
        loop {
            changes.mark_seen();
            let started = environment::now();
            let mut overview = task::aside(|| self.own_overview(visible));
            let ages = overview.take_ages();
            if last.as_ref() != Some(&overview) {
                last = Some(overview.clone());
                overview.set_ages(ages);
                if reports.send(overview).await.is_err() {
                    return;
                }
            }
            let took = environment::now().saturating_duration_since(started);
            tokio::select! {
                () = changes.next() => {}
                () = reports.closed() => return,
            }
            tokio::time::sleep(PAGE_INTERVAL.max(took * REST)).await;
        }
    }

    /// Returns a permit for a query of a caller that sees this namespace, or everything; `None` if too many wait.
    pub fn permit(&self, visible: Option<&Namespace>) -> Option<OwnedSemaphorePermit> {
        self.waiting.acquire(visible)
    }

    /// Returns a permit to follow the mesh, as far as the caller sees it; `None` if too many clients do.
    pub fn follower_permit(&self, visible: Option<&Namespace>) -> Option<OwnedSemaphorePermit> {
        self.followers.acquire(visible)
    }

    /// Returns a permit for a query of another replica; `None` if there are too many.
    pub fn replica_permit(&self) -> Option<OwnedSemaphorePermit> {
        self.waiting_replicas.clone().try_acquire_owned().ok()
    }

    fn own_addresses(&self) -> MutexGuard<'_, BTreeSet<SmolStr>> {
        self.own_addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the effects are those of an earlier revision, or do not include all connections.
    fn is_stale(&self, state: &QueryState) -> bool {
        let revision = self.inputs.mesh.borrow().revision;
        let has_newer = self.inputs.connections.newest() > state.newest;
        let effects = state.effects.as_ref();
        effects.is_some_and(|(computed_for, _)| *computed_for != revision || has_newer)
    }

    async fn report(&self, query: &ObjectQuery, state: &mut QueryState, is_last: bool) -> ObjectReport {
        let mut report = self.unfinished_report(query, state, is_last).await;
        report.replicas = vec![self.own_replica()];
        report.is_final = report.is_settled();
        report
    }

    async fn unfinished_report(&self, query: &ObjectQuery, state: &mut QueryState, is_last: bool) -> ObjectReport {
        // Ingested objects reach the snapshot with the next push.
        let awaits = self.awaits(query);
        if !awaits && !state.has_flushed && query.resource_version.is_some() {
            self.inputs.flushes.flush().await;
            state.has_flushed = true;
        }
        let mesh = self.inputs.mesh.borrow().clone();
        let Some((kind, key, is_known)) = object(query, &mesh) else {
            return ObjectReport::default();
        };
        let findings = self.inputs.ingest_status.findings(kind, &key);
        let is_invalid = findings.iter().any(|finding| finding.severity == Severity::Error);
        let pushes = self.inputs.tracker.pushes();
        let push = pushes.iter().rev().find(|push| push.contains(kind, &key));
        let mut report = ObjectReport {
            object: ObjectName::of(kind, &key),
            revision: mesh.revision.0,
            diagnostics: findings.iter().map(ToString::to_string).collect(),
            unanswered: push.map_or(0, |push| push.outstanding()),
            seconds: push.and_then(|push| push.delivered()).map(|took| took.as_secs_f64()),
            ..ObjectReport::default()
        };
        if awaits {
            report.state = ObjectState::Awaited;
            return report;
        }
        if is_known {
            self.update_effects(kind, &key, state).await;
            if let Some((revision, effects)) = &state.effects {
                report.revision = revision.0;
                let started = environment::now();
                // The report about an invalid object is final, whatever its proxies have acknowledged.
                let with_rows = is_last || is_invalid;
                let done = &mut state.done;
                (report.counts, report.proxies) =
                    task::aside(|| states::proxies(self, query, effects, done, with_rows));
                state.compared = environment::now().saturating_duration_since(started);
            }
        } else if !is_invalid && state.timing == PushTiming::AtOnce {
            // Only people ask for deletions. Conditions are about objects that exist, some of which this control plane
            // does not know.
            report.unanswered = report.unanswered.max(unanswered_later(&pushes, kind, &key));
        }
        report.state = match push {
            _ if is_invalid => ObjectState::Invalid,
            _ if is_known => states::state(&report, self.is_stale(state)),
            _ if report.unanswered > 0 => ObjectState::Pending,
            Some(_) => ObjectState::Removed,
            None => ObjectState::Unknown,
        };
        report
    }

    /// Returns true if the wanted version of an object was not ingested yet.
    fn awaits(&self, query: &ObjectQuery) -> bool {
        let mesh = self.inputs.mesh.borrow().clone();
        let cluster = &mesh.installation.cluster;
        let kinds = query.kinds.iter();
        let seen = kinds
            .filter_map(|kind| self.inputs.ingest_status.seen(cluster, *kind))
            .max();
        let wanted = query.resource_version;
        wanted.is_some_and(|wanted| seen.is_some_and(|seen| seen < wanted))
    }

    /// Computes the effects of an object, unless they are present or were computed recently.
    async fn update_effects(&self, kind: Kind, key: &ObjectKey, state: &mut QueryState) {
        let now = environment::now();
        let is_resting = state.rests_until.is_some_and(|until| now < until);
        if state.effects.is_some() && (is_resting || !self.is_stale(state)) {
            return;
        }
        let newest = self.inputs.connections.newest();
        let effects = self.effects(kind, key).await;
        // With the time in which others had their turn, so that many queries about one change rest longer.
        let took = environment::now().saturating_duration_since(now);
        state.effects = effects.map(|(revision, effects)| (revision, Arc::new(effects)));
        state.newest = newest;
        state.rests_until = Some(environment::now() + took * REST);
    }

    /// Returns the effects of an object, with their revision; `None` if it does not exist.
    async fn effects(&self, kind: Kind, key: &ObjectKey) -> Option<(Revision, Vec<GroupEffect>)> {
        let _turn = self.turn.lock().await;
        let key = key.clone();
        let effects = PushHandle::ask_what_if(&self.inputs.inspect, move |world, store| {
            let without = world.without(kind, &key)?;
            let effects = store.effects(&without.snapshot, &without.changes, &Parallel);
            Some((without.snapshot.revision, effects, without.panics))
        });
        let (revision, effects, panics) = effects.await.flatten()?;
        for panic in panics {
            tracing::error!(resource = %panic, "generator panicked, previous resource kept; this is a bug in istiod");
        }
        Some((revision, effects))
    }

    /// Returns the objects that are blamed for a refused resource; `None` before they were searched.
    pub fn blamed(&self, refusal: &Refusal) -> Option<Vec<ObjectName>> {
        self.blame_cache().objects(refusal.resource_type, refusal.version)
    }

    fn blame_cache(&self) -> MutexGuard<'_, BlameCache> {
        self.blame_cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the kind and key of the object that a query is about, and true if it exists; `None` without kinds.
fn object(query: &ObjectQuery, mesh: &MeshSnapshot) -> Option<(Kind, ObjectKey, bool)> {
    let key = |kind: Kind| {
        let namespace = if kind.is_cluster_scoped() { "" } else { &query.namespace };
        ObjectKey::new(&mesh.installation.cluster, namespace, query.name.as_str())
    };
    let mut kinds = query.kinds.iter().copied();
    let known = kinds.find(|kind| mesh.object(*kind, &key(*kind)).is_some());
    let kind = known.or(query.kinds.first().copied())?;
    Some((kind, key(kind), known.is_some()))
}

/// Returns the number of proxies that have not answered a push after the last one with the object. Such a push may have
/// removed the object without listing it.
fn unanswered_later(pushes: &[Arc<PushRecord>], kind: Kind, key: &ObjectKey) -> usize {
    let later = pushes.iter().rev().take_while(|push| !push.contains(kind, key));
    let unanswered = later.filter(|push| push.is_partial).map(|push| push.outstanding());
    unanswered.max().unwrap_or_default()
}

#[cfg(test)]
mod tests;
