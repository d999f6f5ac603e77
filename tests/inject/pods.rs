//! Pods of workloads: as the API server admits them, and as files of results have them.

use serde_json::{Value, json};

/// A pod as its controller creates it.
pub(super) struct AdmittedPod {
    pub(super) object: Value,
    pub(super) namespace: String,
}

impl AdmittedPod {
    /// True if the pod was injected before.
    pub(super) fn was_injected(&self) -> bool {
        self.object["metadata"]["annotations"]["sidecar.istio.io/status"].is_string()
    }
}

/// Returns the pods of a workload or list.
pub(super) fn admitted(workload: &Value) -> Vec<AdmittedPod> {
    if let Some(items) = workload["items"].as_array() {
        return items.iter().flat_map(admitted).collect();
    }
    let Some(mut object) = template(workload) else {
        return Vec::new();
    };
    let kind = workload["kind"].as_str().unwrap_or_default();
    if kind != "Pod" {
        let name = workload["metadata"]["name"].as_str().unwrap_or_default();
        object["metadata"]["generateName"] = json!(name);
        object["metadata"]["ownerReferences"] = json!([{
            "apiVersion": workload["apiVersion"], "kind": kind, "name": name, "controller": true,
        }]);
    }
    let namespace = workload["metadata"]["namespace"].as_str().unwrap_or("default");
    vec![AdmittedPod {
        object,
        namespace: namespace.to_owned(),
    }]
}

/// Returns the pod templates of a workload or list.
pub(super) fn templates(workload: &Value) -> Vec<Value> {
    match workload["items"].as_array() {
        Some(items) => items.iter().flat_map(templates).collect(),
        None => template(workload).into_iter().collect(),
    }
}

fn template(workload: &Value) -> Option<Value> {
    let template = match workload["kind"].as_str()? {
        "Pod" => workload,
        _ => workload.pointer("/spec/template")?,
    };
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "spec": template["spec"]});
    pod["metadata"] = match &template["metadata"] {
        Value::Null => json!({}),
        metadata => metadata.clone(),
    };
    Some(pod)
}

/// Returns a pod without what its controller adds.
pub(super) fn comparable(mut pod: Value) -> Value {
    if let Some(metadata) = pod["metadata"].as_object_mut() {
        for field in ["generateName", "ownerReferences", "namespace", "creationTimestamp"] {
            metadata.remove(field);
        }
    }
    let mut pod = json!({"metadata": pod["metadata"], "spec": pod["spec"]});
    without_empty(&mut pod);
    pod
}

/// Removes what a pod may have or not have without another meaning. An empty `emptyDir` has a meaning.
fn without_empty(value: &mut Value) {
    match value {
        Value::Object(entries) => {
            entries.values_mut().for_each(without_empty);
            entries.retain(|key, value| {
                let is_empty = match value {
                    Value::Null => true,
                    Value::Object(entries) => entries.is_empty() && key != "emptyDir",
                    Value::Array(items) => items.is_empty(),
                    _ => false,
                };
                !is_empty
            });
        }
        Value::Array(items) => items.iter_mut().for_each(without_empty),
        _ => {}
    }
}
