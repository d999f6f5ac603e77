//! One cluster: all its watches and its discovery filter.
//!
//! Each watch parses objects in its own task and drops them. One task for the cluster keeps the rows in a discovery
//! filter and sends changes of visible objects. It sends nothing until every input is known: the first list of every
//! kind, the served custom kinds and the filters. All of that is one batch, so a partially read cluster is never
//! visible.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use ::kube::{Client, core::ApiResource};
use futures::{
    FutureExt, StreamExt,
    stream::{self, BoxStream},
};
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};
use tokio_stream::{StreamMap, wrappers::ReceiverStream};

use super::{
    context::IngestContext,
    crd::{self, CustomKind, Served},
    defect,
    diagnostics::ActiveDiagnostics,
    discovery_filter::{DiscoveryFilter, FilterOutput, Filters, WatchedObject},
    kinds::{Role, Rules, is_stored},
    source::{Readiness, Source},
};
use crate::{
    api::{Kind, document::parse_object, invalid_route::InvalidRoute, label::REVISION},
    base::{ClusterId, ObjectKey, Shared, SmolStr, Version},
    kube::{
        Object,
        health::WatchHealth,
        watch::{WatchEvent, watch_as},
    },
    model::change::Batch,
};

/// The queue length of one watch, in events.
const EVENTS: usize = 64;
/// The largest number of events handled as one batch.
const TOGETHER: usize = 1_000;
/// The delay before a watch that has ended is started again.
const RESTART_DELAY: Duration = Duration::from_millis(500);
/// The delay of the first warning about missing inputs; it doubles with each warning.
const SYNC_WARNING_DELAY: Duration = Duration::from_secs(10);
/// The longest delay between two such warnings.
const MAX_SYNC_WARNING_DELAY: Duration = Duration::from_mins(10);

/// A cluster to read.
pub struct ClusterSettings {
    /// Id.
    pub id: ClusterId,
    /// Client of its API server.
    pub client: Client,
    /// Role.
    pub role: Role,
    /// Filters of its objects; `None` while unknown.
    pub filters: watch::Receiver<Option<Filters>>,
}

/// Synchronisation state of a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyncState {
    /// Nothing was sent yet.
    #[default]
    Syncing,
    /// The complete state was sent; changes follow.
    Synced,
}

/// The source of one cluster's objects.
pub struct ClusterSource {
    settings: ClusterSettings,
    shared: Arc<IngestContext>,
    state: watch::Sender<SyncState>,
}

impl ClusterSource {
    /// Returns the source.
    pub fn new(settings: ClusterSettings, shared: &Arc<IngestContext>) -> Self {
        Self {
            settings,
            shared: shared.clone(),
            state: watch::Sender::default(),
        }
    }
}

impl Source for ClusterSource {
    fn name(&self) -> &'static str {
        "cluster"
    }

    fn readiness(&self) -> Readiness {
        let mut state = self.state.subscribe();
        Readiness::Synced(Box::pin(async move {
            state.wait_for(|state| *state == SyncState::Synced).await.is_ok()
        }))
    }

    /// Without the config cluster there is no mesh.
    fn is_vital(&self) -> bool {
        self.settings.role == Role::Config
    }

    async fn run(self, changes: mpsc::Sender<Batch>) {
        Cluster::new(self, changes).run().await;
    }
}

/// The name of a watch: its kind, and its namespace unless it has all.
type WatchKey = (Kind, Option<SmolStr>);

/// The events of a watch, and `None` after its end.
type Events = BoxStream<'static, Option<WatchEvent<WatchedObject>>>;

/// Returns the events of a watch. Its end is reported after a delay: at shutdown it means nothing, and a watch that
/// ends again and again must not overload the API server.
fn events_of(receiver: mpsc::Receiver<WatchEvent<WatchedObject>>) -> Events {
    let ended = async {
        sleep(RESTART_DELAY).await;
        None
    };
    ReceiverStream::new(receiver)
        .map(Some)
        .chain(stream::once(ended))
        .boxed()
}

/// A running watch.
struct Watching {
    resource: ApiResource,
    health: Arc<WatchHealth>,
    /// True once the objects are known, or reading them was refused.
    listed: bool,
    /// True while reading the objects is refused, so that they are unknown.
    is_refused: bool,
}

