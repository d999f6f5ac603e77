//! Metrics of stored states.

use prometheus::{IntCounterVec, IntGaugeVec, Registry};

use crate::{base::ClusterId, metrics};

/// Result of reading a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadResult {
    /// It counts.
    Success,
    /// It does not exist.
    Absent,
    /// It is too old.
    Expired,
    /// It cannot be read.
    Invalid,
}

/// Metrics of stored states.
#[derive(Clone)]
pub(super) struct StoredMetrics {
    reads: IntCounterVec,
    writes: IntCounterVec,
    bytes: IntGaugeVec,
}

impl StoredMetrics {
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        Ok(Self {
            reads: metrics::counters(
                registry,
                "istiod_remote_state_reads_total",
                "Number of stored states of remote clusters that were read, by result.",
                &["result"],
            )?,
            writes: metrics::counters(
                registry,
                "istiod_remote_state_writes_total",
                "Number of stored states of remote clusters that were written, by result.",
                &["result"],
            )?,
            bytes: metrics::gauges(
                registry,
                "istiod_remote_state_bytes",
                "Size of the stored state of each remote cluster.",
                &["cluster"],
            )?,
        })
    }

    pub(super) fn read(&self, result: ReadResult) {
        let result = match result {
            ReadResult::Success => "success",
            ReadResult::Absent => "absent",
            ReadResult::Expired => "expired",
            ReadResult::Invalid => "invalid",
        };
        self.reads.with_label_values(&[result]).inc();
    }

    pub(super) fn written(&self, cluster: &ClusterId, bytes: u64) {
        self.writes.with_label_values(&["success"]).inc();
        self.bytes.with_label_values(&[cluster.as_str()]).set(bytes as i64);
    }

    pub(super) fn failed(&self) {
        self.writes.with_label_values(&["failure"]).inc();
    }

    /// Removes the series of a cluster.
    pub(super) fn gone(&self, cluster: &ClusterId) {
        // An error means that the series does not exist, as intended.
        let _ = self.bytes.remove_label_values(&[cluster.as_str()]);
    }
}
