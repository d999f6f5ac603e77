//! Metrics of remote clusters, under Istio's names.

use std::time::SystemTime;

use prometheus::{IntCounterVec, IntGaugeVec, Registry};

use super::{SyncStatus, reconcile::Event};
use crate::{base::ClusterId, metrics};

/// Metrics of remote clusters.
#[derive(Clone)]
pub(super) struct RemoteMetrics {
    managed: IntGaugeVec,
    status: IntGaugeVec,
    events: IntCounterVec,
    timeouts: IntCounterVec,
    stale: IntGaugeVec,
    restarts: IntCounterVec,
}

impl RemoteMetrics {
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauges = |name: &str, help: &str, labels: &[&str]| metrics::gauges(registry, name, help, labels);
        let counters = |name: &str, help: &str, label: &str| metrics::counters(registry, name, help, &[label]);
        let managed = gauges(
            "istiod_managed_clusters",
            "Number of clusters managed by istiod.",
            &["cluster_type"],
        )?;
        managed.with_label_values(&["local"]).set(1);
        managed.with_label_values(&["remote"]).set(0);
        Ok(Self {
            managed,
            status: gauges(
                "istiod_remote_cluster_sync_status",
                "Synchronization state of remote clusters: 1 for the state that a cluster is in, 0 for the others.",
                &["cluster", "cluster_type", "status"],
            )?,
            events: counters(
                "remote_cluster_secret_events_total",
                "Number of events of remote-cluster Secrets or files.",
                "event",
            )?,
            timeouts: counters(
                "remote_cluster_sync_timeouts_total",
                "Number of times a remote cluster took too long to sync; istiod becomes ready without it.",
                "cluster",
            )?,
            stale: gauges(
                "istiod_remote_cluster_stale_since_seconds",
                "Unix time at which the stored state of a remote cluster was current, while it serves.",
                &["cluster"],
            )?,
            restarts: counters(
                "istiod_remote_cluster_restarts_total",
                "Number of times the source of a remote cluster ended by a panic and was started again.",
                "cluster",
            )?,
        })
    }

    pub(super) fn event(&self, event: Event) {
        let event = match event {
            Event::Add => "add",
            Event::Update => "update",
            Event::Delete => "delete",
        };
        self.events.with_label_values(&[event]).inc();
    }

    pub(super) fn managed(&self, clusters: usize) {
        self.managed.with_label_values(&["remote"]).set(clusters as i64);
    }

    pub(super) fn timed_out(&self, cluster: &ClusterId) {
        self.timeouts.with_label_values(&[cluster.as_str()]).inc();
    }

    pub(super) fn restarted(&self, cluster: &ClusterId) {
        self.restarts.with_label_values(&[cluster.as_str()]).inc();
    }

    pub(super) fn status(&self, cluster: &ClusterId, now: SyncStatus) {
        for status in SyncStatus::ALL {
            let gauge = self
                .status
                .with_label_values(&[cluster.as_str(), "remote", status.name()]);
            gauge.set(i64::from(status == now));
        }
    }

    /// Records since when the rows of a cluster are those of its stored state, if they are.
    pub(super) fn stale(&self, cluster: &ClusterId, since: Option<SystemTime>) {
        let since = since.map(|since| since.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
        match since {
            Some(since) => {
                let gauge = self.stale.with_label_values(&[cluster.as_str()]);
                gauge.set(since.as_secs() as i64);
            }
            // An error means that the series does not exist, as intended.
            None => drop(self.stale.remove_label_values(&[cluster.as_str()])),
        }
    }

    /// Removes the series of a cluster.
    pub(super) fn gone(&self, cluster: &ClusterId) {
        self.stale(cluster, None);
        for status in SyncStatus::ALL {
            // An error means that the series does not exist, as intended.
            let _ = self
                .status
                .remove_label_values(&[cluster.as_str(), "remote", status.name()]);
        }
    }
}
