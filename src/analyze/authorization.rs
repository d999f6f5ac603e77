//! AuthorizationPolicies without workloads, and their references to namespaces.
//!
//! Parity (pkg/config/analysis/analyzers/authz/authorizationpolicies.go).

use std::collections::BTreeSet;

use super::{
    json::{indexed, is_set, labels, selector_text, text},
    membership::{has_sidecar, is_ambient},
    mesh::Mesh,
    message::{NO_MATCHING_WORKLOADS, REFERENCE_NOT_FOUND, Report},
    object::Object,
};
use crate::{api::Kind, base::Labels};

/// Reports policies that apply to nothing.
pub(super) fn policies(mesh: &Mesh, report: &mut Report) {
    let is_member = |pod: &Object| has_sidecar(mesh, pod) || is_ambient(pod);
    let pods = mesh.of(Kind::Pod).iter().filter(|pod| is_member(pod));
    let populated: BTreeSet<&str> = pods.map(|pod| pod.namespace.as_str()).collect();
    for policy in mesh.of(Kind::AuthorizationPolicy) {
        let selector = policy.spec("selector");
        let is_mesh_wide = policy.namespace == mesh.root_namespace();
        let wanted: Labels = labels(&selector["matchLabels"]);
        let namespace = (!is_mesh_wide).then_some(policy.namespace.as_str());
        let has_workloads = if is_set(selector) {
            mesh.pods(namespace, &wanted).any(is_member)
        } else {
            is_mesh_wide || populated.contains(policy.namespace.as_str())
        };
        if !has_workloads {
            let text = if wanted.is_empty() {
                "no workload of the mesh is in its namespace".to_owned()
            } else {
                format!("no workload of the mesh has the labels {}", selector_text(&wanted))
            };
            report.add(NO_MATCHING_WORKLOADS, policy, text);
        }
        namespaces(mesh, policy, report);
    }
}

fn namespaces(mesh: &Mesh, policy: &Object, report: &mut Report) {
    for (path, rule) in indexed("spec.rules", policy.spec("rules")) {
        for (path, from) in indexed(&format!("{path}.from"), &rule["from"]) {
            for field in ["namespaces", "notNamespaces"] {
                let path = format!("{path}.source.{field}");
                for (path, pattern) in indexed(&path, &from["source"][field]) {
                    let pattern = text(pattern);
                    if !exists(mesh, pattern) {
                        let text = format!("{path}: namespace {pattern:?} does not exist");
                        report.add(REFERENCE_NOT_FOUND, policy, text);
                    }
                }
            }
        }
    }
}

fn exists(mesh: &Mesh, pattern: &str) -> bool {
    let mut names = mesh.of(Kind::Namespace).iter().map(|namespace| namespace.name.as_str());
    if let Some(suffix) = pattern.strip_prefix('*') {
        return names.any(|name| name.ends_with(suffix));
    }
    if let Some(prefix) = pattern.strip_suffix('*') {
        return names.any(|name| name.starts_with(prefix));
    }
    names.any(|name| name.eq_ignore_ascii_case(pattern))
}
