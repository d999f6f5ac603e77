//! Writes statuses of objects that a snapshot decides, while this replica leads.
//!
//! Statuses come back from watches, so an equal status is not written again, and a new leader continues where the
//! previous one ended. A status that another program changes again and again is corrected less and less often: two
//! control planes would otherwise overload the API server. Every write names the version of the object that it was
//! decided for: of two writers, the second one fails, reads what the first one wrote, and finds nothing left to do.
//! Fields are applied (server-side apply) by a field manager of its own, so fields of others stay. Parts that another
//! control plane left are removed by a merge.

pub(super) mod queue;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::{Future, pending},
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use ::kube::core::ApiResource;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use serde_json::{Map, Value, json};
use smol_str::SmolStr;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio::{sync::watch, time::Instant};

use self::queue::Queue;
use super::{
    store::{Store, WriteError, is_older},
    watching::{WatchSet, WatchedNamespaces, Watches},
};
use crate::{
    api::Kind,
    base::ObjectKey,
    environment,
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    model::{
        gateway_api::status::{StatusKey, Written},
        snapshot::MeshSnapshot,
    },
    task,
};

/// Owner of the fields in statuses.
const FIELD_MANAGER: &str = "istiod-status";
/// Concurrent writes.
const MAX_CONCURRENT: usize = 32;

/// Kinds that the API server serves, with the resources to use; `None` while unknown.
pub type ServedKinds = watch::Receiver<Option<BTreeMap<Kind, ApiResource>>>;

/// Statuses that a snapshot decides.
pub(super) trait Statuses: Send {
    /// Takes a snapshot and the present statuses of objects. Returns the objects whose status may have changed.
    fn update(&mut self, mesh: &Arc<MeshSnapshot>, written: Vec<Written>) -> Vec<StatusKey>;

    /// Returns the fields of `status` to apply; `None` if no write is necessary.
    fn fields(&self, key: &StatusKey, observed: &Observed, now: &str) -> Option<Value>;

    /// Returns the fields of `status` to merge before `fields` are applied; `None` if an apply suffices, which removes
    /// only what this field manager owns.
    fn left_over(&self, _key: &StatusKey, _observed: &Observed, _fields: &Value) -> Option<Value> {
        None
    }

    /// Returns true if statuses of other objects depend on the present status of objects of a kind.
    fn depend_on(&self, kind: Kind) -> bool;

    /// Takes a version of an object that the API server has; `None` if the object is gone. `is_first` is true in the
    /// first list of a kind, whose objects may have existed for long.
    fn observe(&mut self, _key: &StatusKey, _observed: Option<&Observed>, _is_first: bool) {}

    /// Returns true if the next write of an object restores what another program has removed, and so is one of a series
    /// of corrections.
    fn is_correction(&self, _key: &StatusKey) -> bool {
        false
    }

    /// Waits for objects whose status may have changed for another reason than a snapshot. Loses nothing if it is
    /// cancelled.
    fn changed(&mut self) -> impl Future<Output = Vec<StatusKey>> + Send {
        pending()
    }
}

/// An object as the API server has it.
pub(super) struct Observed {
    /// `metadata.generation`.
    pub(super) generation: i64,
    /// `status`.
    pub(super) status: Value,
    version: SmolStr,
}

impl Observed {
    /// Returns `metadata.resourceVersion`.
    pub(super) fn version(&self) -> &str {
        &self.version
    }
}

/// An object of a watch.
struct Row {
    namespace: SmolStr,
    name: SmolStr,
    observed: Observed,
}

impl Row {
    fn of(mut object: Object) -> Self {
        let observed = Observed {
            generation: object.metadata.generation.unwrap_or_default(),
            version: object.resource_version().into(),
            status: object.value["status"].take(),
        };
        Self {
            namespace: object.namespace().into(),
            name: object.name().into(),
            observed,
        }
    }
}

/// The object of a write, and its result: the object as it is now.
type WriteResult = (StatusKey, Result<Value, WriteError>);

