//! Remote clusters: from Secrets (or a folder of kubeconfigs) to sources of changes that come, are exchanged and go.
//!
//! One task owns all of it. Each source has a channel of its own, and this task alone passes on what comes: so the changes
//! of one cluster never interleave with those of the source that it replaces, and nothing of a cluster can arrive after its
//! removal. What a reader would get wrong: a cluster whose kubeconfig changes, or whose API server is gone, keeps what it
//! had. It loses rows only when its new source, completely listed, says so, or when nothing names it any more.

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
    ingest::file::Report,
    kube::{kubeconfig::CheckedKubeconfig, watch::WatchEvent},
    model::change::{Change, SourceId},
};

/// The label of remote-cluster Secrets, as a selector.
pub const SECRET_SELECTOR: &str = "istio/multiCluster=true";

/// How many batches of one cluster wait at most.
const BATCHES: usize = 16;

/// What is served, and how.
#[derive(Clone, Debug)]
pub struct RemoteSettings {
    /// The config cluster, which no Secret may name.
    pub own: ClusterId,
    /// How long the start of istiod waits for a cluster (`PILOT_REMOTE_CLUSTER_TIMEOUT`); zero: without limit.
    pub timeout: Duration,
    /// What kubeconfigs are allowed beyond the rules (`PILOT_INSECURE_MULTICLUSTER_KUBECONFIG_OPTIONS`).
    pub allowed: BTreeSet<String>,
}

/// Where clusters are declared.
pub enum Declarations {
    /// A watch of Secrets that match [`SECRET_SELECTOR`].
    Secrets(mpsc::Receiver<WatchEvent>),
    /// `PILOT_MULTICLUSTER_KUBECONFIG_PATH`.
    Folder(PathBuf),
}

/// Starts the source of a cluster. Its first batch is to be complete; it sends nothing before.
pub type Start = Arc<dyn Fn(StartCluster) -> BoxFuture<'static, Result<RunningCluster, String>> + Send + Sync>;

/// What a source needs to start.
pub struct StartCluster {
    /// The cluster.
    pub cluster: ClusterId,
    /// How to reach it.
    pub kubeconfig: Arc<CheckedKubeconfig>,
    /// Where its changes go.
    pub changes: mpsc::Sender<Vec<Change>>,
}

/// A started source. Dropping it ends it.
pub struct RunningCluster {
    client: Option<::kube::Client>,
    end: Option<Box<dyn FnOnce() + Send>>,
}

impl RunningCluster {
    /// A source with the client that it uses, and how it is ended.
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

/// How far a cluster is. The names are those that Istio shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncStatus {
    /// All of it is known.
    Synced,
    /// Its lists are on the way.
    Syncing,
    /// As before, but longer than the start of istiod waits. It joins when it is synced.
    Timeout,
    /// Nothing is asked of it: its kubeconfig is refused.
    Closed,
}

impl SyncStatus {
    const ALL: [Self; 4] = [Self::Synced, Self::Syncing, Self::Timeout, Self::Closed];

    /// The name that metrics and debug pages show.
    pub fn name(self) -> &'static str {
        match self {
            Self::Synced => "synced",
            Self::Syncing => "syncing",
            Self::Timeout => "timeout",
            Self::Closed => "closed",
        }
    }
}

/// A remote cluster, as others see it.
#[derive(Clone)]
pub struct RemoteCluster {
    /// The Secret or file that names it.
    pub origin: ObjectKey,
    /// How far it is.
    pub status: SyncStatus,
    /// What is wrong with what is declared about it; it may go on with what was declared before.
    pub problem: Option<String>,
    /// The client of the source that serves, if any.
    pub client: Option<::kube::Client>,
    /// The number of that source: another number means another client.
    pub source: u64,
}

/// All remote clusters at one time.
#[derive(Clone, Default)]
pub struct RemoteClusters {
    /// Every cluster that was declared at the start is synced, refused, or took too long. Stays true.
    pub ready: bool,
    /// The clusters.
    pub clusters: BTreeMap<ClusterId, RemoteCluster>,
}

