//! Access to the parts of a pod in JSON.

use serde_json::{Map, Value as Json};

use crate::base::{Labels, SmolStr};

/// The container of the proxy.
pub(super) const PROXY: &str = "istio-proxy";
/// The init container that redirects traffic.
pub(super) const INIT: &str = "istio-init";
/// The init container that checks the redirection of the CNI plugin.
pub(super) const VALIDATION: &str = "istio-validation";

/// The init container that allows core dumps.
pub(super) const CORE_DUMP: &str = "enable-core-dump";

/// The lists of containers that injection knows.
pub(super) const CONTAINERS: &str = "containers";
pub(super) const INIT_CONTAINERS: &str = "initContainers";

/// Returns an annotation.
pub(super) fn annotation<'a>(pod: &'a Json, name: &str) -> Option<&'a str> {
    pod.pointer("/metadata/annotations")?.get(name)?.as_str()
}

/// Returns a label.
pub(super) fn label<'a>(pod: &'a Json, name: &str) -> Option<&'a str> {
    pod.pointer("/metadata/labels")?.get(name)?.as_str()
}

/// Returns all labels.
pub(super) fn labels(pod: &Json) -> Labels {
    let labels = pod.pointer("/metadata/labels").and_then(Json::as_object);
    let labels = labels.into_iter().flatten();
    labels
        .filter_map(|(key, value)| Some((SmolStr::new(key), SmolStr::new(value.as_str()?))))
        .collect()
}

/// Returns a text of the metadata; empty if it is not set.
pub(super) fn metadata<'a>(object: &'a Json, field: &str) -> &'a str {
    let metadata = object.get("metadata").and_then(|metadata| metadata.get(field));
    metadata.and_then(Json::as_str).unwrap_or_default()
}

/// Returns a text of an object; empty if it is not set.
pub(super) fn text<'a>(object: &'a Json, field: &str) -> &'a str {
    object.get(field).and_then(Json::as_str).unwrap_or_default()
}

/// Returns the annotations, created if there are none.
pub(super) fn annotations_mut(pod: &mut Json) -> &mut Map<String, Json> {
    member_mut(member_mut(object_mut(pod), "metadata"), "annotations")
}

/// Returns the labels, created if there are none.
pub(super) fn labels_mut(pod: &mut Json) -> &mut Map<String, Json> {
    member_mut(member_mut(object_mut(pod), "metadata"), "labels")
}

/// Sets the namespace, or removes an empty one.
pub(super) fn set_namespace(pod: &mut Json, namespace: &str) {
    let metadata = member_mut(object_mut(pod), "metadata");
    if namespace.is_empty() {
        metadata.remove("namespace");
    } else {
        metadata.insert("namespace".to_owned(), Json::from(namespace));
    }
}

/// Returns the name of a container.
pub(super) fn name(container: &Json) -> &str {
    text(container, "name")
}

/// Returns a list of containers, or of other elements of the spec.
pub(super) fn list<'a>(pod: &'a Json, field: &str) -> &'a [Json] {
    let list = pod.get("spec").and_then(|spec| spec.get(field));
    list.and_then(Json::as_array).map_or(&[], Vec::as_slice)
}

/// Returns a list of containers, created if there is none.
pub(super) fn list_mut<'a>(pod: &'a mut Json, field: &str) -> &'a mut Vec<Json> {
    items_mut(member_mut(object_mut(pod), "spec"), field)
}

/// Returns the list in a field of an object, created if there is none.
pub(super) fn items_mut<'a>(object: &'a mut Map<String, Json>, field: &str) -> &'a mut Vec<Json> {
    let value = object.entry(field).or_insert(Json::Null);
    if !value.is_array() {
        *value = Json::Array(Vec::new());
    }
    match value {
        Json::Array(items) => items,
        _ => unreachable!("the value was just made a list"),
    }
}

/// Returns a container of a list.
pub(super) fn find<'a>(containers: &'a [Json], wanted: &str) -> Option<&'a Json> {
    containers.iter().find(|container| name(container) == wanted)
}

/// Returns the proxy's container, a plain one or a native sidecar.
pub(super) fn sidecar(pod: &Json) -> Option<&Json> {
    let lists = [CONTAINERS, INIT_CONTAINERS];
    lists.into_iter().find_map(|field| find(list(pod, field), PROXY))
}

/// Returns the proxy's container for changes.
pub(super) fn sidecar_mut(pod: &mut Json) -> Option<&mut Map<String, Json>> {
    let lists = [CONTAINERS, INIT_CONTAINERS];
    let field = lists
        .into_iter()
        .find(|field| find(list(pod, field), PROXY).is_some())?;
    let mut containers = list_mut(pod, field).iter_mut();
    containers.find(|container| name(container) == PROXY)?.as_object_mut()
}

/// Returns the entries of an object. A pod that was read is one.
pub(super) fn object_mut(value: &mut Json) -> &mut Map<String, Json> {
    if !value.is_object() {
        *value = Json::Object(Map::new());
    }
    match value {
        Json::Object(entries) => entries,
        _ => unreachable!("the value was just made an object"),
    }
}

/// Returns an object in a field, created if there is none.
pub(super) fn member_mut<'a>(object: &'a mut Map<String, Json>, field: &str) -> &'a mut Map<String, Json> {
    object_mut(object.entry(field).or_insert(Json::Null))
}
