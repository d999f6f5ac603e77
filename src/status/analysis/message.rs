//! Messages in statuses: what an analysis found, and what an object's status says.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::{
    analyze::{Message, Type},
    api::{Diagnostic, Severity},
    base::SmolStr,
    status::store::is_older,
};

/// The kind (group and name), namespace and name of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Target(&'static str, &'static str, SmolStr, SmolStr);

impl Target {
    pub(super) fn new(kind: Type, namespace: &str, name: &str) -> Self {
        Self(kind.group(), kind.name(), namespace.into(), name.into())
    }
}

/// The result of an analysis: elements of `status.validationMessages` by object.
#[derive(Debug, Default)]
pub(super) struct Found(BTreeMap<Target, Vec<Value>>);

impl Found {
    /// Returns the elements of messages and of exceeded limits, which have no code of Istio.
    pub(super) fn new(messages: &[Message], exceeded: &BTreeSet<Diagnostic>) -> Self {
        let mut found = BTreeMap::<Target, Vec<Value>>::new();
        for message in messages {
            let object = &message.resource;
            let target = Target(object.group, object.kind, object.namespace.clone(), object.name.clone());
            found.entry(target).or_default().push(message.status_json());
        }
        for diagnostic in exceeded {
            let Some(kind) = diagnostic.kind else { continue };
            let key = &diagnostic.key;
            let target = Target(
                kind.group(),
                kind.name(),
                key.namespace.as_str().into(),
                key.name.clone(),
            );
            let level = match diagnostic.severity {
                Severity::Error => "ERROR",
                Severity::Warning => "WARNING",
            };
            let element = json!({"level": level, "type": {"name": diagnostic.code}});
            found.entry(target).or_default().push(element);
        }
        Self(found)
    }

    /// Returns the elements of an object.
    pub(super) fn of(&self, target: &Target) -> &[Value] {
        self.0.get(target).map_or(&[], Vec::as_slice)
    }
}

/// The messages in an object's status.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Published {
    messages: Vec<Value>,
    /// The generation that the messages are about.
    observed_generation: Option<i64>,
    generation: Option<i64>,
    resource_version: SmolStr,
}

impl Published {
    /// Removes the messages from a manifest, so that writing them does not change what is analyzed.
    pub(super) fn take(manifest: &mut Value) -> Self {
        let metadata = &manifest["metadata"];
        let generation = metadata["generation"].as_i64();
        let resource_version = metadata["resourceVersion"].as_str().unwrap_or_default().into();
        let status = manifest.get_mut("status").and_then(Value::as_object_mut);
        let (messages, observed) = match status {
            Some(status) => (status.remove("validationMessages"), status.remove("observedGeneration")),
            None => (None, None),
        };
        let is_empty = manifest
            .get("status")
            .is_some_and(|status| status.as_object().is_some_and(Map::is_empty));
        if is_empty && let Some(object) = manifest.as_object_mut() {
            object.remove("status");
        }
        Self {
            messages: match messages {
                Some(Value::Array(messages)) => messages,
                _ => Vec::new(),
            },
            observed_generation: observed.as_ref().and_then(number),
            generation,
            resource_version,
        }
    }

    /// Returns true if this is of an older version of an object than another one.
    pub(super) fn precedes(&self, other: &Self) -> bool {
        is_older(&self.resource_version, &other.resource_version)
    }

    /// Returns the fields to write, so that the status has these messages; `None` if it does.
    ///
    /// Parity (pilot/pkg/status/resourcelock.go): a status without messages is left as it is.
    pub(super) fn due(&self, messages: &[Value]) -> Option<Value> {
        let is_observed = messages.is_empty() || self.observed_generation == self.generation;
        if self.messages == messages && is_observed {
            return None;
        }
        let messages = if messages.is_empty() {
            Value::Null
        } else {
            messages.into()
        };
        let mut status = json!({"validationMessages": messages});
        if let Some(generation) = self.generation {
            status["observedGeneration"] = generation.into();
        }
        Some(json!({"metadata": {"resourceVersion": self.resource_version}, "status": status}))
    }
}

/// Reads a number, which Istio writes as text.
fn number(value: &Value) -> Option<i64> {
    match value {
        Value::String(text) => text.parse().ok(),
        other => other.as_i64(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn published(status: &Value) -> (Value, Published) {
        let metadata = json!({"name": "a", "generation": 3, "resourceVersion": "7"});
        let mut manifest = json!({"metadata": metadata, "status": status});
        let published = Published::take(&mut manifest);
        (manifest, published)
    }

    #[test]
    fn messages_are_written_once() {
        let element = json!({"type": {"code": "IST0101"}, "level": "ERROR"});
        let (_, fresh) = published(&json!({}));
        assert_eq!(fresh.due(&[]), None, "a status without messages is left");
        let fields = fresh.due(std::slice::from_ref(&element)).expect("a message to write");
        let status = json!({"validationMessages": [element], "observedGeneration": 3});
        assert_eq!(fields, json!({"metadata": {"resourceVersion": "7"}, "status": status}));
        let (manifest, written) = published(&status);
        assert!(manifest.get("status").is_none(), "messages are no input of analyses");
        assert_eq!(written.due(std::slice::from_ref(&element)), None);
        let cleared = written.due(&[]).expect("a message to remove");
        assert_eq!(
            cleared["status"],
            json!({"validationMessages": null, "observedGeneration": 3})
        );
    }

    #[test]
    fn messages_follow_the_generation() {
        let element = json!({"type": {"code": "IST0101"}});
        for (observed, is_due) in [
            (json!("3"), false),
            (json!(3), false),
            (json!(2), true),
            (json!(null), true),
        ] {
            let status = json!({"validationMessages": [element], "observedGeneration": observed, "conditions": []});
            let (manifest, written) = published(&status);
            assert_eq!(manifest["status"], json!({"conditions": []}));
            assert_eq!(
                written.due(std::slice::from_ref(&element)).is_some(),
                is_due,
                "{observed}"
            );
        }
    }
}
