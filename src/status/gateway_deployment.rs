//! Deployments of Gateways: applies the objects that `inject::gateway` makes of each Gateway of this revision, and
//! repairs them.
//!
//! The leader of the revision works; other replicas hold nothing of it. It begins with the first Gateway, and only when
//! all inputs are known. A Gateway is looked at again when it, its class, namespace, ListenerSets or parameters, an
//! object of its deployment, the injector's configuration, the mesh config, a ProxyConfig or a revision tag changes.
//! Before an object is applied it is read: an equal one is not written, and one that lacks the label of managed objects
//! is not changed. Results come back from the watches. A deployment that another client changes again and again rests
//! between its repairs.
//!
//! Parity (pilot/pkg/config/kube/gatewaycommon/deploymentcontroller.go).

mod facts;
mod known;
mod metrics;
mod repair;
mod write;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

pub use self::metrics::Metrics;
use self::{
    facts::Facts,
    known::{Change, Event, Gateway, Known, Owned},
    metrics::Outcome,
    repair::Repairs,
    write::{Applied, Written},
};
use super::{
    NamespacedName,
    leader::{Election, Lock},
    owned_object::Owner,
    revisions,
    store::resource,
    watching::{WatchedNamespaces, Watches},
};
use crate::{
    base::SmolStr,
    inject::{
        self, Injector,
        gateway::{self, GatewayObject, GatewayRequest, ObjectKind},
    },
    kube::{
        client::limited,
        watch::{WatchEvent, WatchTarget},
    },
    model::{features::Features, gateway_api::status::Revisions, snapshot::MeshSnapshot},
    task,
};

/// Least interval between comparisons of Gateways with the mesh.
const INTERVAL: Duration = Duration::from_millis(100);
/// First and longest delay of a retry; it doubles with each failure.
const RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_mins(5);
/// Concurrent writers.
const MAX_CONCURRENT: usize = 8;
/// Capacity of the queue of events.
const QUEUE: usize = 64;

/// The inputs of the controller. Cheap to clone.
#[derive(Clone)]
pub struct Inputs {
    /// Watches of the config cluster.
    pub watches: Watches,
    /// The mesh.
    pub mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// The injector, with the templates; `None` while there is none.
    pub injector: watch::Receiver<Option<Arc<Injector>>>,
    /// The environment of injection, without a namespace.
    pub environment: watch::Receiver<inject::Environment>,
    /// Tags of the own revision; `None` while unknown.
    pub tags: watch::Receiver<Option<BTreeSet<SmolStr>>>,
    /// Variables of the process, which templates may read.
    pub variables: Arc<BTreeMap<String, String>>,
    /// The namespaces that are read.
    pub only: WatchedNamespaces,
    /// Counters.
    pub metrics: Metrics,
}

/// Keeps the deployments of Gateways while this replica leads.
pub async fn run(election: &Election, inputs: Inputs) {
    let lock = Lock::of_revision("istio-gateway-deployment", &election.revision);
    election
        .run(lock, |token| {
            let controller = Controller::new(election, inputs.clone());
            async move {
                token.run_until_cancelled(Box::pin(controller.run())).await;
            }
        })
        .await;
}

/// The result of a round for a Gateway.
type Finished = (NamespacedName, Written);

struct Controller {
    inputs: Inputs,
    /// The revisions that decide which Gateways this control plane deploys; `None` while unknown.
    revisions: watch::Receiver<Option<Revisions>>,
    namespace: SmolStr,
    owner: Owner,
    /// Version of Kubernetes: 128 for 1.28.
    version: i64,
    known: Known,
    watching: FuturesUnordered<BoxFuture<'static, ()>>,
    sender: mpsc::Sender<Event>,
    events: mpsc::Receiver<Event>,
    /// The facts that decide about each Gateway besides its own fields; `None` for one that others deploy.
    facts: BTreeMap<NamespacedName, Option<Arc<Facts>>>,
    /// The environment of injection that all rounds have used.
    environment: Option<inject::Environment>,
    /// Gateways to look at.
    pending: BTreeSet<NamespacedName>,
    running: FuturesUnordered<BoxFuture<'static, Finished>>,
    busy: BTreeSet<NamespacedName>,
    /// Failures in a row, and when the next round begins.
    retries: BTreeMap<NamespacedName, (u32, Instant)>,
    /// The rests between repairs.
    repairs: Repairs,
    /// The objects as they were last applied or found equal.
    applied: BTreeMap<(ObjectKind, NamespacedName), Applied>,
    /// The last refusal of each Gateway, so that it is logged once.
    refusals: BTreeMap<NamespacedName, String>,
    /// When the mesh is looked at again.
    observe_at: Option<Instant>,
}

