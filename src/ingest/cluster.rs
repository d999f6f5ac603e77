//! One cluster: all its watches, what they tell, and what of it counts.
//!
//! Each watch parses objects in its own task and drops them; one task for the cluster keeps the rows behind a gate and
//! passes on what changes. Nothing is passed on before everything is known once: every kind's first list, which custom
//! kinds there are, and the filters. Then it is one batch. So a cluster that is half read looks like a cluster that is
//! not read at all, never like one with half of its services.

use std::{
    collections::{BTreeMap, BTreeSet},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use ::kube::{Client, core::ApiResource};
use futures::{FutureExt, StreamExt};
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};
use tokio_stream::{StreamMap, wrappers::ReceiverStream};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    crd::{self, Served, Wanted},
    findings::{Report, Standing},
    gate::{Filters, Gate, Item, Passed},
    kinds::{Role, Rules},
    metrics::EventMetrics,
};
use crate::{
    api::{Diagnostic, FieldError, Kind, Severity, document::parse_object},
    base::{ClusterId, ObjectKey, SmolStr},
    environment::Environment,
    kube::{
        Object,
        health::{WatchHealth, WatchMetrics},
        watch::{WatchEvent, watch_as},
    },
    model::change::Change,
};

/// Events of one watch that wait at most.
const EVENTS: usize = 64;
/// Events that are taken together at most.
const TOGETHER: usize = 1_000;
/// How long it takes until it is told what the first batch waits for; twice as long each further time.
const TOLD: Duration = Duration::from_secs(10);
/// The longest such time: a cluster that cannot be reached is old news.
const LATEST_TOLD: Duration = Duration::from_mins(10);

/// What all clusters share.
pub struct Shared {
    /// Tasks and shutdown.
    pub environment: Arc<Environment>,
    /// What is read.
    pub rules: Rules,
    /// Told of what is wrong with objects.
    pub report: Report,
    /// Counts what happens to objects.
    pub event_metrics: EventMetrics,
    /// Counts what happens to watches.
    pub watch_metrics: WatchMetrics,
}

impl Shared {
    /// Registers the metrics of events.
    pub fn new(
        environment: &Arc<Environment>,
        rules: Rules,
        report: Report,
        watch_metrics: WatchMetrics,
    ) -> Result<Self, prometheus::Error> {
        Ok(Self {
            event_metrics: EventMetrics::new(&environment.registry)?,
            watch_metrics,
            environment: environment.clone(),
            rules,
            report,
        })
    }
}

/// A cluster to read.
pub struct ClusterSettings {
    /// Its id.
    pub id: ClusterId,
    /// Its API server.
    pub client: Client,
    /// What it is to us.
    pub role: Role,
    /// What decides which of its objects count; none: not known yet.
    pub filters: watch::Receiver<Option<Filters>>,
    /// Where its changes go.
    pub changes: mpsc::Sender<Vec<Change>>,
}

/// How far a cluster is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyncState {
    /// Nothing has been passed on.
    #[default]
    Syncing,
    /// Everything has been passed on once; changes follow.
    Synced,
}

/// A cluster that is read. Dropping it ends the reading.
pub struct ClusterHandle {
    /// How far it is. The batch that makes a cluster synced is sent before this says so.
    pub state: watch::Receiver<SyncState>,
    done: watch::Receiver<bool>,
    end: DropGuard,
}

impl ClusterHandle {
    /// Completes when nothing comes of the cluster any more, for whatever reason.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut done = self.done.clone();
        async move {
            // An error says that the task is gone without having said so: it panicked.
            let _ = done.wait_for(|done| *done).await;
        }
    }

    /// Ends the reading, and waits until nothing more can come of it. What was passed on stays.
    pub async fn end(self) {
        let ended = self.ended();
        drop(self.end);
        ended.await;
    }
}

/// Begins to read a cluster.
pub fn start(settings: ClusterSettings, shared: &Arc<Shared>) -> ClusterHandle {
    let (state_out, state) = watch::channel(SyncState::Syncing);
    let (done_out, done) = watch::channel(false);
    let token = CancellationToken::new();
    let cluster = Cluster::new(settings, shared.clone(), state_out);
    let cancelled = token.clone();
    shared.environment.tasks.spawn_until_shutdown("cluster", async move {
        tokio::select! {
            () = cancelled.cancelled() => {}
            () = cluster.run() => {}
        }
        done_out.send_replace(true);
    });
    ClusterHandle {
        state,
        done,
        end: token.drop_guard(),
    }
}

/// A running watch of a kind.
struct Watching {
    resource: ApiResource,
    listed: bool,
}

