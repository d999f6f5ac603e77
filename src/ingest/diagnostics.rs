//! Diagnostics of users' objects, logged once while active.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use prometheus::{IntCounterVec, Registry};
use tokio::sync::watch;

use crate::{
    api::{Diagnostic, Kind, Severity},
    base::{ClusterId, ObjectKey},
    metrics,
};

/// The maximum number of objects that the metric names. Users may create others without end.
const MAX_NAMED: usize = 10_000;
/// The maximum number of new diagnostics of one object that are logged. An object may have thousands, and its owner may
/// change it all the time.
const MAX_LOGGED: usize = 10;
/// The name of all further objects of a kind, which is the name of no object.
const OTHERS: &str = "(others)";

/// An observer of ingested objects.
pub trait Reports: Send + Sync {
    /// Called once for every new diagnostic.
    fn found(&self, diagnostic: &Diagnostic);

    /// Called when a diagnostic is no longer active.
    fn resolved(&self, _diagnostic: &Diagnostic) {}

    /// Called after the watches of a kind have passed on all objects up to this resource version. It goes back after
    /// the API server was restored from a backup.
    fn seen(&self, _cluster: &ClusterId, _kind: Kind, _version: u64) {}
}

impl<F: Fn(&Diagnostic) + Send + Sync> Reports for F {
    fn found(&self, diagnostic: &Diagnostic) {
        self(diagnostic);
    }
}

/// A shared observer.
pub type Report = Arc<dyn Reports>;

/// Counts errors in `pilot_total_rejected_configs`, and keeps the active diagnostics.
struct Counting {
    counter: IntCounterVec,
    /// The objects that the metric names. Locked for a lookup or an insertion.
    named: Mutex<BTreeSet<(&'static str, String)>>,
    ingest_status: Arc<IngestStatus>,
}

impl Counting {
    /// Returns the label of an object.
    fn label(&self, kind: &'static str, name: String) -> String {
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        let object = (kind, name);
        if named.len() < MAX_NAMED {
            named.insert(object.clone());
        } else if !named.contains(&object) {
            return OTHERS.to_owned();
        }
        object.1
    }
}

impl Reports for Counting {
    fn found(&self, diagnostic: &Diagnostic) {
        if diagnostic.severity == Severity::Error {
            let kind = diagnostic.kind.map_or("document", Kind::name);
            let name = self.label(kind, diagnostic.key.to_string());
            self.counter.with_label_values(&[kind, &name]).inc();
        }
        self.ingest_status.change(diagnostic, |findings| {
            *findings.entry(diagnostic.clone()).or_default() += 1;
        });
    }

    fn resolved(&self, diagnostic: &Diagnostic) {
        self.ingest_status.change(diagnostic, |findings| {
            if let Some(count) = findings.get_mut(diagnostic) {
                *count -= 1;
                if *count == 0 {
                    findings.remove(diagnostic);
                }
            }
        });
    }

    fn seen(&self, cluster: &ClusterId, kind: Kind, version: u64) {
        self.ingest_status.lock().seen.insert((cluster.clone(), kind), version);
        self.ingest_status.notify();
    }
}

/// Returns a report that counts errors in `pilot_total_rejected_configs`, with the active diagnostics.
pub fn counting_report(registry: &Registry) -> Result<(Report, Arc<IngestStatus>), prometheus::Error> {
    let counter = metrics::counters(
        registry,
        "pilot_total_rejected_configs",
        "Total number of configs that Pilot had to reject or ignore.",
        &["type", "name"],
    )?;
    let ingest_status = Arc::<IngestStatus>::default();
    let counting = Counting {
        counter,
        named: Mutex::default(),
        ingest_status: ingest_status.clone(),
    };
    Ok((Arc::new(counting), ingest_status))
}

/// The state of ingestion, for status pages: active diagnostics, and how far each watch has come.
#[derive(Debug, Default)]
pub struct IngestStatus {
    /// Locked for one lookup, or for a copy.
    state: Mutex<IngestState>,
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct IngestState {
    /// By subject, with the number of sources for which each is active: a source and its successor find the same.
    findings: BTreeMap<(Option<Kind>, ObjectKey), BTreeMap<Diagnostic, usize>>,
    seen: BTreeMap<(ClusterId, Kind), u64>,
}

impl IngestStatus {
    /// Returns the active diagnostics of an object.
    pub fn findings(&self, kind: Kind, key: &ObjectKey) -> Vec<Diagnostic> {
        let state = self.lock();
        let findings = state.findings.get(&(Some(kind), key.clone()));
        findings.into_iter().flat_map(BTreeMap::keys).cloned().collect()
    }

    /// Returns all active diagnostics.
    pub fn all(&self) -> Vec<Diagnostic> {
        self.lock()
            .findings
            .values()
            .flat_map(BTreeMap::keys)
            .cloned()
            .collect()
    }

    /// Returns the resource version up to which the objects of a kind are known; `None` without a watch.
    pub fn seen(&self, cluster: &ClusterId, kind: Kind) -> Option<u64> {
        self.lock().seen.get(&(cluster.clone(), kind)).copied()
    }

    /// Returns a receiver that changes with the state.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn change(&self, diagnostic: &Diagnostic, change: impl FnOnce(&mut BTreeMap<Diagnostic, usize>)) {
        let subject = (diagnostic.kind, diagnostic.key.clone());
        let mut state = self.lock();
        let findings = state.findings.entry(subject.clone()).or_default();
        change(findings);
        if findings.is_empty() {
            state.findings.remove(&subject);
        }
        drop(state);
        self.notify();
    }

