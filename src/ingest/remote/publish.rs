//! The published state of remote clusters and the diagnostics of their declarations.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    ClusterState, Remote, Storage,
    view::{RemoteCluster, RemoteClusters, SyncStatus},
};
use crate::{
    api::{Diagnostic, FieldError, Kind, Severity},
    base::{ClusterId, ObjectKey},
};

impl Remote {
    /// Reports the present problems of declarations and of starts.
    pub(super) fn report_problems(&mut self) {
        let declared = self.problems.iter().map(|((origin, cluster), problem)| {
            finding(origin, cluster.as_ref(), problem.code, problem.message.clone())
        });
        let failed = self.states.iter().filter_map(|(cluster, state)| {
            let message = state.problem.clone()?;
            Some(finding(&state.origin, Some(cluster), "BadKubeconfig", message))
        });
        let findings = declared.chain(failed).collect();
        self.findings.set((), findings);
    }

    /// Publishes a changed state.
    pub(super) fn show(&mut self) {
        let mut clusters = BTreeMap::new();
        for (cluster, state) in &self.states {
            // A source that cannot start is not shown while another one serves.
            let is_hidden = state.problem.is_some() && state.serving.is_some();
            let started = state
                .replacement
                .as_ref()
                .filter(|source| source.status != SyncStatus::Closed && !is_hidden);
            let status = started.or(state.serving.as_ref());
            let status = status.map_or(SyncStatus::Closed, |source| source.status);
            self.metrics.status(cluster, status);
            let stale_since = match state.storage {
                Storage::Serving(since) => Some(since),
                Storage::Unused | Storage::Reading(_) | Storage::Read(_) => None,
            };
            self.metrics.stale(cluster, stale_since);
            // Without a complete source, the API server of the cluster can be asked through one that is not complete.
            let mut sources = [&state.serving, &state.replacement].into_iter().flatten();
            let running = sources.find_map(|source| Some((source.number, source.running.as_ref()?)));
            let shown = RemoteCluster {
                origin: state.origin.clone(),
                status,
                problem: state.problem.clone(),
                client: running.and_then(|(_, running)| running.client.clone()),
                source: running.map_or(0, |(number, _)| number),
                stale_since,
            };
            clusters.insert(cluster.clone(), shown);
        }
        self.metrics.managed(clusters.len());
        for ((origin, cluster), problem) in &self.problems {
            let Some(cluster) = cluster else { continue };
            let shown = clusters.entry(cluster.clone()).or_insert_with(|| RemoteCluster {
                origin: origin.clone(),
                status: SyncStatus::Closed,
                problem: None,
                client: None,
                source: 0,
                stale_since: None,
            });
            // A duplicate is a problem of the other origin, not of the cluster.
            if shown.origin == *origin {
                shown.problem = Some(problem.message.clone());
            }
        }
        let is_ready = (self.is_declared || self.is_late) && !self.states.values().any(ClusterState::is_awaited);
        self.view.send_modify(|view| {
            let ready = view.ready || is_ready;
            *view = Arc::new(RemoteClusters { ready, clusters });
        });
    }
}

fn finding(origin: &ObjectKey, cluster: Option<&ClusterId>, code: &'static str, message: String) -> Diagnostic {
    if origin.namespace.is_empty() {
        let message = match cluster {
            Some(cluster) => format!("cluster {cluster}: {message}"),
            None => message,
        };
        return Diagnostic::of_document(origin.name.clone(), code, message);
    }
    let field = cluster.map(|cluster| format!("data.{cluster}")).unwrap_or_default();
    Diagnostic::of_object(
        Kind::Secret,
        origin.clone(),
        Severity::Error,
        code,
        FieldError { field, message },
    )
}
