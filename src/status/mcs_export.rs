//! Exports every Service of a cluster that is not cluster-local, by a ServiceExport owned by the Service
//! (`ENABLE_MCS_AUTO_EXPORT`). Only new Services matter, because a ServiceExport has no content, and Services whose
//! namespace the discovery selectors begin to select.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures::{StreamExt, stream};
use serde_json::{Value, json};
use smol_str::SmolStr;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    discovery::is_selected,
    leader::{Election, Lock},
    object_status::queue::Queue,
    store::{self, Store, WriteError},
    watching::{WatchedNamespaces, Watches},
};
use crate::{
    api::Kind,
    base::{ClusterId, Namespace, ObjectKey},
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    model::{gateway_api::status::StatusKey, snapshot::MeshSnapshot},
    table::Cx,
    task,
};

/// Concurrent writes.
const MAX_CONCURRENT: usize = 8;
/// Writes after which events are read again.
const BATCH: usize = 64;

/// A Service, as far as its export depends on it.
struct Service {
    namespace: SmolStr,
    name: SmolStr,
    uid: SmolStr,
}

/// Exports in one cluster while this replica leads there. `group` and `version` are `MCS_API_GROUP` and
/// `MCS_API_VERSION`, and `only` has the namespaces of the Services.
pub async fn run(
    election: &Election,
    watches: Watches,
    group: &str,
    version: &str,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
    only: WatchedNamespaces,
) {
    let exports = Store::new(
        election.client.clone(),
        group,
        version,
        "ServiceExport",
        "serviceexports",
    );
    election
        .run(Lock::SERVICE_EXPORT, |token| {
            let exporter = Exporter::new(exports.clone(), watches.cluster.clone(), mesh.clone(), only.clone());
            export(exporter, watches.clone(), token)
        })
        .await;
}

async fn export(mut exporter: Exporter, watches: Watches, token: CancellationToken) {
    // Before the mesh config is known, no Service would seem to be cluster-local.
    tokio::select! {
        () = token.cancelled() => return,
        first = exporter.mesh.wait_for(|mesh| mesh.revision.0 > 0) => if first.is_err() { return },
    }
    let target = WatchTarget {
        namespace: exporter.only.target(),
        metadata_only: true,
        ..WatchTarget::all(store::resource("", "v1", "Service", "services"))
    };
    let (services, events) = watches.open(target, service);
    tokio::select! {
        () = token.cancelled() => {}
        () = services => {}
        () = exporter.run(events) => {}
    }
}

fn service(object: Object) -> Service {
    let metadata = object.metadata;
    Service {
        namespace: metadata.namespace.unwrap_or_default().into(),
        name: metadata.name.unwrap_or_default().into(),
        uid: metadata.uid.unwrap_or_default().into(),
    }
}

/// The Services of a cluster, and which of them are exported.
struct Exporter {
    exports: Store,
    cluster: ClusterId,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
    only: WatchedNamespaces,
    /// Uids of all Services.
    services: BTreeMap<StatusKey, SmolStr>,
    /// Uids of the Services that are exported.
    exported: BTreeMap<StatusKey, SmolStr>,
    /// Services of namespaces that the discovery selectors exclude.
    excluded: BTreeMap<Namespace, BTreeSet<StatusKey>>,
    /// Services that may have to be exported.
    queue: Queue,
}

impl Exporter {
    fn new(
        exports: Store,
        cluster: ClusterId,
        mesh: watch::Receiver<Arc<MeshSnapshot>>,
        only: WatchedNamespaces,
    ) -> Self {
        Self {
            exports,
            cluster,
            mesh,
            only,
            services: BTreeMap::new(),
            exported: BTreeMap::new(),
            excluded: BTreeMap::new(),
            queue: Queue::default(),
        }
    }

