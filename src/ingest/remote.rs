//! Remote clusters: starts, replaces and stops sources of changes by Secrets or a folder of kubeconfigs.
//!
//! One task owns all of it. Each source has its own channel, and this task alone forwards changes. So changes of a
//! cluster never interleave with those of a replaced source, and none arrive after its removal. Note: a cluster whose
//! kubeconfig changed, or whose API server is unreachable, keeps its rows. It loses rows only if its new source,
//! completely listed, lacks them, or if no Secret names it any more. Before its first source is complete, it has the
//! rows of its stored state, if there is one.

mod folder;
mod metrics;
mod origin;
mod publish;
mod reconcile;
mod storage;
pub mod stored;
mod view;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::{
    StreamExt,
    future::BoxFuture,
    stream::{self, BoxStream, FuturesUnordered},
};
use prometheus::Registry;
use tokio::{
    sync::{mpsc, watch},
    time::{self, Instant},
};
use tokio_stream::{StreamMap, wrappers::ReceiverStream};

pub use self::view::{RemoteCluster, RemoteClusters, SyncStatus};
use self::{
    metrics::RemoteMetrics,
    origin::Allowed,
    reconcile::{Action, Event, Origin, Problem, ProblemAt, Reconciler},
    stored::{StoredState, StoredStates},
};
use crate::{
    api::{Kind, Row},
    base::{ClusterId, ObjectKey},
    environment::wall_clock,
    ingest::{
        backoff::Backoff,
        diagnostics::{ActiveDiagnostics, Report},
        source::{self, Readiness},
    },
    kube::{kubeconfig::CheckedKubeconfig, watch::WatchEvent},
    model::change::{Batch, Change, SourceId},
};

/// Label selector of remote-cluster Secrets.
pub const SECRET_SELECTOR: &str = "istio/multiCluster=true";

/// Queue length of one cluster, in batches.
const BATCHES: usize = 16;
/// First and longest delay before a source that failed to start, or that has ended, is started again.
const FIRST_RETRY: Duration = Duration::from_millis(500);
const LONGEST_RETRY: Duration = Duration::from_mins(1);
/// Time between two changes of a cluster's kubeconfig that take effect.
const REPLACE_INTERVAL: Duration = Duration::from_secs(5);

/// Settings of remote clusters.
#[derive(Clone, Debug)]
pub struct RemoteSettings {
    /// Config cluster, which no Secret may name.
    pub own: ClusterId,
    /// Time that the start of istiod waits for a cluster (`PILOT_REMOTE_CLUSTER_TIMEOUT`); zero for no limit.
    pub timeout: Duration,
    /// Allowed unsafe kubeconfig options (`PILOT_INSECURE_MULTICLUSTER_KUBECONFIG_OPTIONS`).
    pub allowed: BTreeSet<String>,
}

/// Origin of the declarations of clusters.
pub enum Declarations {
    /// A watch of Secrets that match [`SECRET_SELECTOR`].
    Secrets(mpsc::Receiver<WatchEvent>),
    /// `PILOT_MULTICLUSTER_KUBECONFIG_PATH`.
    Folder(PathBuf),
}

/// Starts the source of a cluster. Its first batch must be complete.
pub type Start = Arc<dyn Fn(StartCluster) -> BoxFuture<'static, Result<RunningCluster, String>> + Send + Sync>;

/// Inputs of a source.
#[derive(Clone)]
pub struct StartCluster {
    /// Cluster.
    pub cluster: ClusterId,
    /// Kubeconfig.
    pub kubeconfig: Arc<CheckedKubeconfig>,
    /// Receiver of its changes.
    pub changes: mpsc::Sender<Vec<Change>>,
}

/// A running source. Dropping it stops it.
pub struct RunningCluster {
    client: Option<::kube::Client>,
    end: Option<Box<dyn FnOnce() + Send>>,
}

impl RunningCluster {
    /// Returns a source with its client, and the function that stops it.
    pub fn new(client: Option<::kube::Client>, end: impl FnOnce() + Send + 'static) -> Self {
        Self {
            client,
            end: Some(Box::new(end)),
        }
    }
}

impl Drop for RunningCluster {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end();
        }
    }
}

/// Declarations of an origin.
enum Declared {
    All(BTreeMap<ObjectKey, Origin>),
    Put(ObjectKey, Origin),
    Gone(ObjectKey),
}

/// Key of a connection. Numbers distinguish the connections to one cluster.
type ConnectionKey = (ClusterId, u64);

