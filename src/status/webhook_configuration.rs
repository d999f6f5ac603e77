//! CA bundles of webhook configurations: API servers verify the webhooks of this control plane with them. The
//! validating webhook is also made to fail closed, once it has proved to work.
//!
//! Nothing that is equal is written, and a write changes nothing but `caBundle` and `failurePolicy`, under the name of
//! this program as field manager. So tools that apply the rest of a configuration see no other change.
//!
//! Replicas may have different roots: one that has restarted does not know the earlier roots that others still trust.
//! So a replica leaves a bundle that contains all its roots, and replaces it by exactly these only when they change.
//! Replicas that still revert each other's writes back off longer and longer in between.
//!
//! Parity (pkg/webhooks/webhookpatch.go, pkg/webhooks/validation/controller/controller.go): every replica writes, not a
//! leader, and retries without end.

mod backoff;
mod metrics;
mod plan;

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use serde_json::{Value, json};
use smol_str::SmolStr;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

pub use self::metrics::Metrics;
use self::{
    backoff::WriteBackoff,
    plan::{Bundle, FailurePolicy, NoWebhook},
};
use super::{
    store::{Store, WriteError},
    watching::Watches,
};
use crate::{
    api::{istio::ALWAYS_REJECTED, label::REVISION},
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    task,
};

const GROUP: &str = "admissionregistration.k8s.io";
const VERSION: &str = "v1";
/// The first and the longest retry delay.
const RETRY: Duration = Duration::from_millis(100);
const RETRY_LATER: Duration = Duration::from_mins(1);
const QUICK_RETRIES: u32 = 5;
/// Name of the object that the validating webhook must refuse. It is never stored.
const PROBE: &str = "invalid-gateway";
/// Texts of refusals that prove that the webhook works, or that it has nothing to check.
const PROOFS: [&str; 3] = [
    "denied the request",
    "the server could not find the requested resource",
    "does not support dry run",
];

/// A kind of webhook configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Mutating,
    Validating,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Mutating => "MutatingWebhookConfiguration",
            Self::Validating => "ValidatingWebhookConfiguration",
        }
    }

    fn plural(self) -> &'static str {
        match self {
            Self::Mutating => "mutatingwebhookconfigurations",
            Self::Validating => "validatingwebhookconfigurations",
        }
    }

    /// Returns the delay after this many failed rounds.
    ///
    /// Parity (pkg/webhooks/webhookpatch.go, pkg/webhooks/validation/controller/controller.go): the validator waits for
    /// its own Service, which has endpoints some seconds after the start, so its delay grows step by step.
    fn retry_delay(self, failures: u32) -> Duration {
        match self {
            Self::Mutating if failures <= QUICK_RETRIES => RETRY,
            Self::Mutating => RETRY_LATER,
            Self::Validating => (RETRY * 2_u32.pow(failures.saturating_sub(1).min(10))).min(RETRY_LATER),
        }
    }
}

/// The inputs of a controller.
#[derive(Clone)]
pub struct Inputs {
    /// Watches of the cluster.
    pub watches: Watches,
    /// The revision of this control plane.
    pub revision: SmolStr,
    /// Root certificates of the serving certificate, as PEM; `None` while there are none.
    pub roots: watch::Receiver<Option<Bytes>>,
    /// Counters.
    pub metrics: Metrics,
}

/// Keeps the CA bundles of the injector's configurations.
pub async fn keep_injectors(inputs: Inputs) {
    keep(inputs, Kind::Mutating, None).await;
}

/// Keeps the CA bundles and failure policies of the validator's configurations. `namespace` is that of this control
/// plane.
pub async fn keep_validators(inputs: Inputs, namespace: SmolStr) {
    keep(inputs, Kind::Validating, Some(namespace)).await;
}

async fn keep(inputs: Inputs, kind: Kind, namespace: Option<SmolStr>) {
    let client = inputs.watches.client.clone();
    let store = Store::new(client.clone(), GROUP, VERSION, kind.name(), kind.plural());
    let target = WatchTarget {
        labels: Some(format!("{REVISION}={}", inputs.revision)),
        ..WatchTarget::all(store.resource().clone())
    };
    let (watching, events) = inputs.watches.open(target, configuration);
    let probe = namespace.map(|namespace| Probe {
        gateways: Store::new(client, "networking.istio.io", "v1", "Gateway", "gateways"),
        namespace,
        revision: inputs.revision.clone(),
    });
    let reconciler = Reconciler {
        store,
        kind,
        roots: inputs.roots,
        metrics: inputs.metrics,
        policy: match probe {
            Some(_) => FailurePolicy::Unproved,
            None => FailurePolicy::Kept,
        },
        probe,
        configurations: BTreeMap::new(),
        bundle: None,
        backoff: WriteBackoff::default(),
        failures: 0,
    };
    tokio::select! {
        () = watching => {}
        () = reconciler.run(events) => {}
    }
}

/// Returns name and content of a configuration.
fn configuration(object: Object) -> (SmolStr, Value) {
    (object.name().into(), object.value)
}

