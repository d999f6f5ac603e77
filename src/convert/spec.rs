//! Access to old specifications, whose fields are written in camel case or snake case.

use serde_json::{Map, Value};

/// A part of a specification; absent parts are null.
#[derive(Clone, Copy)]
pub(super) struct Spec<'a>(pub(super) &'a Value);

impl<'a> Spec<'a> {
    /// Returns a field, by its name in camel case.
    pub(super) fn get(self, name: &str) -> Self {
        let value = &self.0[name];
        if !value.is_null() {
            return Self(value);
        }
        let mut snake = String::new();
        for character in name.chars() {
            if character.is_ascii_uppercase() {
                snake.push('_');
            }
            snake.push(character.to_ascii_lowercase());
        }
        Self(&self.0[snake.as_str()])
    }

    /// Returns true if the part is absent, or has no content.
    pub(super) fn is_empty(self) -> bool {
        match self.0 {
            Value::Null => true,
            Value::Bool(value) => !value,
            Value::String(text) => text.is_empty(),
            Value::Array(items) => items.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::Number(_) => false,
        }
    }

    /// Returns true if the part is written at all, even without content.
    pub(super) fn has(self, name: &str) -> bool {
        self.0.as_object().is_some_and(|map| map.contains_key(name)) || !self.get(name).0.is_null()
    }

    /// Returns the text of a field that is not empty.
    pub(super) fn text(self, name: &str) -> Option<&'a str> {
        self.get(name).0.as_str().filter(|text| !text.is_empty())
    }

    /// Returns the integer of a field; numbers may be written as text.
    pub(super) fn integer(self, name: &str) -> Option<i64> {
        match self.get(name).0 {
            Value::Number(number) => number.as_i64().or_else(|| number.as_f64().map(|number| number as i64)),
            Value::String(text) => text.parse().ok(),
            _ => None,
        }
    }

    /// Returns true if the field is true.
    pub(super) fn is_true(self, name: &str) -> bool {
        self.get(name).0 == &Value::Bool(true)
    }

    /// Returns the items of a field.
    pub(super) fn items(self, name: &str) -> impl Iterator<Item = Spec<'a>> + use<'a> {
        let items = self.get(name).0.as_array().map(Vec::as_slice).unwrap_or_default();
        items.iter().map(Spec)
    }

    /// Returns the texts of a list.
    pub(super) fn texts(self, name: &str) -> Vec<String> {
        let items = self.items(name).filter_map(|item| item.0.as_str());
        items.map(str::to_owned).collect()
    }

    /// Returns the entries of a map.
    pub(super) fn entries(self, name: &str) -> impl Iterator<Item = (&'a str, Spec<'a>)> + use<'a> {
        let map = self.get(name).0.as_object();
        map.into_iter()
            .flatten()
            .map(|(key, value)| (key.as_str(), Spec(value)))
    }

    /// Returns a map of texts.
    pub(super) fn labels(self, name: &str) -> Map<String, Value> {
        let texts = self.entries(name).filter(|(_, value)| value.0.is_string());
        texts.map(|(key, value)| (key.to_owned(), value.0.clone())).collect()
    }
}
