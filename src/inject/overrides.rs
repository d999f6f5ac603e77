//! Settings of users for containers that templates add. They take precedence over the template, and an annotation keeps
//! them for a later injection of the same pod.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json, json};

use super::{
    InjectError, data,
    merge::merge,
    pod::{self, CONTAINERS, INIT_CONTAINERS},
    request::{Rendered, Request},
    schema::{Form, canonical},
};
use crate::{proto::istio::mesh::v1alpha1::proxy_config::InboundInterceptionMode, template::Value};

/// The annotation that records what an injection added.
pub(super) const STATUS: &str = "sidecar.istio.io/status";

/// The annotation that keeps the settings of users.
const OVERRIDES: &str = "proxy.istio.io/overrides";

/// The image that stands for that of the template.
const AUTO: &str = "auto";

/// The containers that an earlier injection added.
pub(super) struct Status {
    pub(super) containers: BTreeSet<String>,
    pub(super) init_containers: BTreeSet<String>,
}

impl Status {
    /// Reads the annotation of a pod; `None` if the pod was not injected or the annotation is not readable.
    pub(super) fn of(pod: &Json) -> Option<Self> {
        let status: Json = serde_json::from_str(pod::annotation(pod, STATUS)?).ok()?;
        let names = |field: &str| {
            let names = status.get(field).and_then(Json::as_array).into_iter().flatten();
            names.filter_map(Json::as_str).map(str::to_owned).collect()
        };
        status.is_object().then(|| Self {
            containers: names(CONTAINERS),
            init_containers: names(INIT_CONTAINERS),
        })
    }
}

/// Returns the settings of users that an earlier injection kept.
fn kept(pod: &Json) -> Result<Json, InjectError> {
    let Some(text) = pod::annotation(pod, OVERRIDES) else {
        return Ok(json!({}));
    };
    let invalid = |reason: String| InjectError::Annotations(vec![format!("annotation {OVERRIDES}: {reason}")]);
    let spec: Json = serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
    canonical("PodSpec", spec, Form::Sparse).map_err(|error| invalid(error.to_string()))
}

fn containers<'a>(spec: &'a Json, field: &str) -> &'a [Json] {
    spec.get(field).and_then(Json::as_array).map_or(&[], Vec::as_slice)
}

/// Adds the kept settings as containers, as they were when the pod was injected first.
pub(super) fn restored(mut pod: Json) -> Result<Json, InjectError> {
    let kept = kept(&pod)?;
    for field in [CONTAINERS, INIT_CONTAINERS] {
        let mut present: BTreeSet<&str> = pod::list(&pod, field).iter().map(pod::name).collect();
        let missing = containers(&kept, field)
            .iter()
            .filter(|container| present.insert(pod::name(container)));
        let missing: Vec<Json> = missing.cloned().collect();
        if !missing.is_empty() {
            pod::list_mut(&mut pod, field).extend(missing);
        }
    }
    Ok(pod)
}

/// Applies the settings of users on top of the containers that templates add.
///
/// Istio does not apply kept settings again, so that a second injection loses them; here it changes nothing.
pub(super) fn apply(request: &Request<'_>, mut rendered: Rendered) -> Result<Rendered, InjectError> {
    let original = request.pod;
    let kept = kept(original)?;
    let status = Status::of(original);
    let mut applied = Map::new();
    let plain = by_name(pod::list(original, CONTAINERS));
    for field in [CONTAINERS, INIT_CONTAINERS] {
        let injected = status.as_ref().map(|status| match field {
            CONTAINERS => &status.containers,
            _ => &status.init_containers,
        });
        let was_injected = |name: &str| injected.is_some_and(|names| names.contains(name));
        let (earlier, own) = (by_name(containers(&kept, field)), by_name(pod::list(original, field)));
        let mut present = BTreeMap::new();
        for container in pod::list_mut(&mut rendered.pod, field) {
            present.entry(pod::name(container).to_owned()).or_insert(container);
        }
        for name in pod::list(&rendered.template, field).iter().map(pod::name) {
            // A user sets up the proxy as a plain container; the template may add it as an init container.
            let plain = || plain.get(name).filter(|_| field == INIT_CONTAINERS);
            let of_user = || own.get(name).or_else(plain).filter(|_| !was_injected(name));
            let found = earlier.get(name).or_else(of_user);
            let (Some(container), Some(target)) = (found, present.get_mut(name)) else {
                continue;
            };
            let container = without_auto_image(container);
            pod::items_mut(&mut applied, field).push(container.clone());
            lay_over(target, container)?;
        }
    }
    if !applied.is_empty() && pod::annotation(original, STATUS).is_none() {
        let text = json_text(&Json::Object(applied))?;
        pod::annotations_mut(&mut rendered.pod).insert(OVERRIDES.to_owned(), Json::String(text));
    }
    adjust_users(request, &kept, &mut rendered.pod);
    Ok(rendered)
}

fn without_auto_image(container: &Json) -> Json {
    let mut container = container.clone();
    if pod::text(&container, "image") == AUTO {
        pod::object_mut(&mut container).remove("image");
    }
    container
}

/// Returns containers by their names. The first one of a name counts.
fn by_name(containers: &[Json]) -> BTreeMap<&str, &Json> {
    let containers = containers.iter().rev();
    containers.map(|container| (pod::name(container), container)).collect()
}

