//! DestinationRules: verification of servers, hosts and subsets.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    deployment::number,
    hosts::Hosts,
    json::{is_set, items, labels, text},
    mesh::Mesh,
    message::{NO_SERVER_VERIFICATION, NO_SERVER_VERIFICATION_ON_PORT, Report, SUBSET_WITHOUT_PODS, UNKNOWN_RULE_HOST},
    object::Object,
};
use crate::{
    api::Kind,
    base::{Labels, SmolStr, select},
};

const REGION: &str = "topology.kubernetes.io/region";
const ZONE: &str = "topology.kubernetes.io/zone";
const SUBZONE: &str = "topology.istio.io/subzone";
const HOSTNAME: &str = "kubernetes.io/hostname";

/// Reports TLS without `caCertificates`.
///
/// Parity (pkg/config/analysis/analyzers/destinationrule/ca-certificates.go).
pub(super) fn certificates(mesh: &Mesh, report: &mut Report) {
    for rule in mesh.of(Kind::DestinationRule) {
        let policy = rule.spec("trafficPolicy");
        let host = text(rule.spec("host"));
        if let Some(mode) = unverified(rule, &policy["tls"]) {
            let text = format!("TLS mode {mode} without caCertificates does not verify the server of {host}");
            report.add(NO_SERVER_VERIFICATION, rule, text);
        }
        for settings in items(&policy["portLevelSettings"]) {
            if let Some(mode) = unverified(rule, &settings["tls"]) {
                let port = number(&settings["port"]["number"]);
                let text = format!(
                    "TLS mode {mode} on port {port} without caCertificates does not verify the server of {host}"
                );
                report.add(NO_SERVER_VERIFICATION_ON_PORT, rule, text);
            }
        }
    }
}

/// Returns the mode if the server is not verified. A credential may have the certificates, but only proxies that a
/// selector names read it.
fn unverified<'a>(rule: &Object, tls: &'a Value) -> Option<&'a str> {
    let mode = text(&tls["mode"]);
    let has_credential = !text(&tls["credentialName"]).is_empty() && is_set(rule.spec("workloadSelector"));
    let is_verified = !text(&tls["caCertificates"]).is_empty() || has_credential;
    (matches!(mode, "SIMPLE" | "MUTUAL") && !is_verified).then_some(mode)
}

/// Reports hosts without a service and subsets without pods.
///
/// Parity (pkg/config/analysis/analyzers/destinationrule/subset.go).
pub(super) fn subsets(mesh: &Mesh, report: &mut Report) {
    let hosts = Hosts::of(mesh);
    for rule in mesh.of(Kind::DestinationRule) {
        let host = text(rule.spec("host"));
        let Some(destination) = hosts.find(&rule.namespace, rule.spec("exportTo"), host) else {
            let text = format!("host {host} is not a service of the mesh");
            report.add(UNKNOWN_RULE_HOST, rule, text);
            continue;
        };
        // The last of equal names counts.
        let subsets = items(rule.spec("subsets")).iter();
        let subsets: BTreeMap<&str, &Value> = subsets
            .map(|subset| (text(&subset["name"]), &subset["labels"]))
            .collect();
        for (name, wanted) in subsets {
            let mut selector = destination.selector.clone();
            selector.extend(labels(wanted));
            if !selects_pods(mesh, selector) {
                let text = format!("subset {name} selects no pod, so requests to it fail with 503");
                report.add(SUBSET_WITHOUT_PODS, rule, text);
            }
        }
    }
}

fn selects_pods(mesh: &Mesh, selector: Labels) -> bool {
    let is_derived = |key: &SmolStr| [REGION, ZONE, SUBZONE, HOSTNAME].contains(&key.as_str());
    let (derived, own): (Labels, Labels) = selector.into_iter().partition(|(key, _)| is_derived(key));
    mesh.pods(None, &own)
        .any(|pod| derived.is_empty() || select::subset(&derived, &topology(mesh, pod)))
}

/// Returns the labels that a pod's node adds, over those of the pod.
fn topology(mesh: &Mesh, pod: &Object) -> Labels {
    let mut found = pod.labels.clone();
    let name = text(pod.spec("nodeName"));
    if name.is_empty() {
        return found;
    }
    found.insert(HOSTNAME.into(), name.into());
    let Some(node) = mesh.find(Kind::Node, "", name) else {
        return found;
    };
    // A locality without a zone has no subzone, and only known parts are labels.
    let parts = [REGION, ZONE, SUBZONE].map(|key| (key, node.label(key)));
    let length = 1 + parts[1..].iter().take_while(|(_, value)| !value.is_empty()).count();
    for (key, value) in &parts[..length] {
        if !value.is_empty() {
            found.insert((*key).into(), (*value).into());
        }
    }
    found
}
