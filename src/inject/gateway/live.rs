//! Objects of deployments as they are in the cluster, compared with what would be applied.

use serde_json::{Map, Value as Json};

use super::{GatewayObject, ObjectKind};
use crate::inject::{
    pod,
    schema::{Form, canonical},
};

/// Label of pods before Istio 1.24. The selector of a Deployment cannot change, so that of an older one keeps it.
const OLD_NAME: &str = "istio.io/gateway-name";

/// Makes a Deployment keep the selector of the present one, if that is older than the label of today.
pub fn keep_selector(desired: &mut Json, live: &Json) {
    let selector = &live["spec"]["selector"];
    let is_old = selector["matchLabels"][OLD_NAME]
        .as_str()
        .is_some_and(|name| !name.is_empty());
    if !is_old {
        return;
    }
    let label = &live["spec"]["template"]["metadata"]["labels"][OLD_NAME];
    let spec = pod::member_mut(pod::object_mut(desired), "spec");
    spec.insert("selector".to_owned(), selector.clone());
    let template = pod::member_mut(spec, "template");
    pod::member_mut(pod::member_mut(template, "metadata"), "labels").insert(OLD_NAME.to_owned(), label.clone());
}

/// Returns an object without what API servers and other controllers report in it. Two equal results mean that what the
/// object asks for has not changed.
pub fn without_status(mut object: Json) -> Json {
    if let Json::Object(fields) = &mut object {
        for field in ["apiVersion", "kind", "status"] {
            fields.remove(field);
        }
    }
    if let Some(Json::Object(metadata)) = object.get_mut("metadata") {
        for field in ["managedFields", "resourceVersion", "generation"] {
            metadata.remove(field);
        }
        if let Some(Json::Object(annotations)) = metadata.get_mut("annotations") {
            // The controller of Deployments counts in it.
            annotations.remove("deployment.kubernetes.io/revision");
        }
    }
    object
}

impl GatewayObject {
    /// Returns true if applying the object would change nothing: the field manager owns exactly its fields, and they
    /// have its values. `live` is the present object with its `managedFields`.
    pub fn is_current(&self, live: &Json, manager: &str) -> bool {
        let entries = live["metadata"]["managedFields"].as_array().into_iter().flatten();
        let (group, version, _) = self.kind.resource();
        let api_version = if group.is_empty() {
            version.to_owned()
        } else {
            format!("{group}/{version}")
        };
        let mut own = entries.filter(|entry| {
            entry["manager"] == manager && entry["operation"] == "Apply" && entry["subresource"].is_null()
        });
        let (Some(own), None) = (own.next(), own.next()) else {
            return false;
        };
        if own["apiVersion"] != api_version {
            return false;
        }
        let Some(owned) = own["fieldsV1"].as_object() else {
            return false;
        };
        let desired = without_nulls(named(self.value.clone()));
        let values = |object: Json| canonical(type_name(self.kind), object, Form::Sparse).ok();
        let (Some(wanted), Some(present)) = (values(desired.clone()), values(named(live.clone()))) else {
            return false;
        };
        owns_exactly(owned, &desired) && has_values(owned, &wanted, &present)
    }
}

/// Returns the name of a kind in the table of types.
fn type_name(kind: ObjectKind) -> &'static str {
    match kind {
        ObjectKind::DaemonSet => "Deployment",
        kind => kind.name(),
    }
}

/// Returns an object without the members that no one owns.
fn named(mut object: Json) -> Json {
    if let Json::Object(fields) = &mut object {
        for field in ["apiVersion", "kind", "status"] {
            fields.remove(field);
        }
    }
    if let Some(Json::Object(metadata)) = object.get_mut("metadata") {
        for field in ["name", "namespace", "managedFields", "resourceVersion"] {
            metadata.remove(field);
        }
    }
    object
}

fn without_nulls(value: Json) -> Json {
    match value {
        Json::Object(fields) => {
            let fields = fields.into_iter().filter(|(_, value)| !value.is_null());
            Json::Object(fields.map(|(key, value)| (key, without_nulls(value))).collect())
        }
        Json::Array(items) => Json::Array(items.into_iter().map(without_nulls).collect()),
        value => value,
    }
}

/// Returns the members of a set of owned fields.
fn members(owned: &Map<String, Json>) -> impl Iterator<Item = (&String, &Json)> {
    owned.iter().filter(|(key, _)| *key != ".")
}

/// Returns the key of an element and its fields in the set of a list.
fn element<'a>(owned: &'a Map<String, Json>, item: &Json) -> Option<(Json, &'a Map<String, Json>)> {
    members(owned).find_map(|(key, set)| {
        let key = key.strip_prefix("k:").or_else(|| key.strip_prefix("v:"))?;
        let key = serde_json::from_str(key).ok().filter(|key| has_key(item, key))?;
        Some((key, set.as_object()?))
    })
}

/// Returns true if a set of owned fields (`fieldsV1`) has exactly the members of a value. A set without members owns
/// the value as a whole.
fn owns_exactly(owned: &Map<String, Json>, desired: &Json) -> bool {
    let count = members(owned).count();
    match desired {
        _ if count == 0 => true,
        Json::Object(fields) => {
            let is_owned = |(key, value): (&String, &Json)| match owned.get(&format!("f:{key}")) {
                Some(Json::Object(set)) => owns_exactly(set, value),
                Some(_) => false,
                None => is_zero(value),
            };
            let is_wanted = |key: &str| key.strip_prefix("f:").is_some_and(|key| fields.contains_key(key));
            fields.iter().all(is_owned) && members(owned).all(|(key, _)| is_wanted(key))
        }
        Json::Array(items) => {
            let is_owned = |item| element(owned, item).is_some_and(|(_, set)| owns_exactly(set, item));
            count == items.len() && items.iter().all(is_owned)
        }
        _ => false,
    }
}

