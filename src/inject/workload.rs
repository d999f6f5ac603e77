//! Injection of workloads in files, as `istioctl kube-inject` does it.

use std::sync::Arc;

use serde_json::{Value as Json, json};

use super::{
    Environment, InjectError, Injector, Mesh,
    annotations::{PROXY_CONFIG, proxy_config_value},
    decision::{IGNORED_NAMESPACES, choice},
    owner::Owner,
    pod,
    schema::{Form, canonical},
};
use crate::api::{mesh_config, yaml};

/// The result for a text of YAML documents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InjectedText {
    /// The documents after injection, each followed by `---`. Documents without pods are as they were.
    pub text: String,
    /// The documents before injection in the same form, for comparison.
    pub before: String,
    /// Workloads that were not injected, with the reasons.
    pub warnings: Vec<String>,
}

/// The place of pods in a kind of workload, as pointers to the metadata and the spec.
struct Template {
    metadata: &'static [&'static str],
    spec: &'static [&'static str],
}

/// Returns the place of pods in a kind; `None` for kinds without pods.
fn template(group: &str, kind: &str) -> Option<Template> {
    let (metadata, spec): (&'static [_], &'static [_]) = match (group, kind) {
        ("", "Pod") => (&["metadata"], &["spec"]),
        // Parity (pkg/kube/inject/inject.go, IntoObject): labels and annotations go to the template of the job.
        ("batch", "CronJob") => (
            &["spec", "jobTemplate", "metadata"],
            &["spec", "jobTemplate", "spec", "template", "spec"],
        ),
        ("batch", "Job")
        | ("apps", "Deployment" | "DaemonSet" | "ReplicaSet" | "StatefulSet")
        | ("", "ReplicationController")
        | ("apps.openshift.io" | "", "DeploymentConfig") => {
            (&["spec", "template", "metadata"], &["spec", "template", "spec"])
        }
        _ => return None,
    };
    Some(Template { metadata, spec })
}

/// Injects all workloads of a text.
///
/// The templates are chosen as in a cluster; selectors and the policy of the configuration do not count, since the
/// caller asks for the injection of these objects.
pub fn inject_text(injector: &Injector, environment: &Environment, text: &str) -> Result<InjectedText, InjectError> {
    let mut result = InjectedText::default();
    for document in yaml::documents(text) {
        let value: Json = document.parse().map_err(|error| InjectError::Workload {
            object: "file".to_owned(),
            message: error.to_string(),
        })?;
        if is_workload(&value) {
            result.before.push_str(&yaml::to_text(&complete(value.clone())?));
            let value = object(injector, environment, value, &mut result.warnings)?;
            result.text.push_str(&yaml::to_text(&complete(value)?));
        } else {
            result.before.push_str(raw(document.text));
            result.text.push_str(raw(document.text));
        }
        result.before.push_str("---\n");
        result.text.push_str("---\n");
    }
    Ok(result)
}

/// Returns a document without its marker, with a final line break.
fn raw(text: &str) -> &str {
    let body = text
        .strip_prefix("---")
        .map_or(text, |rest| rest.trim_start_matches([' ', '\t', '\r']));
    body.strip_prefix('\n').unwrap_or(body)
}

fn group(value: &Json) -> &str {
    pod::text(value, "apiVersion")
        .split_once('/')
        .map_or("", |(group, _)| group)
}

fn is_workload(value: &Json) -> bool {
    let kind = pod::text(value, "kind");
    (group(value), kind) == ("", "List") || template(group(value), kind).is_some()
}

/// Injects a workload, or the items of a list.
fn object(
    injector: &Injector,
    environment: &Environment,
    mut value: Json,
    warnings: &mut Vec<String>,
) -> Result<Json, InjectError> {
    if let Some(template) = template(group(&value), pod::text(&value, "kind")) {
        if let Some(injected) = workload(injector, environment, &value, &template, warnings)? {
            for (path, part) in [(template.metadata, "metadata"), (template.spec, "spec")] {
                *at_mut(&mut value, path) = injected.get(part).cloned().unwrap_or_else(|| json!({}));
            }
        }
    } else if let Some(Json::Array(items)) = value.get_mut("items") {
        for item in items.iter_mut().filter(|item| is_workload(item)) {
            *item = object(injector, environment, item.take(), warnings)?;
        }
    }
    Ok(value)
}

