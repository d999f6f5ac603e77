//! Shadow Services of InferencePools that routes use (`ENABLE_GATEWAY_API_INFERENCE_EXTENSION`): headless Services of
//! the pools' pods, whose labels name the endpoint pickers.
//!
//! The leader of the revision applies them, and repairs them. It begins with the first pool that a route uses. A
//! Service without the label of such Services is not changed. Kubernetes deletes a Service with its pool.
//!
//! Parity (pilot/pkg/config/kube/gateway/inferencepool_collection.go): the Services and the field manager are Istio's,
//! but there every replica writes.

use std::{collections::BTreeMap, sync::Arc};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use serde_json::{Value, json};
use smol_str::SmolStr;
use tokio::{sync::watch, time::Instant};
use xxhash_rust::xxh3::xxh3_64;

use super::{
    leader::{Election, Lock},
    object_status::queue::Queue,
    owned_object::{Owner, fingerprint},
    store::{WriteError, resource},
    watching::{WatchSet, WatchedNamespaces, Watches},
};
use crate::{
    api::Kind,
    base::{ClusterId, ObjectKey},
    inject::gateway::{GatewayObject, ObjectKind},
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    model::{
        gateway_api::{inference_pool::POOL_LABEL, status::StatusKey, used_pool::UsedPool},
        snapshot::MeshSnapshot,
    },
    table::Cx,
    task,
};

/// Name of the lock of a revision, without the revision.
const LOCK: &str = "istio-gateway-inferencepool";
/// Field manager.
const MANAGER: &str = "istio.io/inference-pool-controller";
/// Number of a Service's first port; the following ones count up. Nothing listens there.
const FIRST_PORT: usize = 54321;
/// Concurrent writers.
const MAX_CONCURRENT: usize = 8;

/// Inputs of the controller. Cheap to clone.
#[derive(Clone)]
pub struct Inputs {
    /// Watches in the config cluster.
    pub watches: Watches,
    /// The mesh.
    pub mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// The namespaces that are read.
    pub only: WatchedNamespaces,
}

/// Keeps the Services while this replica leads.
pub async fn run(election: &Election, inputs: Inputs) {
    let lock = Lock::of_revision(LOCK, &election.revision);
    election
        .run(lock, |token| {
            let controller = Controller::new(inputs.clone());
            async move {
                token.run_until_cancelled(Box::pin(controller.run())).await;
            }
        })
        .await;
}

/// A pool or a Service, as a watch reports it.
struct Seen {
    object: ObjectKey,
    /// The pool.
    pool: ObjectKey,
    uid: SmolStr,
    fingerprint: u64,
}

impl Seen {
    fn pool(cluster: &ClusterId, object: Object) -> Self {
        let key = ObjectKey::new(cluster, object.namespace(), object.name());
        Self {
            pool: key.clone(),
            object: key,
            uid: object.metadata.uid.unwrap_or_default().into(),
            fingerprint: 0,
        }
    }

    fn service(cluster: &ClusterId, object: Object) -> Self {
        let labels = object.metadata.labels.as_ref();
        let pool = labels.and_then(|labels| labels.get(POOL_LABEL));
        let pool = pool.map_or("", String::as_str);
        Self {
            object: ObjectKey::new(cluster, object.namespace(), object.name()),
            pool: ObjectKey::new(cluster, object.namespace(), pool),
            uid: SmolStr::default(),
            fingerprint: fingerprint(object.value),
        }
    }
}

/// A Service as it was applied or found equal: hash of what was to be applied, and fingerprint after that; `None` if it
/// was left alone.
type Applied = (u64, Option<u64>);

/// The pool of a write, the hash of what was to be applied, and the result.
type Finished = (ObjectKey, u64, Result<Option<(u64, bool)>, WriteError>);

struct Controller {
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
    only: WatchedNamespaces,
    owner: Owner,
    watches: WatchSet<Kind, Seen>,
    /// The reports of the watches, by kind; none before the first list.
    seen: BTreeMap<Kind, BTreeMap<ObjectKey, Seen>>,
    /// The snapshot that was compared last.
    compared: Option<Arc<MeshSnapshot>>,
    /// By pool.
    applied: BTreeMap<ObjectKey, Applied>,
    queue: Queue,
    writing: FuturesUnordered<BoxFuture<'static, Finished>>,
}

impl Controller {
    fn new(inputs: Inputs) -> Self {
        let owner = Owner {
            client: inputs.watches.client.clone(),
            manager: SmolStr::new_static(MANAGER),
            label: POOL_LABEL,
        };
        Self {
            mesh: inputs.mesh,
            only: inputs.only,
            owner,
            watches: WatchSet::new(inputs.watches),
            seen: BTreeMap::new(),
            compared: None,
            applied: BTreeMap::new(),
            queue: Queue::default(),
            writing: FuturesUnordered::new(),
        }
    }

