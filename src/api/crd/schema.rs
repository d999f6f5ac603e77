//! Structural schemas of messages, as their JSON form has them.

use std::{collections::BTreeMap, sync::OnceLock};

use prost_reflect::{FieldDescriptor, Kind, MessageDescriptor};
use serde_json::{Map, Value, json};

use super::kinds::Definition;
use crate::{api::yaml, proto::descriptor_pool};

/// The message of `status`, the same for all kinds.
const STATUS: &str = "istio.meta.v1alpha1.IstioStatus";

/// The schema of a whole object; `metadata` is the API server's own matter.
pub(super) fn of_object(definition: &Definition) -> Value {
    let mut schema = json!({
        "description": definition.about,
        "type": "object",
        "properties": { "spec": of_message_named(definition.message), "status": of_message_named(STATUS) },
    });
    if definition.needs_spec {
        schema["required"] = json!(["spec"]);
    }
    schema
}

fn of_message_named(name: &str) -> Value {
    let message = descriptor_pool()
        .get_message_by_name(name)
        .expect("because every message of the API is in the pool");
    of_message(&message)
}

fn of_message(message: &MessageDescriptor) -> Value {
    if let Some(schema) = of_well_known(message.full_name()) {
        return schema;
    }
    let mut schema = json!({ "type": "object" });
    let properties: Map<String, Value> = message
        .fields()
        .map(|field| (field.json_name().to_owned(), of_field(&field)))
        .collect();
    if !properties.is_empty() {
        schema["properties"] = Value::Object(properties);
    }
    let choices = message.oneofs().filter(|oneof| !oneof.is_synthetic());
    let mut choices: Vec<Value> = choices.map(|oneof| choice(oneof.fields())).collect();
    if choices.len() == 1 {
        schema["oneOf"] = choices.remove(0);
    } else if !choices.is_empty() {
        let choices: Vec<Value> = choices.into_iter().map(|choice| json!({ "oneOf": choice })).collect();
        schema["allOf"] = json!(choices);
    }
    if let Some(patch) = constraints().get(message.full_name()) {
        merge(&mut schema, patch);
    }
    schema
}

/// Of these fields at most one: none of them, or exactly one.
fn choice(fields: impl Iterator<Item = FieldDescriptor>) -> Value {
    let required: Vec<Value> = fields.map(|field| json!({ "required": [field.json_name()] })).collect();
    let mut choice = vec![json!({ "not": { "anyOf": required } })];
    choice.extend(required);
    Value::Array(choice)
}

fn of_field(field: &FieldDescriptor) -> Value {
    if field.is_map() {
        let entry = field.kind();
        let entry = entry.as_message().expect("because a map is a list of entries");
        let values = of_kind(&entry.map_entry_value_field().kind());
        return json!({ "type": "object", "additionalProperties": values });
    }
    if field.is_list() {
        return json!({ "type": "array", "items": of_kind(&field.kind()) });
    }
    of_kind(&field.kind())
}

fn of_kind(kind: &Kind) -> Value {
    match kind {
        Kind::Double => json!({ "type": "number", "format": "double" }),
        Kind::Float => json!({ "type": "number", "format": "float" }),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => json!({ "type": "integer", "format": "int32" }),
        Kind::Uint32 | Kind::Fixed32 => json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX }),
        // JSON of messages writes 64 bits as a string and reads either.
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => {
            json!({ "anyOf": [{ "type": "integer" }, { "type": "string" }], "x-kubernetes-int-or-string": true })
        }
        Kind::Uint64 | Kind::Fixed64 => json!({ "type": "integer", "minimum": 0 }),
        Kind::Bool => json!({ "type": "boolean" }),
        Kind::String => json!({ "type": "string" }),
        Kind::Bytes => json!({ "type": "string", "format": "byte" }),
        Kind::Enum(values) => {
            let names: Vec<String> = values.values().map(|value| value.name().to_owned()).collect();
            json!({ "type": "string", "enum": names })
        }
        Kind::Message(message) => of_message(message),
    }
}

/// The schema of a message whose JSON form is not that of its fields.
fn of_well_known(name: &str) -> Option<Value> {
    let nullable = |kind| {
        let mut schema = of_kind(&kind);
        schema["nullable"] = json!(true);
        schema
    };
    Some(match name {
        "google.protobuf.BoolValue" => nullable(Kind::Bool),
        "google.protobuf.DoubleValue" => nullable(Kind::Double),
        "google.protobuf.Int32Value" => nullable(Kind::Int32),
        "google.protobuf.UInt32Value" => nullable(Kind::Uint32),
        "google.protobuf.Duration" => json!({ "type": "string", "x-kubernetes-validations": [{
            "rule": "duration(self) >= duration('1ms')",
            "message": "must be a valid duration greater than 1ms",
        }] }),
        "google.protobuf.Struct" => json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true }),
        "google.protobuf.Timestamp" => json!({ "type": "string", "format": "date-time" }),
        _ => return None,
    })
}

/// What messages do not tell: by message, a patch of its schema.
fn constraints() -> &'static BTreeMap<String, Value> {
    static CONSTRAINTS: OnceLock<BTreeMap<String, Value>> = OnceLock::new();
    CONSTRAINTS.get_or_init(|| {
        let [document] = yaml::documents(include_str!("constraints.yaml"))[..] else {
            unreachable!("constraints.yaml is one document");
        };
        let patches = document.parse().expect("because the tests read constraints.yaml too");
        let patches: BTreeMap<String, Value> = serde_json::from_value(patches).expect("because it is one mapping");
        // What has a plain name is there to be repeated by aliases.
        patches.into_iter().filter(|(name, _)| name.contains('.')).collect()
    })
}

/// The names in `constraints.yaml`, for the test that they exist.
#[cfg(test)]
pub(super) fn constrained() -> Vec<&'static str> {
    constraints().keys().map(String::as_str).collect()
}

/// A merge patch by RFC 7386: objects are merged, `null` removes, all else replaces.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let target = target.as_object_mut().expect("because it was made one");
    for (key, value) in patch {
        if value.is_null() {
            target.remove(key);
        } else {
            merge(target.entry(key).or_insert(Value::Null), value);
        }
    }
}
