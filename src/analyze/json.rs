//! Lenient access to manifests: a field of a wrong type counts as missing. The schema analyzer reports it.

use serde_json::Value;

use crate::base::{Labels, SmolStr};

/// Returns a text, or an empty one.
pub(super) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Returns the items of a list.
pub(super) fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Returns the texts of a list.
pub(super) fn texts(value: &Value) -> impl Iterator<Item = &str> {
    items(value).iter().filter_map(Value::as_str)
}

/// Returns a map of texts.
pub(super) fn labels(value: &Value) -> Labels {
    let fields = value.as_object().into_iter().flatten();
    fields
        .filter_map(|(key, value)| Some((SmolStr::new(key), SmolStr::new(value.as_str()?))))
        .collect()
}

/// Returns a field of a list's item with its position, such as `spec.gateways[1]`.
pub(super) fn indexed<'a>(path: &str, value: &'a Value) -> impl Iterator<Item = (String, &'a Value)> {
    let entries = items(value).iter().enumerate();
    entries.map(move |(index, item)| (format!("{path}[{index}]"), item))
}

/// Returns a selector as text: `a=b,c=d`.
pub(super) fn selector_text(selector: &Labels) -> String {
    let pairs: Vec<String> = selector.iter().map(|(key, value)| format!("{key}={value}")).collect();
    pairs.join(",")
}

/// Returns true if a field is present and not null.
pub(super) fn is_set(value: &Value) -> bool {
    !value.is_null()
}
