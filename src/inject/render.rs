//! Rendering: the data of templates, and their overlays merged into the pod.

use std::sync::Arc;

use serde_json::{Value as Json, json};

use super::{
    InjectError,
    config::MAX_TEMPLATES,
    data::{self, Fields},
    decision,
    environment::{Environment, Mesh, Namespace, Platform, reflected},
    overrides, pod, prometheus,
    request::{Rendered, Request},
};
use crate::{
    proto::istio::mesh::v1alpha1::mesh_config::{InboundTrafficPolicy, inbound_traffic_policy::Mode},
    template::{Host, Value},
};

/// Renders the templates of a pod.
pub(super) fn render(request: &Request<'_>) -> Result<Rendered, InjectError> {
    let stripped = overrides::restored(stripped(request.pod, request.mesh().status_port()))?;
    let mut pod = request.pod.clone();
    let mut template = None;
    let status = overrides::Status::of(request.pod);
    let was_native = |status: &overrides::Status| {
        let lists = [&status.containers, &status.init_containers];
        lists.into_iter().all(|names| names.contains(pod::PROXY))
    };
    // An earlier injection added both containers; neither has settings of the user.
    let was_added = status.as_ref().is_some_and(was_native);
    let names = decision::templates(request.config, request.pod);
    if names.len() > MAX_TEMPLATES {
        return Err(InjectError::TooManyTemplates);
    }
    for name in names {
        request.environment.check_deadline()?;
        let Some(templates) = request.config.templates.get(name) else {
            let known: Vec<&str> = request.config.templates.keys().map(String::as_str).collect();
            return Err(InjectError::UnknownTemplate {
                name: name.to_owned(),
                known: known.join(", "),
            });
        };
        let text = templates.render(
            name,
            &data(request, &stripped),
            request.environment.host.as_ref() as &dyn Host,
        )?;
        let overlay = request.config.overlays.parsed(name, &text)?;
        template = match template {
            None => Some(overlay.alone()?),
            Some(template) => Some(Arc::new(overlay.merged_into(Arc::unwrap_or_clone(template))?)),
        };
        if template.as_deref().is_some_and(is_native) && !was_added {
            move_to_init_containers(&mut pod);
        }
        pod = overlay.merged_into(pod)?;
    }
    let template = template.unwrap_or_else(|| Arc::new(json!({})));
    Ok(Rendered { pod, template })
}

/// Returns true if the templates add the proxy as a native sidecar.
fn is_native(template: &Json) -> bool {
    pod::find(pod::list(template, pod::INIT_CONTAINERS), pod::PROXY).is_some()
}

/// Moves the user's settings of the proxy to where a template adds it.
fn move_to_init_containers(pod: &mut Json) {
    if pod::find(pod::list(pod, pod::CONTAINERS), pod::PROXY).is_none() {
        return;
    }
    let containers = std::mem::take(pod::list_mut(pod, pod::CONTAINERS));
    let (moved, kept): (Vec<Json>, Vec<Json>) = containers
        .into_iter()
        .partition(|container| pod::name(container) == pod::PROXY);
    *pod::list_mut(pod, pod::CONTAINERS) = kept;
    pod::list_mut(pod, pod::INIT_CONTAINERS).extend(moved);
}

/// Returns a pod without what an earlier injection added, so that templates see it as the user wrote it.
fn stripped(pod: &Json, status_port: i32) -> Json {
    let mut pod = pod.clone();
    let Some(status) = overrides::Status::of(&pod) else {
        return pod;
    };
    for (field, names) in [
        (pod::CONTAINERS, &status.containers),
        (pod::INIT_CONTAINERS, &status.init_containers),
    ] {
        if !pod::list(&pod, field).is_empty() {
            pod::list_mut(&mut pod, field).retain(|container| !names.contains(pod::name(container)));
        }
    }
    if prometheus::port(&pod).is_some_and(|port| port == status_port.to_string()) {
        prometheus::clear(&mut pod);
    }
    pod::annotations_mut(&mut pod).remove(overrides::STATUS);
    pod
}

