//! The CRDs in a real API server.

use std::collections::BTreeMap;

use istiod::api::{crd, yaml};
use libtest_mimic::{Completion, Failed, Trial};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster};
use crate::support::{missing, project};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::trial(
            "charts::crds::valid_objects_are_accepted_and_invalid_ones_refused",
            |_| valid_objects_are_accepted_and_invalid_ones_refused(),
        ),
        kubernetes::trial("charts::crds::status_is_a_subresource", |_| status_is_a_subresource()),
        kubernetes::trial("charts::crds::versions_share_one_object", |_| {
            versions_share_one_object()
        }),
        Trial::ignorable_test("charts::crds::conformance", conformance),
    ]
}

/// Returns the CRD of a kind.
fn definition(kind: &str) -> Value {
    let of_kind = |definition: &Value| definition["spec"]["names"]["kind"] == kind;
    let found = crd::definitions().into_iter().find(of_kind);
    found.unwrap_or_else(|| panic!("no CRD of {kind}"))
}

/// Sends an object to the API server as a dry run.
fn try_out(cluster: &Cluster, object: &Value) -> Result<Value, String> {
    let definition = definition(object["kind"].as_str().unwrap_or_default());
    let version = object["apiVersion"].as_str().unwrap_or_default();
    let plural = definition["spec"]["names"]["plural"].as_str().unwrap_or_default();
    let path = format!("/apis/{version}/namespaces/default/{plural}?dryRun=All");
    let mut object = object.clone();
    object["metadata"]["name"] = json!("tried-out");
    cluster.api.post(&path, &object)
}

/// The cases of a kind in `objects.yaml`.
#[derive(Deserialize)]
struct Cases {
    accepts: Vec<Value>,
    refuses: BTreeMap<String, Vec<Value>>,
}

fn valid_objects_are_accepted_and_invalid_ones_refused() -> Result<(), Failed> {
    let cluster = kubernetes::shared(0)?;
    let text = std::fs::read_to_string(project().join("tests/charts/objects.yaml"))?;
    let cases: BTreeMap<String, Cases> = serde_json::from_value(yaml::documents(&text)[0].parse()?)?;
    assert_eq!(cases.len(), crd::definitions().len(), "each kind must have cases");
    let mut wrong = Vec::new();
    for (kind, cases) in &cases {
        let definition = definition(kind);
        for version in definition["spec"]["versions"].as_array().into_iter().flatten() {
            let group = definition["spec"]["group"].as_str().unwrap_or_default();
            let version = format!("{group}/{}", version["name"].as_str().unwrap_or_default());
            let decide = |spec: &Value| {
                let mut object = json!({ "apiVersion": version, "kind": kind });
                if !spec.is_null() {
                    object["spec"] = spec.clone();
                }
                try_out(cluster, &object)
            };
            for spec in &cases.accepts {
                match decide(spec) {
                    Ok(stored) if stored["spec"] == *spec || has_null(spec) => {}
                    Ok(stored) => wrong.push(format!("{version} {kind}: {spec} is stored as {}", stored["spec"])),
                    Err(error) => wrong.push(format!("{version} {kind}: {spec} is refused: {error}")),
                }
            }
            for (because, specs) in &cases.refuses {
                for spec in specs {
                    match decide(spec) {
                        Ok(_) => wrong.push(format!(
                            "{version} {kind}: {spec} was accepted, expected error: {because}"
                        )),
                        Err(error) if error.contains(because.as_str()) => {}
                        Err(error) => wrong.push(format!(
                            "{version} {kind}: {spec} was refused, but not with {because}: {error}"
                        )),
                    }
                }
            }
        }
    }
    verdict(wrong)
}

/// Reports whether the value contains a null; the API server stores none.
fn has_null(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.iter().any(has_null),
        Value::Object(fields) => fields.values().any(has_null),
        _ => false,
    }
}

fn verdict(wrong: Vec<String>) -> Result<(), Failed> {
    if wrong.is_empty() {
        return Ok(());
    }
    Err(wrong.join("\n").into())
}