/// Batches of a connection, and `None` after its end.
type Batches = BoxStream<'static, Option<Vec<Change>>>;

/// One connection to a cluster: the source of its changes.
struct Connection {
    number: u64,
    /// `None` for a stored state.
    kubeconfig: Option<Arc<CheckedKubeconfig>>,
    began: Instant,
    /// `None` until it has started.
    running: Option<RunningCluster>,
    status: SyncStatus,
    /// Time at which it counts as timed out, or at which a stored state is too old.
    deadline: Option<Instant>,
}

/// Use of the stored state of a cluster.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Storage {
    /// None: a source serves, or nothing.
    Unused,
    /// The file is being read for the connection with this number.
    Reading(u64),
    /// It is the serving connection, and its rows follow.
    Read(SystemTime),
    /// Its rows, which were current at this time, were forwarded.
    Serving(SystemTime),
}

/// State of one cluster.
struct ClusterState {
    origin: ObjectKey,
    /// Connection whose changes are forwarded.
    serving: Option<Connection>,
    /// Connection that replaces it once it is synced.
    replacement: Option<Connection>,
    /// Kinds that were sent.
    kinds: BTreeSet<Kind>,
    /// Mesh configs that were sent. They count while reading them is refused to the next source.
    mesh_configs: BTreeMap<ObjectKey, Row>,
    /// Time at which a changed kubeconfig last took effect.
    replaced: Option<Instant>,
    /// Kubeconfig that takes effect later, with its origin.
    waiting: Option<(ObjectKey, Arc<CheckedKubeconfig>)>,
    /// Reason why the last source could not start. It is started again later.
    problem: Option<String>,
    /// Delays before sources that have ended are started again.
    restarts: Backoff,
    storage: Storage,
}

impl ClusterState {
    /// Returns true if the start of istiod waits for the cluster.
    fn is_awaited(&self) -> bool {
        let status = self.replacement.as_ref().map(|source| source.status);
        match self.storage {
            // A source that could not start yet is started again.
            Storage::Unused => matches!(status, Some(SyncStatus::Syncing | SyncStatus::Closed)),
            // Soon known, but a broken disk must not delay the start for ever.
            Storage::Reading(_) | Storage::Read(_) => status != Some(SyncStatus::Timeout),
            Storage::Serving(_) => false,
        }
    }

    /// Returns the time at which the waiting kubeconfig takes effect.
    fn replace_at(&self, interval: Duration) -> Option<Instant> {
        let replaced = self.replaced.filter(|_| self.waiting.is_some())?;
        Some(replaced + interval)
    }

    fn keep_mesh_configs(&mut self, batch: &[Change]) {
        for change in batch {
            match change {
                Change::Upsert(row) if row.kind() == Kind::MeshConfig => {
                    self.mesh_configs.insert(row.key().clone(), row.clone());
                }
                Change::Remove(Kind::MeshConfig, key) => drop(self.mesh_configs.remove(key)),
                Change::Replace(source, rows) if source.kind == Kind::MeshConfig => {
                    self.mesh_configs = rows.iter().map(|row| (row.key().clone(), row.clone())).collect();
                }
                _ => {}
            }
        }
    }
}

/// Start of a source: its inputs, the delays after failures, and the result.
struct Started {
    key: ConnectionKey,
    inputs: StartCluster,
    backoff: Backoff,
    result: Result<RunningCluster, String>,
}

/// Controller of remote clusters, see the module's documentation.
pub struct Remote {
    settings: RemoteSettings,
    start: Start,
    findings: ActiveDiagnostics<()>,
    metrics: RemoteMetrics,
    reconciler: Reconciler,
    states: BTreeMap<ClusterId, ClusterState>,
    starting: FuturesUnordered<BoxFuture<'static, Started>>,
    batches: StreamMap<ConnectionKey, Batches>,
    stored: Option<StoredStates>,
    reading: FuturesUnordered<BoxFuture<'static, (ConnectionKey, Option<StoredState>)>>,
    number: u64,
    /// [`REPLACE_INTERVAL`]; other values in tests.
    replace_interval: Duration,
    problems: BTreeMap<ProblemAt, Problem>,
    is_declared: bool,
    /// Time until which the start of istiod waits for a folder of kubeconfigs that cannot be read.
    declared_by: Option<Instant>,
    /// True if the start of istiod waits for declarations no longer.
    is_late: bool,
    /// True if the published state must be updated.
    is_changed: bool,
    view: watch::Sender<Arc<RemoteClusters>>,
}

