//! Namespace controller: a ConfigMap with the mesh's root certificates in every namespace, where proxies find them
//! before they trust anything, and another one with the revocation list, if there is one. Changes and deletions by
//! others are reverted.

pub mod plan;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::pending,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use serde_json::{Value, json};
use smol_str::SmolStr;
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use xxhash_rust::xxh3::xxh3_64;

use self::plan::{Content, Plan};
use super::{
    leader::{Election, Lock},
    store::{Store, WriteError},
    watching::Watches,
};
use crate::{
    base::Labels,
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    model::snapshot::MeshSnapshot,
    table::Cx,
};

/// Key of the certificates.
const ROOTS: &str = "root-cert.pem";
/// Key of the revocation list.
const REVOKED: &str = "ca-crl.pem";
/// Label of all these ConfigMaps.
const LABEL: &str = "istio.io/config";
/// Concurrent writes.
const MAX_CONCURRENT: usize = 16;
/// Attempts of a write; then the next event of the namespace triggers it.
const ATTEMPTS: u32 = 5;
/// First retry delay of a failed write; doubled each time.
const RETRY: Duration = Duration::from_millis(100);

/// Options of the distribution.
#[derive(Clone, Debug)]
pub struct RootCertOptions {
    /// `PILOT_CA_CERT_CONFIGMAP`: name of the ConfigMaps.
    pub config_map: SmolStr,
    /// `PILOT_CRL_CONFIGMAP`: name of the ConfigMaps with the revocation list; `None` without `PILOT_ENABLE_CA_CRL`.
    pub revoked: Option<SmolStr>,
    /// `ISTIO_WATCH_NAMESPACE`; empty for all.
    pub only: SmolStr,
}

/// Distributed texts, PEM each; `None` while there is nothing.
#[derive(Clone, Debug)]
pub struct DistributedTexts {
    /// Root certificates.
    pub roots: watch::Receiver<Option<Bytes>>,
    /// Revocation list.
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
                roots: text.clone(),
                mesh: mesh.clone(),
                plan: Plan::new(election.namespace.clone(), rules.only.clone()),
                waiting: BTreeSet::new(),
                attempts: BTreeMap::new(),
                writing: FuturesUnordered::new(),
                resting: FuturesUnordered::new(),
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

/// Distributes the revocation list. Most meshes have none, so nothing is watched before there is one.
async fn distribute_revoked(distribution: Option<Distribution>, watches: Watches, token: CancellationToken) {
    let Some(distribution) = distribution else { return };
    let mut text = distribution.roots.clone();
    let is_there = async { text.wait_for(Option::is_some).await.is_ok() };
    if token.run_until_cancelled(is_there).await == Some(true) {
        distribution.run(watches, token).await;
    }
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
    roots: watch::Receiver<Option<Bytes>>,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
    plan: Plan,
    /// Namespaces whose ConfigMap may have to be written.
    waiting: BTreeSet<SmolStr>,
    /// Failures since the last success, by namespace.
    attempts: BTreeMap<SmolStr, u32>,
    writing: FuturesUnordered<BoxFuture<'static, (SmolStr, Result<bool, WriteError>)>>,
    resting: FuturesUnordered<BoxFuture<'static, SmolStr>>,
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
        self.resting.push(pending().boxed());
        // Before both lists, every ConfigMap would seem to be missing.
        let (Some(first_namespaces), Some(first_config_maps)) = tokio::join!(namespaces.recv(), config_maps.recv())
        else {
            return;
        };
        self.on_config_map(first_config_maps);
        self.on_namespace(first_namespaces);
        self.roots.mark_changed();
        self.mesh.mark_changed();
        loop {
            tokio::select! {
                event = namespaces.recv() => match event {
                    Some(event) => self.on_namespace(event),
                    None => return,
                },
                event = config_maps.recv() => match event {
                    Some(event) => self.on_config_map(event),
                    None => return,
                },
                changed = self.roots.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let hash = self.roots.borrow_and_update().as_ref().map(|roots| xxh3_64(roots));
                    if self.plan.want(hash) {
                        self.waiting.extend(self.plan.pending());
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
                        self.waiting.extend(self.plan.pending());
                    }
                }
                Some((namespace, written)) = self.writing.next() => self.on_written(namespace, written),
                Some(namespace) = self.resting.next() => {
                    self.waiting.insert(namespace);
                }
            }
            self.write();
        }
    }

    fn on_namespace(&mut self, event: WatchEvent<NamespaceFacts>) {
        match event {
            WatchEvent::Restarted(all) => {
                let active = all.into_iter().filter_map(|(name, labels)| Some((name, labels?)));
                self.plan.namespaces(active);
                self.waiting.extend(self.plan.pending());
            }
            WatchEvent::Applied((name, labels)) => {
                self.plan.namespace(name.clone(), labels);
                self.waiting.insert(name);
            }
            WatchEvent::Deleted((name, _)) => self.plan.namespace(name, None),
        }
    }

    fn on_config_map(&mut self, event: WatchEvent<(SmolStr, Content)>) {
        match event {
            WatchEvent::Restarted(all) => {
                self.plan.contents(all);
                self.waiting.extend(self.plan.pending());
            }
            WatchEvent::Applied((namespace, content)) => {
                self.plan.content(namespace.clone(), Some(content));
                self.waiting.insert(namespace);
            }
            WatchEvent::Deleted((namespace, _)) => {
                self.plan.content(namespace.clone(), None);
                self.waiting.insert(namespace);
            }
        }
    }

    /// Starts pending writes, up to the limit. One pending future never ends and does not count.
    fn write(&mut self) {
        while self.writing.len() <= MAX_CONCURRENT {
            let Some(namespace) = self.waiting.pop_first() else {
                return;
            };
            let Some(roots) = self.roots.borrow().clone() else {
                continue;
            };
            if !self.plan.needs(&namespace) {
                continue;
            }
            let (store, name, key) = (self.store.clone(), self.name.clone(), self.key.name());
            self.writing.push(
                async move {
                    let written = put(&store, &namespace, &name, key, &String::from_utf8_lossy(&roots)).await;
                    (namespace, written)
                }
                .boxed(),
            );
        }
    }

    fn on_written(&mut self, namespace: SmolStr, written: Result<bool, WriteError>) {
        match written {
            Ok(wrote) => {
                self.attempts.remove(&namespace);
                if wrote {
                    tracing::debug!(%namespace, "root certificate ConfigMap written");
                }
            }
            // The namespace is terminating.
            Err(WriteError::NotFound(_)) => {}
            Err(error) => {
                let attempts = self.attempts.entry(namespace.clone()).or_default();
                *attempts += 1;
                if *attempts < ATTEMPTS {
                    let wait = RETRY * 2_u32.pow(*attempts);
                    self.resting.push(sleep(wait).map(|()| namespace).boxed());
                } else {
                    self.attempts.remove(&namespace);
                    tracing::warn!(%namespace, %error, "failed to write root certificate ConfigMap");
                }
            }
        }
    }
}

/// Writes one key of a ConfigMap and keeps the others; returns false if it was right already.
async fn put(store: &Store, namespace: &str, name: &str, key: &str, text: &str) -> Result<bool, WriteError> {
    let Some(mut found) = store.get(namespace, name).await? else {
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
    let roots = object.value["data"][key].as_str();
    let label: &Value = &object.value["metadata"]["labels"][LABEL];
    let content = Content {
        hash: roots.map_or(0, |roots| xxh3_64(roots.as_bytes())),
        labelled: label == "true",
    };
    (object.metadata.namespace.unwrap_or_default().into(), content)
}
