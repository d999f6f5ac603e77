//! Leader election on Istio's locks, so that this control plane and Istio's own can share a cluster: whatever is written
//! by one instance only is written by the holder of a lock.
//!
//! The lock is a courtesy, not a fence: a leader that hangs for longer than its lease may write beside the next one.
//! Whatever runs under it therefore writes with resource versions or tests.

pub mod elector;
pub mod record;

use std::{fmt, future::Future, pin::pin, time::Duration};

use smol_str::{SmolStr, format_smolstr};
use time::OffsetDateTime;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::{
    elector::{Candidate, Elector, Step},
    record::{LockForm, RecordError},
};
use super::{
    store::{self, Store, WriteError},
    watching::Watches,
};
use crate::{
    environment,
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
};

/// How long what ran under a lost lock may take to end by itself.
const FAREWELL: Duration = Duration::from_secs(1);
/// How long giving a lock back may take.
const RELEASE_PATIENCE: Duration = Duration::from_secs(3);

/// A lock of Istio's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lock {
    /// Name of its object in the control plane's namespace.
    pub name: SmolStr,
    /// What it is kept in.
    pub form: LockForm,
    /// All revisions compete for it, the default one first; else it belongs to one revision.
    pub prioritised: bool,
}

impl Lock {
    /// Ingress statuses.
    pub const INGRESS: Self = Self::shared("istio-leader", LockForm::ConfigMap);
    /// Root certificates in namespaces; one in each cluster.
    pub const NAMESPACES: Self = Self::shared("istio-namespace-controller-election", LockForm::ConfigMap);
    /// ServiceExports made for Services; one in each cluster.
    pub const SERVICE_EXPORT: Self = Self::shared("istio-serviceexport-controller-election", LockForm::ConfigMap);
    /// Findings in statuses.
    pub const ANALYSIS: Self = Self::shared("istio-analyze-leader", LockForm::ConfigMap);
    /// Addresses of ServiceEntries.
    pub const AUTO_ALLOCATION: Self = Self::shared("istio-ip-autoallocate", LockForm::ConfigMap);
    /// Removal of taints.
    pub const UNTAINT: Self = Self::shared("istio-node-untaint", LockForm::ConfigMap);
    /// Ambient statuses.
    pub const STATUS: Self = Self::shared("istio-status-leader", LockForm::Lease);

    const fn shared(name: &'static str, form: LockForm) -> Self {
        Self {
            name: SmolStr::new_static(name),
            form,
            prioritised: true,
        }
    }

    /// A lock for which only instances of one revision stand: `istio-gateway-deployment`, `istio-gateway-status-leader`.
    pub fn of_revision(name: &str, revision: &str) -> Self {
        Self {
            name: format_smolstr!("{name}-{revision}"),
            form: LockForm::Lease,
            prioritised: false,
        }
    }
}

/// How long things take; Istio's values by default.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long a lock is held without being renewed.
    pub lease: Duration,
    /// How long renewing may fail before the leader stops.
    pub renew_deadline: Duration,
    /// Between attempts.
    pub retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(30),
            renew_deadline: Duration::from_secs(15),
            retry: Duration::from_millis(7500),
        }
    }
}

/// An instance of the control plane, standing for election in one cluster. Cheap to clone.
#[derive(Clone)]
pub struct Election {
    /// Client of the cluster that the locks are in.
    pub client: ::kube::Client,
    /// The control plane's namespace.
    pub namespace: SmolStr,
    /// The pod's name.
    pub identity: SmolStr,
    /// The revision; `default` where none is set.
    pub revision: SmolStr,
    /// The cluster is not the one that this control plane runs in.
    pub remote: bool,
    /// `ENABLE_LEADER_ELECTION`; false: every instance leads.
    pub enabled: bool,
    /// The default revision of the cluster, empty while there is none.
    pub default_revision: watch::Receiver<SmolStr>,
    /// Ends elections, and gives their locks back.
    pub shutdown: CancellationToken,
    /// How long things take.
    pub timing: Timing,
}

