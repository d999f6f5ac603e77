//! The CA of this process: one current authority and one set of trusted roots, from whichever source.

pub mod options;

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use aws_lc_rs::rand;
use futures::{FutureExt, future::BoxFuture};
use smol_str::SmolStr;
use tokio::{
    sync::{mpsc, watch},
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until},
};

use self::options::LocalOptions;
use super::{
    TrustBundle,
    authority::{Authority, TtlLimits},
    authority_selector::{AuthoritySelector, AuthoritySource, Decision, RootStorage, SecretState},
    files::FileWatch,
    metrics::{self, ExpiryMetrics},
    plugged_in::{self, BundleLookup, FolderError},
    rotate,
    secrets::{Secret, SecretError, SecretStore},
    self_signed::{CACERTS_SECRET, Root, SELF_SIGNED_SECRET},
    signing::{SignError, SignErrorKind, SignedCertificate, Signer, SigningRequest},
};
use crate::{
    environment::Environment,
    task::{self, Tasks, until},
};

/// The interval of expiry checks.
const EXPIRY_CHECK_INTERVAL: Duration = Duration::from_hours(1);
/// The first backoff after a failed write; it doubles up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// The number of attempts to read an incomplete folder at start, and the wait in between: it may still be written.
const START_ATTEMPTS: u32 = 5;
const START_WAIT: Duration = Duration::from_millis(200);

/// Handles of the running CA. Cheap to clone.
#[derive(Clone)]
pub struct LocalCa {
    /// Signs workload certificates with the current authority.
    pub signer: Arc<dyn Signer>,
    /// The current authority; none while unknown.
    pub authority: watch::Receiver<Option<Arc<Authority>>>,
    /// The current trust bundle; none while unknown.
    pub trust: watch::Receiver<Option<Arc<TrustBundle>>>,
}

/// A fatal CA error. Not retryable: the operator's bundle is invalid, and no other CA must sign instead.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The folder cannot be read.
    #[error("failed to create an istiod CA: {0}")]
    Folder(#[from] FolderError),
    /// The bundle in the folder is invalid.
    #[error("failed to create an istiod CA: {0}")]
    Bundle(String),
    /// A metric name is already registered.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
}

/// Starts the CA. `secrets` stores a self-signed root and may hold `cacerts`; without it a root lives in memory.
/// `organization` is the subject of a new root: the trust domain, once the mesh config is known.
pub async fn start(
    environment: &Environment,
    options: LocalOptions,
    secrets: Option<Arc<dyn SecretStore>>,
    organization: BoxFuture<'static, SmolStr>,
) -> Result<LocalCa, LocalError> {
    let clock = crate::environment::wall_clock;
    let (ca, controller) = prepare(options, secrets, organization, clock).await?;
    ExpiryMetrics::register(&environment.registry, ca.authority.clone(), clock)?;
    let tasks = environment.tasks.clone();
    environment
        .tasks
        .spawn_until_shutdown("certificate authority", controller.run(tasks));
    Ok(ca)
}

/// Creates the CA from the folder alone, and its controller.
async fn prepare(
    options: LocalOptions,
    secrets: Option<Arc<dyn SecretStore>>,
    organization: BoxFuture<'static, SmolStr>,
    clock: fn() -> SystemTime,
) -> Result<(LocalCa, CaController), LocalError> {
    // Watch before reading, so that no change is missed.
    let watch = FileWatch::new([options.folder.join(plugged_in::CERTIFICATE).as_path()]);
    let rules = options.rules(secrets.is_some());
    let mut files = plugged_in::read(&options.folder)?;
    for _ in 1..START_ATTEMPTS {
        if !matches!(
            plugged_in::find(rules.folder.clone(), &files, rules.revocation),
            BundleLookup::Incomplete(_)
        ) {
            break;
        }
        sleep(START_WAIT).await;
        files = plugged_in::read(&options.folder)?;
    }
    let (authority_out, authority) = watch::channel(None);
    let (trust_out, trust) = watch::channel(None);
    let mut controller = CaController {
        selector: AuthoritySelector::new(rules.clone(), files),
        options,
        secrets,
        organization: Some(organization),
        clock,
        watch: Some(watch),
        authority: authority_out,
        trust: trust_out,
        last_rejection: String::new(),
        failures: 0,
    };
    // Only the folder is known. A bundle in it is used at once; an invalid one is a start-up error.
    match controller.selector.decide(clock()) {
        Decision::Reject(why) => return Err(LocalError::Bundle(why)),
        decision @ Decision::Switch(_) => controller.apply(decision),
        Decision::NoChange | Decision::CreateRoot(_) => None,
    };
    let signer = Arc::new(LocalSigner::new(authority.clone(), rules.limits, clock));
    let ca = LocalCa {
        signer,
        authority,
        trust,
    };
    Ok((ca, controller))
}

