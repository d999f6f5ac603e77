//! Metrics of the connections, under Istio's names.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, core::Collector,
};

use smol_str::SmolStr;

use crate::generate::ResourceType;

/// Seconds that a push or a send may take.
const SEND_BUCKETS: &[f64] = &[0.01, 0.1, 1.0, 3.0, 5.0, 10.0, 20.0, 30.0];
/// Seconds that a change may take to reach a proxy.
const CONVERGENCE_BUCKETS: &[f64] = &[0.1, 0.5, 1.0, 3.0, 5.0, 10.0, 20.0, 30.0];
/// Sizes of responses.
const SIZE_BUCKETS: &[f64] = &[1.0, 1e4, 1e6, 4e6, 1e7, 4e7];

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Metrics {
    clients: IntGaugeVec,
    /// Clients by version. Clients name their version, so a version without clients is forgotten, and that must not
    /// cross with one that comes: hence a lock, held for a moment when a client comes or goes.
    versions: Arc<Mutex<BTreeMap<SmolStr, i64>>>,
    pushes: IntCounterVec,
    rejects: IntCounterVec,
    rejected: Vec<(ResourceType, IntGaugeVec)>,
    expired_nonce: IntCounterVec,
    push_time: HistogramVec,
    send_time: Histogram,
    size_bytes: HistogramVec,
    convergence: Histogram,
    pub(super) internal_errors: IntCounter,
    pub(super) write_timeout: IntCounter,
    recv_max: IntGauge,
}

impl Metrics {
    /// Registers the metrics; an error means that a name is taken.
    pub fn new(registry: &prometheus::Registry) -> Result<Self, prometheus::Error> {
        let rejected_types = [
            ResourceType::Cluster,
            ResourceType::Endpoint,
            ResourceType::Listener,
            ResourceType::Route,
            ResourceType::Extension,
        ];
        let mut rejected = Vec::new();
        for resource_type in rejected_types {
            let short = resource_type.short_name();
            let opts = Opts::new(
                format!("pilot_xds_{short}_reject"),
                format!("Responses of type {short} that a connected proxy refused."),
            );
            rejected.push((
                resource_type,
                register(registry, IntGaugeVec::new(opts, &["node", "err"])?)?,
            ));
        }
        let counters = |name: &str, help: &str| -> Result<IntCounterVec, prometheus::Error> {
            register(registry, IntCounterVec::new(Opts::new(name, help), &["type"])?)
        };
        let histogram =
            |name: &str, help: &str, buckets: &[f64]| HistogramOpts::new(name, help).buckets(buckets.to_vec());
        let counter = |name: &str, help: &str| register(registry, IntCounter::new(name, help)?);
        Ok(Self {
            clients: register(
                registry,
                IntGaugeVec::new(Opts::new("pilot_xds", "Proxies that are connected."), &["version"])?,
            )?,
            versions: Arc::default(),
            pushes: counters(
                "pilot_xds_pushes",
                "Responses that were sent, or failed to be, by type.",
            )?,
            rejects: counters("pilot_total_xds_rejects", "Responses that proxies refused, by type.")?,
            rejected,
            expired_nonce: counters(
                "pilot_xds_expired_nonce",
                "Requests that answer an outdated response, by type.",
            )?,
            push_time: register(
                registry,
                HistogramVec::new(
                    histogram(
                        "pilot_xds_push_time",
                        "Seconds from rendering a response to its last byte.",
                        SEND_BUCKETS,
                    ),
                    &["type"],
                )?,
            )?,
            send_time: register(
                registry,
                Histogram::with_opts(histogram(
                    "pilot_xds_send_time",
                    "Seconds that the transport took to write a response.",
                    SEND_BUCKETS,
                ))?,
            )?,
            size_bytes: register(
                registry,
                HistogramVec::new(
                    histogram("pilot_xds_config_size_bytes", "Bytes of a response.", SIZE_BUCKETS),
                    &["type"],
                )?,
            )?,
            convergence: register(
                registry,
                Histogram::with_opts(histogram(
                    "pilot_proxy_convergence_time",
                    "Seconds from a change to the moment when a proxy was sent all that follows from it.",
                    CONVERGENCE_BUCKETS,
                ))?,
            )?,
            internal_errors: counter(
                "pilot_total_xds_internal_errors",
                "Streams that ended by a defect of istiod.",
            )?,
            write_timeout: counter(
                "pilot_xds_write_timeout",
                "Responses that were not written for seconds.",
            )?,
            recv_max: register(
                registry,
                IntGauge::new("pilot_xds_recv_max", "Bytes of the largest request so far.")?,
            )?,
        })
    }

    /// A client came.
    pub(super) fn connected(&self, version: &SmolStr) {
        let mut versions = self.versions.lock().unwrap_or_else(PoisonError::into_inner);
        let count = versions.entry(version.clone()).or_default();
        *count += 1;
        self.clients.with_label_values(&[version.as_str()]).set(*count);
    }

    /// A client went.
    pub(super) fn disconnected(&self, version: &SmolStr) {
        let mut versions = self.versions.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(count) = versions.get_mut(version) else { return };
        *count -= 1;
        self.clients.with_label_values(&[version.as_str()]).set(*count);
        if *count == 0 {
            versions.remove(version);
            let _ = self.clients.remove_label_values(&[version.as_str()]);
        }
    }

    /// A request answers a response that is not the last one.
    pub(super) fn expired(&self, resource_type: ResourceType) {
        self.expired_nonce
            .with_label_values(&[resource_type.short_name()])
            .inc();
    }

    /// A response was written.
    pub(super) fn sent(&self, resource_type: ResourceType, size_bytes: usize, sending: Duration, pushing: Duration) {
        let short = resource_type.short_name();
        self.pushes.with_label_values(&[short]).inc();
        self.send_time.observe(sending.as_secs_f64());
        self.push_time
            .with_label_values(&[short])
            .observe(pushing.as_secs_f64());
        self.size_bytes
            .with_label_values(&[resource_type.url()])
            .observe(size_bytes as f64);
    }

    /// A response was not written: the client went away.
    pub(super) fn send_failed(&self, resource_type: ResourceType) {
        let label = format!("{}_senderr", resource_type.short_name());
        self.pushes.with_label_values(&[label.as_str()]).inc();
    }

    /// Everything that follows from a change was written.
    pub(super) fn converged(&self, delay: Duration) {
        self.convergence.observe(delay.as_secs_f64());
    }

    /// A response was refused.
    pub(super) fn nacked(&self, resource_type: ResourceType, node: &str, code: &str) {
        self.rejects.with_label_values(&[resource_type.short_name()]).inc();
        for (of, gauge) in &self.rejected {
            if *of == resource_type {
                gauge.with_label_values(&[node, code]).inc();
            }
        }
    }

    /// Forgets what a node refused: it is gone. Without this, the labels of every proxy that ever was would stay.
    pub(super) fn forget_nacks(&self, resource_type: ResourceType, node: &str, code: &str) {
        for (of, gauge) in &self.rejected {
            if *of == resource_type {
                // It is an error to remove what is not there, which is as good.
                let _ = gauge.remove_label_values(&[node, code]);
            }
        }
    }

    /// A request of this size came.
    pub(super) fn received(&self, size_bytes: usize) {
        let size = i64::try_from(size_bytes).unwrap_or(i64::MAX);
        if size > self.recv_max.get() {
            self.recv_max.set(size);
        }
    }
}

fn register<C: Collector + Clone + 'static>(
    registry: &prometheus::Registry,
    collector: C,
) -> Result<C, prometheus::Error> {
    registry.register(Box::new(collector.clone()))?;
    Ok(collector)
}
