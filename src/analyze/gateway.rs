//! Gateways of Istio: ports, credentials and conflicts.

mod conflict;
mod credential;

use std::collections::{BTreeMap, BTreeSet};

pub(super) use self::{
    conflict::{conflicts, duplicate_certificates},
    credential::credentials,
};
use super::{
    deployment::{number, target_text},
    json::{items, labels, selector_text, text},
    mesh::Mesh,
    message::{PORT_NOT_ON_SERVICE, REFERENCE_NOT_FOUND, Report},
    object::Object,
};
use crate::{
    api::Kind,
    base::{Labels, select},
};

/// Reports Gateways without pods, and ports that the Services of their pods lack.
///
/// Parity (pkg/config/analysis/analyzers/gateway/gateway.go).
pub(super) fn ports(mesh: &Mesh, report: &mut Report) {
    // Many Gateways select the same pods.
    let mut known: BTreeMap<Labels, Option<BTreeSet<i64>>> = BTreeMap::new();
    for gateway in mesh.of(Kind::Gateway) {
        let selector = labels(gateway.spec("selector"));
        let ports = known
            .entry(selector.clone())
            .or_insert_with_key(|selector| open_ports(mesh, selector));
        let Some(ports) = ports else {
            missing_pods(gateway, &selector, report);
            continue;
        };
        for server in items(gateway.spec("servers"))
            .iter()
            .filter(|server| server["port"].is_object())
        {
            let port = number(&server["port"]["number"]);
            if !ports.contains(&port) {
                let text = format!(
                    "port {port} is not on the Service of the gateway's pods ({}), so it cannot be reached through it",
                    selector_text(&selector)
                );
                report.add(PORT_NOT_ON_SERVICE, gateway, text);
            }
        }
    }
}

/// Reports a Gateway that selects no pod.
fn missing_pods(gateway: &Object, selector: &Labels, report: &mut Report) {
    let text = format!("spec.selector: no pod has the labels {}", selector_text(selector));
    report.add(REFERENCE_NOT_FOUND, gateway, text);
}

/// Returns the TCP ports and target ports of the Services of the selected pods; `None` without pods.
fn open_ports(mesh: &Mesh, selector: &Labels) -> Option<BTreeSet<i64>> {
    let pods: BTreeSet<(&str, &Labels)> = mesh
        .pods(None, selector)
        .map(|pod| (pod.namespace.as_str(), &pod.labels))
        .collect();
    if pods.is_empty() {
        return None;
    }
    let mut ports = BTreeSet::new();
    for (namespace, pod) in pods {
        let services = mesh.within(Kind::Service, namespace).iter();
        let services = services.filter(|service| select::subset(&labels(service.spec("selector")), pod));
        let listed = services.flat_map(|service| items(service.spec("ports")));
        for port in listed.filter(|port| text(&port["protocol"]) == "TCP") {
            ports.insert(number(&port["port"]));
            if let Ok(target) = target_text(&port["targetPort"]).parse() {
                ports.insert(target);
            }
        }
    }
    Some(ports)
}