/// A writer of statuses.
pub(super) struct Writer<S> {
    watches: WatchSet<Kind, Row>,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
    served: ServedKinds,
    only: WatchedNamespaces,
    statuses: S,
    objects: BTreeMap<StatusKey, Observed>,
    /// Kinds whose objects are all known.
    listed: BTreeSet<Kind>,
    /// Changed statuses of objects that others depend on.
    written: Vec<Written>,
    /// Versions of objects whose status a write did not correct, or that the server refuses to change.
    settled: BTreeMap<StatusKey, SmolStr>,
    /// Objects that the server refused to change, with the times of the refusals. Some are tried again together.
    refused: BTreeMap<StatusKey, Instant>,
    /// Time of that attempt.
    refused_until: Option<Instant>,
    /// Objects of the last such attempt. If one is written, all refused objects of its kind are tried again.
    retried: BTreeSet<StatusKey>,
    queue: Queue,
    writing: FuturesUnordered<BoxFuture<'static, WriteResult>>,
}

impl<S: Statuses> Writer<S> {
    /// Returns a writer. `only` has the namespaces of the objects.
    pub(super) fn new(
        watches: Watches,
        mut mesh: watch::Receiver<Arc<MeshSnapshot>>,
        served: ServedKinds,
        only: WatchedNamespaces,
        statuses: S,
    ) -> Self {
        mesh.mark_changed();
        Self {
            watches: WatchSet::new(watches),
            mesh,
            served,
            only,
            statuses,
            objects: BTreeMap::new(),
            listed: BTreeSet::new(),
            written: Vec::new(),
            settled: BTreeMap::new(),
            refused: BTreeMap::new(),
            refused_until: None,
            retried: BTreeSet::new(),
            queue: Queue::default(),
            writing: FuturesUnordered::new(),
        }
    }

