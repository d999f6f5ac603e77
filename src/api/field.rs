//! Reads JSON objects field by field. Absent and null fields are empty; a field of a wrong type is an error with its
//! path.

use std::cell::RefCell;

use serde_json::{Map, Value};
use smol_str::SmolStr;

use crate::base::Labels;

/// An error in one field of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
#[error("{field}: {message}")]
pub struct FieldError {
    /// The field as a path, such as `spec.ports[0].port`; empty for the object as a whole.
    pub field: String,
    /// The reason, for people.
    pub message: String,
}

/// Collects the errors of one object.
#[derive(Debug, Default)]
pub struct FieldErrors {
    errors: RefCell<Vec<FieldError>>,
}

impl FieldErrors {
    /// Records an error.
    pub fn add(&self, field: impl Into<String>, message: impl Into<String>) {
        self.errors.borrow_mut().push(FieldError {
            field: field.into(),
            message: message.into(),
        });
    }

    /// Returns the value, or the recorded errors and clears them.
    pub fn finish<T>(&self, value: T) -> Result<T, Vec<FieldError>> {
        let errors = self.errors.take();
        if errors.is_empty() { Ok(value) } else { Err(errors) }
    }
}

/// A JSON object with its path. An absent object reads as an empty one.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    path: String,
    map: Option<&'a Map<String, Value>>,
    errors: &'a FieldErrors,
}

impl<'a> Fields<'a> {
    /// Returns the object of a document.
    pub fn root(value: &'a Value, errors: &'a FieldErrors) -> Self {
        Self::new(String::new(), value, errors)
    }

    fn new(path: String, value: &'a Value, errors: &'a FieldErrors) -> Self {
        let map = match value {
            Value::Object(map) => Some(map),
            Value::Null => None,
            other => {
                errors.add(path.as_str(), format!("expected an object, got {}", type_of(other)));
                None
            }
        };
        Self { path, map, errors }
    }

    fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    fn value(&self, name: &str) -> Option<&'a Value> {
        self.map?.get(name).filter(|value| !value.is_null())
    }

    /// Returns true if the field exists and is not null.
    pub fn has(&self, name: &str) -> bool {
        self.value(name).is_some()
    }

    /// Records an error about a field.
    pub fn error(&self, name: &str, message: impl Into<String>) {
        self.errors.add(self.path_of(name), message);
    }

    fn wrong<T>(&self, name: &str, expected: &str, value: &Value) -> Option<T> {
        self.error(name, format!("expected {expected}, got {}", type_of(value)));
        None
    }

    /// Returns the object in a field.
    pub fn object(&self, name: &str) -> Self {
        match self.value(name) {
            Some(value) => Self::new(self.path_of(name), value, self.errors),
            None => Self {
                path: self.path_of(name),
                map: None,
                errors: self.errors,
            },
        }
    }

    /// Returns the objects of a list.
    pub fn objects(&self, name: &str) -> Vec<Self> {
        self.list(name)
            .iter()
            .enumerate()
            .map(|(i, value)| Self::new(format!("{}[{i}]", self.path_of(name)), value, self.errors))
            .collect()
    }

    fn list(&self, name: &str) -> &'a [Value] {
        match self.value(name) {
            Some(Value::Array(values)) => values,
            Some(other) => self.wrong(name, "a list", other).unwrap_or_default(),
            None => &[],
        }
    }

    /// Returns the texts of a list.
    pub fn texts(&self, name: &str) -> Vec<SmolStr> {
        let list = self.list(name);
        // Rows live long, and most lists have one text. A collected one would have room for four.
        let mut texts = Vec::with_capacity(list.len());
        let values = list.iter().enumerate();
        texts.extend(values.filter_map(|(i, value)| self.text_of(value, || format!("{name}[{i}]"))));
        texts
    }

    /// Returns the texts of a list, where null is an empty text: for what Go reads without the schema of a CRD.
    pub fn nullable_texts(&self, name: &str) -> Vec<SmolStr> {
        let texts = self.list(name).iter().enumerate();
        texts
            .filter_map(|(i, value)| self.nullable_text_of(value, || format!("{name}[{i}]")))
            .collect()
    }

    fn text_of(&self, value: &Value, name: impl FnOnce() -> String) -> Option<SmolStr> {
        scalar_text(value).or_else(|| self.wrong(&name(), "a string", value))
    }

    fn nullable_text_of(&self, value: &Value, name: impl FnOnce() -> String) -> Option<SmolStr> {
        match value {
            Value::Null => Some(SmolStr::default()),
            value => self.text_of(value, name),
        }
    }

    /// Returns a text; `None` if absent.
    pub fn optional_text(&self, name: &str) -> Option<SmolStr> {
        self.text_of(self.value(name)?, || name.to_owned())
    }

    /// Returns a text; empty if absent.
    pub fn text(&self, name: &str) -> SmolStr {
        self.optional_text(name).unwrap_or_default()
    }

    /// Returns an unsigned number of 32 bits.
    pub fn number(&self, name: &str) -> Option<u32> {
        let value = self.value(name)?;
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        match (number, value) {
            (Some(number), _) => Some(number),
            (None, Value::Number(other)) => {
                self.error(name, format!("{other} is out of range, want 0 to {}", u32::MAX));
                None
            }
            (None, other) => self.wrong(name, "a number", other),
        }
    }

    /// Returns a port number (0 to 65535); 0 if absent.
    pub fn port(&self, name: &str) -> u32 {
        match self.number(name) {
            Some(port) if port > 65_535 => {
                self.error(name, format!("{port} is not a port, want 0 to 65535"));
                0
            }
            port => port.unwrap_or_default(),
        }
    }

    /// Returns a boolean; `None` if absent.
    pub fn flag(&self, name: &str) -> Option<bool> {
        match self.value(name)? {
            Value::Bool(flag) => Some(*flag),
            other => self.wrong(name, "a boolean", other),
        }
    }

    /// Returns a map of texts.
    pub fn labels(&self, name: &str) -> Labels {
        let Some(map) = self.object(name).map else {
            return Labels::new();
        };
        let mut labels = Labels::with_capacity(map.len());
        labels.extend(map.iter().filter_map(|(key, value)| {
            let text = self.nullable_text_of(value, || format!("{name}.{key}"))?;
            Some((SmolStr::new(key), text))
        }));
        labels
    }

    /// Returns a field that may be a number or a text, such as Kubernetes' `IntOrString`.
    pub fn raw(&self, name: &str) -> Option<&'a Value> {
        self.value(name)
    }
}

/// Returns a scalar as text. YAML reads `name: off` as a boolean and `version: 1` as a number. Where text is wanted
/// they become text as in JSON (`false`, `1`), as in `sigs.k8s.io/yaml`.
pub(super) fn scalar_text(value: &Value) -> Option<SmolStr> {
    match value {
        Value::String(text) => Some(SmolStr::new(text)),
        Value::Bool(flag) => Some(SmolStr::new_static(if *flag { "true" } else { "false" })),
        Value::Number(number) => Some(match number.as_f64() {
            Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() < 1e6 => {
                SmolStr::new(format!("{float:.0}"))
            }
            _ => SmolStr::new(number.to_string()),
        }),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