fn status_is_a_subresource() -> Result<(), Failed> {
    let cluster = kubernetes::shared(0)?;
    let namespace = "definition-status";
    cluster.namespace(namespace, &json!({}))?;
    let object = json!({ "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
        "metadata": { "namespace": namespace, "name": "apart" }, "spec": { "hosts": ["apart.example.com"] },
        "status": { "observedGeneration": "7" } });
    let reference = Reference::of(&object);
    let created = cluster.api.create(&object)?;
    assert_eq!(created["status"], Value::Null, "a new object must have no status");
    // Assigned addresses are not a field of the status message, but must be kept.
    let mut with_status = object.clone();
    with_status["status"]["addresses"] = json!([{ "value": "240.240.0.1", "host": "apart.example.com" }]);
    with_status["spec"]["hosts"] = json!(["apart.example.com"]);
    let stored = cluster.api.apply(&with_status)?;
    assert_eq!(stored["status"], with_status["status"]);
    let patched = cluster
        .api
        .patch(&reference, &json!({ "spec": { "hosts": ["b"] }, "status": null }))?;
    assert_eq!(
        (&patched["status"], &patched["spec"]["hosts"]),
        (&with_status["status"], &json!(["b"]))
    );
    with_status["status"] = json!({ "conditions": [{ "lastProbeTime": "yesterday" }] });
    assert!(
        cluster.api.apply(&with_status).is_err(),
        "the status schema must be enforced"
    );
    Ok(cluster.api.delete(&reference)?)
}

fn versions_share_one_object() -> Result<(), Failed> {
    let cluster = kubernetes::shared(0)?;
    let namespace = "definition-versions";
    cluster.namespace(namespace, &json!({}))?;
    let object = json!({ "apiVersion": "networking.istio.io/v1alpha3", "kind": "DestinationRule",
        "metadata": { "namespace": namespace, "name": "one" }, "spec": { "host": "web", "unknown": 1 } });
    cluster.api.create(&object)?;
    for version in ["v1", "v1beta1", "v1alpha3"] {
        let reference = Reference::new(
            &format!("networking.istio.io/{version}"),
            "DestinationRule",
            namespace,
            "one",
        );
        let read = cluster.get(&reference)?.ok_or("the object does not exist")?;
        assert_eq!(read["spec"], json!({ "host": "web" }), "unknown fields must be dropped");
    }
    Ok(cluster.api.delete(&Reference::of(&object))?)
}

/// Istio's own cases, where its conformance set is next to the project.
fn conformance() -> Result<Completion, Failed> {
    let set = project().join("../shared/conformance/upstream/crd-validation");
    let Ok(files) = std::fs::read_dir(&set) else {
        return Ok(Completion::ignored_with(
            "skipped: Istio's conformance set is not next to the project (../shared/conformance)",
        ));
    };
    if !kubernetes::is_installed() {
        return missing("the Kubernetes API server is missing; `make tools` installs it");
    }
    let cluster = kubernetes::shared(0)?;
    let (mut count, mut wrong) = (0, Vec::new());
    for file in files {
        let path = file?.path();
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        // YAML 1.2 reads this as a mapping; Go's parser, for which the set was written, reads it as an address.
        let text = std::fs::read_to_string(&path)?.replace("001:db8::]", "'001:db8::']");
        for mut object in kubernetes::api::documents(&text) {
            count += 1;
            let because = object.as_object_mut().and_then(|fields| fields.remove("_err"));
            let name = format!("{} of {}", object["metadata"]["name"], path.display());
            match (try_out(cluster, &object), because.as_ref().and_then(Value::as_str)) {
                (Ok(_), None) => {}
                (Err(error), Some(because)) if has_message(&error, because) => {}
                (decision, because) => wrong.push(format!("{name}: {decision:?}, want {because:?}")),
            }
        }
    }
    assert!(count > 0, "no objects");
    verdict(wrong).map(|()| Completion::Completed)
}

/// Compares error messages. The set's texts come from an older API server, which repeated types and did not drop a
/// null.
fn has_message(error: &str, because: &str) -> bool {
    let because = because
        .rsplit_once(": Invalid value: ")
        .map_or(because, |(_, because)| because);
    let because = ["\"object\": ", "\"integer\": "]
        .iter()
        .find_map(|repeated| because.strip_prefix(repeated))
        .unwrap_or(because);
    let dropped = because
        .split_once(" in body must be of type ")
        .filter(|(_, rest)| rest.ends_with("\"null\""));
    error.contains(because) || dropped.is_some_and(|(field, _)| error.contains(&format!("{field}: Required value")))
}
