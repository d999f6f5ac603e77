//! Messages to JSON: the strict mapping, without defaults.

use base64::{Engine, prelude::BASE64_STANDARD};
use prost_reflect::{DynamicMessage, FieldDescriptor, Kind, MapKey, ReflectMessage, Value};
use serde_json::{Map, Value as Json, json};

use super::{descriptor_by_url, well_known};

/// The maximum nesting of packed messages. Decoding limits the depth within each, so this bounds the whole.
const MAX_ANY_DEPTH: usize = 32;

pub(super) fn message(message: &DynamicMessage, depth: usize) -> Json {
    match message.descriptor().full_name() {
        "google.protobuf.Any" => any(&text(message, "type_url"), &bytes(message, "value"), depth),
        "google.protobuf.Duration" => Json::from(well_known::duration_text(
            int64(message, "seconds"),
            int32(message, "nanos"),
        )),
        "google.protobuf.Timestamp" => Json::from(well_known::timestamp_text(
            int64(message, "seconds"),
            int32(message, "nanos"),
        )),
        "google.protobuf.FieldMask" => field_mask(message),
        "google.protobuf.Value" => free_value(message, depth),
        "google.protobuf.Struct" => inner(message, "fields", depth).unwrap_or_else(|| json!({})),
        "google.protobuf.ListValue" => inner(message, "values", depth).unwrap_or_else(|| json!([])),
        name if is_wrapper(name) => wrapped(message),
        _ => Json::Object(fields(message, depth)),
    }
}

/// Returns the packed message with its type under `@type`; types with their own JSON form are under `value`.
pub(super) fn any(type_url: &str, value: &[u8], depth: usize) -> Json {
    if type_url.is_empty() && value.is_empty() {
        return json!({});
    }
    let decoded = descriptor_by_url(type_url)
        .filter(|_| depth < MAX_ANY_DEPTH)
        .and_then(|descriptor| DynamicMessage::decode(descriptor, value).ok());
    let Some(decoded) = decoded else {
        return json!({ "@type": type_url, "value": BASE64_STANDARD.encode(value) });
    };
    if has_own_form(decoded.descriptor().full_name()) {
        return json!({ "@type": type_url, "value": message(&decoded, depth + 1) });
    }
    let mut object = fields(&decoded, depth + 1);
    object.insert("@type".to_owned(), Json::from(type_url));
    Json::Object(object)
}

/// True if the JSON form is not the object of the message's fields.
pub(super) fn has_own_form(full_name: &str) -> bool {
    is_wrapper(full_name)
        || matches!(
            full_name.strip_prefix("google.protobuf."),
            Some("Any" | "Duration" | "Timestamp" | "FieldMask" | "Value" | "Struct" | "ListValue" | "Empty")
        )
}

/// True if the message is a scalar with presence.
pub(super) fn is_wrapper(full_name: &str) -> bool {
    matches!(
        full_name.strip_prefix("google.protobuf."),
        Some(
            "DoubleValue"
                | "FloatValue"
                | "Int64Value"
                | "UInt64Value"
                | "Int32Value"
                | "UInt32Value"
                | "BoolValue"
                | "StringValue"
                | "BytesValue"
        )
    )
}

fn fields(message: &DynamicMessage, depth: usize) -> Map<String, Json> {
    let set = message.fields();
    set.map(|(field, value)| (field.json_name().to_owned(), field_value(&field, value, depth)))
        .collect()
}

fn field_value(field: &FieldDescriptor, value: &Value, depth: usize) -> Json {
    match value {
        Value::List(items) => items.iter().map(|item| single(&field.kind(), item, depth)).collect(),
        Value::Map(entries) => {
            let entry = field.kind();
            let kind = entry.as_message().map(|entry| entry.map_entry_value_field().kind());
            let kind = kind.expect("because the kind of a map field is its entry message");
            // The reflected map has no order.
            let mut entries: Vec<_> = entries.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            Json::Object(
                entries
                    .into_iter()
                    .map(|(key, value)| (key_text(key), single(&kind, value, depth)))
                    .collect(),
            )
        }
        value => single(&field.kind(), value, depth),
    }
}

fn key_text(key: &MapKey) -> String {
    match key {
        MapKey::Bool(key) => key.to_string(),
        MapKey::I32(key) => key.to_string(),
        MapKey::I64(key) => key.to_string(),
        MapKey::U32(key) => key.to_string(),
        MapKey::U64(key) => key.to_string(),
        MapKey::String(key) => key.clone(),
    }
}

fn single(kind: &Kind, value: &Value, depth: usize) -> Json {
    match value {
        Value::Bool(value) => Json::from(*value),
        Value::I32(value) => Json::from(*value),
        Value::U32(value) => Json::from(*value),
        // Numbers of JavaScript cannot hold 64 bits, so the mapping uses text.
        Value::I64(value) => Json::from(value.to_string()),
        Value::U64(value) => Json::from(value.to_string()),
        Value::F32(value) => well_known::float(*value),
        Value::F64(value) => well_known::number(*value),
        Value::String(value) => Json::from(value.as_str()),
        Value::Bytes(value) => Json::from(BASE64_STANDARD.encode(value)),
        Value::EnumNumber(number) => enum_value(kind, *number),
        Value::Message(value) => message(value, depth),
        // Unreachable: lists and maps are fields, not values of lists or maps.
        Value::List(_) | Value::Map(_) => Json::Null,
    }
}

fn enum_value(kind: &Kind, number: i32) -> Json {
    let Some(descriptor) = kind.as_enum() else {
        return Json::from(number);
    };
    if descriptor.full_name() == "google.protobuf.NullValue" {
        return Json::Null;
    }
    descriptor
        .get_value(number)
        .map_or_else(|| Json::from(number), |value| Json::from(value.name()))
}

fn field_mask(message: &DynamicMessage) -> Json {
    let paths = message.get_field_by_name("paths");
    let paths = paths.as_deref().and_then(Value::as_list).unwrap_or_default();
    Json::from(well_known::field_mask_text(paths.iter().filter_map(Value::as_str)))
}

fn free_value(message: &DynamicMessage, depth: usize) -> Json {
    let set = message.fields().next();
    set.map_or(Json::Null, |(field, value)| field_value(&field, value, depth))
}

fn inner(message: &DynamicMessage, name: &str, depth: usize) -> Option<Json> {
    let field = message.descriptor().get_field_by_name(name)?;
    message
        .has_field(&field)
        .then(|| field_value(&field, &message.get_field(&field), depth))
}

fn wrapped(message: &DynamicMessage) -> Json {
    let field = message
        .descriptor()
        .get_field(1)
        .expect("because every wrapper has the one field");
    single(&field.kind(), &message.get_field(&field), 0)
}

fn text(message: &DynamicMessage, name: &str) -> String {
    let value = message.get_field_by_name(name);
    value.as_deref().and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn bytes(message: &DynamicMessage, name: &str) -> bytes::Bytes {
    let value = message.get_field_by_name(name);
    value.as_deref().and_then(Value::as_bytes).cloned().unwrap_or_default()
}

fn int64(message: &DynamicMessage, name: &str) -> i64 {
    message
        .get_field_by_name(name)
        .and_then(|value| value.as_i64())
        .unwrap_or_default()
}

fn int32(message: &DynamicMessage, name: &str) -> i32 {
    message
        .get_field_by_name(name)
        .and_then(|value| value.as_i32())
        .unwrap_or_default()
}