/// The state of the task that keeps the configurations of one kind up to date.
struct Reconciler {
    store: Store,
    kind: Kind,
    roots: watch::Receiver<Option<Bytes>>,
    metrics: Metrics,
    policy: FailurePolicy,
    probe: Option<Probe>,
    /// The configurations of the revision, by name.
    configurations: BTreeMap<SmolStr, Value>,
    /// The bundle of the last round.
    bundle: Option<Bundle>,
    /// After writes of this bundle and policy.
    backoff: WriteBackoff,
    /// Failed rounds since the last success.
    failures: u32,
}

impl Reconciler {
    async fn run(mut self, mut events: mpsc::Receiver<WatchEvent<(SmolStr, Value)>>) {
        loop {
            let again = self.reconcile().await;
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => self.apply(event),
                    None => return,
                },
                changed = self.roots.changed() => if changed.is_err() { return },
                () = task::until(again) => {}
            }
            // Further events that have arrived already make one round.
            while let Ok(event) = events.try_recv() {
                self.apply(event);
            }
        }
    }

    fn apply(&mut self, event: WatchEvent<(SmolStr, Value)>) {
        match event {
            WatchEvent::Restarted(all) => self.configurations = all.into_iter().collect(),
            WatchEvent::Applied((name, configuration)) => {
                self.configurations.insert(name, configuration);
            }
            WatchEvent::Deleted((name, _)) => {
                self.configurations.remove(&name);
                self.backoff.remove(&name);
            }
        }
    }

    /// Writes what is not as it should be. Returns the time of the next attempt if something is still to be written.
    async fn reconcile(&mut self) -> Option<Instant> {
        let roots = self.roots.borrow_and_update().clone()?;
        let Some(mut bundle) = Bundle::of(&roots) else {
            tracing::error!("the root certificates are not PEM, webhook configurations are left as they are");
            for name in self.configurations.keys() {
                self.metrics.failed(self.kind, name, metrics::LOAD);
            }
            return None;
        };
        if self.bundle.as_ref().is_none_or(|known| known.text != bundle.text) {
            self.backoff.clear();
            bundle.is_exact = self.bundle.is_some();
            self.bundle = Some(bundle);
        }
        let (mut is_done, mut deferred) = self.write_all().await;
        if let Some(bundle) = self.bundle.as_mut().filter(|_| is_done) {
            bundle.is_exact = false;
        }
        let must_prove = self.policy == FailurePolicy::Unproved && !self.configurations.is_empty();
        if is_done && deferred.is_none() && must_prove {
            let is_proved = match &self.probe {
                Some(probe) => probe.is_refused().await,
                None => false,
            };
            if is_proved {
                tracing::info!("validation webhook works, failure policy is raised to Fail");
                self.policy = FailurePolicy::Fail;
                self.backoff.clear();
                (is_done, deferred) = self.write_all().await;
            } else {
                is_done = false;
            }
        }
        if is_done {
            self.failures = 0;
            return deferred;
        }
        self.failures = self.failures.saturating_add(1);
        let retry = Instant::now() + self.kind.retry_delay(self.failures);
        Some(deferred.map_or(retry, |deferred| deferred.min(retry)))
    }

    /// Returns false if a write failed, and the time of the first write that the backoff has put off.
    async fn write_all(&mut self) -> (bool, Option<Instant>) {
        let (mut is_done, mut deferred) = (true, None);
        let Some(bundle) = &self.bundle else {
            return (is_done, deferred);
        };
        let policy = self.policy;
        let change = |(name, found): (&SmolStr, &Value)| (name.clone(), plan::patched(found, bundle, policy));
        let planned: Vec<_> = self.configurations.iter().map(change).collect();
        for (name, patched) in planned {
            match patched {
                Ok(None) => {}
                Ok(Some(new)) => match self.backoff.end(&name, Instant::now()) {
                    Some(end) => deferred = Some(deferred.map_or(end, |first: Instant| first.min(end))),
                    None => is_done &= self.write(name, new).await,
                },
                Err(NoWebhook) => {
                    tracing::debug!(%name, "webhook configuration has no webhook of this control plane");
                    self.metrics.failed(self.kind, &name, metrics::NO_ENTRY);
                }
            }
        }
        (is_done, deferred)
    }

    async fn write(&mut self, name: SmolStr, mut new: Value) -> bool {
        // Items of lists have neither.
        new["apiVersion"] = format!("{GROUP}/{VERSION}").into();
        new["kind"] = self.kind.name().into();
        self.metrics.attempted(self.kind, &name, self.failures > 0);
        match self.store.replace("", &name, &new).await {
            Ok(written) => {
                tracing::info!(kind = self.kind.name(), %name, "CA bundle of webhook configuration written");
                self.metrics.written(self.kind);
                self.backoff.begin(name.clone(), Instant::now());
                self.configurations.insert(name, written);
                true
            }
            // The watch reports the deletion.
            Err(WriteError::NotFound(_)) => {
                self.metrics.failed(self.kind, &name, metrics::NOT_FOUND);
                true
            }
            Err(error) => {
                // Another replica was faster, as a rule, and the watch brings what it wrote.
                if !matches!(error, WriteError::Conflict(_)) {
                    tracing::warn!(kind = self.kind.name(), %name, %error, "failed to write webhook configuration");
                }
                self.metrics.failed(self.kind, &name, metrics::UPDATE);
                false
            }
        }
    }
}

