//! Health of watches, for debug pages and metrics, and for other watches of the same cluster: the first one that
//! reaches the API server again wakes those that wait for their next attempt.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use prometheus::{IntCounter, IntCounterVec, Registry};
use serde::Serialize;
use tokio::{
    sync::{Notify, futures::Notified},
    time::Instant,
};

use crate::{
    base::{ClusterId, SmolStr},
    metrics,
};

/// State of a watch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WatchState {
    /// Not started.
    #[default]
    Idle,
    /// Reading the whole list.
    Listing,
    /// Receiving changes or bookmarks.
    Watching,
    /// Resumed after silence, and still silent.
    Silent,
    /// Waiting before the next request.
    Waiting,
}

/// A watch on a debug page.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchReport {
    /// Cluster.
    pub cluster: SmolStr,
    /// `plural.group`, with namespace and selectors if there are any.
    pub resource: SmolStr,
    /// State.
    pub state: WatchState,
    /// Seconds since the last event, bookmark or list; `None` before the first.
    pub last_event_seconds: Option<f64>,
    /// Version from which it would resume.
    pub resource_version: SmolStr,
    /// Number of objects.
    pub objects: usize,
    /// Number of full lists after the first.
    pub restarts: u64,
    /// Number of resumptions after silence.
    pub silences: u64,
    /// Number of objects that could not be decoded.
    pub undecodable: u64,
    /// Last error, empty without one.
    pub last_error: String,
}

/// Counters of all watches, and the watches themselves. Cheap to clone.
#[derive(Clone)]
pub struct WatchMetrics {
    silent: IntCounterVec,
    restarts: IntCounterVec,
    undecodable: IntCounterVec,
    errors: IntCounterVec,
    watches: Arc<Watches>,
}

/// Health of one watch, shared with its readers.
pub struct WatchHealth {
    cluster: SmolStr,
    resource: SmolStr,
    silent: IntCounter,
    restarts: IntCounter,
    undecodable: IntCounter,
    errors: IntCounter,
    /// True if the objects are part of the stored state of their cluster.
    is_stored: bool,
    /// Signal that a watch of the cluster succeeded after a failure.
    recovery: Arc<Notify>,
    /// Present state. A lock instead of a message: it is held for a copy, and pages read it at any time.
    facts: Mutex<Facts>,
}

/// All watches.
#[derive(Default)]
struct Watches {
    /// A lock instead of a message: it is held for a copy, when a watch starts and when a page is built.
    all: Mutex<Vec<Weak<WatchHealth>>>,
    /// The recovery signals of clusters. Locked when a watch starts.
    recoveries: Mutex<BTreeMap<SmolStr, Weak<Notify>>>,
}

impl Watches {
    /// Returns the signal that all watches of a cluster share.
    fn recovery(&self, cluster: &ClusterId) -> Arc<Notify> {
        let mut recoveries = self.recoveries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(recovery) = recoveries.get(cluster.as_str()).and_then(Weak::upgrade) {
            return recovery;
        }
        recoveries.retain(|_, recovery| recovery.strong_count() > 0);
        let recovery = Arc::new(Notify::new());
        recoveries.insert(SmolStr::new(cluster.as_str()), Arc::downgrade(&recovery));
        recovery
    }

    /// Adds a watch; it is removed when it ends.
    fn add(&self, health: &Arc<WatchHealth>) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|health| health.strong_count() > 0);
        all.push(Arc::downgrade(health));
    }

    fn reports(&self) -> Vec<WatchReport> {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut reports: Vec<_> = all
            .iter()
            .filter_map(Weak::upgrade)
            .map(|health| health.report())
            .collect();
        reports.sort_by(|a, b| (&a.cluster, &a.resource).cmp(&(&b.cluster, &b.resource)));
        reports
    }
}

#[derive(Default)]
struct Facts {
    state: WatchState,
    last_event: Option<Instant>,
    resource_version: SmolStr,
    objects: usize,
    listed: bool,
    /// True once a list was refused before the first complete one.
    refused: bool,
    restarts: u64,
    silences: u64,
    undecodable: u64,
    last_error: String,
    /// Consecutive failures.
    failures: u32,
}

