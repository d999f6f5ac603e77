//! Namespace controller: a ConfigMap with the mesh's root certificates in every namespace, where proxies find them
//! before they trust anything, and another one with the revocation list, if there is one. Changes and deletions by
//! others are reverted.
//!
//! Without a revocation list, the ConfigMaps of an earlier one are emptied: an Envoy with lists refuses a chain with an
//! authority that has none.

pub mod plan;

use std::{future::pending, sync::Arc};

use bytes::Bytes;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use serde_json::{Value, json};
use smol_str::SmolStr;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use xxhash_rust::xxh3::xxh3_64;

use self::plan::{Content, Plan};
use super::{
    leader::{Election, Lock},
    object_status::queue::Queue,
    store::{Store, WriteError},
    watching::{WatchedNamespaces, Watches},
};
use crate::{
    api::Kind,
    base::{ClusterId, Labels, ObjectKey},
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    model::{gateway_api::status::StatusKey, snapshot::MeshSnapshot},
    table::Cx,
    task,
};

/// Key of the certificates.
const ROOTS: &str = "root-cert.pem";
/// Key of the revocation list.
const REVOKED: &str = "ca-crl.pem";
/// Label of all these ConfigMaps.
const LABEL: &str = "istio.io/config";
/// Concurrent writes.
const MAX_CONCURRENT: usize = 16;
/// The failure of a write that is logged, one of each series: earlier ones are mostly conflicts with other writers.
const LOGGED_FAILURE: u32 = 5;

/// Options of the distribution.
#[derive(Clone, Debug)]
pub struct RootCertOptions {
    /// `PILOT_CA_CERT_CONFIGMAP`: name of the ConfigMaps.
    pub config_map: SmolStr,
    /// `PILOT_CRL_CONFIGMAP`: name of the ConfigMaps with the revocation list; `None` without `PILOT_ENABLE_CA_CRL`.
    pub revoked: Option<SmolStr>,
    /// `ISTIO_WATCH_NAMESPACE`: the namespaces to write into.
    pub only: WatchedNamespaces,
}

/// Distributed texts, PEM each; `None` while they are unknown.
#[derive(Clone, Debug)]
pub struct DistributedTexts {
    /// Root certificates.
    pub roots: watch::Receiver<Option<Bytes>>,
    /// Revocation list; empty if there is none.
    pub revoked: watch::Receiver<Option<Bytes>>,
}

/// Distributes in one cluster while this replica leads there.
pub async fn run(
    election: &Election,
    watches: Watches,
    rules: RootCertOptions,
    texts: DistributedTexts,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
) {
    election
        .run(Lock::NAMESPACES, |token| {
            let distribution = |name: &SmolStr, key: Key, text: &watch::Receiver<Option<Bytes>>| Distribution {
                store: Store::new(election.client.clone(), "", "v1", "ConfigMap", "configmaps"),
                name: name.clone(),
                key,
                text: text.clone(),
                mesh: mesh.clone(),
                cluster: watches.cluster.clone(),
                plan: Plan::new(election.namespace.clone(), rules.only.clone()),
                queue: Queue::default(),
                writing: FuturesUnordered::new(),
            };
            let roots = distribution(&rules.config_map, Key::Roots, &texts.roots);
            let revoked = rules.revoked.as_ref();
            let revoked = revoked.map(|name| distribution(name, Key::Revoked, &texts.revoked));
            let watches = watches.clone();
            async move {
                let distributing = Box::pin(roots.run(watches.clone(), token.clone()));
                let revoking = Box::pin(distribute_revoked(revoked, watches, token));
                tokio::join!(distributing, revoking);
            }
        })
        .await;
}

/// Distributes the revocation list. Most meshes have none, so nothing is watched before there is one, or ConfigMaps of
/// an earlier one.
///
/// Parity (pilot/pkg/serviceregistry/kube/controller/namespacecontroller.go, `reconcileCACertAndCRL`): Istio also
/// creates ConfigMaps without a list, which have no effect.
async fn distribute_revoked(distribution: Option<Distribution>, watches: Watches, token: CancellationToken) {
    let Some(distribution) = distribution else { return };
    let is_needed = is_needed(&distribution.store, &distribution.name, distribution.text.clone());
    if token.run_until_cancelled(is_needed).await == Some(true) {
        distribution.run(watches, token).await;
    }
}

