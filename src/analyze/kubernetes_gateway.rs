//! The Gateway API: policies that select its Gateways by labels, and versions of its definitions.

use super::{
    json::{is_set, labels},
    mesh::Mesh,
    message::{INEFFECTIVE_SELECTOR, OLD_DEFINITION, Report},
    object::Type,
};
use crate::api::Kind;

/// The label of pods with the name of their Gateway.
const GATEWAY_NAME: &str = "gateway.networking.k8s.io/gateway-name";

/// The kinds of policies that may select Gateways.
const POLICIES: [Kind; 4] = [
    Kind::AuthorizationPolicy,
    Kind::RequestAuthentication,
    Kind::Telemetry,
    Kind::WasmPlugin,
];

/// Reports policies that select pods of Gateways by labels, which has no effect.
///
/// Parity (pkg/config/analysis/analyzers/k8sgateway/workloadselector.go).
pub(super) fn selectors(mesh: &Mesh, report: &mut Report) {
    for policy in POLICIES.iter().flat_map(|kind| mesh.of(*kind)) {
        let selector = policy.spec("selector");
        if is_set(policy.spec("targetRef")) || !is_set(selector) {
            continue;
        }
        let selector = labels(&selector["matchLabels"]);
        let pods = mesh.pods(Some(&policy.namespace), &selector);
        for pod in pods.filter(|pod| pod.labels.contains_key(GATEWAY_NAME)) {
            let gateway = pod.label(GATEWAY_NAME);
            let text = format!("the selector has no effect on Gateway {gateway}; use targetRefs");
            report.add(INEFFECTIVE_SELECTOR, policy, text);
        }
    }
}

/// The oldest versions that istiod reads.
///
/// Parity (pkg/config/schema/gatewayapi/minimumversions.go).
const MINIMUM: [(&str, [u64; 3]); 3] = [
    ("backendtlspolicies.gateway.networking.k8s.io", [1, 4, 0]),
    ("grpcroutes.gateway.networking.k8s.io", [1, 1, 0]),
    ("tlsroutes.gateway.networking.k8s.io", [1, 5, 0]),
];

/// Reports definitions that are too old.
///
/// Parity (pkg/config/analysis/analyzers/k8sgateway/crdversion.go).
pub(super) fn definitions(mesh: &Mesh, report: &mut Report) {
    for (name, minimum) in MINIMUM {
        let Some(definition) = mesh.find(Type::Definition, "", name) else {
            continue;
        };
        let written = definition.annotation("gateway.networking.k8s.io/bundle-version");
        if version(written).is_some_and(|version| version < minimum) {
            let [major, minor, patch] = minimum;
            let text = format!("version {written} is too old; Istio reads {major}.{minor}.{patch} and later");
            report.add(OLD_DEFINITION, definition, text);
        }
    }
}

/// Parses `v1.4.1-rc1` without its suffix. Missing parts are 0.
fn version(written: &str) -> Option<[u64; 3]> {
    let numbers = written.trim_start_matches('v').split(['-', '+']).next()?;
    let mut version = [0; 3];
    let mut parts = numbers.split('.');
    for part in &mut version {
        match parts.next() {
            Some(number) => *part = number.parse().ok()?,
            None => break,
        }
    }
    parts.next().is_none().then_some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_parsed() {
        assert_eq!(version("v1.4.1-rc.1"), Some([1, 4, 1]));
        assert_eq!(version("1.5"), Some([1, 5, 0]));
        assert_eq!(version("1.2.3.4"), None);
        assert_eq!(version("monthly"), None);
        assert_eq!(version(""), None);
    }
}
