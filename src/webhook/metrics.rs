//! Metrics of the webhooks, with the names of Istio.

use prometheus::{IntCounterVec, Opts, Registry};

use super::validation::Reason;
use crate::api::Kind;

/// Counters of `/validate`.
pub struct ValidationMetrics {
    passed: IntCounterVec,
    failed: IntCounterVec,
    http_errors: IntCounterVec,
}

impl ValidationMetrics {
    /// Registers the metrics. Fails if a name is in use.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = |name: &str, help: &str, labels: &[&str]| -> Result<IntCounterVec, prometheus::Error> {
            let counter = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        Ok(Self {
            passed: counter(
                "galley_validation_passed",
                "Valid objects.",
                &["group", "version", "resource"],
            )?,
            failed: counter(
                "galley_validation_failed",
                "Refused objects, and operations that are not validated.",
                &["group", "version", "resource", "reason"],
            )?,
            http_errors: counter(
                "galley_validation_http_error",
                "Requests to validate an object that are not a review.",
                &["status"],
            )?,
        })
    }

    /// Counts an object. Labels come from the table of kinds, since a client could choose any text.
    pub fn count(&self, kind: Option<Kind>, reason: Option<Reason>) {
        const UNKNOWN: &str = "unknown";
        let [group, version, resource] =
            kind.map_or([UNKNOWN; 3], |kind| [kind.group(), kind.version(), kind.plural()]);
        match reason {
            None => self.passed.with_label_values(&[group, version, resource]).inc(),
            Some(reason) => self
                .failed
                .with_label_values(&[group, version, resource, reason.label()])
                .inc(),
        }
    }

    /// Counts a refused request by its HTTP status.
    pub fn count_http_error(&self, status: u16) {
        self.http_errors.with_label_values(&[status.to_string().as_str()]).inc();
    }
}
