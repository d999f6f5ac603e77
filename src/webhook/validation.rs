//! Validation of Istio's objects on their way into a cluster. The rules are those of parsing: the webhook refuses what
//! parsing reports as an error, or as refused on admission, and passes on its warnings.
//!
//! Parity (pkg/webhooks/validation/server/server.go).

use serde_json::{Map, Value};

use super::review::{Request, Verdict};
use crate::{
    api::{
        Diagnostic, Kind, Severity,
        diagnostics::{MALFORMED, REFUSED},
        document,
    },
    base::ClusterId,
};

/// The top-level fields of Istio's objects.
const FIELDS: [&str; 5] = ["apiVersion", "kind", "metadata", "spec", "status"];

/// The maximum number of errors in a refusal.
const MAX_LISTED: usize = 20;

/// The class of a refusal, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The object is neither created nor updated; it is allowed unchecked.
    UnsupportedOperation,
    /// The object is not an object of Kubernetes.
    NotAnObject,
    /// Its kind is not one of Istio or of the Gateway API.
    UnknownType,
    /// A field has a wrong type.
    Malformed,
    /// It breaks a rule of its kind.
    Invalid,
}

impl Reason {
    /// Returns the value of the label `reason`.
    pub fn label(self) -> &'static str {
        match self {
            Self::UnsupportedOperation => "unsupported_operation",
            Self::NotAnObject => "yaml_decode_error",
            Self::UnknownType => "unknown_type",
            Self::Malformed => "crd_conversion_error",
            Self::Invalid => "invalid_resource",
        }
    }
}

/// The result of a validation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The answer.
    pub verdict: Verdict,
    /// The kind of the object, if it is known.
    pub kind: Option<Kind>,
    /// `None` if the object is valid.
    pub reason: Option<Reason>,
}

/// Validates the object of a request, which is left without parts that only the check needs.
pub fn validate(request: &mut Request) -> Outcome {
    if !matches!(request.operation.as_str(), "CREATE" | "UPDATE") {
        let kind = Kind::ALL.iter().copied().find(|kind| {
            kind.is_object() && kind.group() == request.resource.group && kind.plural() == request.resource.resource
        });
        return Outcome {
            verdict: Verdict::default(),
            kind,
            reason: Some(Reason::UnsupportedOperation),
        };
    }
    let text = |name: &str| request.object[name].as_str().unwrap_or_default().to_owned();
    let (api_version, kind_name) = (text("apiVersion"), text("kind"));
    let Value::Object(object) = &mut request.object else {
        let error = "cannot decode configuration: the object is not a JSON object";
        return refused(None, Reason::NotAnObject, error.to_owned());
    };
    let (group, _) = api_version.split_once('/').unwrap_or(("", &api_version));
    let Some(kind) = known(group, &kind_name) else {
        let error = format!("unrecognized type {api_version}/{kind_name}");
        return refused(None, Reason::UnknownType, error);
    };
    let unknown = object.keys().find(|key| !FIELDS.contains(&key.as_str())).cloned();
    complete(object, &request.name, &request.namespace);
    let parsed = document::parse_object(&ClusterId::default(), kind, &request.object);
    let mut outcome = outcome_of(kind, &parsed.diagnostics);
    if let (None, Some(field)) = (outcome.reason, unknown) {
        let (namespace, name) = (&request.namespace, &request.name);
        let error = format!("unknown field {field:?} on {kind_name} resource {namespace}/{name}");
        outcome.reason = Some(Reason::Invalid);
        outcome.verdict.refusal = Some(error);
    }
    outcome
}

/// Returns the kind of Istio or of the Gateway API by group and name. Every version is accepted, as by Istio.
fn known(group: &str, name: &str) -> Option<Kind> {
    let mut kinds = Kind::ALL.iter().copied();
    kinds.find(|kind| {
        (kind.is_istio() || kind.is_gateway_api()) && kind.is_object() && kind.group() == group && kind.name() == name
    })
}

/// Adds what the API server adds after admission: a generated name, and the namespace of the path.
fn complete(object: &mut Map<String, Value>, name: &str, namespace: &str) {
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else {
        return;
    };
    let is_empty = |metadata: &Map<String, Value>, field: &str| {
        let value = metadata.get(field).unwrap_or(&Value::Null);
        value.is_null() || value == ""
    };
    if is_empty(metadata, "namespace") && !namespace.is_empty() {
        metadata.insert("namespace".into(), namespace.into());
    }
    if is_empty(metadata, "name") {
        let generated = metadata.get("generateName").and_then(Value::as_str);
        let name = generated.map_or_else(|| name.to_owned(), |prefix| format!("{prefix}x"));
        metadata.insert("name".into(), name.into());
    }
}