    async fn run(mut self) {
        let has_pools = |mesh: &Arc<MeshSnapshot>| !mesh.used_pools.is_empty();
        if self.mesh.wait_for(has_pools).await.is_err() {
            return;
        }
        self.open();
        self.compare();
        loop {
            let due = self.queue.next_time().filter(|_| self.may_write());
            tokio::select! {
                (kind, event) = self.watches.next() => {
                    self.on_event(kind, event);
                    while let Some((kind, event)) = self.watches.try_next() {
                        self.on_event(kind, event);
                    }
                }
                changed = self.mesh.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.compare();
                }
                Some(finished) = self.writing.next() => self.on_written(finished),
                () = task::until(due) => {}
            }
            self.write();
        }
    }

    fn open(&mut self) {
        let only = self.only.target();
        let cluster = self.watches.cluster().clone();
        let kind = Kind::InferencePool;
        let pools = WatchTarget {
            namespace: only.clone(),
            metadata_only: true,
            ..WatchTarget::all(resource(kind.group(), kind.version(), kind.name(), "inferencepools"))
        };
        let pool_cluster = cluster.clone();
        self.watches
            .open(kind, pools, move |object| Seen::pool(&pool_cluster, object));
        let services = WatchTarget {
            namespace: only,
            labels: Some(POOL_LABEL.to_owned()),
            ..WatchTarget::all(resource("", "v1", "Service", "services"))
        };
        self.watches
            .open(Kind::Service, services, move |object| Seen::service(&cluster, object));
    }

    /// Returns true if all inputs are known and a writer is free.
    fn may_write(&self) -> bool {
        let is_known = |kind| self.seen.contains_key(&kind);
        is_known(Kind::InferencePool) && is_known(Kind::Service) && self.writing.len() < MAX_CONCURRENT
    }

    /// Takes the present snapshot, and offers the pools that have changed.
    fn compare(&mut self) {
        let mesh = self.mesh.borrow_and_update().clone();
        let changed: Vec<ObjectKey> = match &self.compared {
            Some(before) => mesh.used_pools.differences(&before.used_pools).cloned().collect(),
            None => mesh.used_pools.keys(&Cx::untracked()).cloned().collect(),
        };
        self.compared = Some(mesh);
        self.offer(changed);
    }

    fn offer(&mut self, pools: impl IntoIterator<Item = ObjectKey>) {
        let now = Instant::now();
        for pool in pools {
            self.queue.offer(queue_key(pool), now);
        }
    }

    fn on_event(&mut self, kind: Kind, event: WatchEvent<Seen>) {
        let mut rows = self.seen.remove(&kind);
        let known = rows.get_or_insert_default();
        let affected: Vec<ObjectKey> = match event {
            WatchEvent::Restarted(all) => {
                let all = all.into_iter().map(|seen| (seen.object.clone(), seen)).collect();
                let before = std::mem::replace(known, all);
                let both = before.values().chain(known.values());
                both.map(|seen| seen.pool.clone()).collect()
            }
            WatchEvent::Applied(seen) => {
                let pool = seen.pool.clone();
                known.insert(seen.object.clone(), seen);
                vec![pool]
            }
            WatchEvent::Deleted(seen) => {
                known.remove(&seen.object);
                vec![seen.pool]
            }
        };
        self.seen.extend(rows.map(|rows| (kind, rows)));
        self.offer(affected);
    }

    /// Begins writes of Services that differ, up to the limit.
    fn write(&mut self) {
        let now = Instant::now();
        while self.may_write() {
            let Some(key) = self.queue.pop(now) else { return };
            let pool = key.object.clone();
            let Some(object) = self.object(&pool) else {
                self.applied.remove(&pool);
                continue;
            };
            let desired = xxh3_64(object.value.to_string().as_bytes());
            let service = ObjectKey::new(&pool.cluster, pool.namespace.clone(), SmolStr::new(&object.name));
            let live = self
                .seen
                .get(&Kind::Service)
                .and_then(|services| services.get(&service));
            let present = (desired, live.map(|seen| seen.fingerprint));
            if self.applied.get(&pool) == Some(&present) {
                continue;
            }
            self.queue.begin(key);
            let owner = self.owner.clone();
            let writing = async move {
                let result = owner.ensure(&pool.namespace, &object).await;
                (pool, desired, result)
            };
            self.writing.push(writing.boxed());
        }
    }

    /// Returns the Service of a pool; none if no route uses the pool, or if its identity is not known yet.
    fn object(&self, pool: &ObjectKey) -> Option<GatewayObject> {
        let used = self.compared.as_ref()?.used_pools.get(&Cx::untracked(), pool)?;
        let seen = self.seen.get(&Kind::InferencePool)?.get(pool)?;
        Some(service(pool, used, &seen.uid))
    }

    fn on_written(&mut self, (pool, desired, result): Finished) {
        let now = Instant::now();
        let key = queue_key(pool.clone());
        match result {
            Ok(Some((live, is_written))) => {
                if is_written {
                    tracing::info!(%pool, "shadow service applied");
                }
                self.applied.insert(pool, (desired, Some(live)));
                self.queue.succeeded(&key, now);
            }
            Ok(None) => {
                self.applied.insert(pool, (desired, None));
                self.queue.ended(&key, now);
            }
            Err(error) => {
                tracing::warn!(%pool, %error, "failed to apply shadow service, retrying");
                self.queue.retry(key, now);
            }
        }
    }
}

fn queue_key(pool: ObjectKey) -> StatusKey {
    StatusKey {
        kind: Kind::InferencePool,
        object: pool,
    }
}

/// Returns the Service of a pool.
fn service(pool: &ObjectKey, used: &UsedPool, uid: &str) -> GatewayObject {
    let service = &used.service;
    let ports = service.target_ports.iter().enumerate().map(|(index, target)| {
        let mut port = json!({"name": format!("http-{index}"), "protocol": "TCP", "port": FIRST_PORT + index,
            "targetPort": target});
        if let Some(protocol) = &service.app_protocol {
            port["appProtocol"] = protocol.as_str().into();
        }
        port
    });
    let ports: Vec<Value> = ports.collect();
    let kind = Kind::InferencePool;
    let owner = json!({"apiVersion": format!("{}/{}", kind.group(), kind.version()), "kind": kind.name(),
        "name": pool.name, "uid": uid});
    GatewayObject {
        kind: ObjectKind::Service,
        name: service.name.to_string(),
        value: json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": service.name, "namespace": pool.namespace.as_str(), "labels": service.labels,
                "ownerReferences": [owner]},
            "spec": {"type": "ClusterIP", "clusterIP": "None", "selector": service.selector, "ports": ports}}),
    }
}