struct Cluster {
    settings: ClusterSettings,
    shared: Arc<IngestContext>,
    /// Receiver of the changes.
    changes: mpsc::Sender<Batch>,
    /// State. The batch that completes a cluster is sent before the state changes.
    state: watch::Sender<SyncState>,
    /// All kinds that may be read.
    kinds: BTreeSet<Kind>,
    filter: DiscoveryFilter,
    diagnostics: ActiveDiagnostics<(Kind, ObjectKey)>,
    /// The newest resource version that each watch has received.
    received: BTreeMap<WatchKey, u64>,
    /// The kinds of which something was received and not passed on.
    unreported: BTreeSet<Kind>,
    watching: BTreeMap<WatchKey, Watching>,
    events: StreamMap<WatchKey, Events>,
    served: watch::Receiver<Option<Served>>,
    /// Kept open if there are no custom kinds, whose set then never changes.
    _served_for_ever: Option<watch::Sender<Option<Served>>>,
    has_filters: bool,
    /// True if the served kinds are known, and their watches are started.
    has_served: bool,
    synced: bool,
    sync_warning_delay: Duration,
}

enum Step {
    Events(Vec<(WatchKey, Option<WatchEvent<WatchedObject>>)>),
    Served,
    Filters,
    Late,
    Nothing,
}

impl Cluster {
    fn new(source: ClusterSource, changes: mpsc::Sender<Batch>) -> Self {
        let ClusterSource {
            settings,
            shared,
            state,
        } = source;
        let kinds = shared.rules.kinds(settings.role);
        let custom_kinds: Vec<CustomKind> = kinds
            .iter()
            .filter(|kind| kind.is_custom())
            .map(|kind| custom_kind(&shared.rules, *kind))
            .collect();
        let (served_out, served) = watch::channel(custom_kinds.is_empty().then(Served::new));
        let mut served_for_ever = None;
        if custom_kinds.is_empty() {
            served_for_ever = Some(served_out);
        } else {
            let (id, client) = (settings.id.clone(), settings.client.clone());
            let following = crd::follow(id, client, custom_kinds, shared.clone(), served_out);
            shared.environment.tasks.spawn_until_shutdown("definitions", following);
        }
        Self {
            filter: DiscoveryFilter::new(settings.id.clone(), shared.rules.revision.clone()),
            diagnostics: ActiveDiagnostics::new(shared.report.clone()),
            received: BTreeMap::new(),
            unreported: BTreeSet::new(),
            watching: BTreeMap::new(),
            events: StreamMap::new(),
            has_filters: false,
            has_served: false,
            synced: false,
            sync_warning_delay: SYNC_WARNING_DELAY,
            served,
            _served_for_ever: served_for_ever,
            kinds,
            changes,
            state,
            settings,
            shared,
        }
    }

    async fn run(mut self) {
        for kind in self.kinds.clone() {
            if !kind.is_custom() {
                self.watch(kind, &self.shared.rules.resource(kind));
            }
        }
        self.update_filters(&mut FilterOutput::default());
        self.update_served(&mut FilterOutput::default());
        loop {
            let mut output = FilterOutput::default();
            self.restart_ended_watches();
            match self.next().await {
                Step::Events(events) => self.apply_events(events, &mut output),
                Step::Served => self.update_served(&mut output),
                Step::Filters => self.update_filters(&mut output),
                Step::Late => self.warn_missing_inputs(),
                Step::Nothing => return,
            }
            if !self.synced {
                if !self.is_complete() {
                    continue;
                }
                // Unknown is not empty: of a refused kind, nothing is sent.
                let known = self.kinds.iter().copied().filter(|kind| !self.is_refused(*kind));
                output = self.filter.everything(known);
            }
            for (kind, key, findings) in output.findings {
                self.diagnostics.set((kind, key), findings);
            }
            if !output.changes.is_empty() && self.changes.send(output.changes).await.is_err() {
                return;
            }
            for kind in std::mem::take(&mut self.unreported) {
                let of_kind = self
                    .received
                    .iter()
                    .filter(|((watched_kind, _), _)| *watched_kind == kind);
                let newest = of_kind.map(|(_, version)| *version).max();
                self.shared
                    .report
                    .seen(&self.settings.id, kind, newest.unwrap_or_default());
            }
            if !self.synced {
                self.synced = true;
                tracing::info!(cluster = %self.settings.id, "cluster synced");
                self.state.send_replace(SyncState::Synced);
            }
        }
    }

