//! The state of remote clusters, as other modules and debug pages see it.

use std::{collections::BTreeMap, time::SystemTime};

use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::base::{ClusterId, ObjectKey};

/// Synchronisation state of a cluster, with Istio's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncStatus {
    /// Complete.
    Synced,
    /// Its first lists are being read.
    Syncing,
    /// As before, but for longer than the start of istiod waits. It joins once it is complete.
    Timeout,
    /// Its kubeconfig is refused, or fails, so it is not contacted.
    Closed,
}

impl SyncStatus {
    pub(super) const ALL: [Self; 4] = [Self::Synced, Self::Syncing, Self::Timeout, Self::Closed];

    /// Returns the name in metrics and debug pages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Synced => "synced",
            Self::Syncing => "syncing",
            Self::Timeout => "timeout",
            Self::Closed => "closed",
        }
    }
}

/// State of a remote cluster.
#[derive(Clone)]
pub struct RemoteCluster {
    /// Secret or file that names it.
    pub origin: ObjectKey,
    /// Synchronisation state.
    pub status: SyncStatus,
    /// Problem of its present declaration; the previous one may still be in use.
    pub problem: Option<String>,
    /// Client of the serving source, or of the one that is being read before there is one.
    pub client: Option<::kube::Client>,
    /// Number of that source; another number means another client.
    pub source: u64,
    /// Time at which the stored state that serves was current; `None` if a source serves, or nothing.
    pub stale_since: Option<SystemTime>,
}

/// All remote clusters at one time.
#[derive(Clone, Default)]
pub struct RemoteClusters {
    /// True if every cluster declared at the start is complete, refused or timed out. Stays true.
    pub ready: bool,
    /// Clusters.
    pub clusters: BTreeMap<ClusterId, RemoteCluster>,
}

impl RemoteClusters {
    /// Returns the rows of `/debug/clusterz`, without the config cluster.
    pub fn dump(&self) -> Vec<Value> {
        let rows = self.clusters.iter().map(|(id, cluster)| {
            let mut row = json!({
                "id": id.as_str(),
                "secretName": cluster.origin.to_string(),
                "syncStatus": cluster.status.name(),
            });
            if let Some(problem) = &cluster.problem {
                row["error"] = json!(problem);
            }
            if let Some(since) = cluster.stale_since {
                row["staleSince"] = json!(OffsetDateTime::from(since).format(&Rfc3339).unwrap_or_default());
            }
            row
        });
        rows.collect()
    }
}
