//! Metrics of connections, with Istio's names.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};
use smol_str::SmolStr;

use crate::{generate::ResourceType, metrics};

/// Buckets for the duration of pushes and sends, in seconds.
const SEND_BUCKETS: &[f64] = &[0.01, 0.1, 1.0, 3.0, 5.0, 10.0, 20.0, 30.0];
/// Buckets for the time between a change and its arrival at a proxy, in seconds.
const CONVERGENCE_BUCKETS: &[f64] = &[0.1, 0.5, 1.0, 3.0, 5.0, 10.0, 20.0, 30.0];
/// Buckets for the size of responses, in bytes.
const SIZE_BUCKETS: &[f64] = &[1.0, 1e4, 1e6, 4e6, 1e7, 4e7];

/// The label of all types of objects of configuration.
const OBJECTS: &str = "api";

/// A response that was written.
#[derive(Clone, Copy, Debug)]
pub(super) struct SentResponse {
    pub(super) size_bytes: usize,
    /// The time that the transport took.
    pub(super) sending: Duration,
    /// The time from the beginning of its rendering.
    pub(super) pushing: Duration,
}

/// The metrics of connections.
#[derive(Clone, Debug)]
pub struct Metrics {
    clients: IntGaugeVec,
    /// The number of clients by version. Clients choose the label, so a version without clients is removed. The lock
    /// keeps the removal from racing with a new client; it is held briefly when a client connects or disconnects.
    versions: Arc<Mutex<BTreeMap<SmolStr, i64>>>,
    pushes: IntCounterVec,
    rejects: IntCounterVec,
    rejected: Vec<(ResourceType, IntGaugeVec)>,
    expired_nonce: IntCounterVec,
    push_time: HistogramVec,
    send_time: Histogram,
    size_bytes: HistogramVec,
    convergence: Histogram,
    queue_time: Histogram,
    pub(super) internal_errors: IntCounter,
    pub(super) write_timeout: IntCounter,
    recv_max: IntGauge,
    limited: IntCounterVec,
    refused: IntCounterVec,
    pub(super) quarantined: IntGaugeVec,
}

impl Metrics {
    /// Registers the metrics. An error means that a name is in use.
    pub fn new(registry: &prometheus::Registry) -> Result<Self, prometheus::Error> {
        let by_type = |name: &str, help: &str| metrics::counters(registry, name, help, &["type"]);
        let counter = |name: &str, help: &str| metrics::counter(registry, name, help);
        Ok(Self {
            clients: metrics::gauges(registry, "pilot_xds", "Number of connected proxies.", &["version"])?,
            versions: Arc::default(),
            pushes: by_type(
                "pilot_xds_pushes",
                "Number of responses that were sent or failed, by type.",
            )?,
            rejects: by_type(
                "pilot_total_xds_rejects",
                "Number of responses that proxies rejected, by type.",
            )?,
            rejected: rejected_gauges(registry)?,
            expired_nonce: by_type(
                "pilot_xds_expired_nonce",
                "Number of requests with an outdated nonce, by type.",
            )?,
            push_time: metrics::histograms(
                registry,
                "pilot_xds_push_time",
                "Time from encoding a response to its last byte, in seconds.",
                SEND_BUCKETS,
                &["type"],
            )?,
            send_time: metrics::histogram(
                registry,
                "pilot_xds_send_time",
                "Time that the transport took to write a response, in seconds.",
                SEND_BUCKETS,
            )?,
            size_bytes: metrics::histograms(
                registry,
                "pilot_xds_config_size_bytes",
                "Size of a response, in bytes.",
                SIZE_BUCKETS,
                &["type"],
            )?,
            convergence: metrics::histogram(
                registry,
                "pilot_proxy_convergence_time",
                "Time from a change until a proxy was sent all its consequences, in seconds.",
                CONVERGENCE_BUCKETS,
            )?,
            queue_time: metrics::histogram(
                registry,
                "pilot_proxy_queue_time",
                "Time from the generation of a change until its proxy is served, in seconds.",
                CONVERGENCE_BUCKETS,
            )?,
            internal_errors: counter(
                "pilot_total_xds_internal_errors",
                "Number of streams that failed because of an unreadable request, or of a bug in istiod.",
            )?,
            write_timeout: counter(
                "pilot_xds_write_timeout",
                "Number of responses that were not written in time.",
            )?,
            recv_max: metrics::gauge(
                registry,
                "pilot_xds_recv_max",
                "Size of the largest request so far, in bytes.",
            )?,
            limited: metrics::counters(
                registry,
                "istiod_limited_streams_total",
                "Number of streams that ended because of a limit, by limit.",
                &["limit"],
            )?,
            refused: by_type(
                "istiod_refused_resources_total",
                "Number of resources that proxies refused, as far as their errors say which they are, by type.",
            )?,
            quarantined: metrics::gauges(
                registry,
                "istiod_quarantined_resources",
                "Number of refused resources that are withheld from proxies of the same identity and build, by type.",
                &["type"],
            )?,
        })
    }

