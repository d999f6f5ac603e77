//! JSON objects with more than a message takes: one field in two spellings, or several members of a oneof.
//!
//! Parity (golang/protobuf, jsonpb/decode.go, unmarshalMessage): Istio takes the spelling of JSON, and the member that
//! is declared last.

use prost_reflect::{FieldDescriptor, Kind, MessageDescriptor};
use serde_json::{Map, Value};

use super::unknown::extend_path;

/// Removes what Istio does not take. Returns the paths of the removed fields, spelled as in the input.
pub fn remove_overridden(descriptor: &MessageDescriptor, value: &mut Value) -> Vec<String> {
    let mut removal = Removal::default();
    removal.message(descriptor, value);
    removal.removed
}

#[derive(Default)]
struct Removal {
    path: String,
    removed: Vec<String>,
}

impl Removal {
    fn message(&mut self, descriptor: &MessageDescriptor, value: &mut Value) {
        // Google's well-known types have their own JSON forms.
        let (Value::Object(object), false) = (value, descriptor.package_name() == "google.protobuf") else {
            return;
        };
        for field in descriptor.fields() {
            if field.name() != field.json_name() && is_set(object, field.json_name()) {
                self.remove(object, field.name());
            }
        }
        for oneof in descriptor.oneofs() {
            let members = oneof.fields().filter(|field| is_given(object, field));
            let members: Vec<FieldDescriptor> = members.collect();
            let Some((_, overridden)) = members.split_last() else {
                continue;
            };
            for field in overridden {
                self.remove(object, field.name());
                self.remove(object, field.json_name());
            }
        }
        for (name, value) in object {
            let field = descriptor
                .get_field_by_json_name(name)
                .or_else(|| descriptor.get_field_by_name(name));
            if let Some(field) = field {
                self.within(name, |removal| removal.field(&field, value));
            }
        }
    }

    fn field(&mut self, field: &FieldDescriptor, value: &mut Value) {
        let Kind::Message(descriptor) = field.kind() else {
            return;
        };
        match value {
            Value::Object(entries) if field.is_map() => {
                let Kind::Message(descriptor) = descriptor.map_entry_value_field().kind() else {
                    return;
                };
                for (key, value) in entries {
                    self.within(key, |removal| removal.message(&descriptor, value));
                }
            }
            Value::Array(values) => {
                for (position, value) in values.iter_mut().enumerate() {
                    self.within(&format!("[{position}]"), |removal| removal.message(&descriptor, value));
                }
            }
            other => self.message(&descriptor, other),
        }
    }

    fn remove(&mut self, object: &mut Map<String, Value>, name: &str) {
        if object.remove(name).is_some_and(|value| !value.is_null()) {
            self.within(name, |removal| removal.removed.push(removal.path.clone()));
        }
    }

    /// Runs `body` with the path extended by one step.
    fn within(&mut self, step: &str, body: impl FnOnce(&mut Self)) {
        let length = extend_path(&mut self.path, step);
        body(self);
        self.path.truncate(length);
    }
}

fn is_given(object: &Map<String, Value>, field: &FieldDescriptor) -> bool {
    is_set(object, field.json_name()) || is_set(object, field.name())
}

fn is_set(object: &Map<String, Value>, name: &str) -> bool {
    object.get(name).is_some_and(|value| !value.is_null())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::proto::message_descriptor;

    #[test]
    fn the_last_declared_member_and_the_spelling_of_json_count() {
        let descriptor = message_descriptor("istio.mesh.v1alpha1.MeshConfig").expect("a message of the API");
        let mut value = json!({"trust_domain": "a", "trustDomain": "b", "ingress_class": "c",
            "defaultConfig": {"proxyMetadata": {"a_b": "1", "aB": "2"},
                "tracing": {"lightstep": {"address": "l:1"}, "zipkin": {"address": "z:1"}, "datadog": null}},
            "extensionProviders": [{"name": "x", "envoyOtelAls": {"port": 1}, "envoy_file_access_log": {"path": "/p"}}]});
        let removed = remove_overridden(&descriptor, &mut value);
        assert_eq!(
            removed,
            [
                "trust_domain",
                "defaultConfig.tracing.zipkin",
                "extensionProviders[0].envoy_file_access_log"
            ]
        );
        assert_eq!(value["trustDomain"], "b");
        assert_eq!(value["defaultConfig"]["proxyMetadata"], json!({"a_b": "1", "aB": "2"}));
        assert_eq!(value["defaultConfig"]["tracing"]["lightstep"]["address"], "l:1");
        assert_eq!(remove_overridden(&descriptor, &mut value), [""; 0]);
    }
}
