//! JWT keys, fetched from the servers of their issuers. The mesh declares the required ones. A key set is a change like
//! others, so generation never waits for a server.
//!
//! Each source has its own schedule, so a server that hangs or fails does not delay others. While a server fails, its
//! last good keys stay, until they are so old that they may have been withdrawn.

mod keys;
mod network;
mod report;
mod shares;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures::future::BoxFuture;
use prometheus::Registry;
use smol_str::SmolStr;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};

use self::shares::{Shares, SharesSender};
use super::{
    diagnostics::{ActiveDiagnostics, Report},
    in_flight::InFlight,
    source::{self, Readiness},
};
use crate::{
    api::{
        Diagnostic, FieldError, Kind, Severity,
        fetched_keys::{FetchedKeys, KeySource},
    },
    base::{ClusterId, ObjectKey},
    fetch::Fetcher,
    model::{
        change::{Batch, Change},
        external_dependencies::{ExternalDependencies, RequiredKeys},
    },
};
pub use keys::KeySet;
pub use network::{FetchFailure, NetworkMetrics};
pub use report::{KeyReports, KeysReport};
pub use shares::SourceShares;

/// First retry delay; doubled each time.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// Longest retry delay without keys, while every token of the issuer is refused.
const LONGEST_RETRY_WITHOUT_KEYS: Duration = Duration::from_mins(1);
/// Longest retry delay with keys.
const LONGEST_RETRY: Duration = Duration::from_mins(10);
/// Age at which keys that cannot be fetched again are dropped. Parity (pilot/pkg/model/jwks_resolver.go): seven days.
const OLDEST: Duration = Duration::from_hours(7 * 24);

/// Longest wait for the first results at the start.
const START_TIMEOUT: Duration = Duration::from_secs(6);

/// Fetches key sets.
pub trait Fetch: Send + Sync + 'static {
    /// Fetches the key set of a source after a delay, once one of its shares allows it.
    fn fetch(
        self: Arc<Self>,
        source: KeySource,
        timeout: Duration,
        wait: Duration,
        shares: SourceShares,
    ) -> BoxFuture<'static, Result<KeySet, FetchFailure>>;
}

/// Settings of [`Jwks`].
pub struct JwksSettings {
    /// Config cluster.
    pub cluster: ClusterId,
    /// Fetcher of user-provided URLs.
    pub fetcher: Fetcher,
    /// Time after which good key sets are fetched again.
    pub refresh: Duration,
    /// Required keys.
    pub dependencies: watch::Receiver<Option<Arc<ExternalDependencies>>>,
    /// Receives a warning for each RequestAuthentication whose keys cannot be fetched.
    pub report: Report,
}

/// The source of the required keys.
pub struct Jwks {
    settings: JwksSettings,
    metrics: NetworkMetrics,
    reports: watch::Sender<BTreeMap<KeySource, KeysReport>>,
}

impl Jwks {
    /// Returns the source. Fails if a metric's name is in use.
    pub fn new(registry: &Registry, settings: JwksSettings) -> Result<Self, prometheus::Error> {
        Ok(Self {
            settings,
            metrics: NetworkMetrics::new(registry)?,
            reports: watch::Sender::default(),
        })
    }

    /// Returns the state of fetching.
    pub fn reports(&self) -> KeyReports {
        KeyReports::new(self.reports.subscribe())
    }
}

impl source::Source for Jwks {
    fn name(&self) -> &'static str {
        "jwks"
    }

    /// The first proxies should find the keys that the snapshot refers to.
    fn readiness(&self) -> Readiness {
        let reports = self.reports();
        Readiness::Answered(Box::new(move |dependencies| {
            Box::pin(async move { reports.answered(&dependencies, START_TIMEOUT).await })
        }))
    }

    async fn run(self, changes: mpsc::Sender<Batch>) {
        let JwksSettings {
            cluster,
            fetcher,
            refresh,
            dependencies,
            report,
        } = self.settings;
        let network = Arc::new(network::Network::new(fetcher, self.metrics));
        let resolver = Resolver {
            reports: self.reports,
            ..Resolver::new(cluster, network, refresh, changes, report)
        };
        resolver.run(dependencies).await;
    }
}

/// Required sources and their state.
struct Resolver<F> {
    cluster: ClusterId,
    fetch: Arc<F>,
    refresh: Duration,
    changes: mpsc::Sender<Vec<Change>>,
    findings: ActiveDiagnostics<KeySource>,
    sources: BTreeMap<KeySource, KeyState>,
    shares: Shares,
    in_flight: InFlight<KeySource, Result<KeySet, FetchFailure>>,
    reports: watch::Sender<BTreeMap<KeySource, KeysReport>>,
}

