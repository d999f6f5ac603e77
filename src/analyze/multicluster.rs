//! Meshes of several clusters: registries of the networks, and services that differ between clusters.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{
    json::{items, text},
    mesh::Mesh,
    message::{INCONSISTENT_SERVICE, Report, UNKNOWN_REGISTRY},
    object::Object,
};
use crate::api::Kind;

/// The registries of every mesh.
const BUILT_IN: [&str; 3] = ["Mock", "Kubernetes", "External"];

/// Reports registries in the mesh networks that no Secret of a remote cluster names.
///
/// Parity (pkg/config/analysis/analyzers/multicluster/meshnetworks.go).
pub(super) fn networks(mesh: &Mesh, report: &mut Report) {
    let secrets = mesh.of(Kind::Secret).iter();
    let remote = secrets.filter(|secret| secret.label("istio/multiCluster") == "true");
    let remote = remote.filter_map(|secret| secret.manifest["data"].as_object());
    let known: BTreeSet<&str> = remote
        .flat_map(|data| data.keys().map(String::as_str))
        .chain(BUILT_IN)
        .collect();
    for (name, network) in mesh.settings.networks["networks"].as_object().into_iter().flatten() {
        for endpoints in items(&network["endpoints"]) {
            let registry = &endpoints["fromRegistry"];
            if registry.is_string() && !known.contains(text(registry)) {
                let text = format!("network {name}: no remote cluster is named {}", text(registry));
                let namespace = &mesh.settings.istio_namespace;
                report.add_about(
                    UNKNOWN_REGISTRY,
                    Kind::MeshNetworks.into(),
                    namespace,
                    "meshnetworks",
                    text,
                );
            }
        }
    }
}

/// Reports services of several clusters that differ in type, ports or addresses.
///
/// Parity (pkg/config/analysis/analyzers/multicluster/service.go).
pub(super) fn services(mesh: &Mesh, report: &mut Report) {
    let mut services: BTreeMap<(&str, &str), Vec<&Object>> = BTreeMap::new();
    for service in mesh.of(Kind::Service) {
        services
            .entry((&service.namespace, &service.name))
            .or_default()
            .push(service);
    }
    for members in services.into_values() {
        let Some((first, others)) = members.split_first() else {
            continue;
        };
        let mut reasons = BTreeSet::new();
        let mut clusters: BTreeSet<&str> = BTreeSet::new();
        for other in others {
            let found = differences(first, other);
            if !found.is_empty() {
                clusters.extend([first.cluster.as_str(), other.cluster.as_str()]);
                reasons.extend(found);
            }
        }
        if !reasons.is_empty() {
            let text = format!(
                "differs between the clusters {}: {}",
                clusters.into_iter().collect::<Vec<_>>().join(", "),
                reasons.into_iter().collect::<Vec<_>>().join(", ")
            );
            report.add(INCONSISTENT_SERVICE, first, text);
        }
    }
}

fn differences(a: &Object, b: &Object) -> Vec<&'static str> {
    let is_headless = |service: &Object| service.spec("clusterIP") == "None";
    let mut found = Vec::new();
    if is_headless(a) != is_headless(b) {
        found.push("only one is headless");
    }
    if text(a.spec("type")) != text(b.spec("type")) {
        found.push("their types differ");
    }
    if ports(a) != ports(b) {
        found.push("their ports differ");
    }
    found
}

fn ports(service: &Object) -> Vec<&Value> {
    let mut ports: Vec<&Value> = items(service.spec("ports")).iter().collect();
    ports.sort_by_key(|port| text(&port["name"]));
    ports
}