/// Waits until there is a text, or ConfigMaps that an empty one must replace. Returns false if there will never be one.
async fn is_needed(store: &Store, name: &str, mut text: watch::Receiver<Option<Bytes>>) -> bool {
    if text.wait_for(Option::is_some).await.is_err() {
        return false;
    }
    // If the API server does not answer, the watches try again.
    if !matches!(store.metadata("", name).await, Ok(None)) {
        return true;
    }
    let has_text = |text: &Option<Bytes>| text.as_ref().is_some_and(|text| !text.is_empty());
    text.wait_for(has_text).await.is_ok()
}

/// Returns the hash of a distributed text; 0 for an empty one.
fn hash_of(text: &[u8]) -> u64 {
    if text.is_empty() { 0 } else { xxh3_64(text) }
}

/// Content of a ConfigMap.
#[derive(Clone, Copy)]
enum Key {
    Roots,
    Revoked,
}

impl Key {
    fn name(self) -> &'static str {
        match self {
            Self::Roots => ROOTS,
            Self::Revoked => REVOKED,
        }
    }

    fn facts(self) -> fn(Object) -> (SmolStr, Content) {
        match self {
            Self::Roots => |object| config_map_facts(object, ROOTS),
            Self::Revoked => |object| config_map_facts(object, REVOKED),
        }
    }
}

struct Distribution {
    store: Store,
    /// Name of the ConfigMaps.
    name: SmolStr,
    key: Key,
    /// The distributed text, PEM: root certificates or the revocation list.
    text: watch::Receiver<Option<Bytes>>,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
    cluster: ClusterId,
    plan: Plan,
    /// Namespaces whose ConfigMap may have to be written.
    queue: Queue,
    writing: FuturesUnordered<BoxFuture<'static, (StatusKey, Result<bool, WriteError>)>>,
}

/// Name of a namespace, and its labels unless it is terminating.
type NamespaceFacts = (SmolStr, Option<Labels>);

impl Distribution {
    async fn run(mut self, watches: Watches, token: CancellationToken) {
        let (namespaces, mut namespace_events) = watches.open(
            WatchTarget {
                metadata_only: true,
                ..WatchTarget::all(super::store::resource("", "v1", "Namespace", "namespaces"))
            },
            namespace_facts,
        );
        let (config_maps, mut config_map_events) = watches.open(
            WatchTarget {
                fields: Some(format!("metadata.name={}", self.name)),
                ..WatchTarget::all(self.store.resource().clone())
            },
            self.key.facts(),
        );
        tokio::select! {
            () = token.cancelled() => {}
            () = namespaces => {}
            () = config_maps => {}
            () = self.distribute(&mut namespace_events, &mut config_map_events) => {}
        }
    }