/// Merges settings into a container. A merge into the whole pod would take quadratic time for pods of thousands of
/// containers, all of which templates for gRPC change.
fn lay_over(target: &mut Json, settings: Json) -> Result<(), InjectError> {
    let name = pod::name(&settings).to_owned();
    let invalid = |message: String| InjectError::Overrides {
        container: name.clone(),
        message,
    };
    let merged = merge("Container", std::mem::take(target), settings).map_err(|error| invalid(error.to_string()))?;
    *target = canonical("Container", merged, Form::Sparse).map_err(|error| invalid(error.to_string()))?;
    Ok(())
}

/// Returns containers as Go writes them, with fields in its order.
fn json_text(spec: &Json) -> Result<String, InjectError> {
    let mut members = Vec::new();
    for (field, list) in [CONTAINERS, INIT_CONTAINERS].map(|field| (field, containers(spec, field))) {
        if list.is_empty() {
            continue;
        }
        let items = list.iter().map(|container| data::kube_value("Container", container));
        let text = data::go_json(&Value::list(items.collect())).map_err(|error| InjectError::Overrides {
            container: field.to_owned(),
            message: error.to_string(),
        })?;
        members.push(format!("\"{field}\":{text}"));
    }
    Ok(format!("{{{}}}", members.join(",")))
}

/// Fits the init container to the user that the pod sets for the proxy.
///
/// Parity (pkg/kube/inject/webhook.go, adjustInitContainerUser): under TPROXY the proxy runs as root; otherwise the
/// validation container runs as the proxy's user. Redirection excludes the traffic of that user, unless it is root.
fn adjust_users(request: &Request<'_>, kept: &Json, pod: &mut Json) {
    let settings = match Status::of(request.pod) {
        Some(_) => kept,
        None => request.pod.get("spec").unwrap_or(&Json::Null),
    };
    let mut lists = [CONTAINERS, INIT_CONTAINERS].into_iter();
    let container = lists.find_map(|field| pod::find(containers(settings, field), pod::PROXY));
    let Some(user_context) = container.and_then(|container| container.get("securityContext")) else {
        return;
    };
    let (user, group) = (
        user_context.get("runAsUser").cloned(),
        user_context.get("runAsGroup").cloned(),
    );
    if user.is_none() && group.is_none() {
        return;
    }
    let init = [pod::INIT, pod::VALIDATION];
    let init = init
        .into_iter()
        .find(|name| pod::find(pod::list(pod, INIT_CONTAINERS), name).is_some());
    let Some(init) = init else { return };
    let is_tproxy = request.proxy_config().interception_mode() == InboundInterceptionMode::Tproxy
        || pod::annotation(pod, "sidecar.istio.io/interceptionMode") == Some("TPROXY");
    if is_tproxy
        && user.is_some()
        && let Some(sidecar) = pod::sidecar_mut(pod)
    {
        pod::member_mut(sidecar, "securityContext").insert("runAsUser".to_owned(), Json::from(0));
    }
    let mut containers = pod::list_mut(pod, INIT_CONTAINERS).iter_mut();
    let Some(container) = containers.find(|container| pod::name(container) == init) else {
        return;
    };
    if !is_tproxy && init == pod::VALIDATION {
        let context = pod::member_mut(pod::object_mut(container), "securityContext");
        for (field, value) in [("runAsUser", &user), ("runAsGroup", &group)] {
            if let Some(value) = value {
                context.insert(field.to_owned(), value.clone());
            }
        }
    }
    let user = user.and_then(|user| user.as_i64()).filter(|user| *user != 0);
    let (Some(user), Some(Json::Array(arguments))) = (user, container.get_mut("args")) else {
        return;
    };
    if let Some(position) = arguments.iter().position(|argument| argument == "-u")
        && let Some(argument) = arguments.get_mut(position + 1)
    {
        *argument = Json::String(user.to_string());
    }
}

/// Clears the user and group of the proxy where OpenShift assigned another container of the pod the same.
///
/// Parity (pkg/kube/inject/webhook.go, isSidecarUserMatchingAppUser): traffic of the proxy must have a user of its own.
/// But each other container counts; in Istio, only the last one with a user does, and init containers come last.
pub(super) fn clear_assigned_user(pod: &mut Json) {
    let user = |container: &Json| container.pointer("/securityContext/runAsUser").and_then(Json::as_i64);
    let Some(sidecar) = pod::sidecar(pod) else { return };
    let of_sidecar = user(sidecar).unwrap_or(0);
    let whole = &*pod;
    let lists = [CONTAINERS, INIT_CONTAINERS].into_iter();
    let others = lists
        .flat_map(|field| pod::list(whole, field))
        .filter(|container| !matches!(pod::name(container), pod::PROXY | pod::VALIDATION | pod::INIT));
    let users: Vec<i64> = others.filter_map(user).collect();
    let is_shared = if users.is_empty() {
        of_sidecar == 0
    } else {
        users.contains(&of_sidecar)
    };
    if is_shared
        && let Some(Json::Object(context)) =
            pod::sidecar_mut(pod).and_then(|sidecar| sidecar.get_mut("securityContext"))
    {
        context.remove("runAsUser");
        context.remove("runAsGroup");
    }
}