    async fn run(mut self, mut events: mpsc::Receiver<WatchEvent<Service>>) {
        loop {
            let due = self.queue.next_time();
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => self.apply_event(event),
                    None => return,
                },
                changed = self.mesh.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.select();
                }
                () = task::until(due) => {}
            }
            while let Ok(event) = events.try_recv() {
                self.apply_event(event);
            }
            self.export(Instant::now()).await;
        }
    }

    fn apply_event(&mut self, event: WatchEvent<Service>) {
        match event {
            WatchEvent::Restarted(all) => {
                let mut gone = std::mem::take(&mut self.services);
                for service in all {
                    gone.remove(&self.put(service));
                }
                for key in gone.into_keys() {
                    self.forget(&key);
                }
            }
            WatchEvent::Applied(service) => {
                self.put(service);
            }
            WatchEvent::Deleted(service) => {
                let key = self.key(&service.namespace, service.name);
                self.services.remove(&key);
                self.forget(&key);
            }
        }
    }

    fn key(&self, namespace: &str, name: SmolStr) -> StatusKey {
        StatusKey {
            kind: Kind::Service,
            object: ObjectKey::new(&self.cluster, namespace, name),
        }
    }

    /// Puts a Service and returns its key.
    fn put(&mut self, Service { namespace, name, uid }: Service) -> StatusKey {
        let key = self.key(&namespace, name);
        if self.only.contains(&namespace) && self.exported.get(&key) != Some(&uid) {
            self.queue.offer(key.clone(), Instant::now());
        }
        self.services.insert(key.clone(), uid);
        key
    }

    /// Forgets what is known of a Service that no longer exists.
    fn forget(&mut self, key: &StatusKey) {
        self.exported.remove(key);
        self.queue.forget(key);
        if let Some(excluded) = self.excluded.get_mut(&key.object.namespace) {
            excluded.remove(key);
        }
    }

    /// Offers the Services of namespaces that are no longer excluded.
    fn select(&mut self) {
        let mesh = self.mesh.borrow_and_update().clone();
        let now = Instant::now();
        let (cluster, queue) = (&self.cluster, &mut self.queue);
        self.excluded.retain(|namespace, services| {
            let is_excluded = !is_selected(&mesh, cluster, namespace);
            if !is_excluded {
                for key in std::mem::take(services) {
                    queue.offer(key, now);
                }
            }
            is_excluded
        });
    }

    /// Exports Services that are due, up to the limit of a batch.
    async fn export(&mut self, now: Instant) {
        let mesh = self.mesh.borrow().clone();
        let mut due = Vec::new();
        while due.len() < BATCH
            && let Some(key) = self.queue.pop(now)
        {
            let uid = self.services.get(&key).cloned();
            let is_excluded = !is_selected(&mesh, &self.cluster, &key.object.namespace);
            match uid.filter(|_| !is_excluded && !is_cluster_local(&mesh, &key.object)) {
                Some(uid) => {
                    self.queue.begin(key.clone());
                    due.push((key, uid));
                }
                None => {
                    self.queue.ended(&key, now);
                    if is_excluded {
                        let excluded = self.excluded.entry(key.object.namespace.clone());
                        excluded.or_default().insert(key);
                    }
                }
            }
        }
        let exports = &self.exports;
        let created: Vec<(StatusKey, SmolStr, Result<(), WriteError>)> = stream::iter(due)
            .map(|(key, uid)| async move {
                let created = create(exports, &key.object, &uid).await;
                (key, uid, created)
            })
            .buffer_unordered(MAX_CONCURRENT)
            .collect()
            .await;
        for (key, uid, created) in created {
            self.on_created(key, uid, created, now);
        }
    }

    fn on_created(&mut self, key: StatusKey, uid: SmolStr, created: Result<(), WriteError>, now: Instant) {
        let (namespace, name) = (&key.object.namespace, &key.object.name);
        match created {
            Ok(()) => {
                self.queue.succeeded(&key, now);
                self.exported.insert(key, uid);
            }
            Err(WriteError::NotFound(error)) => {
                tracing::warn!(
                    error,
                    "Services cannot be exported; hint: is the CRD of ServiceExports installed?"
                );
                self.queue.ended(&key, now);
            }
            // Kubernetes deletes the ServiceExport of the earlier Service.
            Err(WriteError::Conflict(_)) => self.queue.retry(key, now),
            Err(error) => {
                // Once for each series of failures.
                if self.queue.failures(&key) == 0 {
                    tracing::warn!(%namespace, %name, %error, "failed to export Service");
                }
                self.queue.retry(key, now);
            }
        }
    }
}

/// Creates the ServiceExport of a Service. It is a conflict if that of an earlier Service of this name still exists.
async fn create(exports: &Store, service: &ObjectKey, uid: &str) -> Result<(), WriteError> {
    let (namespace, name) = (service.namespace.as_str(), service.name.as_str());
    let object = json!({
        "apiVersion": exports.resource().api_version,
        "kind": "ServiceExport",
        "metadata": {
            "name": name,
            "namespace": namespace,
            // It is deleted with its Service.
            "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": name, "uid": uid}],
        },
    });
    match exports.create(namespace, &object).await {
        Err(WriteError::Conflict(error)) => {
            let found = exports.metadata(namespace, name).await?;
            match found.filter(|found| !is_left_over(found, uid)) {
                Some(_) => Ok(()),
                None => Err(WriteError::Conflict(error)),
            }
        }
        created => created.map(|_| ()),
    }
}

/// Returns true if Services own a ServiceExport with this metadata, and none of them has this uid: Kubernetes deletes
/// it.
fn is_left_over(metadata: &Value, uid: &str) -> bool {
    let owners = metadata["ownerReferences"].as_array().into_iter().flatten();
    let mut services = owners.filter(|owner| owner["kind"] == "Service").peekable();
    services.peek().is_some() && services.all(|owner| owner["uid"] != uid)
}