impl RemoteClusters {
    /// The rows of `/debug/clusterz`, without that of the config cluster.
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

/// What a source of declarations says.
enum Declared {
    All(BTreeMap<ObjectKey, Origin>),
    Put(ObjectKey, Origin),
    Gone(ObjectKey),
}

/// A source that was asked for. Numbers tell the sources of one cluster apart.
type SourceKey = (ClusterId, u64);

/// One source of a cluster.
struct Source {
    number: u64,
    /// None while it is being started.
    running: Option<RunningCluster>,
    status: SyncStatus,
    /// When it counts as timed out.
    deadline: Option<Instant>,
}

/// What there is of one cluster.
struct Slot {
    origin: ObjectKey,
    /// The source whose changes are passed on.
    serving: Option<Source>,
    /// The source that takes its place once it is synced.
    coming: Option<Source>,
    /// The kinds that were told of.
    kinds: BTreeSet<Kind>,
    /// Why the last source could not be started.
    problem: Option<String>,
}

/// See the module's text.
pub struct Remote {
    settings: RemoteSettings,
    start: Start,
    report: Report,
    metrics: RemoteMetrics,
    reconciler: Reconciler,
    slots: BTreeMap<ClusterId, Slot>,
    starting: FuturesUnordered<BoxFuture<'static, (SourceKey, Result<RunningCluster, String>)>>,
    batches: StreamMap<SourceKey, ReceiverStream<Vec<Change>>>,
    number: u64,
    problems: BTreeMap<ProblemAt, Problem>,
    is_declared: bool,
    /// What is shown has to be shown anew.
    is_changed: bool,
    view: watch::Sender<Arc<RemoteClusters>>,
}

impl Remote {
    /// Makes the controller. The receiver always holds the present state.
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
            slots: BTreeMap::new(),
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

    /// Follows the declarations and passes on what the clusters say, until nobody takes it.
    pub async fn run(self, declarations: Declarations, changes: mpsc::Sender<Vec<Change>>) {
        let (out, declared) = mpsc::channel(BATCHES);
        let (own, allowed) = (self.settings.own.clone(), Allowed::new(self.settings.allowed.clone()));
        let told = async {
            match declarations {
                Declarations::Folder(path) => folder::Folder::new(path, own, allowed).run(out).await,
                Declarations::Secrets(events) => secrets(events, &own, &allowed, out).await,
            }
        };
        tokio::select! {
            () = self.follow(declared, changes) => {}
            // When the declarations end, what they declared stays.
            () = async { told.await; std::future::pending::<()>().await } => {}
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
            // Most batches change nothing that is shown.
            if std::mem::take(&mut self.is_changed) {
                self.show();
            }
        }
    }

