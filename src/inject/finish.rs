//! Changes of the merged pod that templates cannot make: variables of the request, metadata, and the order of
//! containers.

use std::collections::{BTreeMap, VecDeque};

use serde_json::{Value as Json, json};

use super::{
    environment::NETWORK_VARIABLE,
    overrides, pod,
    request::{Rendered, Request},
};
use crate::api::label::NETWORK;

/// Sets the variables of the request in the proxy's container.
pub(super) fn set_variables(request: &Request<'_>, pod: &mut Json) {
    if request.proxy_variables.is_empty() {
        return;
    }
    let Some(sidecar) = pod::sidecar_mut(pod) else { return };
    let variables = pod::items_mut(sidecar, "env");
    variables.retain(|variable| !request.proxy_variables.contains_key(pod::name(variable)));
    for (name, value) in &request.proxy_variables {
        variables.push(json!({"name": name, "value": value}));
    }
}

/// Keeps the order of the proxy's variables if an earlier injection set the same ones. Variables of the request move to
/// the end otherwise, and a second injection would change the pod.
pub(super) fn keep_variable_order(request: &Request<'_>, pod: &mut Json) {
    if overrides::Status::of(request.pod).is_none() {
        return;
    }
    let earlier = pod::sidecar(request.pod).and_then(|sidecar| sidecar.get("env")?.as_array());
    let (Some(earlier), Some(sidecar)) = (earlier, pod::sidecar_mut(pod)) else {
        return;
    };
    // Several variables may have the same name; the last one counts.
    let mut positions: BTreeMap<&str, VecDeque<usize>> = BTreeMap::new();
    for (index, variable) in earlier.iter().enumerate() {
        positions.entry(pod::name(variable)).or_default().push_back(index);
    }
    let variables = pod::items_mut(sidecar, "env");
    let position = |variable: &Json| positions.get_mut(pod::name(variable))?.pop_front();
    let found: Option<Vec<usize>> = variables.iter().map(position).collect();
    let Some(found) = found.filter(|found| found.len() == earlier.len()) else {
        return;
    };
    let mut placed: Vec<(usize, Json)> = found.into_iter().zip(std::mem::take(variables)).collect();
    placed.sort_by_key(|(position, _)| *position);
    variables.extend(placed.into_iter().map(|(_, variable)| variable));
}

/// Writes the label of the network, the record of the injection, and the annotations of the configuration.
pub(super) fn set_metadata(request: &Request<'_>, rendered: &mut Rendered) {
    if let Some(network) = request.proxy_variables.get(NETWORK_VARIABLE) {
        pod::labels_mut(&mut rendered.pod).insert(NETWORK.to_owned(), Json::from(network.as_str()));
    }
    let status = status(&rendered.template, request.revision());
    let annotations = pod::annotations_mut(&mut rendered.pod);
    annotations.insert(overrides::STATUS.to_owned(), Json::String(status));
    for (name, value) in &request.config.injected_annotations {
        annotations.insert(name.clone(), Json::from(value.as_str()));
    }
}

/// Returns the record of what templates added.
fn status(template: &Json, revision: &str) -> String {
    let names = |field: &str| match pod::list(template, field) {
        [] => Json::Null,
        list => list.iter().map(pod::name).collect(),
    };
    let [init, containers, volumes, secrets] =
        [pod::INIT_CONTAINERS, pod::CONTAINERS, "volumes", "imagePullSecrets"].map(names);
    format!(
        "{{\"initContainers\":{init},\"containers\":{containers},\"volumes\":{volumes},\"imagePullSecrets\":{secrets},\
         \"revision\":{}}}",
        Json::from(revision)
    )
}

/// Orders containers.
///
/// Parity (pkg/kube/inject/webhook.go, reorderPod): tools use the first container by default, so the proxy comes last
/// unless the application waits for it. A native sidecar starts before other init containers; else redirection is set
/// up after them, since their traffic would be lost.
pub(super) fn order(request: &Request<'_>, pod: &mut Json) {
    let holds_by_config = request.proxy_config().hold_application_until_proxy_starts;
    let end = if holds_by_config.unwrap_or_default() || request.config.values.holds_application() {
        End::First
    } else {
        End::Last
    };
    let moves: &[(&str, End)] = if pod::find(pod::list(pod, pod::INIT_CONTAINERS), pod::PROXY).is_some() {
        &[
            (pod::CORE_DUMP, End::First),
            (pod::PROXY, End::First),
            (pod::VALIDATION, End::First),
            (pod::INIT, End::First),
        ]
    } else {
        &[
            (pod::VALIDATION, End::First),
            (pod::INIT, End::Last),
            (pod::CORE_DUMP, End::Last),
        ]
    };
    shift(pod, pod::CONTAINERS, pod::PROXY, end);
    for (name, end) in moves {
        shift(pod, pod::INIT_CONTAINERS, name, *end);
    }
}

#[derive(Clone, Copy)]
enum End {
    First,
    Last,
}

fn shift(pod: &mut Json, field: &str, name: &str, end: End) {
    let list = pod::list(pod, field);
    let Some(position) = list.iter().position(|container| pod::name(container) == name) else {
        return;
    };
    let containers = pod::list_mut(pod, field);
    let container = containers.remove(position);
    match end {
        End::First => containers.insert(0, container),
        End::Last => containers.push(container),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_lists_what_templates_added() {
        let template =
            json!({"spec": {"containers": [{"name": "istio-proxy"}], "volumes": [{"name": "a"}, {"name": "b"}]}});
        assert_eq!(
            status(&template, "canary"),
            "{\"initContainers\":null,\"containers\":[\"istio-proxy\"],\"volumes\":[\"a\",\"b\"],\
             \"imagePullSecrets\":null,\"revision\":\"canary\"}"
        );
    }
}
