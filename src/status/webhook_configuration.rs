//! CA bundles of webhook configurations: API servers verify the webhooks of this control plane with them. The
//! validating webhook is also made to fail closed, once it has proved to work.
//!
//! Nothing that is equal is written, and a write changes nothing but `caBundle` and `failurePolicy`, under the name of
//! this program as field manager. So tools that apply the rest of a configuration see no other change.
//!
//! Parity (pkg/webhooks/webhookpatch.go, pkg/webhooks/validation/controller/controller.go): every replica writes, not a
//! leader, and retries without end.

mod metrics;
mod plan;

use std::{collections::BTreeMap, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::{Value, json};
use smol_str::SmolStr;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};

pub use self::metrics::Metrics;
use self::plan::{FailurePolicy, NoWebhook};
use super::{
    store::{Store, WriteError},
    watching::Watches,
};
use crate::{
    api::istio::ALWAYS_REJECTED,
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
};

const GROUP: &str = "admissionregistration.k8s.io";
const VERSION: &str = "v1";
/// Label with the revision of a configuration.
const REVISION: &str = "istio.io/rev";
/// Retry delays: the first of them for some attempts, then the other one.
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
    let keeper = Keeper {
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
        failures: 0,
    };
    tokio::select! {
        () = watching => {}
        () = keeper.run(events) => {}
    }
}

/// Returns name and content of a configuration.
fn configuration(object: Object) -> (SmolStr, Value) {
    (object.name().into(), object.value)
}

struct Keeper {
    store: Store,
    kind: Kind,
    roots: watch::Receiver<Option<Bytes>>,
    metrics: Metrics,
    policy: FailurePolicy,
    probe: Option<Probe>,
    /// The configurations of the revision, by name.
    configurations: BTreeMap<SmolStr, Value>,
    /// Failed rounds since the last success.
    failures: u32,
}

impl Keeper {
    async fn run(mut self, mut events: mpsc::Receiver<WatchEvent<(SmolStr, Value)>>) {
        loop {
            let again = self.reconcile().await;
            let waiting = async {
                match again {
                    Some(time) => sleep_until(time).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => self.apply(event),
                    None => return,
                },
                changed = self.roots.changed() => if changed.is_err() { return },
                () = waiting => {}
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
            }
        }
    }

    /// Writes what is not as it should be. Returns the time of the next attempt if something failed.
    async fn reconcile(&mut self) -> Option<Instant> {
        let roots = self.roots.borrow_and_update().clone()?;
        let Some(bundle) = encoded(&roots) else {
            tracing::error!("the root certificates are not PEM, webhook configurations are left as they are");
            for name in self.configurations.keys() {
                self.metrics.failed(self.kind, name, metrics::LOAD);
            }
            return None;
        };
        let mut is_done = self.write_all(&bundle).await;
        if is_done && self.policy == FailurePolicy::Unproved && !self.configurations.is_empty() {
            let is_proved = match &self.probe {
                Some(probe) => probe.is_refused().await,
                None => false,
            };
            if is_proved {
                tracing::info!("validation webhook works, failure policy is raised to Fail");
                self.policy = FailurePolicy::Fail;
                is_done = self.write_all(&bundle).await;
            } else {
                is_done = false;
            }
        }
        if is_done {
            self.failures = 0;
            return None;
        }
        self.failures = self.failures.saturating_add(1);
        let delay = if self.failures <= QUICK_RETRIES {
            RETRY
        } else {
            RETRY_LATER
        };
        Some(Instant::now() + delay)
    }

    /// Returns false if a write failed.
    async fn write_all(&mut self, bundle: &str) -> bool {
        let mut is_done = true;
        let policy = self.policy;
        let of = |(name, found): (&SmolStr, &Value)| (name.clone(), plan::patched(found, bundle, policy));
        let planned: Vec<_> = self.configurations.iter().map(of).collect();
        for (name, patched) in planned {
            match patched {
                Ok(None) => {}
                Ok(Some(new)) => is_done &= self.write(name, new).await,
                Err(NoWebhook) => {
                    tracing::debug!(%name, "webhook configuration has no webhook of this control plane");
                    self.metrics.failed(self.kind, &name, metrics::NO_ENTRY);
                }
            }
        }
        is_done
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

/// Returns PEM certificates as in `caBundle`; `None` unless they can be parsed.
fn encoded(roots: &[u8]) -> Option<String> {
    let mut certificates = CertificateDer::pem_slice_iter(roots).peekable();
    let is_there = certificates.peek().is_some();
    let is_valid = is_there && certificates.all(|certificate| certificate.is_ok());
    is_valid.then(|| BASE64_STANDARD.encode(roots))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bundles_are_pem_certificates() {
        let certificate = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert_eq!(
            encoded(certificate.as_bytes()),
            Some(BASE64_STANDARD.encode(certificate))
        );
        assert_eq!(encoded(b""), None);
        assert_eq!(encoded(b"text"), None);
        let broken = "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n";
        assert_eq!(encoded(format!("{certificate}{broken}").as_bytes()), None);
    }
}