/// The controller that selects, creates and rotates the CA.
#[doc(alias = "SelfSignedCARootCertRotator")]
struct CaController {
    options: LocalOptions,
    selector: AuthoritySelector,
    secrets: Option<Arc<dyn SecretStore>>,
    /// Taken once resolved.
    organization: Option<BoxFuture<'static, SmolStr>>,
    clock: fn() -> SystemTime,
    /// Taken when the controller starts.
    watch: Option<FileWatch>,
    authority: watch::Sender<Option<Arc<Authority>>>,
    trust: watch::Sender<Option<Arc<TrustBundle>>>,
    /// The last logged rejection, to log each one once.
    last_rejection: String,
    /// Consecutive failed writes.
    failures: u32,
}

impl CaController {
    async fn run(mut self, tasks: Tasks) {
        let mut plugged = self.watch_secret(&tasks, CACERTS_SECRET);
        let mut own = self.watch_secret(&tasks, SELF_SIGNED_SECRET);
        let mut folder = self.watch_folder(&tasks);
        let mut organization = None;
        let mut candidate = None;
        let mut rotation_check = self.first_rotation_check();
        let mut expiry_check = Instant::now();
        let mut retry = None;
        loop {
            let decision = self.selector.decide((self.clock)());
            let is_new = matches!(decision, Decision::Switch(_));
            if let Some(storage) = self.apply(decision)
                && retry.is_none()
                && let Some(organization) = &organization
            {
                retry = self.create_root(storage, organization, &mut candidate).await;
                if retry.is_none() {
                    continue;
                }
            }
            // An expired root cannot sign, so its renewal does not wait for the interval.
            if is_new && self.is_expired() {
                rotation_check = rotation_check.map(|_| Instant::now());
            }
            tokio::select! {
                secret = next_secret(&mut plugged) => self.selector.cacerts = secret,
                secret = next_secret(&mut own) => self.selector.istio_ca_secret = secret,
                name = resolved(&mut self.organization) => {
                    self.organization = None;
                    organization = Some(name);
                }
                Some(()) = folder.recv() => self.reload_files().await,
                () = until(retry) => retry = None,
                () = until(rotation_check) => rotation_check = self.rotate().await,
                () = sleep_until(expiry_check) => {
                    expiry_check = Instant::now() + EXPIRY_CHECK_INTERVAL;
                    self.expiry_check();
                }
            }
        }
    }

    fn watch_secret(&self, tasks: &Tasks, name: &'static str) -> Option<mpsc::Receiver<Option<Secret>>> {
        let secrets = self.secrets.as_ref()?;
        let (sender, receiver) = mpsc::channel(4);
        tasks.spawn_until_shutdown("CA Secret", secrets.watch(name, sender));
        Some(receiver)
    }

    /// Watches the folder in its own task, so that other events do not restart the debounce.
    fn watch_folder(&mut self, tasks: &Tasks) -> mpsc::Receiver<()> {
        let (sender, receiver) = mpsc::channel(1);
        if let Some(mut watch) = self.watch.take() {
            tasks.spawn_until_shutdown("CA folder", async move {
                loop {
                    watch.changed().await;
                    if sender.send(()).await.is_err() {
                        return;
                    }
                }
            });
        }
        receiver
    }