    async fn next(&mut self) -> Step {
        tokio::select! {
            () = sleep(self.sync_warning_delay), if !self.synced => Step::Late,
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

    /// Returns true if every input is known.
    fn is_complete(&self) -> bool {
        self.has_filters && self.has_served && self.watching.values().all(|watching| watching.listed)
    }

    /// Returns true if no object of a kind may be read.
    fn is_refused(&self, kind: Kind) -> bool {
        let of_kind = self
            .watching
            .iter()
            .filter(|((watched_kind, _), _)| *watched_kind == kind);
        let mut watches = of_kind.map(|(_, watching)| watching).peekable();
        watches.peek().is_some() && watches.all(|watching| watching.is_refused)
    }

    /// Restarts watches that ended. A watch ends only by a panic, which its task has logged.
    fn restart_ended_watches(&mut self) {
        let dead = self.watching.iter().filter(|(key, _)| !self.events.contains_key(*key));
        let dead: Vec<_> = dead
            .map(|(key, watching)| (key.clone(), watching.resource.clone()))
            .collect();
        for (key, resource) in dead {
            self.watch_namespace(key, resource);
        }
    }

    fn warn_missing_inputs(&mut self) {
        self.sync_warning_delay = (self.sync_warning_delay * 2).min(MAX_SYNC_WARNING_DELAY);
        let mut missing = Vec::new();
        missing.extend((!self.has_filters).then_some("mesh config and revision tags"));
        missing.extend((!self.has_served).then_some("CustomResourceDefinitions"));
        let unlisted = self.watching.iter().filter(|(_, watching)| !watching.listed);
        missing.extend(unlisted.map(|(_, watching)| watching.resource.plural.as_str()));
        tracing::warn!(cluster = %self.settings.id, missing = missing.join(", "), "cluster not synced yet");
    }

    /// Starts the watches of a kind.
    fn watch(&mut self, kind: Kind, resource: &ApiResource) {
        for namespace in self.shared.rules.namespaces(kind) {
            self.watch_namespace((kind, namespace), resource.clone());
        }
    }

    fn watch_namespace(&mut self, key: WatchKey, resource: ApiResource) {
        let (kind, namespace) = &key;
        let kind = *kind;
        let mut target = self.shared.rules.target(kind, resource.clone(), namespace.as_ref());
        // Parity (pilot/pkg/credentials/kube/multicluster.go): Secrets have a controller of their own. Services and
        // endpoints of a remote cluster count without it.
        target.may_be_forbidden |= kind == Kind::Secret && self.settings.role == Role::Remote;
        let health_of = if is_stored(kind) {
            WatchHealth::of_stored
        } else {
            WatchHealth::new
        };
        let health = health_of(&self.settings.id, &target.name(), &self.shared.watch_metrics);
        let (sender, receiver) = mpsc::channel(EVENTS);
        let cluster = self.settings.id.clone();
        let convert = move |object| item(kind, &cluster, object);
        let watching = watch_as(self.settings.client.clone(), target, health.clone(), convert, sender);
        self.shared.environment.tasks.spawn_until_shutdown("watch", watching);
        // Replacing the receiver ends the previous watch.
        self.events.insert(key.clone(), events_of(receiver));
        let watching = Watching {
            resource,
            health,
            listed: false,
            is_refused: false,
        };
        self.watching.insert(key, watching);
    }

    fn apply_events(&mut self, events: Vec<(WatchKey, Option<WatchEvent<WatchedObject>>)>, output: &mut FilterOutput) {
        for (key, event) in events {
            match event {
                Some(event) => self.apply_event(&key, event, output),
                None => drop(self.events.remove(&key)),
            }
        }
    }

    fn apply_event(&mut self, watch: &WatchKey, event: WatchEvent<WatchedObject>, output: &mut FilterOutput) {
        let (kind, namespace) = (watch.0, watch.1.as_deref());
        let newest = match &event {
            WatchEvent::Restarted(items) => items.iter().map(|item| item.version).max(),
            WatchEvent::Applied(item) | WatchEvent::Deleted(item) => Some(item.version),
        };
        let newest = newest.unwrap_or_default();
        let received = self.received.entry(watch.clone()).or_default();
        let is_list = matches!(event, WatchEvent::Restarted(_));
        // The list is older than what came before it if the API server was restored from a backup. Otherwise, the
        // newest object may be one that was removed.
        let went_back = is_list
            && self
                .watching
                .get(watch)
                .is_some_and(|watching| watching.health.is_before(*received));
        *received = if went_back { newest } else { newest.max(*received) };
        self.unreported.insert(kind);
        let events = match event {
            WatchEvent::Restarted(items) => {
                let mut was_refused = false;
                if let Some(watching) = self.watching.get_mut(watch) {
                    // A complete list may already follow in the queue.
                    let is_first = !std::mem::replace(&mut watching.listed, true);
                    let is_refused = is_first && watching.health.was_refused();
                    was_refused = std::mem::replace(&mut watching.is_refused, is_refused);
                    if watching.is_refused {
                        return;
                    }
                }
                let mut listed = FilterOutput::default();
                let events = self.filter.replace(kind, namespace, items, &mut listed);
                if was_refused {
                    // Replaces the objects of the kind that the receiver has, such as those of a stored state.
                    listed.changes = self.filter.everything([kind]).changes;
                }
                output.changes.extend(listed.changes);
                output.findings.extend(listed.findings);
                events
            }
            WatchEvent::Applied(item) => vec![self.filter.apply(item, output)],
            WatchEvent::Deleted(item) => self.filter.delete(kind, &item.key, output).into_iter().collect(),
        };
        self.shared.event_metrics.count(kind, &events);
    }

    fn update_filters(&mut self, output: &mut FilterOutput) {
        let filters = self.settings.filters.borrow_and_update().clone();
        if let Some(filters) = filters {
            self.has_filters = true;
            self.filter.set_filters(filters, output);
        }
    }

    /// Starts the watches of newly served kinds. Ends those of kinds that are no longer served and removes their
    /// objects.
    fn update_served(&mut self, output: &mut FilterOutput) {
        let Some(served) = self.served.borrow_and_update().clone() else {
            return;
        };
        self.has_served = true;
        let watched: BTreeSet<Kind> = self.watching.keys().map(|(kind, _)| *kind).collect();
        let gone = watched
            .into_iter()
            .filter(|kind| kind.is_custom() && !served.contains_key(kind));
        for kind in gone {
            tracing::info!(cluster = %self.settings.id, kind = kind.name(), "kind no longer served");
            for namespace in self.shared.rules.namespaces(kind) {
                let key = (kind, namespace);
                self.watching.remove(&key);
                self.events.remove(&key);
            }
            let events = self.filter.replace(kind, None, Vec::new(), output);
            self.shared.event_metrics.count(kind, &events);
        }
        for (kind, resource) in served {
            let watched = self
                .watching
                .iter()
                .find(|((watched_kind, _), _)| *watched_kind == kind);
            if watched.is_none_or(|(_, watching)| watching.resource != resource) {
                self.watch(kind, &resource);
            }
        }
    }
}

impl Drop for Cluster {
    /// Resolves the diagnostics of a remote cluster, which may be removed. The config cluster stays until shutdown.
    fn drop(&mut self) {
        if self.settings.role == Role::Remote {
            self.diagnostics.clear();
        }
    }
}

fn custom_kind(rules: &Rules, kind: Kind) -> CustomKind {
    let (group, versions) = rules.group_and_versions(kind);
    CustomKind { kind, group, versions }
}

/// Annotation that `kubectl apply` keeps for itself.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Parses an object.
pub(super) fn item(kind: Kind, cluster: &ClusterId, object: Object) -> WatchedObject {
    let metadata = &object.metadata;
    let labels = metadata.labels.as_ref();
    let namespace = if kind.is_cluster_scoped() {
        ""
    } else {
        object.namespace()
    };
    let key = ObjectKey::new(cluster, namespace, object.name());
    let revision = labels.and_then(|labels| labels.get(REVISION)).map(SmolStr::new);
    let version = metadata
        .resource_version
        .as_deref()
        .unwrap_or_default()
        .parse()
        .unwrap_or_default();
    let mut value = object.value;
    if let Some(metadata) = value["metadata"].as_object_mut() {
        if let Some(annotations) = metadata.get_mut("annotations").and_then(|all| all.as_object_mut()) {
            annotations.remove(LAST_APPLIED);
        }
        fit_version(kind, metadata);
    }
    let parsed = defect::parsed(kind, &key, || parse_object(cluster, kind, &value));
    let (row, findings) = (parsed.rows.into_iter().next(), parsed.diagnostics);
    let invalid = if row.is_none() {
        InvalidRoute::of(kind, cluster, &value, &findings).map(Shared::new)
    } else {
        None
    };
    let findings = if kind == Kind::MeshConfig {
        // The config cluster has one of the same name.
        let place = SmolStr::from(format!("cluster {cluster}, ConfigMap {key}, key mesh"));
        findings.into_iter().map(|finding| finding.at(&place)).collect()
    } else {
        findings
    };
    WatchedObject {
        kind,
        key,
        revision,
        row,
        invalid,
        findings,
        version,
    }
}

/// Removes the resource version of an object, or replaces it by one that its status does not affect.
///
/// Every heartbeat of a Node and every status write changes the version; rows with the same content must stay equal.
/// Exceptions: a WorkloadGroup that was deleted and recreated within one debounce interval is detected by its version
/// alone, and the entries of its machines were deleted with it. Proxies with Wasm plugins receive a version, and their
/// agents may load the module again whenever it changes: with the settings or the metadata of the object, but not with
/// the status, which this control plane writes.
fn fit_version(kind: Kind, metadata: &mut serde_json::Map<String, serde_json::Value>) {
    match kind {
        Kind::WasmPlugin | Kind::TrafficExtension if metadata.contains_key("generation") => {
            let fields = ["uid", "generation", "labels", "annotations"];
            let text = |field: &str| metadata.get(field).map(ToString::to_string).unwrap_or_default();
            let version = Version::of(fields.map(text).concat().as_bytes());
            metadata.insert("resourceVersion".to_owned(), version.to_string().into());
        }
        Kind::WasmPlugin | Kind::TrafficExtension | Kind::WorkloadGroup => {}
        _ => _ = metadata.remove("resourceVersion"),
    }
}

#[cfg(test)]
mod tests;
