//! Counters of writes to webhook configurations, with the names of Istio.

use prometheus::{IntCounter, IntCounterVec, Registry};

use super::Kind;
use crate::metrics;

/// The root certificates cannot be parsed.
pub(super) const LOAD: &str = "load_ca_bundle_failure";
/// The configuration was deleted.
pub(super) const NOT_FOUND: &str = "webhook_config_not_found";
/// It has no webhook of this control plane.
pub(super) const NO_ENTRY: &str = "webhook_entry_not_found";
/// The API server refused the write, or was not reached.
pub(super) const UPDATE: &str = "webhook_update_failure";

/// The counters of all clusters. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    attempts: IntCounterVec,
    retries: IntCounterVec,
    failures: IntCounterVec,
    updates: IntCounter,
    update_errors: IntCounterVec,
    load_errors: IntCounterVec,
}

impl Metrics {
    /// Registers the metrics. Fails if a name is in use.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counters = |name: &str, help: &str, labels: &[&str]| metrics::counters(registry, name, help, labels);
        Ok(Self {
            attempts: counters(
                "webhook_patch_attempts_total",
                "Attempts to write a configuration of the injector.",
                &["name"],
            )?,
            retries: counters(
                "webhook_patch_retries_total",
                "Attempts to write a configuration of the injector after a failure.",
                &["name"],
            )?,
            failures: counters(
                "webhook_patch_failures_total",
                "Configurations of the injector that were not written.",
                &["name", "reason"],
            )?,
            updates: metrics::counter(
                registry,
                "galley_validation_config_updates",
                "Writes to configurations of the validating webhook.",
            )?,
            update_errors: counters(
                "galley_validation_config_update_error",
                "Configurations of the validating webhook that were not written.",
                &["reason"],
            )?,
            load_errors: counters(
                "galley_validation_config_load_error",
                "Unusable CA bundles for the validating webhook.",
                &["reason"],
            )?,
        })
    }

    pub(super) fn attempted(&self, kind: Kind, name: &str, is_retry: bool) {
        if kind == Kind::Mutating {
            self.attempts.with_label_values(&[name]).inc();
            if is_retry {
                self.retries.with_label_values(&[name]).inc();
            }
        }
    }

    pub(super) fn written(&self, kind: Kind) {
        if kind == Kind::Validating {
            self.updates.inc();
        }
    }

    pub(super) fn failed(&self, kind: Kind, name: &str, reason: &str) {
        match kind {
            Kind::Mutating => self.failures.with_label_values(&[name, reason]).inc(),
            Kind::Validating if reason == LOAD => self.load_errors.with_label_values(&[reason]).inc(),
            Kind::Validating => self.update_errors.with_label_values(&[reason]).inc(),
        }
    }
}
