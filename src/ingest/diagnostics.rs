//! Diagnostics of users' objects, logged once while active.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use prometheus::{IntCounterVec, Opts, Registry};

use crate::api::{Diagnostic, Kind, Severity};

/// Called once for every new diagnostic.
pub type Report = Arc<dyn Fn(&Diagnostic) + Send + Sync>;

/// Returns a report that counts errors in `pilot_total_rejected_configs`.
pub fn counting_report(registry: &Registry) -> Result<Report, prometheus::Error> {
    let counter = IntCounterVec::new(
        Opts::new(
            "pilot_total_rejected_configs",
            "Total number of configs that Pilot had to reject or ignore.",
        ),
        &["type", "name"],
    )?;
    registry.register(Box::new(counter.clone()))?;
    Ok(Arc::new(move |diagnostic: &Diagnostic| {
        if diagnostic.severity == Severity::Error {
            let kind = diagnostic.kind.map_or("document", Kind::name);
            counter.with_label_values(&[kind, &diagnostic.key.to_string()]).inc();
        }
    }))
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
        if findings.is_empty() {
            self.findings.remove(&about);
            return;
        }
        let before = self.findings.insert(about, findings.clone()).unwrap_or_default();
        for diagnostic in findings.difference(&before) {
            match diagnostic.severity {
                Severity::Error => tracing::error!(code = %diagnostic.code, "{diagnostic}"),
                Severity::Warning => tracing::warn!(code = %diagnostic.code, "{diagnostic}"),
            }
            (self.report)(diagnostic);
        }
    }
}