    async fn distribute(
        &mut self,
        namespaces: &mut mpsc::Receiver<WatchEvent<NamespaceFacts>>,
        config_maps: &mut mpsc::Receiver<WatchEvent<(SmolStr, Content)>>,
    ) {
        self.writing.push(pending().boxed());
        // Before both lists, every ConfigMap would seem to be missing.
        let (Some(first_namespaces), Some(first_config_maps)) = tokio::join!(namespaces.recv(), config_maps.recv())
        else {
            return;
        };
        self.on_config_map(first_config_maps);
        self.on_namespace(first_namespaces);
        self.text.mark_changed();
        self.mesh.mark_changed();
        loop {
            let due = self.queue.next_time().filter(|_| self.may_write());
            tokio::select! {
                event = namespaces.recv() => match event {
                    Some(event) => self.on_namespace(event),
                    None => return,
                },
                event = config_maps.recv() => match event {
                    Some(event) => self.on_config_map(event),
                    None => return,
                },
                changed = self.text.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let hash = self.text.borrow_and_update().as_ref().map(|text| hash_of(text));
                    if self.plan.want(hash) {
                        self.offer(self.plan.pending());
                    }
                }
                changed = self.mesh.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let mesh = self.mesh.borrow_and_update().clone();
                    let dependencies = mesh.external_dependencies.get(&Cx::untracked(), &());
                    // Before the mesh config is known, every namespace would seem to be selected.
                    if let Some(dependencies) = dependencies.filter(|_| mesh.revision.0 > 0)
                        && self.plan.select(dependencies.discovery_selectors.clone())
                    {
                        self.offer(self.plan.pending());
                    }
                }
                Some((key, written)) = self.writing.next() => self.on_written(key, written),
                () = task::until(due) => {}
            }
            self.write();
        }
    }

    fn on_namespace(&mut self, event: WatchEvent<NamespaceFacts>) {
        match event {
            WatchEvent::Restarted(all) => {
                let active = all.into_iter().filter_map(|(name, labels)| Some((name, labels?)));
                self.plan.namespaces(active);
                self.offer(self.plan.pending());
            }
            WatchEvent::Applied((name, labels)) => {
                self.plan.namespace(name.clone(), labels);
                self.offer([name]);
            }
            WatchEvent::Deleted((name, _)) => {
                self.queue.forget(&self.queue_key(name.clone()));
                self.plan.namespace(name, None);
            }
        }
    }

    fn on_config_map(&mut self, event: WatchEvent<(SmolStr, Content)>) {
        match event {
            WatchEvent::Restarted(all) => {
                self.plan.contents(all);
                self.offer(self.plan.pending());
            }
            WatchEvent::Applied((namespace, content)) => {
                self.plan.content(namespace.clone(), Some(content));
                self.offer([namespace]);
            }
            WatchEvent::Deleted((namespace, _)) => {
                self.plan.content(namespace.clone(), None);
                self.offer([namespace]);
            }
        }
    }

    /// Returns the key of a namespace in the queue.
    fn queue_key(&self, namespace: SmolStr) -> StatusKey {
        StatusKey {
            kind: Kind::Namespace,
            object: ObjectKey::new(&self.cluster, "", namespace),
        }
    }

    /// Queues namespaces whose ConfigMap may have to be written.
    fn offer(&mut self, namespaces: impl IntoIterator<Item = SmolStr>) {
        let now = Instant::now();
        for namespace in namespaces {
            self.queue.offer(self.queue_key(namespace), now);
        }
    }

    /// Returns true if a writer is free. One pending future never ends and does not count.
    fn may_write(&self) -> bool {
        self.writing.len() <= MAX_CONCURRENT
    }

    /// Starts due writes, up to the limit.
    fn write(&mut self) {
        let now = Instant::now();
        while self.may_write() {
            let Some(key) = self.queue.pop(now) else { return };
            let namespace = key.object.name.clone();
            let text = self.text.borrow().clone().filter(|_| self.plan.needs(&namespace));
            let Some(text) = text else {
                self.queue.ended(&key, now);
                continue;
            };
            self.queue.begin(key.clone());
            let (store, name, field) = (self.store.clone(), self.name.clone(), self.key.name());
            self.writing.push(
                async move {
                    let written = put(&store, &namespace, &name, field, &String::from_utf8_lossy(&text)).await;
                    (key, written)
                }
                .boxed(),
            );
        }
    }

    fn on_written(&mut self, key: StatusKey, written: Result<bool, WriteError>) {
        let now = Instant::now();
        let namespace = &key.object.name;
        match written {
            Ok(wrote) => {
                if wrote {
                    tracing::debug!(%namespace, "root certificate ConfigMap written");
                }
                self.queue.succeeded(&key, now);
            }
            // The namespace is terminating.
            Err(WriteError::NotFound(_)) => {
                self.queue.ended(&key, now);
            }
            Err(error) => {
                if self.queue.failures(&key) + 1 == LOGGED_FAILURE {
                    tracing::warn!(%namespace, %error, "failed to write root certificate ConfigMap");
                }
                self.queue.retry(key, now);
            }
        }
    }
}

/// Writes one key of a ConfigMap and keeps the others; returns false if it was right already. An empty text creates no
/// ConfigMap.
async fn put(store: &Store, namespace: &str, name: &str, key: &str, text: &str) -> Result<bool, WriteError> {
    let Some(mut found) = store.get(namespace, name).await? else {
        if text.is_empty() {
            return Ok(false);
        }
        let new = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": namespace, "labels": {LABEL: "true"}},
            "data": {key: text},
        });
        return store.create(namespace, &new).await.map(|_| true);
    };
    if found["data"][key] == text && found["metadata"]["labels"][LABEL] == "true" {
        return Ok(false);
    }
    found["metadata"]["labels"][LABEL] = "true".into();
    found["data"][key] = text.into();
    store.replace(namespace, name, &found).await.map(|_| true)
}

