//! The CA of this process, live: whatever its certificate comes from, there is one authority at a time, and one set of roots.

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
    authority::{Authority, Limits},
    files::FileWatch,
    keeper::{Keeper, Keeping, Known, Source, Step},
    metrics::{self, Expiry},
    plugged_in::{self, FolderError, Found},
    rotate,
    secrets::{Secret, SecretError, Secrets},
    self_signed::{OWN_SECRET, PLUGGED_SECRET, Root},
    signing::{Issued, SignError, SignErrorKind, Signer, SigningRequest},
};
use crate::{environment::Environment, task::Tasks};

/// How often it is looked whether something ends or has passed.
const REVIEW: Duration = Duration::from_hours(1);
/// The first wait before a failed write is tried again; each next one is twice as long, up to [`RETRY_MAX`].
const RETRY: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// How often an incomplete folder is read before it counts as a mistake, and how long in between: it may be being filled.
const START_ATTEMPTS: u32 = 5;
const START_WAIT: Duration = Duration::from_millis(200);

/// What others need of the CA. Cheap to clone.
#[derive(Clone)]
pub struct LocalCa {
    /// Signs requests of workloads with the authority of the moment.
    pub signer: Arc<dyn Signer>,
    /// What signs now; none while nothing is known.
    pub authority: watch::Receiver<Option<Arc<Authority>>>,
    /// What the mesh trusts now; none while nothing is known.
    pub trust: watch::Receiver<Option<Arc<TrustBundle>>>,
}

/// Why there is no CA. Not retryable: an operator's bundle is wrong, and signing with anything else would be worse.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The folder cannot be read.
    #[error("failed to create an istiod CA: {0}")]
    Folder(#[from] FolderError),
    /// The bundle in the folder is no CA.
    #[error("failed to create an istiod CA: {0}")]
    Bundle(String),
    /// The name of a metric is taken.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
}

/// Starts the CA. `secrets`: where a root of our own is kept, and where `cacerts` may be; none: in memory. `organization`
/// is whose name a new root gets: the trust domain, once the mesh config is known.
pub async fn start(
    environment: &Environment,
    options: LocalOptions,
    secrets: Option<Arc<dyn Secrets>>,
    organization: BoxFuture<'static, SmolStr>,
) -> Result<LocalCa, LocalError> {
    let clock = crate::environment::wall_clock;
    let (ca, life) = prepare(options, secrets, organization, clock).await?;
    Expiry::register(&environment.registry, ca.authority.clone(), clock)?;
    let tasks = environment.tasks.clone();
    environment
        .tasks
        .spawn_until_shutdown("certificate authority", life.run(tasks));
    Ok(ca)
}

/// The CA as far as the folder alone says it, and what keeps it up to date.
async fn prepare(
    options: LocalOptions,
    secrets: Option<Arc<dyn Secrets>>,
    organization: BoxFuture<'static, SmolStr>,
    clock: fn() -> SystemTime,
) -> Result<(LocalCa, Life), LocalError> {
    // Watched before it is read, so that no change falls in between.
    let watch = FileWatch::new([options.folder.join(plugged_in::CERTIFICATE).as_path()]);
    let rules = options.rules(secrets.is_some());
    let mut files = plugged_in::read(&options.folder)?;
    for _ in 1..START_ATTEMPTS {
        if !matches!(
            plugged_in::find(rules.folder.clone(), &files, rules.revocation),
            Found::Partly(_)
        ) {
            break;
        }
        sleep(START_WAIT).await;
        files = plugged_in::read(&options.folder)?;
    }
    let (authority_out, authority) = watch::channel(None);
    let (trust_out, trust) = watch::channel(None);
    let mut life = Life {
        keeper: Keeper::new(rules.clone(), files),
        options,
        secrets,
        organization: Some(organization),
        clock,
        watch: Some(watch),
        authority: authority_out,
        trust: trust_out,
        complaint: String::new(),
        failures: 0,
    };
    // Only the folder is known; what it says counts at once, and if it is wrong there is nothing to go on with.
    match life.keeper.step(clock()) {
        Step::Complain(why) => return Err(LocalError::Bundle(why)),
        step @ Step::Become(_) => life.apply(step),
        Step::Stay | Step::Make(_) => None,
    };
    let signer = Arc::new(LocalSigner::new(authority.clone(), rules.limits, clock));
    let ca = LocalCa {
        signer,
        authority,
        trust,
    };
    Ok((ca, life))
}

/// What keeps the CA up to date.
struct Life {
    options: LocalOptions,
    keeper: Keeper,
    secrets: Option<Arc<dyn Secrets>>,
    /// Taken when it is known.
    organization: Option<BoxFuture<'static, SmolStr>>,
    clock: fn() -> SystemTime,
    /// Taken when the life begins.
    watch: Option<FileWatch>,
    authority: watch::Sender<Option<Arc<Authority>>>,
    trust: watch::Sender<Option<Arc<TrustBundle>>>,
    /// What was said last, so that it is not said again.
    complaint: String,
    /// Writes that failed since the last that did not.
    failures: u32,
}

