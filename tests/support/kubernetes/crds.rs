//! The custom resource definitions of the charts, in a cluster.

use std::time::Duration;

use serde_json::{Value, json};

use super::api::{Api, Reference, documents, plural};
use crate::support::{project, wait};

/// The definitions of the charts, as YAML.
pub(super) fn of_charts() -> Result<String, String> {
    let path = project().join("charts/base/files/crd-all.gen.yaml");
    std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Applies definitions and waits until they are served.
pub(super) fn apply(api: &Api, definitions: &str) -> Result<(), String> {
    let crds = documents(definitions);
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