    /// Takes in what is declared; gives the removals that follow at once.
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
                    if let Some(slot) = self.slots.get_mut(&cluster) {
                        slot.origin = origin;
                    }
                }
                Action::Stop => {
                    tracing::info!(%cluster, %origin, "remote cluster removed");
                    self.metrics.gone(&cluster);
                    if let Some(slot) = self.slots.remove(&cluster) {
                        self.drop_source(&cluster, slot.serving);
                        self.drop_source(&cluster, slot.coming);
                    }
                    removals.push(Change::RemoveCluster(cluster));
                }
            }
        }
        removals
    }

    /// Starts a source beside the one that serves, if any.
    fn begin(&mut self, cluster: ClusterId, origin: ObjectKey, kubeconfig: Arc<CheckedKubeconfig>) {
        self.number += 1;
        let key: SourceKey = (cluster.clone(), self.number);
        let (sender, receiver) = mpsc::channel(BATCHES);
        let started = (self.start)(StartCluster {
            cluster: cluster.clone(),
            kubeconfig,
            changes: sender,
        });
        let named = key.clone();
        self.starting.push(Box::pin(async move { (named, started.await) }));
        self.batches.insert(key, ReceiverStream::new(receiver));
        let source = Source {
            number: self.number,
            running: None,
            status: SyncStatus::Syncing,
            deadline: (!self.settings.timeout.is_zero()).then(|| Instant::now() + self.settings.timeout),
        };
        tracing::info!(%cluster, %origin, "reading remote cluster");
        let slot = self.slots.entry(cluster.clone()).or_insert_with(|| Slot {
            origin: origin.clone(),
            serving: None,
            coming: None,
            kinds: BTreeSet::new(),
            problem: None,
        });
        slot.origin = origin;
        slot.problem = None;
        let given_up = slot.coming.replace(source);
        self.drop_source(&cluster, given_up);
    }

    fn drop_source(&mut self, cluster: &ClusterId, source: Option<Source>) {
        if let Some(source) = source {
            self.batches.remove(&(cluster.clone(), source.number));
        }
    }

    /// A client was made, or cannot be made from what is declared.
    fn started(&mut self, (cluster, number): &SourceKey, started: Result<RunningCluster, String>) {
        let Some(slot) = self.slots.get_mut(cluster) else {
            return;
        };
        let sources = [&mut slot.coming, &mut slot.serving];
        let Some(source) = sources.into_iter().flatten().find(|source| source.number == *number) else {
            return;
        };
        self.is_changed = true;
        match started {
            Ok(running) => source.running = Some(running),
            Err(message) => {
                let finding = finding(&slot.origin, Some(cluster), "BadKubeconfig", message.clone());
                slot.problem = Some(message);
                let given_up = slot.coming.take();
                self.drop_source(cluster, given_up);
                self.told(&finding);
            }
        }
    }

    /// What a batch of a source comes to. The first of a new source takes the place of all that the old one said.
    fn pass(&mut self, (cluster, number): &SourceKey, mut batch: Vec<Change>) -> Vec<Change> {
        let Some(slot) = self.slots.get_mut(cluster) else {
            return Vec::new();
        };
        let told = kinds(&batch);
        let mut former = None;
        if slot.coming.as_ref().is_some_and(|source| source.number == *number) {
            let unsaid = slot.kinds.difference(&told);
            batch.extend(unsaid.map(|kind| {
                let source = SourceId {
                    cluster: cluster.clone(),
                    kind: *kind,
                };
                Change::Replace(source, Vec::new())
            }));
            let mut synced = slot.coming.take();
            if let Some(source) = &mut synced {
                source.status = SyncStatus::Synced;
                source.deadline = None;
            }
            slot.kinds.clear();
            self.is_changed = true;
            former = std::mem::replace(&mut slot.serving, synced);
            tracing::info!(%cluster, origin = %slot.origin, "remote cluster synced");
        }
        slot.kinds.extend(told);
        self.drop_source(cluster, former);
        batch
    }

    fn deadline(&self) -> Option<Instant> {
        let sources = self.slots.values().filter_map(|slot| slot.coming.as_ref());
        sources.filter_map(|source| source.deadline).min()
    }

    fn time_out(&mut self, now: Instant) {
        for (cluster, slot) in &mut self.slots {
            let Some(source) = &mut slot.coming else { continue };
            if source.deadline.is_some_and(|deadline| deadline <= now) {
                source.deadline = None;
                source.status = SyncStatus::Timeout;
                self.is_changed = true;
                self.metrics.timed_out(cluster);
                tracing::error!(
                    %cluster, origin = %slot.origin, timeout = ?self.settings.timeout,
                    "remote cluster sync timed out, adding it once synced"
                );
            }
        }
    }

    /// Tells problems that did not stand before.
    fn tell(&mut self, problems: BTreeMap<ProblemAt, Problem>) {
        for ((origin, cluster), problem) in &problems {
            let at = (origin.clone(), cluster.clone());
            if self.problems.get(&at) != Some(problem) {
                self.told(&finding(
                    origin,
                    cluster.as_ref(),
                    problem.code,
                    problem.message.clone(),
                ));
            }
        }
        self.problems = problems;
    }

    fn told(&self, finding: &Diagnostic) {
        tracing::error!(code = %finding.code, "{finding}");
        (self.report)(finding);
    }

    /// Publishes what became different.
    fn show(&mut self) {
        let mut clusters = BTreeMap::new();
        for (cluster, slot) in &self.slots {
            let status = match (&slot.coming, &slot.serving) {
                (Some(source), _) | (None, Some(source)) => source.status,
                (None, None) => SyncStatus::Closed,
            };
            self.metrics.status(cluster, status);
            let running = slot.serving.as_ref().and_then(|source| source.running.as_ref());
            let shown = RemoteCluster {
                origin: slot.origin.clone(),
                status,
                problem: slot.problem.clone(),
                client: running.and_then(|running| running.client.clone()),
                source: slot.serving.as_ref().map_or(0, |source| source.number),
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
            // A duplicate is wrong with the other origin, not with the cluster.
            if shown.origin == *origin {
                shown.problem = Some(problem.message.clone());
            }
        }
        let waiting = |slot: &Slot| {
            slot.coming
                .as_ref()
                .is_some_and(|source| source.status == SyncStatus::Syncing)
        };
        let is_ready = self.is_declared && !self.slots.values().any(waiting);
        self.view.send_modify(|view| {
            let ready = view.ready || is_ready;
            *view = Arc::new(RemoteClusters { ready, clusters });
        });
    }
}

/// Turns events of the watch into declarations.
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
