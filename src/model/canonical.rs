//! Canonical service of a workload: name and revision in telemetry.

use smol_str::SmolStr;

use crate::base::Labels;

/// The label that names the canonical service.
pub const NAME_LABEL: &str = "service.istio.io/canonical-name";
/// The label that names its revision.
pub const REVISION_LABEL: &str = "service.istio.io/canonical-revision";

/// Returns the name: the first label that sets it, or else the workload's name.
pub fn name(labels: &Labels, workload_name: &str) -> SmolStr {
    let given = [NAME_LABEL, "app.kubernetes.io/name", "app"]
        .iter()
        .find_map(|label| labels.get(*label));
    given.cloned().unwrap_or_else(|| SmolStr::new(workload_name))
}

/// Returns the revision: the first label that sets it, or else `latest`.
pub fn revision(labels: &Labels) -> SmolStr {
    let given = [REVISION_LABEL, "app.kubernetes.io/version", "version"]
        .iter()
        .find_map(|label| labels.get(*label));
    given.cloned().unwrap_or(SmolStr::new_static("latest"))
}

/// Returns name and revision.
pub fn service(labels: &Labels, workload_name: &str) -> (SmolStr, SmolStr) {
    (name(labels, workload_name), revision(labels))
}
