//! JSON forms of debug pages, as Istio's clients read them.
//!
//! Istio writes Go's structs: an empty list or map is `null` unless its field is omitted when it is empty.

pub(super) mod ambient;
pub(super) mod certificate;
pub(super) mod client;
pub(super) mod dump;
pub(super) mod endpoint;
pub(super) mod exposure;
pub(super) mod object;
pub(super) mod policy;
pub(super) mod proxy;
pub(super) mod scope;
pub(super) mod service;
pub(super) mod state;

use std::fmt::Display;

use serde_json::{Map, Value, json};

use crate::base::Labels;

/// Returns a time in seconds since 1970 as text.
fn time(seconds: i64) -> Value {
    time::OffsetDateTime::from_unix_timestamp(seconds).map_or(Value::Null, moment)
}

fn moment(time: time::OffsetDateTime) -> Value {
    time.format(&time::format_description::well_known::Rfc3339)
        .map_or(Value::Null, Value::String)
}

/// Returns an array, or `null` without elements.
fn list_or_null(elements: impl IntoIterator<Item = Value>) -> Value {
    let elements: Vec<Value> = elements.into_iter().collect();
    if elements.is_empty() {
        Value::Null
    } else {
        Value::Array(elements)
    }
}

/// Returns an object, or `null` without fields.
fn map_or_null<K: Display>(fields: impl IntoIterator<Item = (K, Value)>) -> Value {
    let fields: Map<String, Value> = fields
        .into_iter()
        .map(|(key, value)| (key.to_string(), value))
        .collect();
    if fields.is_empty() {
        Value::Null
    } else {
        Value::Object(fields)
    }
}

fn labels_or_null(labels: &Labels) -> Value {
    map_or_null(labels.iter().map(|(key, value)| (key, json!(value))))
}

/// Adds a text field, unless it is empty.
fn put(fields: &mut Map<String, Value>, key: &str, value: &str) {
    if !value.is_empty() {
        fields.insert(key.to_owned(), json!(value));
    }
}