    /// Writes until a source ends.
    pub(super) async fn run(mut self) {
        self.served.mark_changed();
        loop {
            let due = self.queue.next_time().filter(|_| self.writing.len() < MAX_CONCURRENT);
            let refused_until = self.refused_until;
            tokio::select! {
                (kind, event) = self.watches.next() => {
                    self.on_event(kind, event);
                    while let Some((kind, event)) = self.watches.try_next() {
                        self.on_event(kind, event);
                    }
                }
                changed = self.served.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.follow();
                }
                changed = self.mesh.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.evaluate();
                }
                keys = self.statuses.changed() => self.offer(keys),
                Some(result) = self.writing.next() => self.on_written(result),
                () = task::until(due) => {}
                () = task::until(refused_until) => self.retry_refused(),
            }
            if !self.written.is_empty() && self.is_complete() {
                self.evaluate();
            }
            self.write();
        }
    }

    /// Watches the kinds that are served.
    fn follow(&mut self) {
        let Some(served) = self.served.borrow_and_update().clone() else {
            return;
        };
        let kinds = self.watches.kinds();
        let gone: Vec<Kind> = kinds.filter(|kind| !served.contains_key(kind)).collect();
        for kind in gone {
            self.close(kind);
        }
        for (kind, resource) in served {
            if self.watches.resource(kind) != Some(&resource) {
                self.close(kind);
                self.open(kind, resource);
            }
        }
    }

    fn close(&mut self, kind: Kind) {
        if self.watches.close(kind) {
            self.listed.remove(&kind);
            let keys: Vec<StatusKey> = self.objects.keys().filter(|key| key.kind == kind).cloned().collect();
            for key in keys {
                self.remove(key);
            }
        }
    }

    fn open(&mut self, kind: Kind, resource: ApiResource) {
        let target = WatchTarget {
            namespace: self.only.target().filter(|_| !kind.is_cluster_scoped()),
            ..WatchTarget::all(resource)
        };
        self.watches.open(kind, target, Row::of);
    }

    fn on_event(&mut self, kind: Kind, event: WatchEvent<Row>) {
        match event {
            WatchEvent::Restarted(all) => {
                let mut gone: BTreeSet<StatusKey> =
                    self.objects.keys().filter(|key| key.kind == kind).cloned().collect();
                for row in all {
                    let key = self.key(kind, row.namespace, row.name);
                    gone.remove(&key);
                    // Versions of a server that was restored from a backup are older, and only a list says so.
                    self.accept(key, row.observed);
                }
                for key in gone {
                    self.remove(key);
                }
                self.listed.insert(kind);
            }
            WatchEvent::Applied(row) => {
                let key = self.key(kind, row.namespace, row.name);
                self.observe(key, row.observed);
            }
            WatchEvent::Deleted(row) => {
                let key = self.key(kind, row.namespace, row.name);
                self.remove(key);
            }
        }
    }

    fn key(&self, kind: Kind, namespace: SmolStr, name: SmolStr) -> StatusKey {
        StatusKey {
            kind,
            object: ObjectKey::new(self.watches.cluster(), namespace, name),
        }
    }

    /// Takes a version of an object, unless a newer one is known from a write.
    fn observe(&mut self, key: StatusKey, observed: Observed) {
        let known = self.objects.get(&key);
        if known.is_none_or(|known| !is_older(&observed.version, &known.version)) {
            self.accept(key, observed);
        }
    }

    /// Takes a version of an object.
    fn accept(&mut self, key: StatusKey, observed: Observed) {
        if !self.only.contains(&key.object.namespace) {
            return;
        }
        let known = self.objects.get(&key);
        if self.statuses.depend_on(key.kind) && known.is_none_or(|known| known.status != observed.status) {
            self.written.push((key.clone(), Some(observed.status.clone())));
        }
        if known.is_some_and(|known| known.generation != observed.generation) {
            self.queue.renew(&key, Instant::now());
        }
        let is_first = !self.listed.contains(&key.kind);
        self.statuses.observe(&key, Some(&observed), is_first);
        self.queue.offer(key.clone(), Instant::now());
        self.objects.insert(key, observed);
    }

    fn remove(&mut self, key: StatusKey) {
        if self.statuses.depend_on(key.kind) {
            self.written.push((key.clone(), None));
        }
        self.statuses.observe(&key, None, false);
        self.objects.remove(&key);
        self.settled.remove(&key);
        self.refused.remove(&key);
        self.queue.forget(&key);
    }

    /// Returns true if all objects that statuses of others depend on are known.
    fn is_complete(&self) -> bool {
        let mut sources = self.watches.kinds().filter(|kind| self.statuses.depend_on(*kind));
        sources.all(|kind| self.listed.contains(&kind))
    }

    /// Brings the statuses up to date. Before the first commit, nothing is known. Present statuses wait for the first
    /// list of each kind: an InferencePool would lose its parents if its routes were not known yet.
    fn evaluate(&mut self) {
        let mesh = self.mesh.borrow_and_update().clone();
        if mesh.revision.0 == 0 {
            return;
        }
        let written = if self.is_complete() {
            std::mem::take(&mut self.written)
        } else {
            Vec::new()
        };
        let changed = task::aside(|| self.statuses.update(&mesh, written));
        self.offer(changed);
    }

    /// Queues objects whose status may have changed.
    fn offer(&mut self, keys: Vec<StatusKey>) {
        let now = Instant::now();
        for key in keys {
            self.settled.remove(&key);
            if !self.statuses.is_correction(&key) {
                self.queue.renew(&key, now);
            }
            self.queue.offer(key, now);
        }
    }

    /// Starts due writes, up to the limit.
    fn write(&mut self) {
        let now = Instant::now();
        let time = timestamp();
        while self.writing.len() < MAX_CONCURRENT {
            let Some(key) = self.queue.pop(now) else { return };
            let Some(write) = self.decide(&key, &time) else {
                self.queue.ended(&key, now);
                continue;
            };
            self.queue.begin(key.clone());
            self.writing.push(
                async move {
                    let written = write.perform(&key.object).await;
                    (key, written)
                }
                .boxed(),
            );
        }
    }

    /// Returns the write of an object, if its status must change.
    fn decide(&self, key: &StatusKey, now: &str) -> Option<Write> {
        let observed = self.objects.get(key)?;
        if self.settled.get(key) == Some(&observed.version) {
            return None;
        }
        let fields = self.statuses.fields(key, observed, now)?;
        let merged = self.statuses.left_over(key, observed, &fields);
        let resource = self.watches.resource(key.kind)?;
        let object = &key.object;
        let mut metadata = json!({"name": object.name, "resourceVersion": observed.version});
        if !object.namespace.is_empty() {
            metadata["namespace"] = object.namespace.as_str().into();
        }
        let applied = json!({
            "apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, "status": fields,
        });
        let store = Store::of(self.watches.client().clone(), resource.clone());
        Some(Write { store, applied, merged })
    }

    fn on_written(&mut self, (key, result): WriteResult) {
        let now = Instant::now();
        let (kind, object) = (key.kind.name(), &key.object);
        match result {
            Ok(value) => {
                tracing::debug!(kind, %object, "status written");
                if self.retried.remove(&key) {
                    self.retry_kind(key.kind);
                }
                let rest = self.queue.next_rest(&key, now);
                if rest > REST {
                    tracing::warn!(kind, %object, ?rest, "status corrected repeatedly, resting");
                }
                let again = self.queue.succeeded_resting(&key, now, rest);
                // A deletion may have been reported before the result.
                if self.objects.contains_key(&key)
                    && let Ok(written) = Object::from_value(value)
                {
                    self.observe(key.clone(), Row::of(written).observed);
                }
                if !again && self.decide(&key, &timestamp()).is_some() {
                    self.settle(key);
                }
            }
            Err(WriteError::NotFound(_)) => {
                self.queue.ended(&key, now);
            }
            // The object has changed, which the watch reports.
            Err(WriteError::Conflict(_)) => self.queue.retry(key, now),
            Err(error @ WriteError::Refused(_)) => {
                tracing::warn!(kind, %object, %error, "failed to write status");
                if !self.queue.ended(&key, now) {
                    self.settle(key.clone());
                    self.refused.insert(key, now);
                    self.refused_until.get_or_insert(now + REFUSED_RETRY);
                }
            }
            Err(error @ WriteError::Failed(_)) => {
                tracing::warn!(kind, %object, %error, "failed to write status");
                self.queue.retry(key, now);
            }
        }
    }

    /// Queues some objects of each kind that the server refused to change, those whose refusal is the oldest in each
    /// namespace: an administrator may have granted the right, or the server had just started and did not know the
    /// roles yet. All of them would be thousands of requests and lines in the log each time, while a role lacks the
    /// right. Those of one namespace alone may be invalid, and be refused again.
    fn retry_refused(&mut self) {
        let refused = self.refused.iter();
        let mut oldest: Vec<(Instant, &StatusKey)> = refused.map(|(key, at)| (*at, key)).collect();
        oldest.sort_unstable();
        let mut counts: BTreeMap<(Kind, &str), usize> = BTreeMap::new();
        let turns = oldest.into_iter().map(|(at, key)| {
            let count = counts.entry((key.kind, key.object.namespace.as_str())).or_default();
            *count += 1;
            (key.kind, *count, at, key)
        });
        let mut turns: Vec<(Kind, usize, Instant, &StatusKey)> = turns.collect();
        turns.sort_unstable();
        let kinds = turns.chunk_by(|(left, ..), (right, ..)| left == right);
        let some = kinds.flat_map(|of_kind| of_kind.iter().take(REFUSED_RETRIES));
        self.retried = some.map(|(.., key)| StatusKey::clone(key)).collect();
        self.refused.retain(|key, _| !self.retried.contains(key));
        self.refused_until = (!self.refused.is_empty()).then(|| Instant::now() + REFUSED_RETRY);
        self.offer(self.retried.iter().cloned().collect());
    }

    /// Queues all objects of a kind that the server refused to change.
    fn retry_kind(&mut self, kind: Kind) {
        let refused = std::mem::take(&mut self.refused).into_iter();
        let (of_kind, others): (BTreeMap<_, _>, BTreeMap<_, _>) = refused.partition(|(key, _)| key.kind == kind);
        self.refused = others;
        self.offer(of_kind.into_keys().collect());
    }

    /// Leaves an object alone until it, or the status that it should have, changes.
    fn settle(&mut self, key: StatusKey) {
        if let Some(observed) = self.objects.get(&key) {
            self.settled.insert(key, observed.version.clone());
        }
    }
}