    fn notify(&self) {
        if self.changed.receiver_count() > 0 {
            self.changed.send_modify(|changed| *changed += 1);
        }
    }

    fn lock(&self) -> MutexGuard<'_, IngestState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Active diagnostics by their subject.
pub struct ActiveDiagnostics<K> {
    report: Report,
    findings: BTreeMap<K, BTreeSet<Diagnostic>>,
}

impl<K: Ord> ActiveDiagnostics<K> {
    /// Returns an empty set.
    pub fn new(report: Report) -> Self {
        Self {
            report,
            findings: BTreeMap::new(),
        }
    }

    /// Sets the diagnostics of a subject; logs and counts new ones.
    pub fn set(&mut self, about: K, findings: BTreeSet<Diagnostic>) {
        let before = if findings.is_empty() {
            self.findings.remove(&about)
        } else {
            self.findings.insert(about, findings.clone())
        };
        let before = before.unwrap_or_default();
        for diagnostic in before.difference(&findings) {
            self.report.resolved(diagnostic);
        }
        let mut new: Vec<&Diagnostic> = findings.difference(&before).collect();
        // The order begins with the object.
        let is_same = |a: &&Diagnostic, b: &&Diagnostic| a.kind == b.kind && a.key == b.key && a.place == b.place;
        for of_object in new.chunk_by_mut(is_same) {
            log_new(of_object);
        }
        for diagnostic in new {
            self.report.found(diagnostic);
        }
    }

    /// Resolves the diagnostics of all subjects.
    pub fn clear(&mut self) {
        for diagnostic in std::mem::take(&mut self.findings).values().flatten() {
            self.report.resolved(diagnostic);
        }
    }
}

/// Logs new diagnostics of one object.
fn log_new(of_object: &mut [&Diagnostic]) {
    let (logged, omitted) = split_for_log(of_object);
    for diagnostic in logged {
        match diagnostic.severity {
            Severity::Error => tracing::error!(code = %diagnostic.code, "{diagnostic}"),
            Severity::Warning => tracing::warn!(code = %diagnostic.code, "{diagnostic}"),
        }
    }
    if let Some(first) = logged.first().filter(|_| omitted > 0) {
        let kind = first.kind.map_or("document", Kind::name);
        tracing::warn!(kind, object = %first.key, omitted, "more problems of the object found");
    }
}

/// Returns the diagnostics of one object to log, errors first, and the number of the others.
fn split_for_log<'a, 'd>(of_object: &'a mut [&'d Diagnostic]) -> (&'a [&'d Diagnostic], usize) {
    of_object.sort_by_key(|diagnostic| Reverse(diagnostic.severity));
    let (logged, omitted) = of_object.split_at(of_object.len().min(MAX_LOGGED));
    (logged, omitted.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::FieldError;

    #[test]
    fn r21_one_object_logs_few_diagnostics() {
        let diagnostic = |number: usize, severity| {
            let finding = FieldError {
                field: format!("spec.hosts[{number:03}]"),
                message: "message".to_owned(),
            };
            Diagnostic::of_object(Kind::Sidecar, ObjectKey::default(), severity, "Code", finding)
        };
        let mut found: Vec<Diagnostic> = (0..100).map(|number| diagnostic(number, Severity::Warning)).collect();
        found.push(diagnostic(100, Severity::Error));
        let mut new: Vec<&Diagnostic> = found.iter().collect();
        let (logged, omitted) = split_for_log(&mut new);
        assert_eq!((logged.len(), omitted), (MAX_LOGGED, 101 - MAX_LOGGED));
        assert_eq!(logged[0].severity, Severity::Error);
        let mut new: Vec<&Diagnostic> = found.iter().take(MAX_LOGGED).collect();
        assert_eq!(split_for_log(&mut new).1, 0);
    }

    #[test]
    fn a_diagnostic_is_active_while_one_of_several_sources_finds_it() {
        let (report, ingest_status) = counting_report(&Registry::new()).expect("new names");
        let [mut source, mut successor] = [(); 2].map(|()| ActiveDiagnostics::new(report.clone()));
        let found: BTreeSet<Diagnostic> = [Diagnostic::of_document("here", "Code", "message")].into();
        source.set((), found.clone());
        successor.set((), found.clone());
        source.clear();
        assert_eq!(ingest_status.all(), found.into_iter().collect::<Vec<_>>());
        successor.clear();
        successor.clear();
        assert!(ingest_status.all().is_empty());
    }

    #[test]
    fn seen_versions_may_go_back() {
        let (report, ingest_status) = counting_report(&Registry::new()).expect("new names");
        let cluster = ClusterId::default();
        assert_eq!(ingest_status.seen(&cluster, Kind::Service), None);
        for version in [7, 9, 3] {
            report.seen(&cluster, Kind::Service, version);
            assert_eq!(ingest_status.seen(&cluster, Kind::Service), Some(version));
        }
    }

    #[test]
    fn the_metric_names_a_limited_number_of_objects() {
        let registry = Registry::new();
        let (report, _) = counting_report(&registry).expect("new names");
        for number in 0..MAX_NAMED + 10 {
            let key = ObjectKey::new(&ClusterId::default(), "shop", number.to_string());
            let finding = FieldError {
                field: String::new(),
                message: "message".to_owned(),
            };
            let diagnostic = Diagnostic::of_object(Kind::Service, key, Severity::Error, "Code", finding);
            report.found(&diagnostic);
        }
        let metrics = registry.gather().remove(0);
        assert_eq!(metrics.get_metric().len(), MAX_NAMED + 1);
    }
}
