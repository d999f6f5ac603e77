//! Workloads that belong to the mesh.
//!
//! Parity (pkg/config/analysis/analyzers/util/in_mesh.go).

use serde_json::Value;

use super::{
    json::{items, labels, text},
    mesh::Mesh,
    object::Object,
};
use crate::api::{Kind, label::REVISION};

/// Label and annotation that decide about the injection of a pod.
pub(super) const INJECT: &str = "sidecar.istio.io/inject";

/// Returns true for pods with a sidecar, or that would get one.
pub(super) fn has_sidecar(mesh: &Mesh, pod: &Object) -> bool {
    let metadata = &pod.manifest["metadata"];
    is_in_mesh(
        mesh,
        metadata,
        &pod.namespace,
        &pod.manifest["spec"],
        &["containers", "initContainers"],
    )
}

/// Returns true for Deployments whose pods have a sidecar, or would get one.
pub(super) fn makes_sidecars(mesh: &Mesh, deployment: &Object) -> bool {
    let template = deployment.spec("template");
    is_in_mesh(
        mesh,
        &template["metadata"],
        &deployment.namespace,
        &template["spec"],
        &["containers"],
    )
}

/// Returns true for pods whose traffic ztunnel captures.
pub(super) fn is_ambient(pod: &Object) -> bool {
    pod.annotation("ambient.istio.io/redirection") == "enabled"
}

/// Returns true for namespaces in ambient mode.
pub(super) fn is_ambient_namespace(namespace: &Object) -> bool {
    namespace.label("istio-injection") != "enabled"
        && namespace.label(REVISION).is_empty()
        && namespace.label("istio.io/dataplane-mode") == "ambient"
}

/// Returns the containers of a pod with the name of the proxy.
pub(super) fn proxies<'a>(spec: &'a Value, lists: &'a [&str]) -> impl Iterator<Item = &'a Value> {
    let containers = lists.iter().flat_map(|list| items(&spec[*list]));
    containers.filter(|container| container["name"] == "istio-proxy")
}

fn is_in_mesh(mesh: &Mesh, metadata: &Value, namespace: &str, spec: &Value, lists: &[&str]) -> bool {
    let has_proxy = proxies(spec, lists)
        .next()
        .is_some_and(|proxy| !text(&proxy["image"]).is_empty());
    let choice = ["labels", "annotations"]
        .iter()
        .find_map(|field| labels(&metadata[*field]).get(INJECT).map(|value| value == "true"));
    let by_namespace = || {
        let namespace = mesh.find(Kind::Namespace, "", namespace);
        namespace.is_some_and(|namespace| namespace.label("istio-injection") == "enabled")
    };
    has_proxy || choice.unwrap_or_else(by_namespace)
}