impl WatchMetrics {
    /// Registers the counters.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counters = |name: &str, help: &str, labels: &[&str]| metrics::counters(registry, name, help, labels);
        let each = ["cluster", "resource"];
        Ok(Self {
            silent: counters(
                "istiod_watch_silent_total",
                "Watches that were resumed because neither an event nor a bookmark came.",
                &each,
            )?,
            restarts: counters(
                "istiod_watch_restarts_total",
                "Watches that read the whole list again.",
                &each,
            )?,
            undecodable: counters(
                "istiod_watch_undecodable_total",
                "Objects of watches that could not be read as objects.",
                &each,
            )?,
            errors: counters(
                "controller_sync_errors_total",
                "Total number of errors syncing controllers.",
                &["cluster"],
            )?,
            watches: Arc::default(),
        })
    }

    /// Returns the state of all watches, by cluster and resource.
    pub fn reports(&self) -> Vec<WatchReport> {
        self.watches.reports()
    }

    /// Returns the time since the last event, bookmark or list of a cluster's most silent watch of stored objects;
    /// `None` without such watches.
    pub fn silence(&self, cluster: &ClusterId) -> Option<Duration> {
        let all = self.watches.all.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let watches = all.iter().filter_map(Weak::upgrade);
        let of_state = watches.filter(|health| health.is_stored && health.cluster == cluster.as_str());
        of_state
            .filter_map(|health| health.facts().last_event)
            .map(|at| at.elapsed())
            .max()
    }
}

impl WatchHealth {
    /// Returns the health of a watch before its start. `resource` is its name on pages; in metrics it has no
    /// selectors.
    pub fn new(cluster: &ClusterId, resource: &str, metrics: &WatchMetrics) -> Arc<Self> {
        Self::idle(cluster, resource, metrics).added(metrics)
    }

    /// Returns the health of a watch whose objects are part of the stored state of their cluster. Its silence counts
    /// in [`WatchMetrics::silence`].
    pub fn of_stored(cluster: &ClusterId, resource: &str, metrics: &WatchMetrics) -> Arc<Self> {
        let health = Self {
            is_stored: true,
            ..Self::idle(cluster, resource, metrics)
        };
        health.added(metrics)
    }

    fn idle(cluster: &ClusterId, resource: &str, metrics: &WatchMetrics) -> Self {
        // Selectors may be long, and there may be many.
        let label = resource.split('?').next().unwrap_or_default();
        let labelled = |counter: &IntCounterVec| counter.with_label_values(&[cluster.as_str(), label]);
        Self {
            cluster: SmolStr::new(cluster.as_str()),
            resource: SmolStr::new(resource),
            silent: labelled(&metrics.silent),
            restarts: labelled(&metrics.restarts),
            undecodable: labelled(&metrics.undecodable),
            errors: metrics.errors.with_label_values(&[cluster.as_str()]),
            is_stored: false,
            recovery: metrics.watches.recovery(cluster),
            facts: Mutex::default(),
        }
    }

    fn added(self, metrics: &WatchMetrics) -> Arc<Self> {
        let health = Arc::new(self);
        metrics.watches.add(&health);
        health
    }

    /// Returns the present health.
    pub fn report(&self) -> WatchReport {
        let facts = self.facts();
        WatchReport {
            cluster: self.cluster.clone(),
            resource: self.resource.clone(),
            state: facts.state,
            last_event_seconds: facts.last_event.map(|at| at.elapsed().as_secs_f64()),
            resource_version: facts.resource_version.clone(),
            objects: facts.objects,
            restarts: facts.restarts,
            silences: facts.silences,
            undecodable: facts.undecodable,
            last_error: facts.last_error.clone(),
        }
    }

    /// Returns true after the first complete list.
    pub fn has_listed(&self) -> bool {
        self.facts().listed
    }

    /// Returns true if the first event of the watch is an empty list in place of a refused one. Such an event is sent
    /// before any list, and after this is known, so what it returns at that event holds whatever was listed since.
    pub fn was_refused(&self) -> bool {
        self.facts().refused
    }

    /// Returns true if the API server is known to have only older versions than this one. Versions that are not numbers
    /// have no order.
    pub fn is_before(&self, version: u64) -> bool {
        self.facts()
            .resource_version
            .parse()
            .is_ok_and(|newest: u64| newest < version)
    }

