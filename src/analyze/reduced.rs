//! The part of a manifest that analyzers read, so that many objects fit into memory.

use serde_json::{Map, Value};

use super::object::Type;
use crate::api::Kind;

/// Fields of `metadata` that analyzers read.
const METADATA: [&str; 5] = ["name", "namespace", "labels", "annotations", "creationTimestamp"];
/// A copy of the object that kubectl keeps.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Fields of a pod's spec that analyzers read.
const POD: [&str; 5] = [
    "containers",
    "initContainers",
    "hostNetwork",
    "nodeName",
    "securityContext",
];
/// Fields of a container that analyzers read.
const CONTAINER: [&str; 3] = ["name", "image", "securityContext"];
/// Fields of a Deployment's container that analyzers read, with the settings of istiod.
const DEPLOYED_CONTAINER: [&str; 4] = ["name", "image", "securityContext", "env"];
/// Keys of Secrets with certificates.
const CERTIFICATES: [&str; 2] = ["tls.crt", "cert"];
/// Keys of Secrets with private keys, of which analyzers read whether they are set.
const KEYS: [&str; 2] = ["tls.key", "key"];
/// Stands for a value that is set; `-` in base64.
const SET: &str = "LQ==";

/// Removes what no analyzer reads. Of Secrets, only certificates are left, and which keys they have.
pub fn reduce(kind: Type, manifest: &mut Value) {
    retain(manifest, "/metadata", &METADATA);
    remove(manifest, "/metadata/annotations", LAST_APPLIED);
    match kind {
        Type::Known(Kind::Pod) => {
            remove(manifest, "", "status");
            reduce_pod(manifest, "/spec", &CONTAINER);
        }
        Type::Deployment => {
            remove(manifest, "", "status");
            reduce_pod(manifest, "/spec/template/spec", &DEPLOYED_CONTAINER);
        }
        Type::Known(Kind::Node | Kind::Namespace) => {
            remove(manifest, "", "status");
            remove(manifest, "", "spec");
        }
        Type::Known(Kind::Service) => retain(manifest, "/status", &["conditions"]),
        Type::Known(Kind::Secret) => reduce_secret(manifest),
        Type::MutatingWebhook | Type::ValidatingWebhook => {
            for webhook in elements(manifest, "/webhooks") {
                remove(webhook, "/clientConfig", "caBundle");
            }
        }
        Type::Definition => {
            remove(manifest, "", "status");
            retain(manifest, "/spec", &["group", "names"]);
        }
        Type::Known(_) => {}
    }
}

fn reduce_pod(manifest: &mut Value, spec: &str, of_container: &[&str]) {
    retain(manifest, spec, &POD);
    for list in ["containers", "initContainers"] {
        for container in elements(manifest, &format!("{spec}/{list}")) {
            retain(container, "", of_container);
        }
    }
}

fn reduce_secret(manifest: &mut Value) {
    retain(manifest, "", &["apiVersion", "kind", "metadata", "type", "data"]);
    for (key, value) in fields(manifest, "/data").into_iter().flatten() {
        if KEYS.contains(&key.as_str()) && value.as_str().is_some_and(|text| !text.is_empty()) {
            *value = SET.into();
        } else if !CERTIFICATES.contains(&key.as_str()) {
            *value = "".into();
        }
    }
}

/// Returns the object at a JSON pointer.
fn fields<'a>(value: &'a mut Value, pointer: &str) -> Option<&'a mut Map<String, Value>> {
    value.pointer_mut(pointer)?.as_object_mut()
}

fn elements<'a>(value: &'a mut Value, pointer: &str) -> impl Iterator<Item = &'a mut Value> + use<'a> {
    let list = value.pointer_mut(pointer).and_then(Value::as_array_mut);
    list.into_iter().flatten()
}

fn retain(value: &mut Value, pointer: &str, names: &[&str]) {
    if let Some(object) = fields(value, pointer) {
        let all = std::mem::take(object).into_iter();
        *object = all.filter(|(name, _)| names.contains(&name.as_str())).collect();
    }
}

fn remove(value: &mut Value, pointer: &str, name: &str) {
    if let Some(object) = fields(value, pointer) {
        object.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_lose_their_keys() {
        let mut secret = json!({"metadata": {"name": "a", "uid": "1"}, "stringData": {"key": "private"},
            "data": {"tls.crt": "Y2VydA==", "tls.key": "cHJpdmF0ZQ==", "other": "c2VjcmV0"}});
        reduce(Kind::Secret.into(), &mut secret);
        let want = json!({"metadata": {"name": "a"}, "data": {"tls.crt": "Y2VydA==", "tls.key": SET, "other": ""}});
        assert_eq!(secret, want);
    }

    #[test]
    fn pods_keep_what_analyzers_read() {
        let mut pod = json!({"metadata": {"name": "a", "annotations": {LAST_APPLIED: "{}", "b": "c"}},
            "spec": {"volumes": [], "nodeName": "n", "containers": [{"name": "c", "image": "i", "env": []}]},
            "status": {"phase": "Running"}});
        reduce(Kind::Pod.into(), &mut pod);
        let want = json!({"metadata": {"name": "a", "annotations": {"b": "c"}},
            "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i"}]}});
        assert_eq!(pod, want);
    }

    #[test]
    fn malformed_manifests_are_left() {
        for kind in Type::all() {
            for text in ["{}", r#"{"metadata": 1, "spec": [], "data": "x", "webhooks": {}}"#] {
                let mut manifest: Value = serde_json::from_str(text).unwrap();
                reduce(kind, &mut manifest);
            }
        }
    }
}