/// Why an attempt failed. Every one is tried again.
#[derive(Debug, thiserror::Error)]
enum AttemptError {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("no answer in time")]
    Slow,
}

impl Election {
    /// Runs `work` whenever this instance leads, until shutdown. Its token is cancelled when the lead is lost; then it is
    /// dropped soon. Work that ends by itself is started again.
    pub async fn run<F, W>(&self, lock: Lock, work: F)
    where
        F: Fn(CancellationToken) -> W,
        W: Future<Output = ()>,
    {
        if !self.enabled {
            tracing::info!(lock = %lock.name, "there is no election: every instance leads");
            return self.keep_working(&work, self.shutdown.child_token()).await;
        }
        let store = self.store(&lock);
        while !self.shutdown.is_cancelled() {
            let mut elector = Elector::new(self.candidate(&lock));
            if !self.acquire(&lock, &store, &mut elector).await {
                return;
            }
            tracing::info!(lock = %lock.name, "leading");
            let token = self.shutdown.child_token();
            {
                let mut working = pin!(self.keep_working(&work, token.clone()));
                let ended = tokio::select! {
                    () = self.renew(&lock, &store, &mut elector) => false,
                    () = working.as_mut() => true,
                };
                token.cancel();
                if !ended && tokio::time::timeout(FAREWELL, working).await.is_err() {
                    tracing::debug!(lock = %lock.name, "work was cut off");
                }
            }
            tracing::info!(lock = %lock.name, "leading no more");
            self.release(&lock, &store, &elector).await;
        }
    }

    async fn keep_working<F, W>(&self, work: &F, token: CancellationToken)
    where
        F: Fn(CancellationToken) -> W,
        W: Future<Output = ()>,
    {
        while !token.is_cancelled() {
            work(token.clone()).await;
            tokio::select! {
                () = token.cancelled() => return,
                () = tokio::time::sleep(self.timing.retry) => {}
            }
        }
    }

    fn candidate(&self, lock: &Lock) -> Candidate {
        Candidate {
            identity: self.identity.clone(),
            revision: self.revision.clone(),
            remote: self.remote,
            prioritised: lock.prioritised,
            lease: self.timing.lease,
        }
    }

    fn store(&self, lock: &Lock) -> Store {
        let (group, version, kind, plural) = lock.form.resource();
        Store::new(self.client.clone(), group, version, kind, plural)
    }

    /// Tries until the lock is won; false at shutdown.
    async fn acquire(&self, lock: &Lock, store: &Store, elector: &mut Elector) -> bool {
        let mut told = None;
        loop {
            let attempt = tokio::select! {
                attempt = self.attempt(lock, store, elector, self.timing.renew_deadline) => attempt,
                () = self.shutdown.cancelled() => return false,
            };
            match attempt {
                Ok(true) => return true,
                Ok(false) => told = None,
                Err(error) => tell_once(&mut told, lock, &error),
            }
            tokio::select! {
                () = self.shutdown.cancelled() => return false,
                () = tokio::time::sleep(self.timing.retry) => {}
            }
        }
    }