    /// Completes when a watch of the same cluster succeeds after a failure: the API server is back.
    pub fn recovered(&self) -> Notified<'_> {
        self.recovery.notified()
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn enter(&self, state: WatchState) {
        let mut facts = self.facts();
        // A silent watch stays silent until the next event.
        if !(facts.state == WatchState::Silent && state == WatchState::Watching) {
            facts.state = state;
        }
        if state == WatchState::Watching && facts.failures > 0 {
            self.recovery.notify_waiters();
        }
    }

    pub(super) fn listed(&self, objects: usize, resource_version: &str) {
        let mut facts = self.facts();
        if facts.listed {
            facts.restarts += 1;
            self.restarts.inc();
        }
        if facts.failures > 0 {
            self.recovery.notify_waiters();
        }
        facts.listed = true;
        facts.objects = objects;
        facts.state = WatchState::Watching;
        drop(facts);
        self.alive(resource_version, 0);
    }

    /// Records an event or bookmark; `more` is the change of the number of objects.
    pub(super) fn alive(&self, resource_version: &str, more: isize) {
        let mut facts = self.facts();
        facts.last_event = Some(Instant::now());
        facts.resource_version = SmolStr::new(resource_version);
        facts.objects = facts.objects.saturating_add_signed(more);
        if facts.state == WatchState::Silent {
            facts.state = WatchState::Watching;
        }
        if std::mem::take(&mut facts.failures) > 1 {
            tracing::info!(cluster = %self.cluster, resource = %self.resource, "watch recovered");
        }
    }

    pub(super) fn failed(&self, error: &str) {
        self.errors.inc();
        let mut facts = self.facts();
        facts.failures = facts.failures.saturating_add(1);
        let (failures, known) = (facts.failures, facts.last_error == error);
        error.clone_into(&mut facts.last_error);
        drop(facts);
        let (cluster, resource) = (&self.cluster, &self.resource);
        // A single failure is a restart of the API server or a new definition; most are over at once.
        if failures == 2 || failures > 2 && !known {
            tracing::warn!(%cluster, %resource, failures, error, "watch failed, retrying");
        } else {
            tracing::debug!(%cluster, %resource, failures, error, "watch failed, retrying");
        }
    }

    /// Records a refused list of objects that need not exist, before the first complete list. It does not count as an
    /// error, and is logged once.
    pub(super) fn not_permitted(&self, error: &str) {
        let mut facts = self.facts();
        let is_known = facts.last_error == error;
        error.clone_into(&mut facts.last_error);
        facts.refused = true;
        drop(facts);
        if !is_known {
            tracing::warn!(cluster = %self.cluster, resource = %self.resource, error, "watch not permitted, retrying");
        }
    }

    pub(super) fn silent(&self) {
        self.silent.inc();
        let mut facts = self.facts();
        facts.state = WatchState::Silent;
        facts.silences += 1;
        drop(facts);
        tracing::warn!(cluster = %self.cluster, resource = %self.resource,
            "watch idle for too long, resuming");
    }

    pub(super) fn undecodable(&self, error: &str) {
        self.undecodable.inc();
        self.facts().undecodable += 1;
        tracing::error!(cluster = %self.cluster, resource = %self.resource, error,
            "failed to decode object, skipping it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let metrics = WatchMetrics::new(&Registry::new()).expect("new names");
        let health = WatchHealth::new(&ClusterId::new_static("c"), "pods", &metrics);
        assert!(!health.is_before(1), "nothing is known");
        health.listed(0, "9");
        assert!(health.is_before(10));
        assert!(!health.is_before(9));
        health.alive("none", 0);
        assert!(!health.is_before(10));
    }

    #[test]
    fn only_watches_of_stored_objects_make_a_state_old() {
        let metrics = WatchMetrics::new(&Registry::new()).expect("new names");
        let cluster = ClusterId::new_static("c");
        let secrets = WatchHealth::new(&cluster, "secrets", &metrics);
        secrets.listed(0, "1");
        assert_eq!(metrics.silence(&cluster), None);
        let pods = WatchHealth::of_stored(&cluster, "pods", &metrics);
        assert_eq!(metrics.silence(&cluster), None, "not listed yet");
        pods.listed(0, "1");
        assert!(metrics.silence(&cluster).is_some());
        assert_eq!(metrics.silence(&ClusterId::new_static("d")), None);
    }
}