    /// Records a new client.
    pub(super) fn connected(&self, version: &SmolStr) {
        let mut versions = self.versions.lock().unwrap_or_else(PoisonError::into_inner);
        let count = versions.entry(version.clone()).or_default();
        *count += 1;
        self.clients.with_label_values(&[version.as_str()]).set(*count);
    }

    /// Records a disconnected client.
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

    /// Records a request with an outdated nonce.
    pub(super) fn expired(&self, resource_type: ResourceType) {
        self.expired_nonce
            .with_label_values(&[resource_type.short_name()])
            .inc();
    }

    /// Records a stream that ended because of a limit.
    pub(super) fn limited(&self, limit: &str) {
        self.limited.with_label_values(&[limit]).inc();
    }

    /// Records a written response.
    pub(super) fn sent(&self, resource_type: ResourceType, sent: &SentResponse) {
        self.record(resource_type.short_name(), resource_type.url(), sent);
    }

    /// Records a written response to a debug request, whose type has this label.
    pub(super) fn sent_debug(&self, label: &str, sent: &SentResponse) {
        self.record(label, label, sent);
    }

    /// Records a written response with objects of configuration.
    pub(super) fn sent_objects(&self, sent: &SentResponse) {
        self.record(OBJECTS, OBJECTS, sent);
    }

    fn record(&self, short: &str, url: &str, sent: &SentResponse) {
        self.pushes.with_label_values(&[short]).inc();
        self.send_time.observe(sent.sending.as_secs_f64());
        let push_time = self.push_time.with_label_values(&[short]);
        push_time.observe(sent.pushing.as_secs_f64());
        let size_bytes = self.size_bytes.with_label_values(&[url]);
        size_bytes.observe(sent.size_bytes as f64);
    }

    /// Records a response that was not written because of an error.
    pub(super) fn send_failed(&self, resource_type: ResourceType) {
        let label = format!("{}_senderr", resource_type.short_name());
        self.pushes.with_label_values(&[label.as_str()]).inc();
    }

    /// Records the time from the publication of a change to its first response.
    pub(super) fn dequeued(&self, queued: Duration) {
        self.queue_time.observe(queued.as_secs_f64());
    }

    /// Records that all consequences of a change were written.
    pub(super) fn converged(&self, delay: Duration) {
        self.convergence.observe(delay.as_secs_f64());
    }

    /// Records a NACK.
    pub(super) fn nacked(&self, resource_type: ResourceType, node: &str, code: &str) {
        self.rejects.with_label_values(&[resource_type.short_name()]).inc();
        for (rejected_type, gauge) in &self.rejected {
            if *rejected_type == resource_type {
                gauge.with_label_values(&[node, code]).inc();
            }
        }
    }

    /// Records a refused resource.
    pub(super) fn refused(&self, resource_type: ResourceType) {
        self.refused.with_label_values(&[resource_type.short_name()]).inc();
    }

    /// Removes the NACKs of a disconnected node. Without this, the labels of all former proxies would stay.
    pub(super) fn forget_nacks(&self, resource_type: ResourceType, node: &str, code: &str) {
        for (rejected_type, gauge) in &self.rejected {
            if *rejected_type == resource_type {
                // Fails only if the label was removed before.
                let _ = gauge.remove_label_values(&[node, code]);
            }
        }
    }

    /// Records the size of a request.
    pub(super) fn received(&self, size_bytes: usize) {
        let size = i64::try_from(size_bytes).unwrap_or(i64::MAX);
        if size > self.recv_max.get() {
            self.recv_max.set(size);
        }
    }
}

/// Registers the gauges of rejected responses, one for each type that Istio has one for.
fn rejected_gauges(registry: &prometheus::Registry) -> Result<Vec<(ResourceType, IntGaugeVec)>, prometheus::Error> {
    let types = [
        ResourceType::Cluster,
        ResourceType::Endpoint,
        ResourceType::Listener,
        ResourceType::Route,
        ResourceType::Extension,
    ];
    let mut rejected = Vec::with_capacity(types.len());
    for resource_type in types {
        let short = resource_type.short_name();
        let name = format!("pilot_xds_{short}_reject");
        let help = format!("Number of rejected responses of type {short}, for each connected proxy.");
        let gauges = metrics::gauges(registry, &name, &help, &["node", "err"])?;
        rejected.push((resource_type, gauges));
    }
    Ok(rejected)
}
