//! Unknown fields of JSON objects. They are reported as warnings, as most are spelling mistakes.

use prost_reflect::{Kind, MessageDescriptor};
use serde_json::Value;

/// The maximum number of fields that are reported for an object.
const MOST: usize = 20;

/// Returns the paths of unknown fields, spelled as in the input.
pub fn unknown_fields(descriptor: &MessageDescriptor, value: &Value) -> Vec<String> {
    let mut search = Search::default();
    search.message(descriptor, value);
    search.found
}

/// Extends the path of a field by one step: a name, or a position in brackets. Returns the former length.
pub(super) fn extend_path(path: &mut String, step: &str) -> usize {
    let length = path.len();
    if length > 0 && !step.starts_with('[') {
        path.push('.');
    }
    path.push_str(step);
    length
}

#[derive(Default)]
struct Search {
    path: String,
    found: Vec<String>,
}

impl Search {
    fn message(&mut self, descriptor: &MessageDescriptor, value: &Value) {
        // Google's well-known types have their own JSON forms.
        let (Value::Object(object), false) = (value, descriptor.package_name() == "google.protobuf") else {
            return;
        };
        for (name, value) in object {
            let field = descriptor
                .get_field_by_json_name(name)
                .or_else(|| descriptor.get_field_by_name(name));
            self.within(name, |search| match field {
                None if search.found.len() < MOST => search.found.push(search.path.clone()),
                None => {}
                Some(field) if field.is_map() => {
                    if let Kind::Message(entry) = field.kind() {
                        search.entries(&entry.map_entry_value_field().kind(), value);
                    }
                }
                Some(field) => search.field(&field.kind(), value),
            });
        }
    }

    fn field(&mut self, kind: &Kind, value: &Value) {
        let Kind::Message(descriptor) = kind else { return };
        match value {
            Value::Array(values) => {
                for (position, value) in values.iter().enumerate() {
                    self.within(&format!("[{position}]"), |search| search.message(descriptor, value));
                }
            }
            other => self.message(descriptor, other),
        }
    }

    fn entries(&mut self, kind: &Kind, value: &Value) {
        let (Kind::Message(descriptor), Value::Object(entries)) = (kind, value) else {
            return;
        };
        for (key, value) in entries {
            self.within(key, |search| search.message(descriptor, value));
        }
    }

    /// Runs `body` with the path extended by one step.
    fn within(&mut self, step: &str, body: impl FnOnce(&mut Self)) {
        let length = extend_path(&mut self.path, step);
        body(self);
        self.path.truncate(length);
    }
}