/// A due write of a status.
struct Write {
    store: Store,
    /// The object to apply, with the version that the status was decided for.
    applied: Value,
    /// The fields of its status to merge before.
    merged: Option<Value>,
}

impl Write {
    /// Writes the status, and returns the object with it.
    async fn perform(self, object: &ObjectKey) -> Result<Value, WriteError> {
        let (mut applied, (namespace, name)) = (self.applied, (&object.namespace, &object.name));
        if let Some(fields) = self.merged {
            let version = &mut applied["metadata"]["resourceVersion"];
            let merge = json!({"metadata": {"resourceVersion": *version}, "status": fields});
            let mut written = self.store.merge_status(namespace, name, &merge).await?;
            *version = written["metadata"]["resourceVersion"].take();
        }
        self.store.apply_status(namespace, name, FIELD_MANAGER, &applied).await
    }
}

/// Returns true if an existing status needs no write. Absent and empty fields are equal; lists of conditions and
/// listeners have no order. Existing fields that are not wanted do not count, unless they are in `fields`.
pub(super) fn is_equal(wanted: &Value, existing: &Value, fields: &[&str]) -> bool {
    let wanted_fields = wanted.as_object().into_iter().flatten().map(|(name, _)| name.as_str());
    let mut all = wanted_fields.chain(fields.iter().copied());
    all.all(|field| ordered(&wanted[field]) == ordered(&existing[field]))
}

