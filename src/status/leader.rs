//! Leader election on Istio's locks, so that this control plane and Istio's can share a cluster. The holder of a lock
//! performs the writes that only one replica may do.
//!
//! The lock is a courtesy, not a fence: a leader that hangs for longer than its lease may write at the same time as the
//! next one. So all work under a lock writes with resource versions or tests.

pub mod elector;
pub mod record;

use std::{fmt, future::Future, panic::AssertUnwindSafe, pin::pin, time::Duration};

use futures::FutureExt;
use smol_str::{SmolStr, format_smolstr};
use time::OffsetDateTime;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::{
    elector::{Candidate, Elector, Step},
    record::{LockForm, RecordError},
};
use super::{
    revisions,
    store::{self, Store, WriteError},
    watching::Watches,
};
use crate::environment;

/// Time for work under a lost lock to end.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of releasing a lock.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(3);

/// One of Istio's locks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lock {
    /// Name of its object in the control plane's namespace.
    pub name: SmolStr,
    /// Kind of its object.
    pub form: LockForm,
    /// True if all revisions compete for it, with priority for the default one; otherwise it belongs to one revision.
    pub prioritised: bool,
}

impl Lock {
    /// Ingress statuses.
    pub const INGRESS: Self = Self::shared("istio-leader", LockForm::ConfigMap);
    /// Root certificates in namespaces, per cluster.
    pub const NAMESPACES: Self = Self::shared("istio-namespace-controller-election", LockForm::ConfigMap);
    /// ServiceExports of Services, per cluster.
    pub const SERVICE_EXPORT: Self = Self::shared("istio-serviceexport-controller-election", LockForm::ConfigMap);
    /// Analysis messages in statuses.
    pub const ANALYSIS: Self = Self::shared("istio-analyze-leader", LockForm::ConfigMap);
    /// Addresses of ServiceEntries.
    pub const AUTO_ALLOCATION: Self = Self::shared("istio-ip-autoallocate", LockForm::ConfigMap);
    /// Removal of node taints.
    pub const UNTAINT: Self = Self::shared("istio-node-untaint", LockForm::ConfigMap);
    /// Ambient statuses.
    pub const STATUS: Self = Self::shared("istio-status-leader", LockForm::Lease);

    /// Conditions about the distribution of objects.
    pub const DISTRIBUTION: Self = Self::shared("istio-distribution-leader", LockForm::Lease);

    /// Gateway API statuses of revisions before the lock of each revision existed.
    pub const OLD_GATEWAY_STATUS: Self = Self::shared("istio-gateway-status-leader", LockForm::ConfigMap);

    const fn shared(name: &'static str, form: LockForm) -> Self {
        Self {
            name: SmolStr::new_static(name),
            form,
            prioritised: true,
        }
    }

    /// Returns a lock of one revision: `istio-gateway-deployment`, `istio-gateway-status-leader`.
    pub fn of_revision(name: &str, revision: &str) -> Self {
        Self {
            name: format_smolstr!("{name}-{revision}"),
            form: LockForm::Lease,
            prioritised: false,
        }
    }
}

/// Durations; Istio's by default.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Time for which a lock is held without renewal.
    pub lease: Duration,
    /// Time for which renewal may fail before the leader stops.
    pub renew_deadline: Duration,
    /// Interval of attempts.
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

/// A replica that takes part in elections of one cluster. Cheap to clone.
#[derive(Clone)]
pub struct Election {
    /// Client of the cluster with the locks.
    pub client: ::kube::Client,
    /// Namespace of the control plane.
    pub namespace: SmolStr,
    /// Name of the pod.
    pub identity: SmolStr,
    /// Revision; `default` if unset.
    pub revision: SmolStr,
    /// True if the cluster is not the one of this control plane.
    pub remote: bool,
    /// `ENABLE_LEADER_ELECTION`; if false, every replica leads.
    pub enabled: bool,
    /// Default revision of the cluster, empty if there is none: the one that the tag `default` points to.
    pub default_revision: watch::Receiver<SmolStr>,
    /// Ends elections, and releases their locks.
    pub shutdown: CancellationToken,
    /// Durations.
    pub timing: Timing,
}

/// Reason of a failed attempt. All are retried.
#[derive(Debug, thiserror::Error)]
enum AttemptError {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("request to the API server timed out")]
    Slow,
}

