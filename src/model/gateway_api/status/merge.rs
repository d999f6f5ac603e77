//! Statuses as parts of an object's status.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::{
    Condition, Content, Entries, Entry, GatewayStatus, List, MESH_CONTROLLER, RESOLVED_REFS, Status, condition,
    gateway::INSECURE_VALIDATION, route::PARTIALLY_INVALID,
};
use crate::{api::gateway_api::common::GROUP, base::Namespace};

/// Conditions of Gateways that only some settings lead to.
const OF_GATEWAYS: [&str; 2] = [RESOLVED_REFS, INSECURE_VALIDATION];
/// Conditions of entries that hold rarely, and are absent otherwise.
const OF_ENTRIES: [&str; 1] = [PARTIALLY_INVALID];
/// Entries that the API's schemas allow in a policy.
const MAX_ANCESTORS: usize = 16;
/// Entries that the API's schemas allow in a route or InferencePool.
const MAX_PARENTS: usize = 32;

impl Status {
    /// Returns the status that an object is to have. `now` is the time of new transitions, in RFC 3339.
    ///
    /// Conditions and entries of others stay; entries of this control plane without a reason to exist are left out.
    pub fn merged(&self, existing: &Value, namespace: &Namespace, now: &str) -> Value {
        match &self.content {
            Content::Class(own) => json!({
                "conditions": condition::merged(own, &existing["conditions"], self.generation, now),
            }),
            Content::Gateway(own) => self.gateway(own, existing, now, condition::merged),
            Content::Entries(own) => self.entries(own, existing, namespace, now),
        }
    }

    /// Returns the fields to apply, of which this control plane becomes the owner. Lists of entries have one owner, so
    /// they contain the entries of others.
    pub fn applied(&self, existing: &Value, namespace: &Namespace, now: &str) -> Value {
        match &self.content {
            Content::Class(own) => json!({
                "conditions": condition::applied(own, &existing["conditions"], self.generation, now),
            }),
            Content::Gateway(own) => self.gateway(own, existing, now, condition::applied),
            Content::Entries(own) => self.entries(own, existing, namespace, now),
        }
    }

    /// Returns the fields that an apply of `applied` leaves if another field manager owns them, as a merge patch;
    /// `None` without any. Each listener has owners of its own, such as Istio in a mesh that it has served before.
    pub fn left_over(&self, applied: &Value, existing: &Value) -> Option<Value> {
        let Content::Gateway(_) = &self.content else {
            return None;
        };
        let mut fields = Map::new();
        let (listeners, sets) = ("listeners", "attachedListenerSets");
        let wanted = names(&applied[listeners]);
        if !names(&existing[listeners]).is_subset(&wanted) {
            // Only removes listeners. The others keep their owners, and the conditions of other controllers.
            let is_wanted = |listener: &&Value| listener["name"].as_str().is_some_and(|name| wanted.contains(name));
            let kept = existing[listeners].as_array().into_iter().flatten().filter(is_wanted);
            fields.insert(listeners.to_owned(), kept.cloned().collect());
        }
        if !existing[sets].is_null() && applied[sets].is_null() {
            fields.insert(sets.to_owned(), Value::Null);
        }
        (!fields.is_empty()).then_some(Value::Object(fields))
    }

    fn gateway(&self, own: &GatewayStatus, existing: &Value, now: &str, conditions: Merge) -> Value {
        let listed = existing["listeners"].as_array().map_or(&[][..], Vec::as_slice);
        let listeners = own.listeners.iter().map(|listener| {
            let existing = listed
                .iter()
                .find(|existing| existing["name"] == listener.name.as_str());
            let existing = existing.map_or(&Value::Null, |existing| &existing["conditions"]);
            let kinds = listener.kinds.iter();
            let kinds = kinds.map(|kind| json!({"group": kind.group(), "kind": kind.name()}));
            json!({
                "name": listener.name,
                "attachedRoutes": listener.attached_routes,
                "supportedKinds": kinds.collect::<Vec<_>>(),
                "conditions": conditions(&listener.conditions, existing, self.generation, now),
            })
        });
        let present = without_ended(&existing["conditions"], &OF_GATEWAYS, &own.conditions);
        let mut status = json!({
            "conditions": conditions(&own.conditions, &present, self.generation, now),
            "listeners": listeners.collect::<Vec<_>>(),
        });
        if own.attached_sets > 0 {
            status["attachedListenerSets"] = own.attached_sets.into();
        }
        let reported = &existing["addresses"];
        let addresses = own.addresses.as_ref().map(|addresses| {
            let addresses = addresses.iter();
            let addresses = addresses.map(|address| json!({"type": address.address_type, "value": address.value}));
            addresses.collect::<Vec<Value>>()
        });
        match addresses {
            // An empty list also removes the addresses of another field manager, such as Istio.
            Some(addresses) if !addresses.is_empty() || !reported.is_null() => status["addresses"] = addresses.into(),
            None if !reported.is_null() => status["addresses"] = reported.clone(),
            _ => {}
        }
        status
    }