/// Returns a value without empty parts, and with conditions and listeners in a fixed order.
fn ordered(value: &Value) -> Value {
    match value {
        Value::Array(values) if values.is_empty() => Value::Null,
        Value::Array(values) => {
            let mut values: Vec<Value> = values.iter().map(ordered).collect();
            let is_condition = |value: &Value| value["lastTransitionTime"].is_string();
            let is_listener = |value: &Value| !value["attachedRoutes"].is_null();
            if values.iter().all(is_condition) {
                values.sort_by_cached_key(|value| value["type"].to_string());
            } else if values.iter().all(is_listener) {
                values.sort_by_cached_key(|value| value["name"].to_string());
            }
            Value::Array(values)
        }
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| (name.clone(), ordered(value)));
            let fields: Map<String, Value> = fields.filter(|(_, value)| !value.is_null()).collect();
            if fields.is_empty() {
                Value::Null
            } else {
                Value::Object(fields)
            }
        }
        other => other.clone(),
    }
}

/// Returns the present time, to the second, as in Kubernetes.
fn timestamp() -> String {
    let now = environment::wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = i64::try_from(now.as_secs()).unwrap_or_default();
    let now = OffsetDateTime::from_unix_timestamp(now).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    now.format(&Rfc3339).unwrap_or_default()
}

