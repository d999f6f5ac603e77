//! The custom resource definitions of the charts, in a cluster.

use std::time::Duration;

use serde_json::{Value, json};

use super::api::{Api, Reference, documents, plural};
use crate::support::{project, wait};

/// Applies them and waits until they are served.
pub(super) fn apply(api: &Api) -> Result<(), String> {
    let path = project().join("charts/base/files/crd-all.gen.yaml");
    let crds = std::fs::read_to_string(path).map_or_else(|_| loose(), |text| documents(&text));
    for crd in &crds {
        api.apply(crd)?;
    }
    crds.iter().try_for_each(|crd| established(api, crd))
}

/// Waits until objects of a definition can be written.
pub(crate) fn established(api: &Api, crd: &Value) -> Result<(), String> {
    let reference = Reference::of(crd);
    wait::until(
        &format!("the CRD {} to be served", reference.name),
        Duration::from_mins(1),
        || {
            let crd = api.get(&reference).ok()??;
            let conditions = crd["status"]["conditions"].as_array()?;
            conditions
                .iter()
                .any(|condition| condition["type"] == "Established" && condition["status"] == "True")
                .then_some(())
        },
    )
}

/// Definitions without a schema.
fn loose() -> Vec<Value> {
    let kinds = [
        ("networking.istio.io", "DestinationRule"),
        ("networking.istio.io", "EnvoyFilter"),
        ("networking.istio.io", "Gateway"),
        ("networking.istio.io", "ProxyConfig"),
        ("networking.istio.io", "ServiceEntry"),
        ("networking.istio.io", "Sidecar"),
        ("networking.istio.io", "VirtualService"),
        ("networking.istio.io", "WorkloadEntry"),
        ("networking.istio.io", "WorkloadGroup"),
        ("security.istio.io", "AuthorizationPolicy"),
        ("security.istio.io", "PeerAuthentication"),
        ("security.istio.io", "RequestAuthentication"),
        ("telemetry.istio.io", "Telemetry"),
        ("extensions.istio.io", "WasmPlugin"),
    ];
    kinds.map(|(group, kind)| loose_crd(group, kind)).to_vec()
}

/// A definition without a schema, which accepts any object.
pub(crate) fn loose_crd(group: &str, kind: &str) -> Value {
    let anything = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let version = |name: &str, stored: bool| {
        json!({ "name": name, "served": true, "storage": stored, "subresources": { "status": {} },
            "schema": { "openAPIV3Schema": anything } })
    };
    let mut versions = vec![version("v1", true)];
    versions.extend(["v1alpha3", "v1beta1", "v1alpha1"].map(|name| version(name, false)));
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{}.{group}", plural(kind)) },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": { "kind": kind, "listKind": format!("{kind}List"), "plural": plural(kind),
                "singular": kind.to_lowercase() },
            "versions": versions,
        },
    })
}