    fn entries(&self, own: &Entries, existing: &Value, namespace: &Namespace, now: &str) -> Value {
        let (field, reference, most) = match own.list {
            List::RouteParents | List::PoolParents => ("parents", "parentRef", MAX_PARENTS),
            List::Ancestors => ("ancestors", "ancestorRef", MAX_ANCESTORS),
        };
        let entry = |own: &Entry, existing: &Value| {
            let present = without_ended(&existing["conditions"], &OF_ENTRIES, &own.conditions);
            let mut entry = json!({
                "conditions": condition::merged(&own.conditions, &present, self.generation, now),
            });
            entry[reference] = own.reference.clone();
            if !own.controller.is_empty() {
                entry["controllerName"] = own.controller.as_str().into();
            }
            entry
        };
        let identity = |controller: &str, reference: &Value| (controller.to_owned(), identity(reference, namespace));
        let left = own.entries.iter();
        let mut left: Vec<_> = left
            .map(|own| (identity(&own.controller, &own.reference), own))
            .collect();
        let listed = existing[field].as_array().map_or(&[][..], Vec::as_slice);
        let mut entries = Vec::with_capacity(listed.len() + left.len());
        for existing in listed {
            let controller = existing["controllerName"].as_str().unwrap_or_default();
            let found = identity(controller, &existing[reference]);
            match left.iter().position(|(own, _)| *own == found) {
                Some(position) => entries.push(entry(left.remove(position).1, existing)),
                None if own.owns(controller) => {}
                None if own.dropped.iter().any(|dropped| identity("", dropped) == found) => {}
                None => entries.push(existing.clone()),
            }
        }
        entries.extend(left.into_iter().map(|(_, own)| entry(own, &Value::Null)));
        entries.truncate(most);
        let mut status = json!({});
        status[field] = entries.into();
        status
    }
}

impl Entries {
    /// Returns true if entries of a controller are this control plane's.
    fn owns(&self, controller: &str) -> bool {
        match self.list {
            List::RouteParents => self.controller == controller,
            List::PoolParents => false,
            List::Ancestors => self.controller == controller || controller == MESH_CONTROLLER,
        }
    }
}

/// Returns existing conditions without those of optional types that hold no longer.
fn without_ended(existing: &Value, optional: &[&str], own: &[Condition]) -> Value {
    let mut present = existing.clone();
    if let Some(present) = present.as_array_mut() {
        let has = |kind: &Value| own.iter().any(|condition| *kind == condition.kind);
        present.retain(|condition| !optional.iter().any(|kind| condition["type"] == *kind) || has(&condition["type"]));
    }
    present
}

/// Returns the names of listeners.
fn names(listeners: &Value) -> BTreeSet<&str> {
    let listeners = listeners.as_array().into_iter().flatten();
    listeners.filter_map(|listener| listener["name"].as_str()).collect()
}

/// Merges conditions.
type Merge = fn(&[Condition], &Value, i64, &str) -> Vec<Value>;

/// Returns a text that is equal for references to the same object and section, however they are written.
fn identity(reference: &Value, namespace: &Namespace) -> String {
    let text = |field: &str, default: &str| reference[field].as_str().unwrap_or(default).to_owned();
    let port = reference["port"].as_u64().unwrap_or_default();
    [
        text("group", GROUP),
        text("kind", "Gateway"),
        text("namespace", namespace),
        text("name", ""),
        text("sectionName", ""),
        port.to_string(),
    ]
    .join("/")
}
