//! Hosts whose endpoints are used only by clients of the same cluster.

use super::MeshSnapshot;
use crate::{base::host, table::Cx};

/// Hosts that are cluster-local unless the mesh says otherwise, without the domain.
const DEFAULTS: &[&str] = &["*.kube-system.svc", "kubernetes.default.svc"];

impl MeshSnapshot {
    /// True if a host is cluster-local: `serviceSettings` of the mesh, the most specific host first, then the defaults.
    pub fn is_cluster_local(&self, cx: &Cx, hostname: &str) -> bool {
        let settings = self.mesh_config(cx).service_settings.iter().flat_map(|entry| {
            let local = entry.settings.is_some_and(|settings| settings.cluster_local);
            entry.hosts.iter().map(move |pattern| (pattern.as_str(), local))
        });
        let mut matching: Vec<(&str, bool)> = settings
            .filter(|(pattern, _)| host::subset_of(hostname, pattern))
            .collect();
        matching.sort_by(|(a, _), (b, _)| host::more_specific(a, b));
        if let Some((_, local)) = matching.first() {
            return *local;
        }
        let prefix = hostname
            .strip_suffix(self.installation.domain.as_str())
            .and_then(|rest| rest.strip_suffix('.'));
        prefix.is_some_and(|prefix| DEFAULTS.iter().any(|pattern| host::subset_of(prefix, pattern)))
    }
}