/// The state of one key source.
struct KeyState {
    required: RequiredKeys,
    /// Shares of the namespaces that require the keys.
    shares: SharesSender,
    /// Last good keys, as published.
    published: Option<KeySet>,
    /// Memory of these keys.
    memory: Option<OwnedSemaphorePermit>,
    /// Failures since the last success.
    failures: u32,
    /// Last failure; `None` after a success.
    failure: Option<FetchFailure>,
    /// Duration of the failure, as the sum of the delays.
    failing_for: Duration,
}

impl<F: Fetch> Resolver<F> {
    fn new(
        cluster: ClusterId,
        fetch: Arc<F>,
        refresh: Duration,
        changes: mpsc::Sender<Vec<Change>>,
        report: Report,
    ) -> Self {
        Self {
            cluster,
            fetch,
            // Without an interval, servers would be asked all the time.
            refresh: refresh.max(FIRST_RETRY),
            changes,
            findings: ActiveDiagnostics::new(report),
            sources: BTreeMap::new(),
            shares: Shares::default(),
            in_flight: InFlight::default(),
            reports: watch::Sender::default(),
        }
    }

    /// Runs until an input or the receiver of changes is closed.
    async fn run(mut self, mut dependencies: watch::Receiver<Option<Arc<ExternalDependencies>>>) {
        let mut goes_on = true;
        while goes_on {
            let required = dependencies.borrow_and_update().clone();
            if let Some(required) = required {
                goes_on = self.update_sources(&required.keys).await;
            }
            while goes_on {
                tokio::select! {
                    changed = dependencies.changed() => {
                        goes_on = changed.is_ok();
                        break;
                    }
                    (source, answer) = self.in_flight.next() => goes_on = self.handle_result(source, answer).await,
                }
            }
        }
    }

    /// Updates the required sources. Returns false if the receiver of changes is closed.
    async fn update_sources(&mut self, all: &BTreeMap<KeySource, RequiredKeys>) -> bool {
        for (source, required) in all {
            if let Some(known) = self.sources.get_mut(source) {
                self.shares.update(&known.shares, &required.by);
                let is_by_others = known.required.by != required.by;
                known.required = required.clone();
                if is_by_others {
                    self.findings.set(source.clone(), known.findings(source));
                    self.reports.send_if_modified(|reports| {
                        let report = reports.get_mut(source);
                        report.map(|report| report.set_required_by(&required.by)).is_some()
                    });
                }
            } else {
                let new = KeyState::new(required.clone(), self.shares.of(&required.by));
                self.schedule_fetch(source, required.timeout, Duration::ZERO, new.shares.subscribe());
                self.sources.insert(source.clone(), new);
            }
        }
        let gone: Vec<KeySource> = self
            .sources
            .keys()
            .filter(|source| !all.contains_key(source))
            .cloned()
            .collect();
        let mut removed = Vec::new();
        for source in gone {
            let Some(entry) = self.sources.remove(&source) else {
                continue;
            };
            self.in_flight.cancel(&source);
            if entry.published.is_some() {
                removed.push(Change::Remove(
                    FetchedKeys::KIND,
                    FetchedKeys::key(&self.cluster, &source),
                ));
            }
            self.reports
                .send_if_modified(|reports| reports.remove(&source).is_some());
            self.findings.set(source, BTreeSet::new());
        }
        self.shares.prune();
        removed.is_empty() || self.changes.send(removed).await.is_ok()
    }

    fn schedule_fetch(&mut self, source: &KeySource, timeout: Duration, wait: Duration, shares: SourceShares) {
        let answer = self.fetch.clone().fetch(source.clone(), timeout, wait, shares);
        self.in_flight.insert(source.clone(), answer);
    }

