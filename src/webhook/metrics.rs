//! Metrics of the webhooks, with the names of Istio.

use prometheus::{Histogram, IntCounter, IntCounterVec, Registry};

use super::{injection::Injection, validation::Reason};
use crate::{api::Kind, metrics};

/// Counters of `/validate`.
pub struct ValidationMetrics {
    passed: IntCounterVec,
    failed: IntCounterVec,
    http_errors: IntCounterVec,
}

impl ValidationMetrics {
    /// Registers the metrics. Fails if a name is in use.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counters = |name: &str, help: &str, labels: &[&str]| metrics::counters(registry, name, help, labels);
        Ok(Self {
            passed: counters(
                "galley_validation_passed",
                "Valid objects.",
                &["group", "version", "resource"],
            )?,
            failed: counters(
                "galley_validation_failed",
                "Refused objects, and operations that are not validated.",
                &["group", "version", "resource", "reason"],
            )?,
            http_errors: counters(
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

/// The upper bounds of `sidecar_injection_time_seconds`, in seconds.
const INJECTION_SECONDS: [f64; 8] = [0.1, 1.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0];

/// Metrics of `/inject`.
pub struct InjectionMetrics {
    requests: IntCounter,
    answered: IntCounter,
    failed: IntCounter,
    skipped: IntCounter,
    seconds: Histogram,
}

impl InjectionMetrics {
    /// Registers the metrics.
    ///
    /// # Errors
    /// If a name is in use.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = |name: &str, help: &str| metrics::counter(registry, name, help);
        Ok(Self {
            requests: counter("sidecar_injection_requests_total", "Requests to inject a pod.")?,
            // Parity (pkg/kube/inject/webhook.go): skipped and refused pods count as well.
            answered: counter("sidecar_injection_success_total", "Answered requests to inject a pod.")?,
            failed: counter(
                "sidecar_injection_failure_total",
                "Requests to inject a pod that failed.",
            )?,
            skipped: counter("sidecar_injection_skip_total", "Pods that are not injected.")?,
            seconds: metrics::histogram(
                registry,
                "sidecar_injection_time_seconds",
                "Duration of the injection of a pod, in seconds.",
                &INJECTION_SECONDS,
            )?,
        })
    }

    /// Counts a request on its arrival.
    pub fn count_request(&self) {
        self.requests.inc();
    }

    /// Counts a request that is not a review.
    pub fn count_malformed(&self) {
        self.failed.inc();
    }

    /// Counts an answered request.
    pub fn count(&self, injection: &Injection, seconds: f64) {
        match injection {
            Injection::Injected => {}
            Injection::Skipped(_) => self.skipped.inc(),
            Injection::Failed => self.failed.inc(),
        }
        self.answered.inc();
        self.seconds.observe(seconds);
    }
}