/// Returns a workload in the form in which Go writes it.
fn complete(mut value: Json) -> Result<Json, InjectError> {
    if let Some(Json::Array(items)) = value.get_mut("items") {
        for item in items.iter_mut().filter(|item| is_workload(item)) {
            *item = complete(item.take())?;
        }
    }
    let (kind, name) = (
        pod::text(&value, "kind").to_owned(),
        pod::metadata(&value, "name").to_owned(),
    );
    canonical(&kind, value, Form::Complete).map_err(|error| InjectError::Workload {
        object: format!("{kind} {name:?}"),
        message: error.to_string(),
    })
}

/// Returns the pod of a workload after injection; `None` if it is not injected.
fn workload(
    injector: &Injector,
    environment: &Environment,
    value: &Json,
    template: &Template,
    warnings: &mut Vec<String>,
) -> Result<Option<Json>, InjectError> {
    let part = |path: &[&str]| at(value, path).cloned().unwrap_or_else(|| json!({}));
    let original = json!({"metadata": part(template.metadata), "spec": part(template.spec)});
    let original = canonical("Pod", original, Form::Sparse).map_err(|error| InjectError::Workload {
        object: description(value, template),
        message: error.to_string(),
    })?;
    if let Some(reason) = reason_to_skip(&original) {
        let object = description(value, template);
        warnings.push(format!("===> Skipping injection because {object} has {reason}"));
        return Ok(None);
    }
    let mut owner = match pod::text(value, "kind") {
        "Pod" => Owner::of_pod(value),
        _ => Owner::itself(value),
    };
    if owner.namespace.is_empty() {
        owner.namespace.clone_from(&environment.namespace.name);
    }
    // A file may have many workloads, and the messages do not name theirs.
    let named = |error: InjectError| InjectError::Workload {
        object: description(value, template),
        message: error.to_string(),
    };
    let own = with_proxy_config(environment, &original).map_err(named)?;
    let environment = own.as_ref().unwrap_or(environment);
    injector
        .injected(&original, &owner, environment)
        .map(Some)
        .map_err(named)
}

/// Returns the reason not to inject a pod that the caller named.
fn reason_to_skip(pod: &Json) -> Option<&'static str> {
    if pod.pointer("/spec/hostNetwork") == Some(&Json::Bool(true)) {
        return Some("host networking enabled");
    }
    let is_disabled = choice(pod) == Some("false");
    let is_ignored = IGNORED_NAMESPACES.contains(&pod::metadata(pod, "namespace"));
    (is_disabled || is_ignored).then_some("sidecar injection disabled")
}

/// Returns the environment with the proxy config of a pod as that of the mesh.
///
/// Parity (pkg/kube/inject/inject.go, IntoObject): here, unlike in the webhook, the annotation also sets the port that
/// probes and Prometheus use.
fn with_proxy_config(environment: &Environment, pod: &Json) -> Result<Option<Environment>, InjectError> {
    let Some(text) = pod::annotation(pod, PROXY_CONFIG) else {
        return Ok(None);
    };
    let invalid = |reason: String| InjectError::Annotations(vec![format!("annotation {PROXY_CONFIG}: {reason}")]);
    let overlay = proxy_config_value(text).map_err(invalid)?;
    let base = environment.mesh.config();
    let default = base.default_config.clone().unwrap_or_default();
    let merged = mesh_config::lay_over_proxy_config(&default, &overlay).map_err(|error| invalid(error.to_string()))?;
    let mut config = base.clone();
    config.default_config = Some(merged);
    Ok(Some(Environment {
        mesh: Arc::new(Mesh::new(config)),
        ..environment.clone()
    }))
}

/// Names a workload, such as `Deployment "default/web"`.
fn description(value: &Json, template: &Template) -> String {
    let of_pod = at(value, template.metadata).map_or("", |metadata| pod::text(metadata, "name"));
    let name = if of_pod.is_empty() {
        pod::metadata(value, "name")
    } else {
        of_pod
    };
    let kind = pod::text(value, "kind");
    match pod::metadata(value, "namespace") {
        "" => format!("{kind} {name:?}"),
        namespace => format!("{kind} {:?}", format!("{namespace}/{name}")),
    }
}

fn at<'a>(value: &'a Json, path: &[&str]) -> Option<&'a Json> {
    path.iter().try_fold(value, |value, member| value.get(member))
}

fn at_mut<'a>(value: &'a mut Json, path: &[&str]) -> &'a mut Json {
    let mut current = value;
    for member in path {
        current = pod::object_mut(current).entry(*member).or_insert(Json::Null);
    }
    current
}