struct Cluster {
    settings: ClusterSettings,
    shared: Arc<Shared>,
    state: watch::Sender<SyncState>,
    /// Every kind that may be passed on.
    kinds: BTreeSet<Kind>,
    gate: Gate,
    standing: Standing<(Kind, ObjectKey)>,
    watching: BTreeMap<Kind, Watching>,
    events: StreamMap<Kind, ReceiverStream<WatchEvent<Item>>>,
    served: watch::Receiver<Option<Served>>,
    /// Where there are no custom kinds to follow, what is served never changes.
    _served_for_ever: Option<watch::Sender<Option<Served>>>,
    has_filters: bool,
    synced: bool,
    told_after: Duration,
}

enum Step {
    Events(Vec<(Kind, WatchEvent<Item>)>),
    Served,
    Filters,
    Late,
    Nothing,
}

impl Cluster {
    fn new(settings: ClusterSettings, shared: Arc<Shared>, state: watch::Sender<SyncState>) -> Self {
        let kinds = shared.rules.kinds(settings.role);
        let wanted: Vec<Wanted> = kinds
            .iter()
            .filter(|kind| kind.is_custom())
            .map(|kind| wanted(&shared.rules, *kind))
            .collect();
        let (served_out, served) = watch::channel(wanted.is_empty().then(Served::new));
        let mut served_for_ever = None;
        if wanted.is_empty() {
            served_for_ever = Some(served_out);
        } else {
            let (id, client) = (settings.id.clone(), settings.client.clone());
            let following = crd::follow(id, client, wanted, shared.clone(), served_out);
            shared.environment.tasks.spawn_until_shutdown("definitions", following);
        }
        Self {
            gate: Gate::new(settings.id.clone(), shared.rules.revision.clone()),
            standing: Standing::new(shared.report.clone()),
            watching: BTreeMap::new(),
            events: StreamMap::new(),
            has_filters: false,
            synced: false,
            told_after: TOLD,
            served,
            _served_for_ever: served_for_ever,
            kinds,
            state,
            settings,
            shared,
        }
    }

    async fn run(mut self) {
        for kind in self.kinds.clone() {
            if !kind.is_custom() {
                self.watch(kind, self.shared.rules.resource(kind));
            }
        }
        self.take_filters(&mut Passed::default());
        self.take_served(&mut Passed::default());
        loop {
            let mut passed = Passed::default();
            self.revive();
            match self.next().await {
                Step::Events(events) => {
                    for (kind, event) in events {
                        self.take(kind, event, &mut passed);
                    }
                }
                Step::Served => self.take_served(&mut passed),
                Step::Filters => self.take_filters(&mut passed),
                Step::Late => self.tell_what_is_missing(),
                Step::Nothing => return,
            }
            if !self.synced {
                if !self.is_complete() {
                    continue;
                }
                passed = self.gate.everything(self.kinds.iter().copied());
            }
            for (kind, key, findings) in passed.findings {
                self.standing.set((kind, key), findings);
            }
            if !passed.changes.is_empty() && self.settings.changes.send(passed.changes).await.is_err() {
                return;
            }
            if !self.synced {
                self.synced = true;
                tracing::info!(cluster = %self.settings.id, "the cluster is synced");
                self.state.send_replace(SyncState::Synced);
            }
        }
    }

    async fn next(&mut self) -> Step {
        tokio::select! {
            () = sleep(self.told_after), if !self.synced => Step::Late,
            changed = self.served.changed() => if changed.is_ok() { Step::Served } else { Step::Nothing },
            changed = self.settings.filters.changed() => if changed.is_ok() { Step::Filters } else { Step::Nothing },
            Some(first) = self.events.next() => {
                let mut events = vec![first];
                while events.len() < TOGETHER
                    && let Some(Some(next)) = self.events.next().now_or_never()
                {
                    events.push(next);
                }
                Step::Events(events)
            }
        }
    }

    /// True when nothing is unknown.
    fn is_complete(&self) -> bool {
        let custom = self.served.borrow().is_some();
        self.has_filters && custom && self.watching.values().all(|watching| watching.listed)
    }

    /// A watch ends only by a panic, which its task has told. It begins anew, so that its kind does not stand still.
    fn revive(&mut self) {
        let dead = self.watching.iter().filter(|(kind, _)| !self.events.contains_key(kind));
        let dead: Vec<_> = dead
            .map(|(kind, watching)| (*kind, watching.resource.clone()))
            .collect();
        for (kind, resource) in dead {
            self.watch(kind, resource);
        }
    }

    fn tell_what_is_missing(&mut self) {
        self.told_after = (self.told_after * 2).min(LATEST_TOLD);
        let mut missing = Vec::new();
        missing.extend((!self.has_filters).then_some("mesh config and revision tags"));
        missing.extend(self.served.borrow().is_none().then_some("CustomResourceDefinitions"));
        let unlisted = self.watching.iter().filter(|(_, watching)| !watching.listed);
        missing.extend(unlisted.map(|(kind, _)| kind.plural()));
        tracing::warn!(cluster = %self.settings.id, "the cluster is not synced yet, missing: {}", missing.join(", "));
    }

