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
    let existing = Names::of(mesh.of(Kind::Namespace).iter().map(|namespace| namespace.name.as_str()));
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
        namespaces(&existing, policy, report);
    }
}

fn namespaces(existing: &Names<'_>, policy: &Object, report: &mut Report) {
    for (path, rule) in indexed("spec.rules", policy.spec("rules")) {
        for (path, from) in indexed(&format!("{path}.from"), &rule["from"]) {
            for field in ["namespaces", "notNamespaces"] {
                let path = format!("{path}.source.{field}");
                for (path, pattern) in indexed(&path, &from["source"][field]) {
                    let pattern = text(pattern);
                    if !existing.have(pattern) {
                        let text = format!("{path}: namespace {pattern:?} does not exist");
                        report.add(REFERENCE_NOT_FOUND, policy, text);
                    }
                }
            }
        }
    }
}

/// The names of all namespaces, to look up patterns. A policy may have a hundred thousand of these.
struct Names<'a> {
    /// Sorted.
    forwards: Vec<&'a str>,
    /// Each backwards, sorted.
    backwards: Vec<Vec<u8>>,
    lowercase: BTreeSet<String>,
}

impl<'a> Names<'a> {
    fn of(names: impl Iterator<Item = &'a str>) -> Self {
        let mut forwards: Vec<&str> = names.collect();
        forwards.sort_unstable();
        let mut backwards: Vec<Vec<u8>> = forwards.iter().map(|name| reversed(name)).collect();
        backwards.sort_unstable();
        Self {
            lowercase: forwards.iter().map(|name| name.to_ascii_lowercase()).collect(),
            forwards,
            backwards,
        }
    }

    /// Returns true if a name matches a pattern, which may begin or end with `*`. Only whole names are compared without
    /// regard to case.
    fn have(&self, pattern: &str) -> bool {
        if let Some(suffix) = pattern.strip_prefix('*') {
            return has_prefix(&self.backwards, &reversed(suffix));
        }
        if let Some(prefix) = pattern.strip_suffix('*') {
            return has_prefix(&self.forwards, prefix.as_bytes());
        }
        self.lowercase.contains(&pattern.to_ascii_lowercase())
    }
}

/// Returns true if one of some sorted texts begins with a prefix.
fn has_prefix(sorted: &[impl AsRef<[u8]>], prefix: &[u8]) -> bool {
    let first = sorted.partition_point(|text| text.as_ref() < prefix);
    sorted.get(first).is_some_and(|text| text.as_ref().starts_with(prefix))
}

fn reversed(text: &str) -> Vec<u8> {
    text.bytes().rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r21_patterns_are_looked_up_among_namespaces() {
        let names = Names::of(["shop", "shop-test", "Edge"].into_iter());
        for pattern in [
            "shop", "SHOP", "edge", "shop*", "sho*", "*test", "*-test", "*op", "Ed*", "*",
        ] {
            assert!(names.have(pattern), "{pattern}");
        }
        for pattern in ["", "sho", "shop-*-x", "edg*", "*tes", "SHOP*", "*TEST", "z*", "*z"] {
            assert!(!names.have(pattern), "{pattern}");
        }
        assert!(!Names::of(std::iter::empty()).have("*"), "there is no namespace");
    }
}
