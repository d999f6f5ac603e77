//! Remote clusters: starts, replaces and stops sources of changes by Secrets or a folder of kubeconfigs.
//!
//! One task owns all of it. Each source has its own channel, and this task alone forwards changes. So changes of a
//! cluster never interleave with those of a replaced source, and none arrive after its removal. Note: a cluster whose
//! kubeconfig changed, or whose API server is unreachable, keeps its rows. It loses rows only if its new source,
//! completely listed, lacks them, or if no Secret names it any more.

mod folder;
mod metrics;
mod origin;
mod reconcile;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use prometheus::Registry;
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, watch},
    time::{self, Instant},
};
use tokio_stream::{StreamMap, wrappers::ReceiverStream};

use self::{
    metrics::RemoteMetrics,
    origin::Allowed,
    reconcile::{Action, Event, Origin, Problem, ProblemAt, Reconciler},
};
use crate::{
    api::{Diagnostic, FieldError, Kind, Severity},
    base::{ClusterId, ObjectKey},
    ingest::{
        file::Report,
        source::{self, Readiness},
    },
    kube::{kubeconfig::CheckedKubeconfig, watch::WatchEvent},
    model::change::{Batch, Change, SourceId},
};

/// Label selector of remote-cluster Secrets.
pub const SECRET_SELECTOR: &str = "istio/multiCluster=true";

/// Queue length of one cluster, in batches.
const BATCHES: usize = 16;

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

/// Synchronisation state of a cluster, with Istio's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncStatus {
    /// Complete.
    Synced,
    /// Its first lists are being read.
    Syncing,
    /// As before, but for longer than the start of istiod waits. It joins once it is complete.
    Timeout,
    /// Its kubeconfig is refused, so it is not contacted.
    Closed,
}

impl SyncStatus {
    const ALL: [Self; 4] = [Self::Synced, Self::Syncing, Self::Timeout, Self::Closed];

    /// Returns the name in metrics and debug pages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Synced => "synced",
            Self::Syncing => "syncing",
            Self::Timeout => "timeout",
            Self::Closed => "closed",
        }
    }
}

/// State of a remote cluster.
#[derive(Clone)]
pub struct RemoteCluster {
    /// Secret or file that names it.
    pub origin: ObjectKey,
    /// Synchronisation state.
    pub status: SyncStatus,
    /// Problem of its present declaration; the previous one may still be in use.
    pub problem: Option<String>,
    /// Client of the serving source, if any.
    pub client: Option<::kube::Client>,
    /// Number of that source; another number means another client.
    pub source: u64,
}

/// All remote clusters at one time.
#[derive(Clone, Default)]
pub struct RemoteClusters {
    /// True if every cluster declared at the start is complete, refused or timed out. Stays true.
    pub ready: bool,
    /// Clusters.
    pub clusters: BTreeMap<ClusterId, RemoteCluster>,
}