    fn watch(&mut self, kind: Kind, resource: ApiResource) {
        let target = self.shared.rules.target(kind, resource.clone());
        let health = WatchHealth::new(&self.settings.id, &target.name(), &self.shared.watch_metrics);
        let (sender, receiver) = mpsc::channel(EVENTS);
        let cluster = self.settings.id.clone();
        let convert = move |object| item(kind, &cluster, object);
        let watching = watch_as(self.settings.client.clone(), target, health, convert, sender);
        self.shared.environment.tasks.spawn_until_shutdown("watch", watching);
        // The receiver of a watch that was there before goes, and with it that watch.
        self.events.insert(kind, ReceiverStream::new(receiver));
        let watching = Watching {
            resource,
            listed: false,
        };
        self.watching.insert(kind, watching);
    }

    fn take(&mut self, kind: Kind, event: WatchEvent<Item>, passed: &mut Passed) {
        let effects = match event {
            WatchEvent::Restarted(items) => {
                if let Some(watching) = self.watching.get_mut(&kind) {
                    watching.listed = true;
                }
                self.gate.replace(kind, items, passed)
            }
            WatchEvent::Applied(item) => vec![self.gate.apply(item, passed)],
            WatchEvent::Deleted(item) => self.gate.delete(kind, &item.key, passed).into_iter().collect(),
        };
        self.shared.event_metrics.count(kind, &effects);
    }

    fn take_filters(&mut self, passed: &mut Passed) {
        let filters = self.settings.filters.borrow_and_update().clone();
        if let Some(filters) = filters {
            self.has_filters = true;
            self.gate.set_filters(filters, passed);
        }
    }

    /// Begins the watches of kinds that appeared, and ends those of kinds that are gone, with all that they had.
    fn take_served(&mut self, passed: &mut Passed) {
        let Some(served) = self.served.borrow_and_update().clone() else {
            return;
        };
        let gone = self
            .watching
            .keys()
            .copied()
            .filter(|kind| kind.is_custom() && !served.contains_key(kind));
        for kind in gone.collect::<Vec<_>>() {
            tracing::info!(cluster = %self.settings.id, kind = kind.name(), "the kind is not served any longer");
            self.watching.remove(&kind);
            self.events.remove(&kind);
            let effects = self.gate.replace(kind, Vec::new(), passed);
            self.shared.event_metrics.count(kind, &effects);
        }
        for (kind, resource) in served {
            if self
                .watching
                .get(&kind)
                .is_none_or(|watching| watching.resource != resource)
            {
                self.watch(kind, resource);
            }
        }
    }
}

fn wanted(rules: &Rules, kind: Kind) -> Wanted {
    let (group, versions) = rules.group_and_versions(kind);
    Wanted { kind, group, versions }
}

/// What `kubectl apply` keeps in an object for itself.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Makes a row of an object.
fn item(kind: Kind, cluster: &ClusterId, object: Object) -> Item {
    let metadata = &object.metadata;
    let labels = metadata.labels.as_ref();
    let namespace = if kind.is_cluster_scoped() {
        ""
    } else {
        object.namespace()
    };
    let key = ObjectKey::new(cluster, namespace, object.name());
    let revision = labels.and_then(|labels| labels.get("istio.io/rev")).map(SmolStr::new);
    let mut value = object.value;
    if let Some(metadata) = value["metadata"].as_object_mut() {
        if let Some(annotations) = metadata.get_mut("annotations").and_then(|all| all.as_object_mut()) {
            annotations.remove(LAST_APPLIED);
        }
        if !version_counts(kind) {
            metadata.remove("resourceVersion");
        }
    }
    // A parser that panics on one object is a defect, but no reason to lose the watch.
    let parsed = catch_unwind(AssertUnwindSafe(|| parse_object(cluster, kind, &value)));
    let (row, findings) = match parsed {
        Ok(parsed) => (parsed.rows.into_iter().next(), parsed.diagnostics),
        Err(_) => {
            let finding = FieldError {
                field: String::new(),
                message: "reading it failed; this is a defect of istiod".to_owned(),
            };
            (
                None,
                vec![Diagnostic::of_object(
                    kind,
                    key.clone(),
                    Severity::Error,
                    "Defect",
                    finding,
                )],
            )
        }
    };
    Item {
        kind,
        key,
        revision,
        row,
        findings,
    }
}

/// True if two objects of the kind that differ in nothing but their version are two rows.
///
/// Every heartbeat of a Node and every write of a status gives a new version; rows that say the same must be the same.
/// But proxies with Wasm plugins are told the version, and a WorkloadGroup that was deleted and made again within one
/// debounced change is seen by its version alone: the entries of its machines went with the old one.
fn version_counts(kind: Kind) -> bool {
    matches!(kind, Kind::WasmPlugin | Kind::TrafficExtension | Kind::WorkloadGroup)
}

#[cfg(test)]
mod tests;
