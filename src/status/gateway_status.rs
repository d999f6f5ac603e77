//! Writes the statuses of the Gateway API's objects (`PILOT_ENABLE_GATEWAY_API_STATUS`).
//!
//! Each revision has a leader, because each is responsible for objects of its own. An older Istio has one lock for all
//! revisions: while it holds that, this revision waits for it, and then releases it for the other revisions.
//!
//! Parity (pilot/pkg/bootstrap/configcontroller.go, pilot/pkg/leaderelection/).

use std::{collections::BTreeSet, sync::Arc};

use serde_json::Value;
use smol_str::SmolStr;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use super::object_status::ServedKinds;
use super::{
    leader::{Election, Lock},
    object_status::{self, Observed, Writer, is_equal},
    revisions,
    watching::{WatchedNamespaces, Watches},
};
use crate::{
    api::Kind,
    model::{
        gateway_api::status::{Content, Revisions, StatusKey, Statuses, Written},
        snapshot::MeshSnapshot,
    },
};

/// Name of the lock of a revision, without the revision.
const LOCK: &str = "istio-gateway-status-leader";

/// Inputs of the writer.
#[derive(Clone)]
pub struct Inputs {
    /// Watches in the config cluster.
    pub watches: Watches,
    /// The mesh.
    pub mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// Tags of the own revision; `None` while unknown.
    pub tags: watch::Receiver<Option<BTreeSet<SmolStr>>>,
    /// Starts to follow the kinds that are served.
    pub served: Arc<dyn Fn() -> ServedKinds + Send + Sync>,
    /// The namespaces that are read.
    pub only: WatchedNamespaces,
}

/// Writes while this replica leads.
pub async fn run(election: &Election, inputs: Inputs) {
    let lock = Lock::of_revision(LOCK, &election.revision);
    election
        .run(lock, |token| {
            let (election, inputs) = (election.clone(), inputs.clone());
            async move {
                let default_tag = election.default_revision.clone();
                if election.is_held(&Lock::OLD_GATEWAY_STATUS).await {
                    Box::pin(take_over(election, &token)).await;
                }
                write(inputs, default_tag, token).await;
            }
        })
        .await;
}

/// Waits until an older Istio no longer writes: acquires its lock and releases it at once, because every other revision
/// waits for it, too. Ends early with the token.
///
/// Parity (pilot/pkg/bootstrap/configcontroller.go, `checkAndRunNonRevisionLeaderElectionIfRequired`).
async fn take_over(election: Election, token: &CancellationToken) {
    let acquired = token.child_token();
    let election = Election {
        shutdown: acquired.clone(),
        ..election
    };
    election
        .run(Lock::OLD_GATEWAY_STATUS, |_| {
            let acquired = acquired.clone();
            async move { acquired.cancel() }
        })
        .await;
}

/// Writes until the token is cancelled. `default_tag` is the revision that the tag `default` points to.
async fn write(inputs: Inputs, default_tag: watch::Receiver<SmolStr>, token: CancellationToken) {
    let (watches, tags) = (inputs.watches.clone(), inputs.tags.clone());
    let writing = revisions::run_with(watches, tags, default_tag, move |revisions| {
        write_own(inputs.clone(), revisions)
    });
    token.run_until_cancelled(Box::pin(writing)).await;
}

/// Writes until a source ends.
async fn write_own(inputs: Inputs, revisions: Revisions) {
    let has_pools = {
        let mesh = inputs.mesh.borrow();
        mesh.installation.features.enable_gateway_api_inference_extension
    };
    let statuses = Statuses::new(revisions);
    let statuses = GatewayStatuses { statuses, has_pools };
    let writer = Writer::new(inputs.watches, inputs.mesh, (inputs.served)(), inputs.only, statuses);
    Box::pin(writer.run()).await;
}

/// The statuses, and whether InferencePools have some.
struct GatewayStatuses {
    statuses: Statuses,
    has_pools: bool,
}

impl object_status::Statuses for GatewayStatuses {
    fn update(&mut self, mesh: &Arc<MeshSnapshot>, written: Vec<Written>) -> Vec<StatusKey> {
        let changed = self.statuses.update(mesh, written);
        for object in self.statuses.take_panics() {
            tracing::error!(object, "status derivation panicked");
        }
        changed
    }

    fn fields(&self, key: &StatusKey, observed: &Observed, now: &str) -> Option<Value> {
        // A status describes the generation that the snapshot has; the other one follows.
        let status = self.statuses.get(key);
        let status = status.filter(|status| status.generation == observed.generation)?;
        let (existing, namespace) = (&observed.status, &key.object.namespace);
        let optional: &[&str] = match &status.content {
            Content::Gateway(_) => &["addresses", "attachedListenerSets"],
            Content::Class(_) | Content::Entries(_) => &[],
        };
        let wanted = status.merged(existing, namespace, now);
        (!is_equal(&wanted, existing, optional)).then(|| status.applied(existing, namespace, now))
    }

    fn left_over(&self, key: &StatusKey, observed: &Observed, fields: &Value) -> Option<Value> {
        self.statuses.get(key)?.left_over(fields, &observed.status)
    }

    fn depend_on(&self, kind: Kind) -> bool {
        self.has_pools && Statuses::depend_on(kind)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::status::{
        fake_api::FakeApi,
        leader::{
            Timing,
            record::{LockForm, Record},
        },
    };

    #[tokio::test]
    async fn revisions_do_not_keep_the_lock_of_an_older_istio() {
        const PATH: &str = "/api/v1/namespaces/istio-system/configmaps/istio-gateway-status-leader";
        let api = FakeApi::default();
        let held = Record {
            holder_identity: "istiod-old".to_owned(),
            holder_key: "default".to_owned(),
            ..Record::default()
        };
        let lock = Lock::OLD_GATEWAY_STATUS;
        api.put(PATH, lock.form.object("istio-system", &lock.name, &held));
        for revision in ["canary", "stable"] {
            let election = Election {
                client: api.client(),
                namespace: "istio-system".into(),
                identity: format!("istiod-{revision}").into(),
                revision: revision.into(),
                remote: false,
                enabled: true,
                default_revision: watch::channel(SmolStr::default()).1,
                shutdown: CancellationToken::new(),
                // The lease of the older one is over.
                timing: Timing {
                    lease: Duration::ZERO,
                    ..Timing::default()
                },
            };
            let token = CancellationToken::new();
            let waiting = take_over(election.clone(), &token);
            let ended = tokio::time::timeout(Duration::from_secs(30), waiting).await;
            assert!(ended.is_ok(), "{revision} does not get the lock");
            assert!(!token.is_cancelled());
            assert!(!election.is_held(&lock).await, "{revision} keeps the lock");
        }
        let object = api.get(PATH).expect("the lock");
        let record = LockForm::ConfigMap.read(&object).expect("a record");
        assert_eq!(record.leader_transitions, 2);
    }
}