/// Returns the data of templates.
fn data(request: &Request<'_>, pod: &Json) -> Value {
    let (environment, owner) = (request.environment, request.owner);
    let (uid, gid) = proxy_ids(environment);
    let image_type = pod::annotation(pod, "sidecar.istio.io/proxyImageType").or_else(|| {
        let image = request.proxy_config().image.as_ref();
        image.map(|image| image.image_type.as_str())
    });
    let type_meta = Fields::pointer(
        "v1.TypeMeta",
        vec![
            ("Kind", owner.kind.as_str().into()),
            ("APIVersion", owner.api_version.as_str().into()),
        ],
    );
    let native = environment.uses_native_sidecars(pod.pointer("/spec/nodeName").and_then(Json::as_str));
    let none = Json::Null;
    Fields::pointer(
        "inject.SidecarTemplateData",
        vec![
            ("TypeMeta", type_meta),
            ("DeploymentMeta", data::namespaced_name(&owner.namespace, &owner.name)),
            (
                "ObjectMeta",
                data::kube_value("ObjectMeta", pod.get("metadata").unwrap_or(&none)),
            ),
            ("Spec", data::kube_value("PodSpec", pod.get("spec").unwrap_or(&none))),
            (
                "ProxyConfig",
                match &request.proxy_config {
                    Some(config) => data::message(&reflected(config)),
                    None => environment.mesh.proxy_template.clone(),
                },
            ),
            ("MeshConfig", environment.mesh.template.clone()),
            ("Values", request.config.values.for_template()),
            ("Revision", environment.revision.as_str().into()),
            ("NativeSidecars", native.into()),
            ("ProxyImage", request.config.values.proxy_image(image_type).into()),
            ("ProxyUID", Value::int64(uid)),
            ("ProxyGID", Value::int64(gid)),
            ("InboundTrafficPolicyMode", inbound_mode(request.mesh()).into()),
            ("CompliancePolicy", environment.compliance_policy.as_str().into()),
        ],
    )
}

fn inbound_mode(mesh: &Mesh) -> &'static str {
    match mesh
        .config
        .inbound_traffic_policy
        .as_ref()
        .map(InboundTrafficPolicy::mode)
    {
        Some(Mode::Localhost) => "localhost",
        _ => "passthrough",
    }
}

/// The user and group of the proxy outside OpenShift.
const PROXY_ID: i64 = 1337;

/// Returns the user and group of the proxy. OpenShift assigns ranges to namespaces; the proxy takes the last id of its.
fn proxy_ids(environment: &Environment) -> (i64, i64) {
    if environment.platform != Platform::OpenShift {
        return (PROXY_ID, PROXY_ID);
    }
    assigned_ids(&environment.namespace)
}

/// Returns the last ids of the ranges that annotations assign to a namespace, or the usual ids.
pub(super) fn assigned_ids(namespace: &Namespace) -> (i64, i64) {
    let range = |name: &str| namespace.annotations.get(name).and_then(|text| last_id(text));
    let users = range("openshift.io/sa.scc.uid-range");
    let groups = range("openshift.io/sa.scc.supplemental-groups").or(users);
    (users.unwrap_or(PROXY_ID), groups.unwrap_or(PROXY_ID))
}

/// Returns the last id of the first block in `START/SIZE` or `START-END` form.
fn last_id(text: &str) -> Option<i64> {
    let block = text.split(',').next()?.trim();
    if let Some((start, size)) = block.split_once('/') {
        let size = size.parse::<i64>().ok().filter(|size| *size > 0)?;
        return start.parse::<i64>().ok()?.checked_add(size - 1);
    }
    let (start, end) = block.split_once('-')?;
    let (start, end) = (start.parse::<i64>().ok()?, end.parse::<i64>().ok()?);
    (start <= end).then_some(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_have_last_ids() {
        assert_eq!(last_id("1000620000/10000"), Some(1_000_629_999));
        assert_eq!(last_id("100-200,300/5"), Some(200));
        assert_eq!(last_id("200-100"), None);
        assert_eq!(last_id("1/0"), None);
        assert_eq!(last_id("x"), None);
    }
}
