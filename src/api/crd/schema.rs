//! Structural schemas of messages in their JSON form.

use std::{collections::BTreeMap, sync::OnceLock};

use prost_reflect::{FieldDescriptor, Kind, MessageDescriptor};
use serde_json::{Map, Value, json};

use super::kinds::KindDefinition;
use crate::{api::yaml, proto::message_descriptor};

/// The message of `status`, the same for all kinds.
const STATUS: &str = "istio.meta.v1alpha1.IstioStatus";

/// Returns the schema of an object without `metadata`, which the API server defines.
pub(super) fn of_object(kind_definition: &KindDefinition) -> Value {
    let KindDefinition {
        message, definition, ..
    } = kind_definition;
    let mut schema = json!({
        "description": definition.description,
        "type": "object",
        "properties": { "spec": of_message_named(message), "status": of_message_named(STATUS) },
    });
    if definition.requires_spec {
        schema["required"] = json!(["spec"]);
    }
    schema
}

fn of_message_named(name: &str) -> Value {
    let message = message_descriptor(name).expect("because the pool has every message of the API");
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

/// Returns the constraint of a oneof: none of the fields, or exactly one.
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
        // Protobuf JSON writes 64-bit integers as strings and reads both.
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

/// Returns the schema of a message with a JSON form of its own.
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

/// Returns the patches of `constraints.yaml` by message name.
fn constraints() -> &'static BTreeMap<String, Value> {
    static CONSTRAINTS: OnceLock<BTreeMap<String, Value>> = OnceLock::new();
    CONSTRAINTS.get_or_init(|| {
        let [document] = yaml::documents(include_str!("constraints.yaml"))[..] else {
            unreachable!("constraints.yaml is one document");
        };
        let patches = document.parse().expect("because tests read constraints.yaml");
        let patches: BTreeMap<String, Value> =
            serde_json::from_value(patches).expect("because the document is a mapping");
        // Plain names are YAML anchors for reuse.
        patches.into_iter().filter(|(name, _)| name.contains('.')).collect()
    })
}

/// Returns the message names in `constraints.yaml`.
#[cfg(test)]
pub(super) fn constrained() -> Vec<&'static str> {
    constraints().keys().map(String::as_str).collect()
}

/// Applies a merge patch (RFC 7386): objects are merged, `null` removes, other values replace.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let target = target.as_object_mut().expect("because the value is an object");
    for (key, value) in patch {
        if value.is_null() {
            target.remove(key);
        } else {
            merge(target.entry(key).or_insert(Value::Null), value);
        }
    }
}