impl Election {
    /// Runs `work` whenever this replica leads, until shutdown. Its token is cancelled when the lead is lost, and it is
    /// dropped soon after. Work that ends or panics is restarted.
    pub async fn run<F, W>(&self, lock: Lock, work: F)
    where
        F: Fn(CancellationToken) -> W,
        W: Future<Output = ()>,
    {
        if !self.enabled {
            tracing::info!(lock = %lock.name, "leader election disabled");
            return self.keep_working(&lock, &work, self.shutdown.child_token()).await;
        }
        let store = self.store(&lock);
        while !self.shutdown.is_cancelled() {
            let mut elector = Elector::new(self.candidate(&lock));
            if !self.acquire(&lock, &store, &mut elector).await {
                return;
            }
            tracing::info!(lock = %lock.name, "became leader");
            let token = self.shutdown.child_token();
            {
                let mut working = pin!(self.keep_working(&lock, &work, token.clone()));
                let ended = tokio::select! {
                    () = self.renew(&lock, &store, &mut elector) => false,
                    () = working.as_mut() => true,
                };
                token.cancel();
                if !ended && tokio::time::timeout(SHUTDOWN_TIMEOUT, working).await.is_err() {
                    tracing::debug!(lock = %lock.name, "work cancelled after lost lead");
                }
            }
            tracing::info!(lock = %lock.name, "lost leader election");
            self.release(&lock, &store, &elector).await;
        }
    }

    async fn keep_working<F, W>(&self, lock: &Lock, work: &F, token: CancellationToken)
    where
        F: Fn(CancellationToken) -> W,
        W: Future<Output = ()>,
    {
        while !token.is_cancelled() {
            // Without another replica, nothing else would do the work until the process ends.
            let working = AssertUnwindSafe(async { work(token.clone()).await });
            if working.catch_unwind().await.is_err() {
                tracing::error!(lock = %lock.name, "work of the leader panicked, starting it again");
            }
            tokio::select! {
                () = token.cancelled() => return,
                () = tokio::time::sleep(self.timing.retry) => {}
            }
        }
    }

    /// Returns true if a lock has a holder. Errors count as none.
    pub async fn is_held(&self, lock: &Lock) -> bool {
        let object = self.store(lock).get(&self.namespace, &lock.name).await;
        let record = object.ok().flatten().and_then(|object| lock.form.read(&object).ok());
        record.is_some_and(|record| !record.holder_identity.is_empty())
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

    /// Tries until the lock is acquired; returns false on shutdown.
    async fn acquire(&self, lock: &Lock, store: &Store, elector: &mut Elector) -> bool {
        let mut last_logged = None;
        loop {
            let attempt = tokio::select! {
                attempt = self.attempt(lock, store, elector, self.timing.renew_deadline) => attempt,
                () = self.shutdown.cancelled() => return false,
            };
            match attempt {
                Ok(true) => return true,
                Ok(false) => last_logged = None,
                Err(error) => log_once(&mut last_logged, lock, &error),
            }
            tokio::select! {
                () = self.shutdown.cancelled() => return false,
                () = tokio::time::sleep(self.timing.retry) => {}
            }
        }
    }

    /// Renews until that fails for too long, another replica holds the lock, or shutdown.
    async fn renew(&self, lock: &Lock, store: &Store, elector: &mut Elector) {
        let mut renewed = tokio::time::Instant::now();
        let mut last_logged = None;
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
                    last_logged = None;
                }
                Ok(false) => return,
                Err(error) => log_once(&mut last_logged, lock, &error),
            }
        }
    }

    /// Makes one attempt to acquire or renew. Returns true if this replica leads.
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

    /// Releases the lock, so that others need not wait for the end of the lease.
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
        match tokio::time::timeout(RELEASE_TIMEOUT, releasing).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(lock = %lock.name, %error, "failed to release lock"),
            Err(_) => tracing::warn!(lock = %lock.name, "lock release timed out"),
        }
    }
}

/// Webhook configuration whose label names the default revision.
const DEFAULT_TAG: &str = "istio-revision-tag-default";

/// Watches the default revision of a cluster; empty means none.
pub async fn default_revision(watches: Watches, revision: watch::Sender<SmolStr>) {
    let webhooks = store::resource(
        "admissionregistration.k8s.io",
        "v1",
        "MutatingWebhookConfiguration",
        "mutatingwebhookconfigurations",
    );
    revisions::of_webhook(watches, webhooks, DEFAULT_TAG, revision).await;
}

/// Logs an error that differs from the previous one.
fn log_once(last_logged: &mut Option<String>, lock: &Lock, error: &AttemptError) {
    let text = error.to_string();
    if last_logged.as_ref() != Some(&text) {
        tracing::warn!(lock = %lock.name, error = text, "failed to acquire lock");
        *last_logged = Some(text);
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