impl Remote {
    /// Returns the controller. The receiver always has the present state.
    pub fn new(
        registry: &Registry,
        settings: RemoteSettings,
        start: Start,
        report: Report,
        stored: Option<StoredStates>,
    ) -> Result<(Self, watch::Receiver<Arc<RemoteClusters>>), prometheus::Error> {
        let (view, shown) = watch::channel(Arc::default());
        let remote = Self {
            reconciler: Reconciler::new(settings.own.clone()),
            settings,
            start,
            findings: ActiveDiagnostics::new(report),
            metrics: RemoteMetrics::new(registry)?,
            states: BTreeMap::new(),
            starting: FuturesUnordered::new(),
            batches: StreamMap::new(),
            stored,
            reading: FuturesUnordered::new(),
            number: 0,
            replace_interval: REPLACE_INTERVAL,
            problems: BTreeMap::new(),
            is_declared: false,
            declared_by: None,
            is_late: false,
            is_changed: false,
            view,
        };
        Ok((remote, shown))
    }

    /// Watches the declarations and forwards changes of clusters, until the receiver is closed.
    async fn run(mut self, declarations: Declarations, changes: mpsc::Sender<Vec<Change>>) {
        let (out, declared) = mpsc::channel(BATCHES);
        let (own, allowed) = (self.settings.own.clone(), Allowed::new(self.settings.allowed.clone()));
        if matches!(declarations, Declarations::Folder(_)) {
            self.declared_by = self.sync_deadline();
        }
        let watch = async {
            match declarations {
                Declarations::Folder(path) => folder::Folder::new(path, own, allowed).run(out).await,
                Declarations::Secrets(events) => secrets(events, &own, &allowed, out).await,
            }
        };
        tokio::select! {
            () = self.follow(declared, changes) => {}
            // When the declarations end, the declared clusters stay.
            () = async { watch.await; std::future::pending::<()>().await } => {}
        }
    }