impl RemoteClusters {
    /// Returns the rows of `/debug/clusterz`, without the config cluster.
    pub fn dump(&self) -> Vec<Value> {
        let rows = self.clusters.iter().map(|(id, cluster)| {
            let mut row = json!({
                "id": id.as_str(),
                "secretName": cluster.origin.to_string(),
                "syncStatus": cluster.status.name(),
            });
            if let Some(problem) = &cluster.problem {
                row["error"] = json!(problem);
            }
            row
        });
        rows.collect()
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

/// One connection to a cluster: the source of its changes.
struct Connection {
    number: u64,
    /// `None` while it is starting.
    running: Option<RunningCluster>,
    status: SyncStatus,
    /// Time at which it counts as timed out.
    deadline: Option<Instant>,
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
    /// Reason why the last source could not start.
    problem: Option<String>,
}

/// Controller of remote clusters, see the module's documentation.
pub struct Remote {
    settings: RemoteSettings,
    start: Start,
    report: Report,
    metrics: RemoteMetrics,
    reconciler: Reconciler,
    states: BTreeMap<ClusterId, ClusterState>,
    starting: FuturesUnordered<BoxFuture<'static, (ConnectionKey, Result<RunningCluster, String>)>>,
    batches: StreamMap<ConnectionKey, ReceiverStream<Vec<Change>>>,
    number: u64,
    problems: BTreeMap<ProblemAt, Problem>,
    is_declared: bool,
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
    ) -> Result<(Self, watch::Receiver<Arc<RemoteClusters>>), prometheus::Error> {
        let (view, shown) = watch::channel(Arc::default());
        let remote = Self {
            reconciler: Reconciler::new(settings.own.clone()),
            settings,
            start,
            report,
            metrics: RemoteMetrics::new(registry)?,
            states: BTreeMap::new(),
            starting: FuturesUnordered::new(),
            batches: StreamMap::new(),
            number: 0,
            problems: BTreeMap::new(),
            is_declared: false,
            is_changed: false,
            view,
        };
        Ok((remote, shown))
    }

    /// Watches the declarations and forwards changes of clusters, until the receiver is closed.
    async fn run(self, declarations: Declarations, changes: mpsc::Sender<Vec<Change>>) {
        let (out, declared) = mpsc::channel(BATCHES);
        let (own, allowed) = (self.settings.own.clone(), Allowed::new(self.settings.allowed.clone()));
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
                Some((key, started)) = self.starting.next() => {
                    self.started(&key, started);
                    Vec::new()
                }
                () = time::sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    self.time_out(Instant::now());
                    Vec::new()
                }
                Some((key, batch)) = self.batches.next() => self.pass(&key, batch),
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
        self.is_declared |= matches!(declared, Declared::All(_));
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
        self.tell(problems);
        let mut removals = Vec::new();
        for (cluster, (origin, action)) in actions {
            match action {
                Action::Start(kubeconfig) | Action::Replace(kubeconfig) => self.begin(cluster, origin, kubeconfig),
                Action::Adopt => {
                    if let Some(state) = self.states.get_mut(&cluster) {
                        state.origin = origin;
                    }
                }
                Action::Stop => {
                    tracing::info!(%cluster, %origin, "remote cluster removed");
                    self.metrics.gone(&cluster);
                    if let Some(state) = self.states.remove(&cluster) {
                        self.drop_source(&cluster, state.serving);
                        self.drop_source(&cluster, state.replacement);
                    }
                    removals.push(Change::RemoveCluster(cluster));
                }
            }
        }
        removals
    }

    /// Starts a source in addition to the serving one, if any.
    fn begin(&mut self, cluster: ClusterId, origin: ObjectKey, kubeconfig: Arc<CheckedKubeconfig>) {
        self.number += 1;
        let key: ConnectionKey = (cluster.clone(), self.number);
        let (sender, receiver) = mpsc::channel(BATCHES);
        let started = (self.start)(StartCluster {
            cluster: cluster.clone(),
            kubeconfig,
            changes: sender,
        });
        let named = key.clone();
        self.starting.push(Box::pin(async move { (named, started.await) }));
        self.batches.insert(key, ReceiverStream::new(receiver));
        let source = Connection {
            number: self.number,
            running: None,
            status: SyncStatus::Syncing,
            deadline: (!self.settings.timeout.is_zero()).then(|| Instant::now() + self.settings.timeout),
        };
        tracing::info!(%cluster, %origin, "reading remote cluster");
        let state = self.states.entry(cluster.clone()).or_insert_with(|| ClusterState {
            origin: origin.clone(),
            serving: None,
            replacement: None,
            kinds: BTreeSet::new(),
            problem: None,
        });
        state.origin = origin;
        state.problem = None;
        let replaced = state.replacement.replace(source);
        self.drop_source(&cluster, replaced);
    }

    fn drop_source(&mut self, cluster: &ClusterId, source: Option<Connection>) {
        if let Some(source) = source {
            self.batches.remove(&(cluster.clone(), source.number));
        }
    }

