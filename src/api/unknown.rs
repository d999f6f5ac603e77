//! Fields of a JSON object that its message does not have: told as a warning, for they are mostly spelling mistakes.

use prost_reflect::{Kind, MessageDescriptor};
use serde_json::Value;

/// The most fields that are named; more than that is another kind of mistake.
const MOST: usize = 20;

/// The paths of unknown fields, in the names of the input.
pub fn unknown_fields(descriptor: &MessageDescriptor, value: &Value) -> Vec<String> {
    let mut search = Search::default();
    search.message(descriptor, value);
    search.found
}

#[derive(Default)]
struct Search {
    path: String,
    found: Vec<String>,
}

impl Search {
    fn message(&mut self, descriptor: &MessageDescriptor, value: &Value) {
        // Google's own types have JSON forms of their own.
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

    /// Goes one step down and back.
    fn within(&mut self, step: &str, body: impl FnOnce(&mut Self)) {
        let length = self.path.len();
        if length > 0 && !step.starts_with('[') {
            self.path.push('.');
        }
        self.path.push_str(step);
        body(self);
        self.path.truncate(length);
    }
}