/// An object that the validating webhook must refuse.
struct Probe {
    gateways: Store,
    namespace: SmolStr,
    revision: SmolStr,
}

impl Probe {
    /// Returns true if the API server refuses the object because of the webhook.
    async fn is_refused(&self) -> bool {
        let object = json!({
            "apiVersion": "networking.istio.io/v1",
            "kind": "Gateway",
            "metadata": {
                "name": PROBE,
                "namespace": self.namespace,
                "labels": {REVISION: self.revision},
                "annotations": {ALWAYS_REJECTED: "true"},
            },
            "spec": {},
        });
        let Err(error) = self.gateways.try_create(&self.namespace, &object).await else {
            return false;
        };
        let error = error.to_string();
        let is_proof = PROOFS.iter().any(|proof| error.contains(proof));
        if !is_proof {
            tracing::debug!(error, "validation webhook not proved to work");
        }
        is_proof
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;
    use crate::status::fake_api::FakeApi;

    const PATH: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/x";

    fn roots(certificates: &[&str]) -> Bytes {
        let block = |text: &&str| format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n");
        let blocks: Vec<String> = certificates.iter().map(block).collect();
        blocks.concat().into()
    }

    fn bundle(certificates: &[&str]) -> String {
        Bundle::of(&roots(certificates)).expect("certificates").text
    }

    /// Sets the bundle of a configuration, as another replica does.
    fn revert(api: &FakeApi, reconciler: &mut Reconciler, certificates: &[&str]) {
        let client = json!({"caBundle": bundle(certificates)});
        let webhook = json!({"name": "x.sidecar-injector.istio.io", "clientConfig": client});
        api.put(PATH, json!({"metadata": {"name": "x"}, "webhooks": [webhook]}));
        let found = api.get(PATH).expect("the configuration");
        reconciler.apply(WatchEvent::Applied(("x".into(), found)));
    }

    fn reconciler(api: &FakeApi, roots: watch::Receiver<Option<Bytes>>) -> Reconciler {
        let kind = Kind::Mutating;
        Reconciler {
            store: Store::new(api.client(), GROUP, VERSION, kind.name(), kind.plural()),
            kind,
            roots,
            metrics: Metrics::new(&Registry::new()).expect("unused names"),
            policy: FailurePolicy::Kept,
            probe: None,
            configurations: BTreeMap::new(),
            bundle: None,
            backoff: WriteBackoff::default(),
            failures: 0,
        }
    }

    #[test]
    fn the_validator_is_soon_proved_to_work() {
        let delays = (1..=7).map(|failures| Kind::Validating.retry_delay(failures));
        assert_eq!(delays.sum::<Duration>(), RETRY * 127);
        assert_eq!(Kind::Mutating.retry_delay(QUICK_RETRIES), RETRY);
        for kind in [Kind::Mutating, Kind::Validating] {
            assert_eq!(kind.retry_delay(u32::MAX), RETRY_LATER);
        }
    }

    #[tokio::test]
    async fn replicas_with_different_roots_do_not_revert_each_other() {
        let api = FakeApi::default();
        let present = || api.get(PATH).expect("the configuration")["webhooks"][0]["clientConfig"]["caBundle"].clone();
        let (sender, receiver) = watch::channel(Some(roots(&["AAAA"])));
        let mut reconciler = reconciler(&api, receiver);
        // Other replicas still trust an earlier root.
        revert(&api, &mut reconciler, &["AAAA", "AAAB"]);
        assert_eq!(reconciler.reconcile().await, None);
        assert_eq!(present(), bundle(&["AAAA", "AAAB"]));
        sender.send_replace(Some(roots(&["AAAB"])));
        assert_eq!(reconciler.reconcile().await, None);
        assert_eq!(present(), bundle(&["AAAB"]), "the own roots have changed");
        revert(&api, &mut reconciler, &["AAAA", "AAAB"]);
        assert_eq!(reconciler.reconcile().await, None);
        assert_eq!(present(), bundle(&["AAAA", "AAAB"]));
        // A bundle without the own roots is replaced, but not at once.
        revert(&api, &mut reconciler, &["AAAA"]);
        reconciler
            .backoff
            .begin("x".into(), Instant::now() + Duration::from_hours(1));
        assert!(reconciler.reconcile().await.is_some());
        assert_eq!(present(), bundle(&["AAAA"]));
        reconciler.backoff.clear();
        assert_eq!(reconciler.reconcile().await, None);
        assert_eq!(present(), bundle(&["AAAB"]));
    }
}