    /// Renews until that fails for too long, somebody else holds the lock, or shutdown.
    async fn renew(&self, lock: &Lock, store: &Store, elector: &mut Elector) {
        let mut renewed = tokio::time::Instant::now();
        let mut told = None;
        loop {
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = tokio::time::sleep(self.timing.retry) => {}
            }
            let left = (renewed + self.timing.retry + self.timing.renew_deadline)
                .saturating_duration_since(tokio::time::Instant::now());
            if left.is_zero() {
                return;
            }
            let attempt = tokio::select! {
                () = self.shutdown.cancelled() => return,
                attempt = self.attempt(lock, store, elector, left) => attempt,
            };
            match attempt {
                Ok(true) => {
                    renewed = tokio::time::Instant::now();
                    told = None;
                }
                Ok(false) => return,
                Err(error) => tell_once(&mut told, lock, &error),
            }
        }
    }

    /// One attempt to win or to renew. True: this instance leads.
    async fn attempt(
        &self,
        lock: &Lock,
        store: &Store,
        elector: &mut Elector,
        patience: Duration,
    ) -> Result<bool, AttemptError> {
        tokio::time::timeout(patience, self.exchange(lock, store, elector))
            .await
            .unwrap_or(Err(AttemptError::Slow))
    }

    async fn exchange(&self, lock: &Lock, store: &Store, elector: &mut Elector) -> Result<bool, AttemptError> {
        let object = store.get(&self.namespace, &lock.name).await?;
        let found = object.as_ref().map(|object| lock.form.read(object)).transpose()?;
        let default_revision = self.default_revision.borrow().clone();
        let now = environment::now();
        let record = match (elector.step(found.as_ref(), now, wall(), &default_revision), object) {
            (Step::Wait, _) => return Ok(false),
            (Step::Update(record), Some(mut object)) => {
                lock.form.write(&mut object, &record);
                store.replace(&self.namespace, &lock.name, &object).await?;
                record
            }
            (Step::Create(record) | Step::Update(record), _) => {
                let object = lock.form.object(&self.namespace, &lock.name, &record);
                store.create(&self.namespace, &object).await?;
                record
            }
        };
        elector.wrote(record, now);
        Ok(true)
    }

    /// Gives the lock back, so that others need not wait for the lease to end.
    async fn release(&self, lock: &Lock, store: &Store, elector: &Elector) {
        let releasing = async {
            let Some(mut object) = store.get(&self.namespace, &lock.name).await? else {
                return Ok(());
            };
            let record = lock.form.read(&object)?;
            if let Some(record) = elector.release(&record, wall()) {
                lock.form.write(&mut object, &record);
                store.replace(&self.namespace, &lock.name, &object).await?;
            }
            Ok::<(), AttemptError>(())
        };
        match tokio::time::timeout(RELEASE_PATIENCE, releasing).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(lock = %lock.name, %error, "the lock could not be given back"),
            Err(_) => tracing::warn!(lock = %lock.name, "the lock could not be given back in time"),
        }
    }
}

/// The webhook configuration whose label names the default revision.
const DEFAULT_TAG: &str = "istio-revision-tag-default";

/// Follows which revision is the default one in a cluster; empty: none.
pub async fn default_revision(watches: Watches, revision: watch::Sender<SmolStr>) {
    let webhooks = store::resource(
        "admissionregistration.k8s.io",
        "v1",
        "MutatingWebhookConfiguration",
        "mutatingwebhookconfigurations",
    );
    let target = WatchTarget {
        fields: Some(format!("metadata.name={DEFAULT_TAG}")),
        metadata_only: true,
        ..WatchTarget::all(webhooks)
    };
    let (watching, mut events) = watches.open(target, revision_of);
    let following = async {
        while let Some(event) = events.recv().await {
            let named = match event {
                WatchEvent::Restarted(all) => all.into_iter().next().unwrap_or_default(),
                WatchEvent::Applied(named) => named,
                WatchEvent::Deleted(_) => SmolStr::default(),
            };
            revision.send_replace(named);
        }
    };
    tokio::select! {
        () = watching => {}
        () = following => {}
    }
}

fn revision_of(webhook: Object) -> SmolStr {
    let labels = webhook.metadata.labels.unwrap_or_default();
    labels.get("istio.io/rev").map(SmolStr::new).unwrap_or_default()
}

/// Tells an error that differs from the last one.
fn tell_once(told: &mut Option<String>, lock: &Lock, error: &AttemptError) {
    let text = error.to_string();
    if told.as_ref() != Some(&text) {
        tracing::warn!(lock = %lock.name, error = text, "the lock cannot be had");
        *told = Some(text);
    }
}

fn wall() -> OffsetDateTime {
    environment::wall_clock().into()
}

impl fmt::Debug for Election {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let election = (&self.namespace, &self.identity, &self.revision, self.remote);
        formatter.debug_tuple("Election").field(&election).finish()
    }
}

#[cfg(test)]
mod tests;