impl Life {
    async fn run(mut self, tasks: Tasks) {
        let mut plugged = self.follow(&tasks, PLUGGED_SECRET);
        let mut own = self.follow(&tasks, OWN_SECRET);
        let mut folder = self.follow_folder(&tasks);
        let mut organization = None;
        let mut candidate = None;
        let mut check = self.first_check();
        let mut review = Instant::now();
        let mut again = None;
        loop {
            let step = self.keeper.step((self.clock)());
            let is_new = matches!(step, Step::Become(_));
            if let Some(keeping) = self.apply(step)
                && again.is_none()
                && let Some(organization) = &organization
            {
                again = self.make(keeping, organization, &mut candidate).await;
                if again.is_none() {
                    continue;
                }
            }
            // Nothing can be signed with a root that has expired: that waits for no interval.
            if is_new && self.is_expired() {
                check = check.map(|_| Instant::now());
            }
            tokio::select! {
                secret = told(&mut plugged) => self.keeper.plugged = secret,
                secret = told(&mut own) => self.keeper.own = secret,
                name = known(&mut self.organization) => {
                    self.organization = None;
                    organization = Some(name);
                }
                Some(()) = folder.recv() => self.read().await,
                () = until(again) => again = None,
                () = until(check) => check = self.rotate().await,
                () = sleep_until(review) => {
                    review = Instant::now() + REVIEW;
                    self.review();
                }
            }
        }
    }

    fn follow(&self, tasks: &Tasks, name: &'static str) -> Option<mpsc::Receiver<Option<Secret>>> {
        let secrets = self.secrets.as_ref()?;
        let (sender, receiver) = mpsc::channel(4);
        tasks.spawn_until_shutdown("CA Secret", secrets.follow(name, sender));
        Some(receiver)
    }