    /// Handles a source that started or failed to start.
    fn started(&mut self, (cluster, number): &ConnectionKey, started: Result<RunningCluster, String>) {
        let Some(state) = self.states.get_mut(cluster) else {
            return;
        };
        let sources = [&mut state.replacement, &mut state.serving];
        let Some(source) = sources.into_iter().flatten().find(|source| source.number == *number) else {
            return;
        };
        self.is_changed = true;
        match started {
            Ok(running) => source.running = Some(running),
            Err(message) => {
                let finding = finding(&state.origin, Some(cluster), "BadKubeconfig", message.clone());
                state.problem = Some(message);
                let replaced = state.replacement.take();
                self.drop_source(cluster, replaced);
                self.report_finding(&finding);
            }
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
            let absent = state.kinds.difference(&sent);
            batch.extend(absent.map(|kind| {
                let source = SourceId {
                    cluster: cluster.clone(),
                    kind: *kind,
                };
                Change::Replace(source, Vec::new())
            }));
            let mut synced = state.replacement.take();
            if let Some(source) = &mut synced {
                source.status = SyncStatus::Synced;
                source.deadline = None;
            }
            state.kinds.clear();
            self.is_changed = true;
            previous = std::mem::replace(&mut state.serving, synced);
            tracing::info!(%cluster, origin = %state.origin, "remote cluster synced");
        }
        state.kinds.extend(sent);
        self.drop_source(cluster, previous);
        batch
    }

    fn deadline(&self) -> Option<Instant> {
        let sources = self.states.values().filter_map(|state| state.replacement.as_ref());
        sources.filter_map(|source| source.deadline).min()
    }

    fn time_out(&mut self, now: Instant) {
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

    /// Logs new problems.
    fn tell(&mut self, problems: BTreeMap<ProblemAt, Problem>) {
        for ((origin, cluster), problem) in &problems {
            let at = (origin.clone(), cluster.clone());
            if self.problems.get(&at) != Some(problem) {
                self.report_finding(&finding(
                    origin,
                    cluster.as_ref(),
                    problem.code,
                    problem.message.clone(),
                ));
            }
        }
        self.problems = problems;
    }

    fn report_finding(&self, finding: &Diagnostic) {
        tracing::error!(code = %finding.code, "{finding}");
        (self.report)(finding);
    }

    /// Publishes a changed state.
    fn show(&mut self) {
        let mut clusters = BTreeMap::new();
        for (cluster, state) in &self.states {
            let status = match (&state.replacement, &state.serving) {
                (Some(source), _) | (None, Some(source)) => source.status,
                (None, None) => SyncStatus::Closed,
            };
            self.metrics.status(cluster, status);
            let running = state.serving.as_ref().and_then(|source| source.running.as_ref());
            let shown = RemoteCluster {
                origin: state.origin.clone(),
                status,
                problem: state.problem.clone(),
                client: running.and_then(|running| running.client.clone()),
                source: state.serving.as_ref().map_or(0, |source| source.number),
            };
            clusters.insert(cluster.clone(), shown);
        }
        self.metrics.managed(clusters.len());
        for ((origin, cluster), problem) in &self.problems {
            let Some(cluster) = cluster else { continue };
            let shown = clusters.entry(cluster.clone()).or_insert_with(|| RemoteCluster {
                origin: origin.clone(),
                status: SyncStatus::Closed,
                problem: None,
                client: None,
                source: 0,
            });
            // A duplicate is a problem of the other origin, not of the cluster.
            if shown.origin == *origin {
                shown.problem = Some(problem.message.clone());
            }
        }
        let waiting = |state: &ClusterState| {
            state
                .replacement
                .as_ref()
                .is_some_and(|source| source.status == SyncStatus::Syncing)
        };
        let is_ready = self.is_declared && !self.states.values().any(waiting);
        self.view.send_modify(|view| {
            let ready = view.ready || is_ready;
            *view = Arc::new(RemoteClusters { ready, clusters });
        });
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

fn finding(origin: &ObjectKey, cluster: Option<&ClusterId>, code: &'static str, message: String) -> Diagnostic {
    if origin.namespace.is_empty() {
        let message = match cluster {
            Some(cluster) => format!("cluster {cluster}: {message}"),
            None => message,
        };
        return Diagnostic::of_document(origin.name.clone(), code, message);
    }
    let field = cluster.map(|cluster| format!("data.{cluster}")).unwrap_or_default();
    Diagnostic::of_object(
        Kind::Secret,
        origin.clone(),
        Severity::Error,
        code,
        FieldError { field, message },
    )
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
