//! Deployments with the services that select their pods, and users that containers run as.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{
    json::{items, labels, text},
    membership::makes_sidecars,
    mesh::Mesh,
    message::{DEPLOYMENT_PORTS, DEPLOYMENT_PROTOCOLS, RESERVED_USER, Report, listed},
    object::{Object, Type},
    service::is_of_istio,
};
use crate::{api::Kind, base::select};

/// The user of the sidecar.
const RESERVED: i64 = 1337;

/// Reports Deployments whose services contradict each other.
///
/// Parity (pkg/config/analysis/analyzers/deployment/services.go).
pub(super) fn services(mesh: &Mesh, report: &mut Report) {
    for deployment in mesh.of(Type::Deployment) {
        let is_waypoint = deployment.label("gateway.istio.io/managed") == "istio.io-mesh-controller";
        if is_waypoint || !makes_sidecars(mesh, deployment) {
            continue;
        }
        let pod = labels(&deployment.spec("template")["metadata"]["labels"]);
        let services = mesh.within(Kind::Service, &deployment.namespace).iter();
        let matching: Vec<&Object> = services
            .filter(|service| {
                let selector = labels(service.spec("selector"));
                !selector.is_empty() && select::subset(&selector, &pod)
            })
            .collect();
        protocols(deployment, &matching, report);
        target_ports(deployment, &matching, report);
    }
}

fn ports<'a>(services: &[&'a Object]) -> impl Iterator<Item = (&'a Object, &'a Value)> {
    let services = services.iter().copied();
    services.flat_map(|service| items(service.spec("ports")).iter().map(move |port| (service, port)))
}

fn protocols(deployment: &Object, services: &[&Object], report: &mut Report) {
    let mut protocols: BTreeMap<i64, (BTreeSet<&str>, Vec<String>)> = BTreeMap::new();
    for (service, port) in ports(services) {
        let protocol = match text(&port["protocol"]) {
            "" => "TCP",
            protocol => protocol,
        };
        let entry = protocols.entry(number(&port["port"])).or_default();
        entry.0.insert(protocol);
        entry.1.push(service.full_name());
    }
    for (port, (protocols, mut names)) in protocols {
        if protocols.len() > 1 {
            names.sort();
            let text = format!(
                "services use port {port} with different protocols: {}",
                listed(names.iter())
            );
            report.add(DEPLOYMENT_PROTOCOLS, deployment, text);
        }
    }
}

fn target_ports(deployment: &Object, services: &[&Object], report: &mut Report) {
    let mut targets: BTreeMap<String, BTreeMap<i64, String>> = BTreeMap::new();
    for (service, port) in ports(services) {
        let target = match target_text(&port["targetPort"]).as_str() {
            "" | "0" => number(&port["port"]).to_string(),
            target => target.to_owned(),
        };
        let ports = targets.entry(target).or_default();
        ports.insert(number(&port["port"]), service.full_name());
    }
    for (target, ports) in targets {
        if ports.len() > 1 {
            let numbers = listed(ports.keys());
            let mut names: Vec<String> = ports.into_values().collect();
            names.sort();
            let text = format!(
                "services {} have one target port, {target}, for different ports: {numbers}",
                listed(names.iter())
            );
            report.add(DEPLOYMENT_PORTS, deployment, text);
        }
    }
}

/// Returns a number, or 0.
pub(super) fn number(value: &Value) -> i64 {
    value.as_i64().unwrap_or_default()
}

/// Returns a port's number or name as text.
pub(super) fn target_text(target: &Value) -> String {
    match target {
        Value::Number(number) => number.to_string(),
        other => text(other).to_owned(),
    }
}

/// Reports containers that run as the user of the sidecar, whose traffic is not captured.
///
/// Parity (pkg/config/analysis/analyzers/deployment/pod.go).
pub(super) fn users(mesh: &Mesh, report: &mut Report) {
    let pods = mesh.of(Kind::Pod).iter().map(|pod| (pod, &pod.manifest["spec"]));
    let deployments = mesh.of(Type::Deployment).iter();
    let deployments = deployments.map(|deployment| (deployment, &deployment.spec("template")["spec"]));
    for (object, spec) in pods.chain(deployments) {
        let containers = items(&spec["containers"]).iter();
        let applications =
            containers.filter(|container| !matches!(text(&container["name"]), "istio-proxy" | "istio-operator"));
        let runs_as_reserved = |settings: &Value| settings["securityContext"]["runAsUser"] == RESERVED;
        if !is_of_istio(object) && (runs_as_reserved(spec) || applications.into_iter().any(runs_as_reserved)) {
            let text = format!("user {RESERVED} is reserved for the sidecar; traffic of this workload is not captured");
            report.add(RESERVED_USER, object, text);
        }
    }
}