    /// A task of its own: gathering notices must not begin anew whenever something else happens.
    fn follow_folder(&mut self, tasks: &Tasks) -> mpsc::Receiver<()> {
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

    /// Does what can be done at once. Where a root that has to be made is to be kept, if one has.
    fn apply(&mut self, step: Step) -> Option<Keeping> {
        match step {
            Step::Stay => {}
            Step::Become(current) => {
                let authority = current.authority.clone();
                let name = &authority.certificate().name;
                let place = &authority.material().place;
                tracing::info!(%name, %place, roots = authority.roots().len(), "this CA signs from now on");
                self.complaint.clear();
                self.keeper.current = Some(current);
                self.publish(authority);
            }
            Step::Complain(why) => {
                if self.complaint != why {
                    let goes_on = self.keeper.current.is_some();
                    tracing::error!(goes_on, "the CA cannot be changed: {why}");
                    self.complaint = why;
                }
            }
            Step::Make(keeping) => return Some(keeping),
        }
        None
    }

    fn publish(&self, authority: Arc<Authority>) {
        let revoked = authority.material().revoked.as_ref().map(|part| part.pem.clone());
        let trust = Arc::new(TrustBundle {
            roots: authority.trusted().clone(),
            revoked,
        });
        // Trust first: nobody is to see a certificate whose root is not known here.
        self.trust.send_if_modified(|known| {
            let changed = known.as_ref() != Some(&trust);
            *known = Some(trust);
            changed
        });
        self.authority.send_replace(Some(authority));
    }

    /// Makes a root and keeps it. The time of the next attempt, if that failed.
    async fn make(
        &mut self,
        keeping: Keeping,
        organization: &SmolStr,
        candidate: &mut Option<Root>,
    ) -> Option<Instant> {
        let root = match candidate.take() {
            Some(root) => root,
            None => {
                let (organization, options, now) =
                    (organization.clone(), self.keeper.rules.root.clone(), (self.clock)());
                // An RSA key takes long to find; streams are not to wait for it.
                let made = spawn_blocking(move || Root::new(&organization, &options, now)).await;
                match made {
                    Ok(Ok(root)) => root,
                    Ok(Err(error)) => return Some(self.failed("a root cannot be made", &error)),
                    Err(error) => return Some(self.failed("a root cannot be made", &error)),
                }
            }
        };
        let (Keeping::Secret(name), Some(secrets)) = (keeping, self.secrets.clone()) else {
            tracing::warn!("the root of this CA is kept nowhere: it ends with this process");
            self.keeper.memory = Some(root);
            return None;
        };
        match secrets.create(root.to_secret(name)).await {
            Ok(()) => tracing::info!(secret = name, "a new root was made"),
            // The winner's is told of by the watch.
            Err(SecretError::Conflict) => tracing::info!(secret = name, "another replica was faster to make a root"),
            Err(error) => {
                *candidate = Some(root);
                return Some(self.failed("the root cannot be kept", &error));
            }
        }
        self.failures = 0;
        // Until the watch tells what stands there now.
        Some(Instant::now() + RETRY_MAX)
    }

    fn failed(&mut self, what: &str, error: &dyn std::fmt::Display) -> Instant {
        let wait = RETRY.saturating_mul(2_u32.saturating_pow(self.failures)).min(RETRY_MAX);
        self.failures = self.failures.saturating_add(1);
        tracing::warn!(%error, "{what}; it is tried again");
        Instant::now() + wait
    }

    async fn read(&mut self) {
        let folder = self.options.folder.clone();
        match spawn_blocking(move || plugged_in::read(&folder)).await {
            Ok(Ok(files)) => self.keeper.files = files,
            Ok(Err(error)) => tracing::warn!(%error, "the folder of the CA cannot be read; what it held last counts"),
            Err(error) => tracing::warn!(%error, "the folder of the CA cannot be read; what it held last counts"),
        }
    }

    fn is_expired(&self) -> bool {
        let current = self.keeper.current.as_ref();
        current.is_some_and(|current| current.authority.holds_until() <= (self.clock)())
    }

    /// When roots are looked at first; none: never. Replicas begin at different times.
    fn first_check(&self) -> Option<Instant> {
        let interval = self.options.check_interval?;
        let wait = if self.options.jitter {
            random_below(interval)
        } else {
            Duration::ZERO
        };
        Some(Instant::now() + wait + interval)
    }

    /// Renews the root if that is due. When to look next.
    async fn rotate(&mut self) -> Option<Instant> {
        let next = self.options.check_interval.map(|interval| Instant::now() + interval);
        let (root, source) = match self.keeper.renewal((self.clock)()) {
            None => return next,
            Some(Ok(renewed)) => renewed,
            Some(Err(error)) => {
                tracing::error!(%error, "the root cannot be renewed");
                return next;
            }
        };
        let (Some(secret), Some(secrets)) = (self.keeper.secret_of(&root, source), &self.secrets) else {
            if source == Source::Memory {
                self.keeper.memory = Some(root);
            }
            return next;
        };
        match secrets.replace(secret).await {
            Ok(()) => tracing::info!("the root was renewed"),
            Err(SecretError::Conflict) => tracing::info!("another replica was faster to renew the root"),
            // Nothing was changed here, so nothing has to be taken back.
            Err(error) => {
                let again = self.failed("the renewed root cannot be kept", &error);
                return next.map(|next| next.min(again));
            }
        }
        self.failures = 0;
        next
    }

    /// Lets go of what has passed, and says what ends soon.
    fn review(&mut self) {
        let now = (self.clock)();
        let Some(current) = &mut self.keeper.current else {
            return;
        };
        if let Some(warning) = metrics::warning(&current.authority, now) {
            tracing::warn!("{warning}");
        }
        let Some(without) = rotate::without_passed(&current.authority, now) else {
            return;
        };
        current.authority = Arc::new(without);
        let authority = current.authority.clone();
        self.publish(authority);
    }
}

/// What is told of a Secret next. Pending for ever if nobody tells.
async fn told(by: &mut Option<mpsc::Receiver<Option<Secret>>>) -> Known {
    if let Some(receiver) = by {
        if let Some(secret) = receiver.recv().await {
            return Known::from(secret);
        }
        *by = None;
    }
    std::future::pending().await
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

async fn known(organization: &mut Option<BoxFuture<'static, SmolStr>>) -> SmolStr {
    match organization {
        Some(organization) => organization.await,
        None => std::future::pending().await,
    }
}

fn random_below(most: Duration) -> Duration {
    let mut bytes = [0; 8];
    // Without randomness there is no key either; the start is then simply not spread.
    let _ = rand::fill(&mut bytes);
    Duration::from_secs(u64::from_le_bytes(bytes) % most.as_secs().max(1))
}

/// Signs with the authority of the moment.
pub struct LocalSigner {
    authority: watch::Receiver<Option<Arc<Authority>>>,
    limits: Limits,
    clock: fn() -> SystemTime,
}

impl LocalSigner {
    /// A signer; `clock` says what time it is.
    pub fn new(authority: watch::Receiver<Option<Arc<Authority>>>, limits: Limits, clock: fn() -> SystemTime) -> Self {
        Self {
            authority,
            limits,
            clock,
        }
    }
}

impl Signer for LocalSigner {
    fn sign(&self, request: SigningRequest) -> BoxFuture<'_, Result<Issued, SignError>> {
        // In place: it is a millisecond of work that the caller's threads are there for.
        async move {
            let authority = self.authority.borrow().clone();
            let authority = authority.ok_or_else(|| SignError {
                kind: SignErrorKind::NotReady,
                text: "Istio CA is not ready: no signing certificate is known yet".into(),
            })?;
            authority.issue(&request, (self.clock)(), self.limits)
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests;