fn outcome_of(kind: Kind, diagnostics: &[Diagnostic]) -> Outcome {
    let is_refusal = |found: &&Diagnostic| found.severity == Severity::Error || found.code == REFUSED;
    let refusals: Vec<&Diagnostic> = diagnostics.iter().filter(is_refusal).collect();
    let malformed = refusals.iter().any(|found| found.code == MALFORMED);
    let texts: Vec<String> = refusals.into_iter().map(text).collect();
    let (reason, refusal) = match texts.is_empty() {
        true => (None, None),
        false if malformed => (
            Some(Reason::Malformed),
            Some(format!("error decoding configuration: {}", listed(&texts))),
        ),
        false => (
            Some(Reason::Invalid),
            Some(format!("configuration is invalid: {}", listed(&texts))),
        ),
    };
    let warnings = diagnostics
        .iter()
        .filter(|found| !is_refusal(found))
        .map(text)
        .collect();
    Outcome {
        verdict: Verdict {
            refusal,
            warnings,
            patch: None,
        },
        kind: Some(kind),
        reason,
    }
}

fn refused(kind: Option<Kind>, reason: Reason, error: String) -> Outcome {
    Outcome {
        verdict: Verdict::refused(error),
        kind,
        reason: Some(reason),
    }
}

/// Returns a finding without the name of the object, which the client knows.
fn text(found: &Diagnostic) -> String {
    if found.field.is_empty() {
        found.message.clone()
    } else {
        format!("{}: {}", found.field, found.message)
    }
}

/// Joins errors in the form of Istio (`multierror`): one as it is, several as a list.
fn listed(texts: &[String]) -> String {
    match texts {
        [text] => text.clone(),
        texts => {
            let shown = texts.len().min(MAX_LISTED);
            let mut list = texts[..shown].join("\n\t* ");
            if shown < texts.len() {
                list.push_str("\n\t* …");
            }
            format!("{} errors occurred:\n\t* {list}\n\n", texts.len())
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(operation: &str, object: Value) -> Outcome {
        validate(&mut Request {
            operation: operation.into(),
            namespace: "app".into(),
            name: "a".into(),
            object,
            ..Request::default()
        })
    }

    fn virtual_service(spec: &Value) -> Value {
        json!({"apiVersion": "networking.istio.io/v1", "kind": "VirtualService", "metadata": {"name": "a"}, "spec": spec})
    }

    #[test]
    fn only_created_and_updated_objects_are_checked() {
        for operation in ["DELETE", "CONNECT", ""] {
            let outcome = of(operation, Value::Null);
            assert_eq!(outcome.verdict, Verdict::default());
            assert_eq!(outcome.reason, Some(Reason::UnsupportedOperation));
        }
    }

    #[test]
    fn refusals_name_field_and_reason() {
        let route = |destination: Value| json!([{"route": [{"destination": destination}]}]);
        let valid = json!({"hosts": ["a.b"], "http": route(json!({"host": "c.d"}))});
        assert_eq!(of("CREATE", virtual_service(&valid)).reason, None);

        let invalid = json!({"hosts": ["a.b"], "http": route(json!({"host": "c.d", "port": {"number": 70000}}))});
        let outcome = of("UPDATE", virtual_service(&invalid));
        assert_eq!(outcome.reason, Some(Reason::Invalid));
        let error = outcome.verdict.refusal.expect("a refusal");
        assert_eq!(
            error,
            "configuration is invalid: spec.http[0].route[0].destination.port.number: 70000 is not a port, \
             want 1 to 65535"
        );

        let outcome = of("CREATE", virtual_service(&json!({"hosts": "a.b"})));
        assert_eq!(outcome.reason, Some(Reason::Malformed));
        let error = outcome.verdict.refusal.expect("a refusal");
        assert!(
            error.starts_with("error decoding configuration: spec.hosts: "),
            "{error}"
        );

        let several = json!({"hosts": ["a b"], "http": route(json!({"host": ""}))});
        let error = of("CREATE", virtual_service(&several))
            .verdict
            .refusal
            .expect("a refusal");
        assert!(
            error.starts_with("configuration is invalid: 2 errors occurred:\n\t* spec.hosts[0]"),
            "{error}"
        );
    }

    #[test]
    fn objects_of_other_kinds_are_refused() {
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}});
        let outcome = of("CREATE", pod);
        assert_eq!(outcome.reason, Some(Reason::UnknownType));
        assert_eq!(outcome.verdict.refusal.as_deref(), Some("unrecognized type v1/Pod"));
        assert_eq!(of("CREATE", json!([])).reason, Some(Reason::NotAnObject));
    }

    #[test]
    fn unknown_top_level_fields_are_refused() {
        let mut object = virtual_service(&json!({"hosts": ["a.b"], "http": [{"redirect": {"uri": "/"}}]}));
        object["specs"] = json!({});
        let outcome = of("CREATE", object);
        let want = "unknown field \"specs\" on VirtualService resource app/a";
        assert_eq!(outcome.verdict.refusal.as_deref(), Some(want));
    }

    #[test]
    fn generated_names_are_names() {
        let mut object = virtual_service(&json!({"hosts": ["a.b"], "http": [{"redirect": {"uri": "/"}}]}));
        object["metadata"] = json!({"generateName": "a-"});
        assert_eq!(of("CREATE", object).reason, None);
    }
}
