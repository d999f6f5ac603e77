//! Objects whose `spec` is a Rust type, read by serde. Errors name the path of the field. Unknown fields are ignored,
//! as API groups grow.

use std::borrow::Cow;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::{Config, FieldError, Meta};
use crate::base::Shared;

/// Parses the `spec` of a manifest.
pub fn parse<T: DeserializeOwned>(meta: Shared<Meta>, object: &Value) -> Result<Config<T>, Vec<FieldError>> {
    let spec = match &object["spec"] {
        Value::Null => Cow::Owned(Value::Object(Map::new())),
        // Null means absent. API servers remove nulls, files may contain them.
        spec if has_null(spec) => Cow::Owned(without_nulls(spec)),
        spec => Cow::Borrowed(spec),
    };
    match serde_path_to_error::deserialize(&*spec) {
        Ok(spec) => Ok(Config {
            status: meta.kind.status_of(object),
            meta,
            spec,
        }),
        Err(error) => {
            let field = match error.path().to_string() {
                path if path == "." => "spec".to_owned(),
                path => format!("spec.{path}"),
            };
            let message = error.into_inner().to_string();
            Err(vec![FieldError { field, message }])
        }
    }
}

fn has_null(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(values) => values.iter().any(has_null),
        Value::Object(map) => map.values().any(has_null),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Array(values) => values.iter().map(without_nulls).collect(),
        Value::Object(map) => {
            let kept = map.iter().filter(|(_, value)| !value.is_null());
            kept.map(|(key, value)| (key.clone(), without_nulls(value))).collect()
        }
        other => other.clone(),
    }
}
