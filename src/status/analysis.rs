//! Analysis of the config cluster, as `istiod analyze` does it, with the results in the statuses of objects
//! (`PILOT_ENABLE_ANALYSIS`): `status.validationMessages`.
//!
//! The leader alone reads what analyzers need; other replicas hold nothing of it. Statuses come back from the watches,
//! so a new leader knows what is written already, and removes messages that its predecessor left.
//!
//! Parity (pkg/config/analysis/incluster/controller.go).

mod inputs;
mod message;

use std::{
    collections::BTreeSet,
    future::pending,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use serde_json::Value;
use tokio::{
    sync::watch,
    task::{JoinError, JoinHandle, spawn_blocking},
    time::Instant,
};

use self::{
    inputs::{AnalysisInputs, Entry, Write},
    message::Found,
};
use super::{
    leader::{Election, Lock},
    store::{Store, WriteError, resource},
    watching::{WatchSet, WatchedNamespaces, Watches},
};
use crate::{
    analyze::{Level, Mesh, Message, Scope, Type, analyze},
    api::Kind,
    base::SmolStr,
    environment,
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    model::snapshot::MeshSnapshot,
    task,
};

/// Time without a change after which an analysis begins, at most.
///
/// Parity (pkg/config/analysis/incluster/controller.go).
const QUIET: Duration = Duration::from_secs(1);
/// Delay of a retry of failed writes.
const RETRY: Duration = Duration::from_secs(5);
/// Rest after an analysis, as a multiple of its CPU time: a tenth of one core is used at most.
const REST: u32 = 9;
/// Concurrent writes.
const MAX_CONCURRENT: usize = 8;
/// Messages that are logged after an analysis.
const MAX_LOGGED: usize = 100;

/// Options of the analysis.
#[derive(Clone, Debug)]
pub struct AnalysisOptions {
    /// `PILOT_ANALYSIS_INTERVAL`: the longest delay of an analysis after a change.
    pub interval: Duration,
    /// Revision of this control plane; empty for all.
    pub revision: SmolStr,
    /// Tags of the revision; `None` while unknown.
    pub tags: watch::Receiver<Option<BTreeSet<SmolStr>>>,
    /// The namespaces that are read.
    pub only: WatchedNamespaces,
}

/// Analyzes while this replica leads.
pub async fn run(
    election: &Election,
    watches: Watches,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
    options: AnalysisOptions,
) {
    election
        .run(Lock::ANALYSIS, |token| {
            let analysis = Analysis::new(election, watches.clone(), mesh.clone(), options.clone());
            async move {
                token.run_until_cancelled(Box::pin(analysis.run())).await;
            }
        })
        .await;
}

/// The result of a write, with the object as it is now.
type Written = (Write, Result<Value, WriteError>);

/// The messages of an analysis, `None` if it panicked, and its CPU time.
type Analyzed = (Option<Vec<Message>>, Duration);

/// The times of the first and the last change that no analysis has read.
#[derive(Clone, Copy)]
struct Changed {
    first: Instant,
    last: Instant,
}

struct Analysis {
    watches: WatchSet<Type, Entry>,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
    options: AnalysisOptions,
    istio_namespace: String,
    inputs: AnalysisInputs,
    changed: Option<Changed>,
    /// No analysis begins before.
    earliest: Instant,
    /// When the snapshot is looked at again.
    observe_at: Option<Instant>,
    /// When statuses are compared again after a failed write.
    retry_at: Option<Instant>,
    analyzing: Option<JoinHandle<Analyzed>>,
    found: Found,
    reported: BTreeSet<Message>,
    queue: Vec<Write>,
    writing: FuturesUnordered<BoxFuture<'static, Written>>,
}

impl Analysis {
    fn new(
        election: &Election,
        watches: Watches,
        mut mesh: watch::Receiver<Arc<MeshSnapshot>>,
        mut options: AnalysisOptions,
    ) -> Self {
        mesh.mark_changed();
        options.tags.mark_changed();
        Self {
            watches: WatchSet::new(watches),
            mesh,
            inputs: AnalysisInputs::new(options.revision.clone()),
            options,
            istio_namespace: election.namespace.to_string(),
            changed: None,
            earliest: Instant::now(),
            observe_at: None,
            retry_at: None,
            analyzing: None,
            found: Found::default(),
            reported: BTreeSet::new(),
            queue: Vec::new(),
            writing: FuturesUnordered::new(),
        }
    }

    async fn run(mut self) {
        for kind in Type::all().filter(|kind| !is_custom(*kind)) {
            self.open(kind, kind.served_versions().first().copied().unwrap_or("v1"));
        }
        loop {
            let due = self.due();
            tokio::select! {
                (kind, event) = self.watches.next() => {
                    self.on_event(kind, event);
                    while let Some((kind, event)) = self.watches.try_next() {
                        self.on_event(kind, event);
                    }
                }
                changed = self.mesh.changed(), if self.observe_at.is_none() => {
                    if changed.is_err() {
                        return;
                    }
                    self.observe();
                }
                changed = self.options.tags.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.observe_tags();
                }
                () = task::until(self.observe_at) => self.observe_at = None,
                () = task::until(due) => self.begin(),
                analyzed = ended(&mut self.analyzing) => self.on_analyzed(analyzed),
                Some(written) = self.writing.next() => self.on_written(written),
                () = task::until(self.retry_at) => {
                    self.retry_at = None;
                    self.queue = self.inputs.due(&self.found);
                }
            }
            self.write();
        }
    }

    /// Returns when the next analysis begins; `None` if nothing has changed, something is unknown or one runs.
    fn due(&self) -> Option<Instant> {
        let changed = self
            .changed
            .filter(|_| self.analyzing.is_none() && self.inputs.are_complete())?;
        let interval = self.options.interval;
        let is_quiet = changed.last + QUIET.min(interval);
        Some(is_quiet.min(changed.first + interval).max(self.earliest))
    }

    fn has_changed(&mut self) {
        let now = Instant::now();
        let first = self.changed.map_or(now, |changed| changed.first);
        self.changed = Some(Changed { first, last: now });
    }

    /// Looks at the snapshot, at most once per interval.
    fn observe(&mut self) {
        let mesh = self.mesh.borrow_and_update().clone();
        if self.inputs.observe(&mesh) {
            self.has_changed();
        }
        self.observe_at = (mesh.revision.0 > 0).then(|| Instant::now() + self.options.interval);
    }

    fn observe_tags(&mut self) {
        let tags = self.options.tags.borrow_and_update().clone();
        if tags.is_some_and(|tags| self.inputs.set_tags(tags)) {
            self.has_changed();
        }
    }

    fn on_event(&mut self, kind: Type, event: WatchEvent<Entry>) {
        if !self.inputs.apply_event(kind, event) {
            return;
        }
        self.has_changed();
        if kind == Type::Definition {
            self.follow_definitions();
        }
    }

    /// Watches the custom kinds that the cluster serves.
    fn follow_definitions(&mut self) {
        for kind in Type::all().filter(|kind| is_custom(*kind)) {
            let served = self.inputs.served_version(kind);
            let watched = self.watches.resource(kind).map(|resource| resource.version.as_str());
            if served.is_some() && watched == served {
                continue;
            }
            if self.watches.close(kind) {
                self.inputs.forget(kind);
            }
            match served {
                Some(version) => self.open(kind, version),
                None => {
                    if self.inputs.is_absent(kind) {
                        self.has_changed();
                    }
                }
            }
        }
    }

    fn open(&mut self, kind: Type, version: &str) {
        let target = self.target(kind, version);
        // ConfigMaps are those of the control plane.
        let is_config_map = kind == Kind::ConfigMap.into();
        let only = if is_config_map {
            WatchedNamespaces::default()
        } else {
            self.options.only.clone()
        };
        let convert = move |object| Entry::of(kind, object).within(&only);
        self.watches.open(kind, target, convert);
    }

    fn target(&self, kind: Type, version: &str) -> WatchTarget {
        let is_config_map = kind == Kind::ConfigMap.into();
        let namespace = if is_config_map {
            Some(self.istio_namespace.clone())
        } else {
            self.options.only.target().filter(|_| !kind.is_cluster_scoped())
        };
        WatchTarget {
            namespace,
            fields: kind.field_selector().map(str::to_owned),
            metadata_only: kind == Kind::Namespace.into() || kind == Kind::Node.into(),
            ..WatchTarget::all(resource(kind.group(), version, kind.name(), kind.plural()))
        }
    }

    /// Begins an analysis on a thread that serves no one.
    fn begin(&mut self) {
        let now = environment::wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        let Some((objects, settings)) = self.inputs.analysis(&self.istio_namespace, now) else {
            return;
        };
        self.changed = None;
        self.analyzing = Some(spawn_blocking(move || {
            let before = environment::thread_time();
            let analysis = || analyze(&Mesh::new(objects, settings), &Scope::default());
            let messages = catch_unwind(AssertUnwindSafe(analysis)).ok();
            (messages, environment::thread_time().saturating_sub(before))
        }));
    }

    fn on_analyzed(&mut self, analyzed: Result<Analyzed, JoinError>) {
        self.analyzing = None;
        let (messages, used) = match analyzed {
            Ok(analyzed) => analyzed,
            Err(error) => return tracing::error!(%error, "analysis failed"),
        };
        self.earliest = Instant::now() + REST * used;
        let Some(messages) = messages else {
            return tracing::error!("analysis panicked, previous messages kept; this is a bug in istiod");
        };
        self.found = Found::new(&messages, &self.inputs.exceeded());
        self.queue = self.inputs.due(&self.found);
        self.report(messages);
    }

    /// Logs messages that are new, and those that are resolved.
    fn report(&mut self, messages: Vec<Message>) {
        let messages: BTreeSet<Message> = messages.into_iter().collect();
        let new: Vec<&Message> = messages.difference(&self.reported).collect();
        for message in new.iter().take(MAX_LOGGED) {
            let (code, object, text) = (message.code, &message.resource, &message.text);
            match message.level {
                Level::Error => tracing::error!(code, %object, text, "configuration problem found"),
                Level::Warning => tracing::warn!(code, %object, text, "configuration problem found"),
                Level::Info => tracing::debug!(code, %object, text, "configuration problem found"),
            }
        }
        if let Some(omitted) = new.len().checked_sub(MAX_LOGGED).filter(|omitted| *omitted > 0) {
            tracing::warn!(omitted, "more configuration problems found");
        }
        for message in self.reported.difference(&messages).take(MAX_LOGGED) {
            tracing::info!(code = message.code, object = %message.resource, "configuration problem resolved");
        }
        self.reported = messages;
    }

    /// Starts due writes, up to the limit.
    fn write(&mut self) {
        while self.writing.len() < MAX_CONCURRENT {
            let Some(write) = self.queue.pop() else { return };
            let Some(resource) = self.watches.resource(write.kind) else {
                continue;
            };
            let store = Store::of(self.watches.client().clone(), resource.clone());
            self.writing.push(
                async move {
                    let (namespace, name) = (&write.key.namespace, &write.key.name);
                    let written = store.merge_status(namespace, name, &write.fields).await;
                    (write, written)
                }
                .boxed(),
            );
        }
    }

    fn on_written(&mut self, (write, written): Written) {
        let (kind, namespace, name) = (write.kind, &write.key.namespace, &write.key.name);
        match written {
            Ok(object) => {
                tracing::debug!(kind = kind.name(), %namespace, %name, "validation messages written");
                // The next comparison must not find the status of before.
                if let Ok(object) = Object::from_value(object) {
                    let entry = Entry::of(kind, object);
                    if self.inputs.take_written(kind, entry) {
                        self.has_changed();
                    }
                }
            }
            Err(WriteError::NotFound(_)) => {}
            // The object has changed, and the watch says so.
            Err(WriteError::Conflict(_)) => self.retry(),
            Err(error) => {
                tracing::warn!(kind = kind.name(), %namespace, %name, %error, "failed to write validation messages");
                self.retry();
            }
        }
    }

    fn retry(&mut self) {
        self.retry_at = Some(Instant::now() + RETRY);
    }
}

/// Returns true for kinds that CustomResourceDefinitions define.
fn is_custom(kind: Type) -> bool {
    matches!(kind, Type::Known(kind) if kind.is_custom())
}

async fn ended<T>(job: &mut Option<JoinHandle<T>>) -> Result<T, JoinError> {
    match job {
        Some(job) => job.await,
        None => pending().await,
    }
}
