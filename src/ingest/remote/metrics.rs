//! Metrics of remote clusters, under Istio's names.

use std::time::SystemTime;

use prometheus::{IntCounterVec, IntGaugeVec, Opts, Registry};

use super::{SyncStatus, reconcile::Event};
use crate::base::ClusterId;

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
        let managed = IntGaugeVec::new(
            Opts::new("istiod_managed_clusters", "Number of clusters managed by istiod."),
            &["cluster_type"],
        )?;
        let status = IntGaugeVec::new(
            Opts::new(
                "istiod_remote_cluster_sync_status",
                "Synchronization state of remote clusters: 1 for the state that a cluster is in, 0 for the others.",
            ),
            &["cluster", "cluster_type", "status"],
        )?;
        let events = IntCounterVec::new(
            Opts::new(
                "remote_cluster_secret_events_total",
                "Number of events of remote-cluster Secrets or files.",
            ),
            &["event"],
        )?;
        let timeouts = IntCounterVec::new(
            Opts::new(
                "remote_cluster_sync_timeouts_total",
                "Number of times a remote cluster took too long to sync; istiod becomes ready without it.",
            ),
            &["cluster"],
        )?;
        let stale = IntGaugeVec::new(
            Opts::new(
                "istiod_remote_cluster_stale_since_seconds",
                "Unix time at which the stored state of a remote cluster was current, while it serves.",
            ),
            &["cluster"],
        )?;
        let restarts = IntCounterVec::new(
            Opts::new(
                "istiod_remote_cluster_restarts_total",
                "Number of times the source of a remote cluster ended by a panic and was started again.",
            ),
            &["cluster"],
        )?;
        registry.register(Box::new(restarts.clone()))?;
        registry.register(Box::new(stale.clone()))?;
        registry.register(Box::new(managed.clone()))?;
        registry.register(Box::new(status.clone()))?;
        registry.register(Box::new(events.clone()))?;
        registry.register(Box::new(timeouts.clone()))?;
        managed.with_label_values(&["local"]).set(1);
        managed.with_label_values(&["remote"]).set(0);
        Ok(Self {
            managed,
            status,
            events,
            timeouts,
            stale,
            restarts,
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