impl Controller {
    fn new(election: &Election, inputs: Inputs) -> Self {
        let (sender, events) = mpsc::channel(QUEUE);
        let (out, revisions) = watch::channel(None);
        let (watches, default_tag) = (inputs.watches.clone(), election.default_revision.clone());
        let following = revisions::follow(watches, inputs.tags.clone(), default_tag, out);
        let mut inputs = inputs;
        inputs.mesh.mark_changed();
        Self {
            revisions,
            namespace: election.namespace.clone(),
            owner: write::owner(&election.client, manager(&inputs)),
            version: 0,
            inputs,
            known: Known::default(),
            watching: FuturesUnordered::from_iter([following.boxed()]),
            sender,
            events,
            facts: BTreeMap::new(),
            environment: None,
            pending: BTreeSet::new(),
            running: FuturesUnordered::new(),
            busy: BTreeSet::new(),
            retries: BTreeMap::new(),
            repairs: Repairs::default(),
            applied: BTreeMap::new(),
            refusals: BTreeMap::new(),
            observe_at: None,
        }
    }

    async fn run(mut self) {
        let has_gateways = |mesh: &Arc<MeshSnapshot>| !mesh.kube_gateways.is_empty();
        if self.inputs.mesh.wait_for(has_gateways).await.is_err() {
            return;
        }
        self.inputs.mesh.mark_changed();
        self.version = loop {
            match limited(self.inputs.watches.client.apiserver_version()).await {
                Ok(version) => break number(&version.major, &version.minor),
                Err(error) => tracing::warn!(%error, "failed to read the version of the API server"),
            }
            tokio::time::sleep(RETRY).await;
        };
        self.open_all();
        loop {
            let retry_at = self.retries.values().map(|(_, at)| *at).min();
            let repair_at = self.repairs.next_at();
            tokio::select! {
                Some(()) = self.watching.next() => {}
                Some(event) = self.events.recv() => {
                    self.on_event(event);
                    while let Ok(event) = self.events.try_recv() {
                        self.on_event(event);
                    }
                }
                changed = self.inputs.mesh.changed(), if self.observe_at.is_none() => {
                    if changed.is_err() {
                        return;
                    }
                    self.observe();
                    self.observe_at = Some(Instant::now() + INTERVAL);
                }
                () = task::until(self.observe_at) => self.observe_at = None,
                changed = self.inputs.injector.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.queue_all();
                }
                changed = self.inputs.environment.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.on_environment();
                }
                changed = self.revisions.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.observe();
                }
                Some(finished) = self.running.next() => self.on_finished(finished),
                () = task::until(retry_at) => self.on_retry(),
                () = task::until(repair_at) => self.pending.extend(self.repairs.take_due(Instant::now())),
            }
            self.begin();
        }
    }

    fn open_all(&mut self) {
        let only = self.inputs.only.target();
        let target = |group: &str, version: &str, kind: &str, plural: &str| WatchTarget {
            namespace: only.clone(),
            ..WatchTarget::all(resource(group, version, kind, plural))
        };
        let gateways = target("gateway.networking.k8s.io", "v1", "Gateway", "gateways");
        self.open(gateways, Gateway::of, Event::Gateway);
        let parameters = target("", "v1", "ConfigMap", "configmaps");
        self.open(parameters, known::parameters, Event::Parameters);
        for kind in known::WATCHED {
            let (group, version, plural) = kind.resource();
            let owned = WatchTarget {
                labels: Some(gateway::MANAGED.to_owned()),
                ..target(group, version, kind.name(), plural)
            };
            self.open(owned, Owned::of, move |event| Event::Owned(kind, event));
        }
    }

    fn open<T: Send + Sync + 'static>(
        &self,
        target: WatchTarget,
        convert: fn(crate::kube::Object) -> T,
        event: impl Fn(WatchEvent<T>) -> Event + Send + 'static,
    ) {
        let (watching, mut events) = self.inputs.watches.open(target, convert);
        let sender = self.sender.clone();
        let forwarding = async move {
            while let Some(received) = events.recv().await {
                if sender.send(event(received)).await.is_err() {
                    return;
                }
            }
        };
        self.watching.push(
            async move {
                tokio::select! {
                    () = watching => {}
                    () = forwarding => {}
                }
            }
            .boxed(),
        );
    }

    fn on_event(&mut self, event: Event) {
        for change in self.known.apply_event(event) {
            match change {
                Change::Gateway(key) => self.queue(key),
                Change::Owned {
                    object,
                    fingerprint,
                    owner,
                } => {
                    let is_expected = self
                        .applied
                        .get(&object)
                        .is_some_and(|applied| Some(applied.live) == fingerprint);
                    if fingerprint.is_none() {
                        self.applied.remove(&object);
                    }
                    if !is_expected && let Some(owner) = owner {
                        self.repair(owner);
                    }
                }
                Change::Parameters(key) => {
                    let affected = self.known.reading(&key, &self.namespace);
                    for key in &affected {
                        self.repairs.forget(key);
                    }
                    self.pending.extend(affected);
                }
            }
        }
    }

    /// Queues a Gateway that has changed, and forgets one that is gone. Kubernetes deletes its objects.
    fn queue(&mut self, key: NamespacedName) {
        self.repairs.forget(&key);
        if self.known.gateway(&key).is_some() {
            let facts = self.facts_of(&key);
            self.facts.insert(key.clone(), facts);
            self.retries.remove(&key);
            self.pending.insert(key);
            return;
        }
        self.facts.remove(&key);
        self.pending.remove(&key);
        self.retries.remove(&key);
        self.refusals.remove(&key);
    }

    /// Queues all Gateways, also those that wait for a retry.
    fn queue_all(&mut self) {
        self.pending.extend(self.known.gateways().cloned());
        self.retries.clear();
        self.repairs.clear();
    }

    /// Queues a Gateway with a changed object, once its rest has ended.
    fn repair(&mut self, key: NamespacedName) {
        if self.repairs.may_begin(&key, Instant::now()) {
            self.pending.insert(key);
        }
    }

    /// Queues the Gateways whose facts have changed.
    fn observe(&mut self) {
        self.inputs.mesh.mark_unchanged();
        let keys: Vec<NamespacedName> = self.known.gateways().cloned().collect();
        for key in keys {
            let facts = self.facts_of(&key);
            if self.facts.get(&key) != Some(&facts) {
                self.facts.insert(key.clone(), facts);
                self.retries.remove(&key);
                self.repairs.forget(&key);
                self.pending.insert(key);
            }
        }
    }

    fn facts_of(&self, key: &NamespacedName) -> Option<Arc<Facts>> {
        let gateway = self.known.gateway(key)?;
        let mesh = self.inputs.mesh.borrow().clone();
        let revisions = self.revisions.borrow();
        Facts::of(&mesh, key, gateway, revisions.as_ref()?, &self.namespace).map(Arc::new)
    }

    fn on_environment(&mut self) {
        let environment = self.inputs.environment.borrow_and_update();
        let is_same = self.environment.as_ref().is_some_and(|before| {
            Arc::ptr_eq(&before.mesh, &environment.mesh) && before.proxy_configs == environment.proxy_configs
        });
        if !is_same {
            self.environment = Some(environment.clone());
            drop(environment);
            self.queue_all();
        }
    }

    fn on_retry(&mut self) {
        let now = Instant::now();
        let due: Vec<NamespacedName> = self
            .retries
            .iter()
            .filter(|(_, (_, at))| *at <= now)
            .map(|(key, _)| key.clone())
            .collect();
        for key in due {
            if let Some((_, at)) = self.retries.get_mut(&key) {
                // Until the round has a result.
                *at = now + LONGEST_RETRY;
            }
            self.pending.insert(key);
        }
    }

    fn on_finished(&mut self, (key, written): Finished) {
        self.busy.remove(&key);
        let Written {
            applied,
            writes,
            failure,
        } = written;
        self.applied.extend(applied);
        let rest = (writes > 0)
            .then(|| self.repairs.written(&key, Instant::now()))
            .flatten();
        if let Some(rest) = rest {
            tracing::warn!(namespace = %key.namespace, name = %key.name, ?rest, "gateway deployment repaired repeatedly, resting");
            // No input has changed during so many rounds, so only objects have queued it.
            if self.pending.remove(&key) {
                self.repair(key.clone());
            }
        }
        let metrics = &self.inputs.metrics;
        let NamespacedName { namespace, name } = &key;
        match failure {
            None => {
                metrics.count(if writes > 0 {
                    Outcome::Written
                } else {
                    Outcome::Unchanged
                });
                if writes > 0 {
                    tracing::info!(%namespace, %name, writes, "gateway deployment applied");
                }
                self.retries.remove(&key);
            }
            Some(error) => {
                metrics.count(Outcome::Failed);
                let failures = self.retries.get(&key).map_or(0, |(failures, _)| *failures);
                let delay = RETRY.saturating_mul(1 << failures.min(16)).min(LONGEST_RETRY);
                tracing::warn!(%namespace, %name, error, ?delay, "failed to apply gateway deployment, retrying");
                self.retries
                    .insert(key, (failures.saturating_add(1), Instant::now() + delay));
            }
        }
    }

    /// Begins rounds, once all inputs are known, up to the limit.
    fn begin(&mut self) {
        if !self.known.is_complete() || self.revisions.borrow().is_none() {
            return;
        }
        let Some(injector) = self.inputs.injector.borrow().clone() else {
            return;
        };
        if self.environment.is_none() {
            self.on_environment();
        }
        while self.running.len() < MAX_CONCURRENT {
            let Some(key) = self.pending.iter().find(|key| !self.busy.contains(*key)).cloned() else {
                return;
            };
            self.pending.remove(&key);
            if !self.begin_one(&injector, &key) {
                self.retries.remove(&key);
            }
        }
    }

    /// Begins a round for a Gateway. Returns false if there is nothing to apply.
    fn begin_one(&mut self, injector: &Injector, key: &NamespacedName) -> bool {
        let features = self.inputs.mesh.borrow().installation.features.clone();
        let (Some(gateway), Some(Some(facts))) = (self.known.gateway(key), self.facts.get(key)) else {
            return false;
        };
        if !gateway::is_managed(&gateway.value, features.enable_gateway_api_manual_deployment) {
            return false;
        }
        if !facts::is_ours(gateway) {
            tracing::debug!(namespace = %key.namespace, name = %key.name, "gateway has a newer controller");
            return false;
        }
        // Templates may run until their time limit.
        let objects = task::aside(|| self.objects(injector, key, gateway, facts, &features));
        let objects = match objects {
            Ok(objects) => objects,
            Err(error) => {
                self.refuse(key, error.to_string());
                return false;
            }
        };
        self.refusals.remove(key);
        let due = write::due(key, objects, |object| self.present(object));
        let round = write::round(&self.owner, key.clone(), due);
        self.busy.insert(key.clone());
        self.running.push(round.boxed());
        true
    }

    /// Returns how an object was last applied, if it is still the same.
    fn present(&self, object: &(ObjectKind, NamespacedName)) -> Option<Applied> {
        let applied = *self.applied.get(object)?;
        (self.known.fingerprint(object) == Some(applied.live)).then_some(applied)
    }

    fn objects(
        &self,
        injector: &Injector,
        key: &NamespacedName,
        gateway: &Gateway,
        facts: &Facts,
        features: &Features,
    ) -> Result<Vec<GatewayObject>, gateway::GatewayError> {
        let environment = inject::Environment {
            namespace: facts.namespace.clone(),
            host: Arc::new(facts::TemplateHost::new(self.inputs.variables.clone())),
            ..self.environment.clone().unwrap_or_default()
        };
        let parameters = gateway::parameters_name(&gateway.value)?;
        let parameters =
            parameters.and_then(|name| self.known.parameters(&NamespacedName::new(key.namespace.clone(), name)));
        let class_parameters = self.known.class_parameters(&self.namespace, gateway.class());
        let cluster = self.inputs.mesh.borrow().installation.cluster.clone();
        let request = GatewayRequest {
            gateway: &gateway.value,
            class: &facts.class,
            more_ports: &facts.ports,
            class_parameters: class_parameters.filter(|_| facts.has_class_parameters),
            parameters,
            cluster: cluster.as_str(),
            kubernetes_version: self.version,
            ambient: features.pilot_enable_ambient_waypoints,
            copies_metadata: features.pilot_enable_gateway_api_copy_labels_annotations,
        };
        injector.gateway_objects(&request, &environment)
    }

    fn refuse(&mut self, key: &NamespacedName, error: String) {
        self.inputs.metrics.count(Outcome::Refused);
        if self.refusals.get(key) != Some(&error) {
            let NamespacedName { namespace, name } = key;
            tracing::error!(%namespace, %name, error, "gateway deployment refused");
            self.refusals.insert(key.clone(), error);
        }
    }
}

/// Returns the field manager: the name of the default controller, for all classes.
fn manager(inputs: &Inputs) -> SmolStr {
    let mesh = inputs.mesh.borrow();
    mesh.installation.features.pilot_gateway_api_controller_name.clone()
}

/// Returns major and minor version, written together; -1 if they are no numbers.
fn number(major: &str, minor: &str) -> i64 {
    let digits: String = major
        .chars()
        .chain(minor.chars())
        .filter(char::is_ascii_digit)
        .collect();
    digits.parse().unwrap_or(-1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_numbers() {
        assert_eq!(number("1", "28"), 128);
        assert_eq!(number("1", "33+"), 133);
        assert_eq!(number("", ""), -1);
    }
}