fn namespace_facts(object: Object) -> NamespaceFacts {
    let metadata = object.metadata;
    let labels = metadata.labels.unwrap_or_default();
    let labels = labels.into_iter().map(|(key, value)| (key.into(), value.into()));
    let is_active = metadata.deletion_timestamp.is_none();
    (
        metadata.name.unwrap_or_default().into(),
        is_active.then(|| labels.collect()),
    )
}

fn config_map_facts(object: Object, key: &str) -> (SmolStr, Content) {
    let text = object.value["data"][key].as_str();
    let label: &Value = &object.value["metadata"]["labels"][LABEL];
    let content = Content {
        hash: text.map_or(0, |text| hash_of(text.as_bytes())),
        labelled: label == "true",
    };
    (object.metadata.namespace.unwrap_or_default().into(), content)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ::kube::client::Body;

    use super::*;
    use crate::{
        model::{Installation, World},
        status::fake_api::FakeApi,
    };

    /// A distribution in a cluster whose API server is not asked.
    fn distribution() -> Distribution {
        let unreachable = tower::service_fn(|_: http::Request<Body>| async {
            Err::<http::Response<Body>, _>(std::io::Error::other("unreachable"))
        });
        distribution_in(::kube::Client::new(unreachable, "default"))
    }

    fn distribution_in(client: ::kube::Client) -> Distribution {
        Distribution {
            store: Store::new(client, "", "v1", "ConfigMap", "configmaps"),
            name: "roots".into(),
            key: Key::Roots,
            text: watch::channel(None).1,
            mesh: watch::channel(World::new(Installation::default()).snapshot()).1,
            cluster: ClusterId::default(),
            plan: Plan::default(),
            queue: Queue::default(),
            writing: FuturesUnordered::new(),
        }
    }

    #[tokio::test]
    async fn a_failed_write_is_tried_again_until_it_succeeds() {
        let mut distribution = distribution();
        let key = distribution.queue_key("a".into());
        for attempt in 1..=20 {
            let refused = WriteError::Refused("no rights".to_owned());
            distribution.on_written(key.clone(), Err(refused));
            let time = distribution.queue.next_time().expect("another attempt");
            assert!(time <= Instant::now() + Duration::from_mins(1), "attempt {attempt}");
            assert_eq!(distribution.queue.pop(time).as_ref(), Some(&key));
            distribution.queue.begin(key.clone());
        }
        distribution.on_written(key.clone(), Ok(true));
        assert_eq!(distribution.queue.failures(&key), 0);
        assert_eq!(distribution.queue.next_time(), None);
    }

    #[tokio::test]
    async fn an_empty_text_empties_config_maps_and_creates_none() {
        const PATH: &str = "/api/v1/namespaces/a/configmaps/roots";
        let api = FakeApi::default();
        let store = distribution_in(api.client()).store;
        let write = async |text: &str| put(&store, "a", "roots", REVOKED, text).await.expect("an answer");
        assert!(!write("").await);
        assert_eq!(api.get(PATH), None);
        assert!(write("list").await);
        assert!(write("").await);
        let config_map = api.get(PATH).expect("the ConfigMap");
        assert_eq!(config_map["data"], json!({REVOKED: ""}));
        let metadata = json!({"namespace": "a", "name": "roots", "labels": config_map["metadata"]["labels"]});
        let emptied = Object::from_value(json!({"metadata": metadata, "data": config_map["data"]}));
        let (_, content) = config_map_facts(emptied.expect("an object"), REVOKED);
        assert_eq!((content.hash, content.labelled), (0, true));
    }

    #[tokio::test]
    async fn config_maps_of_an_earlier_text_are_watched() {
        let api = FakeApi::default();
        let store = distribution_in(api.client()).store;
        let needed = async |text: &'static str| {
            let text = watch::channel(Some(Bytes::from_static(text.as_bytes()))).1;
            is_needed(&store, "roots", text).await
        };
        assert!(needed("list").await);
        assert!(!needed("").await, "there will never be a text");
        api.put("/api/v1/configmaps/roots", json!({"metadata": {"name": "roots"}}));
        assert!(needed("").await);
    }
}