    /// Applies a decision. Returns the storage if a root must be created.
    fn apply(&mut self, decision: Decision) -> Option<RootStorage> {
        match decision {
            Decision::NoChange => {}
            Decision::Switch(current) => {
                let authority = current.authority.clone();
                let name = &authority.certificate().name;
                let location = &authority.bundle().location;
                tracing::info!(%name, %location, roots = authority.roots().len(), "signing CA changed");
                self.last_rejection.clear();
                self.selector.current = Some(current);
                self.publish(authority);
            }
            Decision::Reject(why) => {
                if self.last_rejection != why {
                    let goes_on = self.selector.current.is_some();
                    tracing::error!(keeps_current = goes_on, error = why, "CA bundle rejected");
                    self.last_rejection = why;
                }
            }
            Decision::CreateRoot(storage) => return Some(storage),
        }
        None
    }

    fn publish(&self, authority: Arc<Authority>) {
        let crl = authority.bundle().crl.as_ref();
        let trust = Arc::new(TrustBundle {
            roots: authority.trusted_roots().clone(),
            crl: Some(crl.map(|part| part.pem.clone()).unwrap_or_default()),
        });
        // Trust first: a certificate must not be visible before its root is trusted.
        task::publish(&self.trust, Some(trust));
        self.authority.send_replace(Some(authority));
    }

    /// Creates and stores a root. Returns the time of the next attempt, if there is one.
    async fn create_root(
        &mut self,
        storage: RootStorage,
        organization: &SmolStr,
        candidate: &mut Option<Root>,
    ) -> Option<Instant> {
        let root = match candidate.take() {
            Some(root) => root,
            None => {
                let (organization, options, now) =
                    (organization.clone(), self.selector.rules.root.clone(), (self.clock)());
                // Generating an RSA key is slow and must not block streams.
                let root = spawn_blocking(move || Root::new(&organization, &options, now)).await;
                match root {
                    Ok(Ok(root)) => root,
                    Ok(Err(error)) => return Some(self.retry_after("root creation failed", &error)),
                    Err(error) => return Some(self.retry_after("root creation failed", &error)),
                }
            }
        };
        let (RootStorage::Secret(name), Some(secrets)) = (storage, self.secrets.clone()) else {
            tracing::warn!("self-signed root is in memory only and is lost on restart");
            self.selector.in_memory_root = Some(root);
            return None;
        };
        match secrets.create(root.to_secret(name)).await {
            Ok(()) => tracing::info!(secret = name, "root created"),
            // The watch delivers the root of the replica that created it first.
            Err(SecretError::Conflict) => tracing::info!(secret = name, "root already created by another replica"),
            Err(error) => {
                *candidate = Some(root);
                return Some(self.retry_after("root Secret write failed", &error));
            }
        }
        self.failures = 0;
        // Wait for the watch to deliver the Secret.
        Some(Instant::now() + RETRY_MAX)
    }

    fn retry_after(&mut self, what: &str, error: &dyn std::fmt::Display) -> Instant {
        let wait = RETRY_MIN
            .saturating_mul(2_u32.saturating_pow(self.failures))
            .min(RETRY_MAX);
        self.failures = self.failures.saturating_add(1);
        tracing::warn!(%error, "{what}, retrying");
        Instant::now() + wait
    }

    async fn reload_files(&mut self) {
        let folder = self.options.folder.clone();
        match spawn_blocking(move || plugged_in::read(&folder)).await {
            Ok(Ok(files)) => self.selector.files = files,
            Ok(Err(error)) => tracing::warn!(%error, "failed to read CA folder, keeping the last content"),
            Err(error) => tracing::warn!(%error, "failed to read CA folder, keeping the last content"),
        }
    }

    fn is_expired(&self) -> bool {
        let current = self.selector.current.as_ref();
        current.is_some_and(|current| current.authority.path_expires_at() <= (self.clock)())
    }