    async fn follow(mut self, mut declared: mpsc::Receiver<Declared>, changes: mpsc::Sender<Vec<Change>>) {
        loop {
            let deadline = self.deadline();
            let out = tokio::select! {
                biased;
                () = changes.closed() => return,
                Some(declared) = declared.recv() => self.declare(declared),
                Some(started) = self.starting.next() => {
                    self.started(started);
                    Vec::new()
                }
                Some((key, stored)) = self.reading.next() => {
                    self.read(key, stored);
                    Vec::new()
                }
                () = time::sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    let now = Instant::now();
                    self.time_out(now);
                    self.replace_waiting(now);
                    self.expire(now)
                }
                Some((key, batch)) = self.batches.next() => match batch {
                    Some(batch) => self.pass(&key, batch),
                    None => {
                        self.restart(&key);
                        Vec::new()
                    }
                },
            };
            if !out.is_empty() && changes.send(out).await.is_err() {
                return;
            }
            // Most batches do not change the published state.
            if std::mem::take(&mut self.is_changed) {
                self.show();
            }
        }
    }

    /// Applies declarations; returns removals that follow at once.
    fn declare(&mut self, declared: Declared) -> Vec<Change> {
        if matches!(declared, Declared::All(_)) {
            self.is_declared = true;
            self.declared_by = None;
        }
        self.is_changed = true;
        let events: Vec<Event> = match declared {
            Declared::All(origins) => self.reconciler.replace(origins),
            Declared::Put(key, origin) => self.reconciler.put(key, origin).into_iter().collect(),
            Declared::Gone(key) => self.reconciler.remove(&key).into_iter().collect(),
        };
        for event in events {
            self.metrics.event(event);
        }
        let (actions, problems) = self.reconciler.reconcile();
        self.problems = problems;
        let mut removals = Vec::new();
        for (cluster, (origin, action)) in actions {
            match action {
                Action::Start(kubeconfig) => {
                    self.begin(Duration::ZERO, cluster.clone(), origin, kubeconfig);
                    self.read_stored(cluster);
                }
                Action::Replace(kubeconfig) => self.replace(cluster, origin, kubeconfig),
                Action::Adopt => {
                    if let Some(state) = self.states.get_mut(&cluster) {
                        match &mut state.waiting {
                            Some((waiting, _)) => *waiting = origin,
                            None => state.origin = origin,
                        }
                    }
                }
                Action::Stop => {
                    tracing::info!(%cluster, %origin, "remote cluster removed");
                    self.metrics.gone(&cluster);
                    if let Some(state) = self.states.remove(&cluster) {
                        self.drop_source(&cluster, state.serving);
                        self.drop_source(&cluster, state.replacement);
                    }
                    if let Some(stored) = &self.stored {
                        stored.publish(|live| live.remove(&cluster));
                    }
                    removals.push(Change::RemoveCluster(cluster));
                }
            }
        }
        self.report_problems();
        self.publish_names();
        removals
    }

    /// Starts a source with another kubeconfig, at once or after the interval. A Secret that changes all the time would
    /// otherwise end each source before it is complete, and each would list the objects of the cluster at the rate of a
    /// new client.
    fn replace(&mut self, cluster: ClusterId, origin: ObjectKey, kubeconfig: Arc<CheckedKubeconfig>) {
        let now = Instant::now();
        if let Some(state) = self.states.get_mut(&cluster) {
            if state.replaced.is_some_and(|at| now < at + self.replace_interval) {
                if state.waiting.is_none() {
                    let interval = self.replace_interval;
                    tracing::warn!(%cluster, %origin, ?interval, "kubeconfig of remote cluster changed again, waiting");
                }
                state.waiting = Some((origin, kubeconfig));
                return;
            }
            state.replaced = Some(now);
            state.waiting = None;
        }
        self.begin(Duration::ZERO, cluster, origin, kubeconfig);
    }

    /// Starts the sources of kubeconfigs that have waited.
    fn replace_waiting(&mut self, now: Instant) {
        let interval = self.replace_interval;
        let mut due = Vec::new();
        for (cluster, state) in &mut self.states {
            if state.replace_at(interval).is_some_and(|at| at <= now)
                && let Some((origin, kubeconfig)) = state.waiting.take()
            {
                state.replaced = Some(now);
                due.push((cluster.clone(), origin, kubeconfig));
            }
        }
        if due.is_empty() {
            return;
        }
        for (cluster, origin, kubeconfig) in due {
            self.begin(Duration::ZERO, cluster, origin, kubeconfig);
        }
        self.report_problems();
        self.is_changed = true;
    }

    /// Starts a source after a delay, in addition to the serving one, if any.
    fn begin(&mut self, delay: Duration, cluster: ClusterId, origin: ObjectKey, kubeconfig: Arc<CheckedKubeconfig>) {
        let is_start_waiting = !self.view.borrow().ready;
        self.number += 1;
        let key: ConnectionKey = (cluster.clone(), self.number);
        let (sender, receiver) = mpsc::channel(BATCHES);
        let inputs = StartCluster {
            cluster: cluster.clone(),
            kubeconfig: kubeconfig.clone(),
            changes: sender,
        };
        let backoff = Backoff::new(FIRST_RETRY, LONGEST_RETRY);
        self.start_after(delay, key.clone(), inputs, backoff);
        let batches = ReceiverStream::new(receiver).map(Some);
        self.batches.insert(key, batches.chain(stream::once(ended())).boxed());
        let mut source = Connection {
            number: self.number,
            kubeconfig: Some(kubeconfig),
            began: Instant::now() + delay,
            running: None,
            status: SyncStatus::Syncing,
            deadline: self.sync_deadline(),
        };
        tracing::info!(%cluster, %origin, "reading remote cluster");
        let state = self.states.entry(cluster.clone()).or_insert_with(|| ClusterState {
            origin: origin.clone(),
            serving: None,
            replacement: None,
            kinds: BTreeSet::new(),
            mesh_configs: BTreeMap::new(),
            replaced: None,
            waiting: None,
            problem: None,
            restarts: Backoff::new(FIRST_RETRY, LONGEST_RETRY),
            storage: Storage::Unused,
        });
        state.origin = origin;
        state.problem = None;
        // The start of istiod waits for all attempts together, not for each.
        if let Some(replaced) = state.replacement.as_ref().filter(|_| is_start_waiting) {
            source.deadline = replaced.deadline;
            if replaced.status == SyncStatus::Timeout {
                source.status = SyncStatus::Timeout;
            }
        }
        let replaced = state.replacement.replace(source);
        self.drop_source(&cluster, replaced);
    }

    fn start_after(&self, delay: Duration, key: ConnectionKey, inputs: StartCluster, backoff: Backoff) {
        let start = self.start.clone();
        self.starting.push(Box::pin(async move {
            tokio::select! {
                () = time::sleep(delay) => {}
                () = inputs.changes.closed() => {}
            }
            let result = if inputs.changes.is_closed() {
                Err("the cluster is not declared any more".to_owned())
            } else {
                start(inputs.clone()).await
            };
            Started {
                key,
                inputs,
                backoff,
                result,
            }
        }));
    }

    /// Returns the time until which the start of istiod waits for a source that starts now.
    fn sync_deadline(&self) -> Option<Instant> {
        (!self.settings.timeout.is_zero()).then(|| Instant::now() + self.settings.timeout)
    }

    fn drop_source(&mut self, cluster: &ClusterId, source: Option<Connection>) {
        if let Some(source) = source {
            self.batches.remove(&(cluster.clone(), source.number));
        }
    }

    /// Handles a source that started, or starts it again later. What a kubeconfig refers to, such as a token file or a
    /// credential plugin, may fail only for a while.
    fn started(&mut self, started: Started) {
        let Started {
            key,
            inputs,
            mut backoff,
            result,
        } = started;
        let (cluster, number) = &key;
        let Some(state) = self.states.get_mut(cluster) else {
            return;
        };
        let sources = [&mut state.replacement, &mut state.serving];
        let Some(source) = sources.into_iter().flatten().find(|source| source.number == *number) else {
            return;
        };
        self.is_changed = true;
        match result {
            Ok(running) => {
                source.running = Some(running);
                if source.status == SyncStatus::Closed {
                    source.status = SyncStatus::Syncing;
                }
                state.problem = None;
            }
            Err(message) => {
                // The start of istiod waits for all attempts together, not for each.
                if source.status != SyncStatus::Timeout {
                    source.status = SyncStatus::Closed;
                }
                state.problem = Some(message);
                self.start_after(backoff.next(), key, inputs, backoff);
            }
        }
        self.report_problems();
    }

    /// Starts a source again that has ended. Only a panic ends it, which its task has logged. The rows that it sent
    /// stay until the new source is complete.
    fn restart(&mut self, (cluster, number): &ConnectionKey) {
        let Some(state) = self.states.get_mut(cluster) else {
            return;
        };
        let sources = [&state.replacement, &state.serving];
        let Some(source) = sources.into_iter().flatten().find(|source| source.number == *number) else {
            return;
        };
        let Some(kubeconfig) = source.kubeconfig.clone() else {
            return;
        };
        let (status, deadline, is_stable) = (source.status, source.deadline, source.began.elapsed() > LONGEST_RETRY);
        let replacement = state.replacement.as_ref().map(|source| source.number);
        self.metrics.restarted(cluster);
        if replacement.is_some_and(|other| other != *number) {
            tracing::error!(%cluster, origin = %state.origin, "source of remote cluster ended while it is replaced");
            return;
        }
        if is_stable {
            state.restarts.reset();
        }
        let (origin, delay) = (state.origin.clone(), state.restarts.next());
        tracing::error!(%cluster, %origin, restart_in = ?delay, "source of remote cluster ended, starting it again");
        self.begin(delay, cluster.clone(), origin, kubeconfig);
        self.is_changed = true;
        let state = self.states.get_mut(cluster);
        let source = state.and_then(|state| state.replacement.as_mut());
        if let (Some(source), Some(_)) = (source, replacement) {
            // The start of istiod waits for all attempts together, not for each.
            (source.status, source.deadline) = (status, deadline);
        }
    }

    /// Returns the changes to forward for a batch. The first batch of a new source replaces all rows of the previous
    /// one.
    fn pass(&mut self, (cluster, number): &ConnectionKey, mut batch: Vec<Change>) -> Vec<Change> {
        let Some(state) = self.states.get_mut(cluster) else {
            return Vec::new();
        };
        let sent = kinds(&batch);
        let mut previous = None;
        if state
            .replacement
            .as_ref()
            .is_some_and(|source| source.number == *number)
        {
            // Secrets are always served. A source without them may not read them, and those that are known stay.
            let absent = state.kinds.difference(&sent).filter(|kind| **kind != Kind::Secret);
            batch.extend(absent.map(|kind| {
                let source = SourceId {
                    cluster: cluster.clone(),
                    kind: *kind,
                };
                // Other kinds are absent because they are not served.
                let rows = match kind {
                    Kind::MeshConfig => state.mesh_configs.values().cloned().collect(),
                    _ => Vec::new(),
                };
                Change::Replace(source, rows)
            }));
            let mut synced = state.replacement.take();
            if let Some(source) = &mut synced {
                source.status = SyncStatus::Synced;
                source.deadline = None;
            }
            state.kinds.retain(|kind| *kind == Kind::MeshConfig);
            self.is_changed = true;
            previous = std::mem::replace(&mut state.serving, synced);
            state.storage = Storage::Unused;
            tracing::info!(%cluster, origin = %state.origin, "remote cluster synced");
        }
        if let Storage::Read(since) = state.storage {
            state.storage = Storage::Serving(since);
            self.is_changed = true;
            tracing::warn!(
                %cluster, origin = %state.origin, age = ?wall_clock().duration_since(since).unwrap_or_default(),
                "serving the stored state of a remote cluster until it is synced"
            );
        }
        if let (Storage::Unused, Some(stored)) = (state.storage, &self.stored) {
            stored.publish(|live| live.apply(cluster, &batch));
        }
        state.kinds.extend(sent);
        state.keep_mesh_configs(&batch);
        self.drop_source(cluster, previous);
        batch
    }

    fn deadline(&self) -> Option<Instant> {
        let sources = self
            .states
            .values()
            .flat_map(|state| [&state.replacement, &state.serving]);
        let deadlines = sources.flatten().filter_map(|source| source.deadline);
        let states = self.states.values();
        let waiting = states.filter_map(|state| state.replace_at(self.replace_interval));
        deadlines.chain(waiting).chain(self.declared_by).min()
    }

    fn time_out(&mut self, now: Instant) {
        if self.declared_by.take_if(|deadline| *deadline <= now).is_some() {
            self.is_late = true;
            self.is_changed = true;
            tracing::error!(timeout = ?self.settings.timeout, "starting without the remote clusters of the folder");
        }
        for (cluster, state) in &mut self.states {
            let Some(source) = &mut state.replacement else { continue };
            if source.deadline.is_some_and(|deadline| deadline <= now) {
                source.deadline = None;
                source.status = SyncStatus::Timeout;
                self.is_changed = true;
                self.metrics.timed_out(cluster);
                tracing::error!(
                    %cluster, origin = %state.origin, timeout = ?self.settings.timeout,
                    "remote cluster sync timed out, adding it once synced"
                );
            }
        }
    }
}

