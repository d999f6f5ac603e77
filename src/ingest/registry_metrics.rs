//! Metrics of registries and config sources besides Kubernetes.

use prometheus::{IntCounterVec, IntGaugeVec, Registry};

use crate::metrics;

/// The metrics of all registries. Cheap to clone.
#[derive(Clone)]
pub struct RegistryMetrics {
    errors: IntCounterVec,
    objects: IntGaugeVec,
    connected: IntGaugeVec,
}

/// The metrics of one registry.
#[derive(Clone)]
pub struct OfRegistry {
    metrics: RegistryMetrics,
    registry: String,
}

impl RegistryMetrics {
    /// Registers the metrics. An error means that a name is in use.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauges = |name: &str, help: &str| metrics::gauges(registry, name, help, &["registry"]);
        Ok(Self {
            errors: metrics::counters(
                registry,
                "istiod_registry_errors_total",
                "Number of failed requests to a registry or config source and of unusable parts of its answers.",
                &["registry", "reason"],
            )?,
            objects: gauges(
                "istiod_registry_objects",
                "Number of objects or services that a registry or config source has declared.",
            )?,
            connected: gauges(
                "istiod_registry_connected",
                "1 if the last request to a registry or config source succeeded, otherwise 0.",
            )?,
        })
    }

    /// Returns the metrics of one registry, by the name or address that the operator configured.
    pub fn of(&self, registry: &str) -> OfRegistry {
        let metrics = OfRegistry {
            metrics: self.clone(),
            registry: registry.to_owned(),
        };
        metrics.connected(false);
        metrics
    }
}

impl OfRegistry {
    /// Counts errors of one kind.
    pub fn failed(&self, reason: &str, count: usize) {
        let counter = self.metrics.errors.with_label_values(&[self.registry.as_str(), reason]);
        counter.inc_by(count as u64);
    }

    /// Sets the number of declared objects.
    pub fn objects(&self, count: usize) {
        let gauge = self.metrics.objects.with_label_values(&[self.registry.as_str()]);
        gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Sets the state of the connection.
    pub fn connected(&self, is_connected: bool) {
        let gauge = self.metrics.connected.with_label_values(&[self.registry.as_str()]);
        gauge.set(i64::from(is_connected));
    }
}