    /// The time of the first rotation check; none if disabled. Jitter spreads the replicas.
    fn first_rotation_check(&self) -> Option<Instant> {
        let interval = self.options.check_interval?;
        let wait = if self.options.jitter {
            random_below(interval)
        } else {
            Duration::ZERO
        };
        Some(Instant::now() + wait + interval)
    }

    /// Renews the root if due. Returns the time of the next check.
    /// Parity (security/pkg/pki/ca/selfsignedcarootcertrotator.go).
    async fn rotate(&mut self) -> Option<Instant> {
        let next = self.options.check_interval.map(|interval| Instant::now() + interval);
        let (root, source) = match self.selector.renewal((self.clock)()) {
            None => return next,
            Some(Ok(renewed)) => renewed,
            Some(Err(error)) => {
                tracing::error!(%error, "root renewal failed");
                return next;
            }
        };
        let (Some(secret), Some(secrets)) = (self.selector.renewed_secret(&root, source), &self.secrets) else {
            if source == AuthoritySource::InMemory {
                self.selector.in_memory_root = Some(root);
            }
            return next;
        };
        match secrets.replace(secret).await {
            Ok(()) => tracing::info!("root renewed"),
            Err(SecretError::Conflict) => tracing::info!("root already renewed by another replica"),
            // Memory is unchanged, so there is nothing to roll back.
            Err(error) => {
                let retry = self.retry_after("root Secret write failed", &error);
                return next.map(|next| next.min(retry));
            }
        }
        self.failures = 0;
        next
    }

    /// Drops expired roots, and warns about an expiring CA.
    fn expiry_check(&mut self) {
        let now = (self.clock)();
        let Some(current) = &mut self.selector.current else {
            return;
        };
        if let Some(warning) = metrics::warning(&current.authority, now) {
            tracing::warn!("{warning}");
        }
        let Some(without) = rotate::without_expired(&current.authority, now) else {
            return;
        };
        current.authority = Arc::new(without);
        let authority = current.authority.clone();
        self.publish(authority);
    }
}

/// Returns the next state of a Secret. Never completes without a watch.
async fn next_secret(by: &mut Option<mpsc::Receiver<Option<Secret>>>) -> SecretState {
    if let Some(receiver) = by {
        if let Some(secret) = receiver.recv().await {
            return SecretState::from(secret);
        }
        *by = None;
    }
    std::future::pending().await
}

async fn resolved(organization: &mut Option<BoxFuture<'static, SmolStr>>) -> SmolStr {
    match organization {
        Some(organization) => organization.await,
        None => std::future::pending().await,
    }
}

fn random_below(most: Duration) -> Duration {
    let mut bytes = [0; 8];
    // Without randomness there is no jitter.
    let _ = rand::fill(&mut bytes);
    Duration::from_secs(u64::from_le_bytes(bytes) % most.as_secs().max(1))
}

/// A signer that uses the current authority.
pub struct LocalSigner {
    authority: watch::Receiver<Option<Arc<Authority>>>,
    limits: TtlLimits,
    clock: fn() -> SystemTime,
}

impl LocalSigner {
    /// Creates a signer with an injected clock.
    pub fn new(
        authority: watch::Receiver<Option<Arc<Authority>>>,
        limits: TtlLimits,
        clock: fn() -> SystemTime,
    ) -> Self {
        Self {
            authority,
            limits,
            clock,
        }
    }
}

impl Signer for LocalSigner {
    fn sign(&self, request: SigningRequest) -> BoxFuture<'_, Result<SignedCertificate, SignError>> {
        // Runs inline: signing takes about a millisecond, on the caller's thread.
        async move {
            let authority = self.authority.borrow().clone();
            let authority = authority.ok_or_else(|| SignError {
                kind: SignErrorKind::NotReady,
                text: "Istio CA is not ready: no signing certificate yet".into(),
            })?;
            authority.issue(&request, (self.clock)(), self.limits)
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests;