/// The source of all remote clusters. It starts a source for each cluster, whose changes it forwards.
pub struct RemoteSource {
    /// Controller.
    pub remote: Remote,
    /// Origin of the declarations.
    pub declarations: Declarations,
}

impl source::Source for RemoteSource {
    fn name(&self) -> &'static str {
        "remote clusters"
    }

    fn readiness(&self) -> Readiness {
        let mut view = self.remote.view.subscribe();
        Readiness::Synced(Box::pin(async move { view.wait_for(|view| view.ready).await.is_ok() }))
    }

    async fn run(self, changes: mpsc::Sender<Batch>) {
        self.remote.run(self.declarations, changes).await;
    }
}

/// Marks the end of a source, after a while: at shutdown, sources and this task end in any order.
async fn ended() -> Option<Vec<Change>> {
    time::sleep(FIRST_RETRY).await;
    None
}

/// Converts watch events to declarations.
async fn secrets(
    mut events: mpsc::Receiver<WatchEvent>,
    own: &ClusterId,
    allowed: &Allowed,
    out: mpsc::Sender<Declared>,
) {
    while let Some(event) = events.recv().await {
        let declared = match event {
            WatchEvent::Restarted(objects) => Declared::All(
                objects
                    .iter()
                    .map(|secret| (origin::key_of(secret, own), origin::of_secret(secret, allowed)))
                    .collect(),
            ),
            WatchEvent::Applied(secret) => {
                Declared::Put(origin::key_of(&secret, own), origin::of_secret(&secret, allowed))
            }
            WatchEvent::Deleted(secret) => Declared::Gone(origin::key_of(&secret, own)),
        };
        if out.send(declared).await.is_err() {
            return;
        }
    }
}

fn kinds(batch: &[Change]) -> BTreeSet<Kind> {
    let kind = |change: &Change| match change {
        Change::Upsert(row) => Some(row.kind()),
        Change::Remove(kind, _) => Some(*kind),
        Change::Replace(source, _) => Some(source.kind),
        Change::RemoveCluster(_) => None,
    };
    batch.iter().filter_map(kind).collect()
}

#[cfg(test)]
mod tests;