/// Delay between two writes of one object, in which changes are collected.
const REST: Duration = Duration::from_millis(250);
/// First delay of a retry; doubled each time.
const RETRY: Duration = Duration::from_millis(200);
/// Writes of a series that corrects a status, before the rest between them grows.
const FREE_WRITES: u32 = 5;
/// Longest rest between such writes.
const MAX_REST: Duration = Duration::from_mins(5);
/// Time after such a rest after which the next write is the first of a new series.
const CALM: Duration = Duration::from_mins(1);
/// Longest delay of a retry.
const MAX_RETRY: Duration = Duration::from_secs(30);
/// Delay before writes that the server refused are tried again.
const REFUSED_RETRY: Duration = Duration::from_mins(5);
/// Number of writes of a kind that are tried again then, unless one of them succeeds.
const REFUSED_RETRIES: usize = 8;

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;
    use crate::{
        base::ClusterId,
        kube::health::WatchMetrics,
        model::{Installation, World},
        status::{fake_api::FakeApi, store::resource},
    };

    /// Statuses that all need this write, or none.
    struct Fixed {
        fields: Option<Value>,
        is_correction: bool,
    }

    impl Statuses for Fixed {
        fn update(&mut self, _: &Arc<MeshSnapshot>, _: Vec<Written>) -> Vec<StatusKey> {
            Vec::new()
        }

        fn fields(&self, _: &StatusKey, _: &Observed, _: &str) -> Option<Value> {
            self.fields.clone()
        }

        fn depend_on(&self, _: Kind) -> bool {
            false
        }

        fn is_correction(&self, _: &StatusKey) -> bool {
            self.is_correction
        }
    }

    fn writer(fields: Option<Value>) -> Writer<Fixed> {
        let watches = Watches {
            client: FakeApi::default().client(),
            cluster: ClusterId::new("c"),
            metrics: WatchMetrics::new(&Registry::new()).expect("unused names"),
        };
        let mesh = watch::channel(World::new(Installation::default()).snapshot()).1;
        let served = watch::channel(None).1;
        let statuses = Fixed {
            fields,
            is_correction: false,
        };
        Writer::new(watches, mesh, served, WatchedNamespaces::default(), statuses)
    }

    fn row(version: &str) -> Row {
        named("a", "x", version)
    }

    fn named(namespace: &str, name: &str, version: &str) -> Row {
        let metadata = json!({"namespace": namespace, "name": name, "resourceVersion": version});
        Row::of(Object::from_value(json!({"metadata": metadata})).expect("an object"))
    }

    #[tokio::test]
    async fn a_refused_status_is_written_again_later() {
        let mut writer = writer(Some(json!({"parents": []})));
        let routes = resource("gateway.networking.k8s.io", "v1", "HTTPRoute", "httproutes");
        writer.open(Kind::HttpRoute, routes);
        writer.on_event(Kind::HttpRoute, WatchEvent::Restarted(vec![row("7")]));
        let key = writer.key(Kind::HttpRoute, "a".into(), "x".into());
        assert!(writer.decide(&key, "now").is_some());
        writer.on_written((key.clone(), Err(WriteError::Refused("no rights".to_owned()))));
        assert!(writer.decide(&key, "now").is_none(), "it is not repeated at once");
        assert!(writer.refused_until.is_some());
        writer.retry_refused();
        assert!(writer.decide(&key, "now").is_some());
        assert!(writer.refused_until.is_none());
    }

    #[tokio::test]
    async fn some_of_many_refused_statuses_are_written_again_until_one_succeeds() {
        let mut writer = writer(Some(json!({"parents": []})));
        let routes = resource("gateway.networking.k8s.io", "v1", "HTTPRoute", "httproutes");
        writer.open(Kind::HttpRoute, routes);
        let count = 3 * REFUSED_RETRIES;
        let rows = (0..count).map(|number| named("a", &number.to_string(), "7")).collect();
        writer.on_event(Kind::HttpRoute, WatchEvent::Restarted(rows));
        let keys: Vec<StatusKey> = writer.objects.keys().cloned().collect();
        for key in &keys {
            writer.on_written((key.clone(), Err(WriteError::Refused("no rights".to_owned()))));
        }
        let due = |writer: &Writer<Fixed>| keys.iter().filter(|key| writer.decide(key, "now").is_some()).count();
        assert_eq!(due(&writer), 0);
        writer.retry_refused();
        assert_eq!(due(&writer), REFUSED_RETRIES);
        assert!(writer.refused_until.is_some(), "others follow later");
        let retried = writer.retried.first().cloned().expect("an attempt");
        writer.on_written((retried, Ok(Value::Null)));
        assert_eq!(due(&writer), count - 1);
        assert!(writer.refused.is_empty());
    }

    #[tokio::test]
    async fn refused_statuses_of_one_namespace_do_not_delay_those_of_others() {
        let mut writer = writer(None);
        let count = 3 * REFUSED_RETRIES;
        let mut keys: Vec<StatusKey> = (0..count)
            .map(|number| writer.key(Kind::HttpRoute, "a".into(), number.to_string().into()))
            .collect();
        let last = writer.key(Kind::HttpRoute, "b".into(), "x".into());
        keys.push(last.clone());
        for key in keys {
            writer.on_written((key, Err(WriteError::Refused("invalid".to_owned()))));
        }
        writer.retry_refused();
        assert!(writer.retried.contains(&last));
        assert_eq!(writer.retried.len(), REFUSED_RETRIES);
    }

    #[tokio::test]
    async fn corrections_do_not_end_the_rest_of_a_contested_status() {
        let mut writer = writer(None);
        let key = writer.key(Kind::HttpRoute, "a".into(), "x".into());
        let now = Instant::now();
        for _ in 0..FREE_WRITES + 4 {
            let rest = writer.queue.next_rest(&key, now);
            writer.queue.succeeded_resting(&key, now, rest);
        }
        writer.statuses.is_correction = true;
        writer.offer(vec![key.clone()]);
        assert_eq!(writer.queue.next_time(), Some(now + REST * 16));
        writer.statuses.is_correction = false;
        writer.offer(vec![key]);
        let next = writer.queue.next_time().expect("it waits");
        assert!(next <= Instant::now() + REST);
    }

    #[tokio::test]
    async fn a_list_replaces_newer_versions() {
        let mut writer = writer(None);
        let mut version_after = |event: WatchEvent<Row>| {
            writer.on_event(Kind::HttpRoute, event);
            let key = writer.key(Kind::HttpRoute, "a".into(), "x".into());
            writer.objects[&key].version.to_string()
        };
        assert_eq!(version_after(WatchEvent::Restarted(vec![row("7")])), "7");
        assert_eq!(
            version_after(WatchEvent::Applied(row("6"))),
            "7",
            "the result of a write was first"
        );
        assert_eq!(
            version_after(WatchEvent::Restarted(vec![row("5")])),
            "5",
            "the API server was restored from a backup"
        );
    }

    #[tokio::test]
    async fn fields_that_an_apply_would_leave_are_merged_before() {
        let api = FakeApi::default();
        let path = "/apis/gateway.networking.k8s.io/v1/namespaces/gw/gateways/x";
        api.put(path, json!({"metadata": {"name": "x"}}));
        let group = "gateway.networking.k8s.io";
        let store = Store::new(api.client(), group, "v1", "Gateway", "gateways");
        let object = ObjectKey::new(&ClusterId::new("c"), "gw", "x");
        for (merged, requests) in [(None, 1), (Some(json!({"listeners": []})), 3)] {
            let write = Write {
                store: store.clone(),
                applied: json!({"metadata": {"name": "x", "resourceVersion": "1"}, "status": {}}),
                merged,
            };
            write.perform(&object).await.expect("an object");
            assert_eq!(api.requests(&format!("{path}/status")), requests);
        }
    }

    #[test]
    fn order_and_empty_fields_do_not_matter() {
        let condition = |kind: &str| json!({"type": kind, "lastTransitionTime": "t"});
        let listener = |name: &str| json!({"name": name, "attachedRoutes": 0, "supportedKinds": []});
        let wanted =
            json!({"conditions": [condition("A"), condition("B")], "listeners": [listener("x"), listener("y")]});
        let mut existing = json!({"conditions": [condition("B"), condition("A")], "other": 1,
            "listeners": [{"name": "y", "attachedRoutes": 0}, listener("x")]});
        assert!(is_equal(&wanted, &existing, &["addresses"]));
        existing["addresses"] = json!(["1.2.3.4"]);
        assert!(!is_equal(&wanted, &existing, &["addresses"]));
        assert!(is_equal(&json!({"parents": []}), &Value::Null, &[]));
        let addresses = |existing: Value| json!({"loadBalancer": existing});
        assert!(is_equal(&addresses(json!({"ingress": []})), &addresses(json!({})), &[]));
        assert!(is_equal(&addresses(json!({"ingress": []})), &Value::Null, &[]));
        // Entries of routes have an order.
        let parents = |names: [&str; 2]| json!({"parents": names.map(|name| json!({"controllerName": name}))});
        assert!(!is_equal(&parents(["a", "b"]), &parents(["b", "a"]), &[]));
    }
}