fn is_cluster_local(mesh: &MeshSnapshot, service: &ObjectKey) -> bool {
    let ObjectKey { namespace, name, .. } = service;
    let host = format!("{name}.{namespace}.svc.{}", mesh.installation.domain);
    mesh.is_cluster_local(&Cx::untracked(), &host)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::document,
        model::{Change, Installation, World, fixture},
        status::fake_api::FakeApi,
    };

    const EXPORT: &str = "/apis/multicluster.x-k8s.io/v1alpha1/namespaces/app/serviceexports/web";

    /// A mesh that selects namespaces with the label `env: x`, and one namespace with these labels.
    fn mesh(labels: &Value) -> Arc<MeshSnapshot> {
        let installation = Installation::default();
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "app", "labels": labels}});
        let selectors = "{discoverySelectors: [{matchLabels: {env: x}}]}";
        let mut rows = fixture::folder(&installation, &[("mesh.yaml", selectors)]);
        rows.extend(document::parse(&installation.cluster, &namespace).rows);
        let mut world = World::new(installation);
        world.commit(rows.into_iter().map(Change::Upsert).collect());
        world.snapshot()
    }

    fn exporter(api: &FakeApi, mesh: Arc<MeshSnapshot>) -> (Exporter, watch::Sender<Arc<MeshSnapshot>>) {
        let group = "multicluster.x-k8s.io";
        let exports = Store::new(api.client(), group, "v1alpha1", "ServiceExport", "serviceexports");
        let cluster = mesh.installation.cluster.clone();
        let (sender, mesh) = watch::channel(mesh);
        let only = WatchedNamespaces::new(["app".into()].into());
        (Exporter::new(exports, cluster, mesh, only), sender)
    }

    /// Returns the Service `web` of a namespace.
    fn web(namespace: &str, uid: &str) -> Service {
        Service {
            namespace: namespace.into(),
            name: "web".into(),
            uid: uid.into(),
        }
    }

    fn applied(uid: &str) -> WatchEvent<Service> {
        WatchEvent::Applied(web("app", uid))
    }

    impl Exporter {
        /// Exports what is due next, and returns the uid of the owner of the ServiceExport.
        async fn attempt(&mut self, api: &FakeApi) -> Option<Value> {
            let time = self.queue.next_time().expect("a Service to export");
            self.export(time).await;
            let found = api.get(EXPORT)?;
            Some(found["metadata"]["ownerReferences"][0]["uid"].clone())
        }
    }

    #[tokio::test]
    async fn a_service_that_was_created_again_waits_for_the_end_of_its_old_export() {
        let api = FakeApi::default();
        let (mut exporter, _mesh) = exporter(&api, mesh(&json!({"env": "x"})));
        exporter.apply_event(applied("old"));
        assert_eq!(exporter.attempt(&api).await, Some(json!("old")));
        assert_eq!(exporter.queue.next_time(), None);
        exporter.apply_event(WatchEvent::Deleted(web("app", "old")));
        exporter.apply_event(applied("new"));
        for _ in 0..10 {
            assert_eq!(exporter.attempt(&api).await, Some(json!("old")));
        }
        api.delete(EXPORT);
        assert_eq!(exporter.attempt(&api).await, Some(json!("new")));
        assert_eq!(exporter.queue.next_time(), None);
        // An export without an owner is that of a user.
        exporter.apply_event(WatchEvent::Restarted(vec![]));
        api.put(EXPORT, json!({"metadata": {"name": "web"}}));
        exporter.apply_event(applied("newer"));
        assert_eq!(exporter.attempt(&api).await, Some(Value::Null));
        assert_eq!(exporter.queue.next_time(), None);
    }

    #[tokio::test]
    async fn a_failed_export_is_tried_again_until_it_succeeds() {
        let api = FakeApi::default();
        let (mut exporter, _mesh) = exporter(&api, mesh(&json!({"env": "x"})));
        exporter.apply_event(WatchEvent::Applied(web("other", "u")));
        assert_eq!(exporter.queue.next_time(), None, "it is of another namespace");
        exporter.apply_event(applied("u"));
        api.fail(10);
        for _ in 0..10 {
            assert_eq!(exporter.attempt(&api).await, None);
        }
        assert_eq!(exporter.attempt(&api).await, Some(json!("u")));
        assert_eq!(exporter.queue.next_time(), None);
    }

    #[tokio::test]
    async fn services_of_excluded_namespaces_are_not_exported() {
        let api = FakeApi::default();
        let (mut exporter, sender) = exporter(&api, mesh(&json!({})));
        exporter.apply_event(applied("u"));
        assert_eq!(exporter.attempt(&api).await, None);
        exporter.select();
        assert_eq!(exporter.queue.next_time(), None);
        sender.send_replace(mesh(&json!({"env": "x"})));
        exporter.select();
        assert_eq!(exporter.attempt(&api).await, Some(json!("u")));
    }
}