/// Returns true if the present object has the values of another one. API servers add defaults and elements of lists.
fn has_values(owned: &Map<String, Json>, desired: &Json, live: &Json) -> bool {
    match (desired, live) {
        (Json::Object(desired), Json::Object(live)) => {
            let whole = Map::new();
            desired.iter().all(|(key, value)| {
                let set = owned.get(&format!("f:{key}")).and_then(Json::as_object);
                match live.get(key) {
                    Some(live) => has_values(set.unwrap_or(&whole), value, live),
                    None => is_zero(value),
                }
            })
        }
        (Json::Array(desired), Json::Array(live)) if members(owned).next().is_none() => {
            let mut pairs = desired.iter().zip(live);
            desired.len() == live.len() && pairs.all(|(desired, live)| has_values(owned, desired, live))
        }
        (Json::Array(desired), Json::Array(live)) => desired.iter().all(|item| {
            let own = element(owned, item);
            own.is_some_and(|(key, set)| {
                let present = live.iter().find(|live| has_key(live, &key));
                present.is_some_and(|live| has_values(set, item, live))
            })
        }),
        (desired, live) => desired == live,
    }
}

/// Returns true if an element of a list has a key. Members of the key that the element lacks have their defaults.
fn has_key(item: &Json, key: &Json) -> bool {
    match key {
        Json::Object(members) => members
            .iter()
            .all(|(name, value)| item.get(name).is_none_or(|own| own == value)),
        scalar => item == scalar,
    }
}

/// Returns true for a value that Go omits.
fn is_zero(value: &Json) -> bool {
    match value {
        Json::Object(fields) => fields.is_empty(),
        Json::Array(items) => items.is_empty(),
        Json::String(text) => text.is_empty(),
        Json::Number(number) => number.as_f64() == Some(0.0),
        Json::Bool(value) => !value,
        Json::Null => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const MANAGER: &str = "istio.io/gateway-controller";

    fn service(ports: Json) -> GatewayObject {
        GatewayObject {
            kind: ObjectKind::Service,
            name: "a".to_owned(),
            value: json!({"apiVersion": "v1", "kind": "Service",
                "metadata": {"name": "a", "namespace": "n", "annotations": {}, "labels": {"l": "1"}},
                "spec": {"type": "ClusterIP", "selector": {"x": "y"}, "ports": ports}}),
        }
    }

    fn live() -> Json {
        json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "a", "namespace": "n", "uid": "u", "resourceVersion": "5",
                "labels": {"l": "1", "other": "2"},
                "managedFields": [
                    {"manager": "other", "operation": "Update", "apiVersion": "v1",
                        "fieldsV1": {"f:metadata": {"f:labels": {"f:other": {}}}}},
                    {"manager": MANAGER, "operation": "Apply", "apiVersion": "v1", "fieldsV1": {
                        "f:metadata": {"f:labels": {"f:l": {}}},
                        "f:spec": {"f:type": {}, "f:selector": {},
                            "f:ports": {
                                "k:{\"port\":80,\"protocol\":\"TCP\"}": {".": {}, "f:name": {}, "f:port": {}}}}}}]},
            "spec": {"type": "ClusterIP", "clusterIP": "10.0.0.1", "selector": {"x": "y"},
                "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 80}]},
            "status": {}})
    }

    #[test]
    fn equal_objects_are_current() {
        let desired = service(json!([{"name": "http", "port": 80}]));
        assert!(desired.is_current(&live(), MANAGER));
        assert!(!desired.is_current(&live(), "someone"));
    }

    #[test]
    fn changes_are_found() {
        let other = service(json!([{"name": "web", "port": 80}]));
        assert!(!other.is_current(&live(), MANAGER), "another value");
        let more = service(json!([{"name": "http", "port": 80}, {"name": "b", "port": 81}]));
        assert!(!more.is_current(&live(), MANAGER), "another element");
        let mut fewer = service(json!([{"name": "http", "port": 80}]));
        fewer.value["metadata"]["labels"] = json!({});
        assert!(!fewer.is_current(&live(), MANAGER), "a member that is gone");
        let desired = service(json!([{"name": "http", "port": 80}]));
        let mut edited = live();
        edited["spec"]["type"] = "NodePort".into();
        assert!(!desired.is_current(&edited, MANAGER), "edited by another");
        let mut taken = live();
        taken["metadata"]["managedFields"][1]["fieldsV1"]["f:spec"] = json!({"f:selector": {}});
        assert!(!desired.is_current(&taken, MANAGER), "owned by another");
    }

    #[test]
    fn selectors_of_old_deployments_stay() {
        let old = json!({"spec": {"selector": {"matchLabels": {OLD_NAME: "a", "b": "c"}},
            "template": {"metadata": {"labels": {OLD_NAME: "a"}}}}});
        let mut desired = json!({"spec": {"selector": {"matchLabels": {"b": "c"}},
            "template": {"metadata": {"labels": {"b": "c"}}}}});
        let same = desired.clone();
        keep_selector(&mut desired, &same);
        assert_eq!(desired, same);
        keep_selector(&mut desired, &old);
        assert_eq!(desired["spec"]["selector"], old["spec"]["selector"]);
        assert_eq!(
            desired["spec"]["template"]["metadata"]["labels"],
            json!({"b": "c", OLD_NAME: "a"})
        );
    }
}