    /// Publishes a changed result and schedules the next fetch. Returns false if the receiver of changes is closed.
    async fn handle_result(&mut self, source: KeySource, answer: Result<KeySet, FetchFailure>) -> bool {
        let refresh = self.refresh;
        let Some(entry) = self.sources.get_mut(&source) else {
            return true;
        };
        let by = entry.required.by.clone();
        let shares = entry.shares.subscribe();
        let learned = answer.and_then(|keys| entry.succeed(keys));
        let (wait, change) = match learned {
            Ok(change) => (refresh, change),
            Err(failure) => entry.fail(failure, refresh),
        };
        let timeout = entry.required.timeout;
        let update = report::FetchResult::new(entry.published.as_ref(), entry.failures, entry.failure.as_ref());
        let findings = entry.findings(&source);
        self.schedule_fetch(&source, timeout, wait, shares);
        self.findings.set(source.clone(), findings);
        let sent = match change {
            Some(KeyChange::Keys(keys)) => {
                tracing::info!(%source, next_fetch = ?wait, "JWKS fetched");
                let key = FetchedKeys::key(&self.cluster, &source);
                self.changes
                    .send(vec![Change::Upsert(FetchedKeys { key, keys }.into())])
                    .await
            }
            Some(KeyChange::TooOld) => {
                tracing::error!(%source, max_age = ?OLDEST, "JWKS expired, removing its keys");
                let key = FetchedKeys::key(&self.cluster, &source);
                self.changes.send(vec![Change::Remove(FetchedKeys::KIND, key)]).await
            }
            None => Ok(()),
        };
        // The report follows the keys, so that its readers find the keys sent.
        self.reports.send_modify(|reports| {
            let report = reports.entry(source.clone()).or_default();
            report.update(&source, &by, update);
        });
        sent.is_ok()
    }
}

/// Change that the mesh needs to know.
enum KeyChange {
    /// Changed keys.
    Keys(SmolStr),
    /// The last good keys have expired.
    TooOld,
}

impl KeyState {
    fn new(required: RequiredKeys, shares: SharesSender) -> Self {
        Self {
            required,
            shares,
            published: None,
            memory: None,
            failures: 0,
            failure: None,
            failing_for: Duration::ZERO,
        }
    }

    /// Records fetched keys. Returns the change to publish; fails if there is no memory for them.
    fn succeed(&mut self, keys: KeySet) -> Result<Option<KeyChange>, FetchFailure> {
        let mut change = None;
        if self.published.as_ref() != Some(&keys) {
            self.memory = Some(self.memory_for(keys.size())?);
            change = Some(KeyChange::Keys(keys.text().clone()));
            self.published = Some(keys);
        }
        self.failures = 0;
        self.failure = None;
        self.failing_for = Duration::ZERO;
        Ok(change)
    }

    /// Returns the memory for keys that take the place of the published ones.
    fn memory_for(&mut self, bytes: usize) -> Result<OwnedSemaphorePermit, FetchFailure> {
        let last = self.memory.take();
        let last = last.map(|memory| (memory.semaphore().clone(), memory.num_permits()));
        if let Some(memory) = self.shares.subscribe().memory(bytes) {
            return Ok(memory);
        }
        // The published keys stay, even if their namespace requires them no longer.
        self.memory = last.and_then(|(share, kib)| share.try_acquire_many_owned(u32::try_from(kib).ok()?).ok());
        Err(FetchFailure::NoMemory)
    }

    /// Records a failure. Returns the delay before the next fetch, and the change to publish.
    fn fail(&mut self, failure: FetchFailure, refresh: Duration) -> (Duration, Option<KeyChange>) {
        self.failure = Some(failure);
        let longest = match self.published {
            Some(_) => LONGEST_RETRY.min(refresh).max(FIRST_RETRY),
            None => LONGEST_RETRY_WITHOUT_KEYS,
        };
        let wait = FIRST_RETRY.saturating_mul(1 << self.failures.min(16)).min(longest);
        self.failures = self.failures.saturating_add(1);
        self.failing_for += wait;
        let is_too_old = self.failing_for >= OLDEST && self.published.take().is_some();
        if is_too_old {
            self.memory = None;
        }
        (wait, is_too_old.then_some(KeyChange::TooOld))
    }

    /// Returns the warnings for the authors of the policies that require the keys.
    fn findings(&self, source: &KeySource) -> BTreeSet<Diagnostic> {
        let Some(failure) = &self.failure else {
            return BTreeSet::new();
        };
        let has_keys = self.published.is_some();
        let policies = self.required.by.iter();
        policies
            .map(|policy| finding(policy, source, failure, has_keys))
            .collect()
    }
}

/// Returns the warning for the author of a policy.
fn finding(policy: &ObjectKey, source: &KeySource, failure: &FetchFailure, has_keys: bool) -> Diagnostic {
    let consequence = if has_keys {
        "the last keys stay"
    } else {
        "until they are fetched, all tokens of this issuer are refused"
    };
    let finding = FieldError {
        field: "spec.jwtRules".to_owned(),
        message: format!("cannot fetch the keys of {source}: {failure}; {consequence}"),
    };
    Diagnostic::of_object(
        Kind::RequestAuthentication,
        policy.clone(),
        Severity::Warning,
        "JwksUnavailable",
        finding,
    )
}
