//! The data of templates: Istio's `SidecarTemplateData` with the types that it has in Go.

mod duration;
mod kube;
mod message;
mod quantity;

use std::sync::Arc;

use serde_json::Value as Json;

use crate::template::{Context, Escapes, Failure, Function, Layout, Limits, NoHost, Object, Type, Value, encode_json};

pub(super) use kube::{list as kube_list, value as kube_value};
pub(super) use message::{call, message};

/// A struct with fields.
pub(super) struct Fields {
    type_name: &'static str,
    fields: Vec<(&'static str, Value)>,
    /// An embedded struct, whose fields and methods are also those of this one.
    embedded: Option<Value>,
}

impl Fields {
    /// Returns a pointer to a struct.
    pub(super) fn pointer(type_name: &'static str, fields: Vec<(&'static str, Value)>) -> Value {
        Value::object(Self {
            type_name,
            fields,
            embedded: None,
        })
    }

    /// Returns a pointer to a struct that embeds another one.
    pub(super) fn embedding(embedded: Value, type_name: &'static str, fields: Vec<(&'static str, Value)>) -> Value {
        Value::object(Self {
            type_name,
            fields,
            embedded: Some(embedded),
        })
    }

    fn embedded(&self) -> Option<&Arc<dyn Object>> {
        match &self.embedded {
            Some(Value::Object(object)) => Some(object),
            _ => None,
        }
    }
}

impl Object for Fields {
    fn type_of(&self) -> Type {
        Type::named(self.type_name).pointer()
    }

    fn field_names(&self) -> Vec<&str> {
        self.fields.iter().map(|(name, _)| *name).collect()
    }

    fn field(&self, name: &str) -> Option<Value> {
        match self.fields.iter().find(|(field, _)| *field == name) {
            Some((_, value)) => Some(value.clone()),
            None => self.embedded()?.field(name),
        }
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        self.embedded()?.method(name)
    }
}

/// A name with its namespace.
struct NamespacedName {
    namespace: String,
    name: String,
}

/// Returns a name with its namespace.
pub(super) fn namespaced_name(namespace: &str, name: &str) -> Value {
    Value::object(NamespacedName {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    })
}

impl Object for NamespacedName {
    fn type_of(&self) -> Type {
        Type::named("types.NamespacedName")
    }

    fn field_names(&self) -> Vec<&str> {
        vec!["Namespace", "Name"]
    }

    fn field(&self, name: &str) -> Option<Value> {
        match name {
            "Namespace" => Some(self.namespace.as_str().into()),
            "Name" => Some(self.name.as_str().into()),
            _ => None,
        }
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        let text = self.to_text()?;
        (name == "String").then(|| Arc::new(Function::getter(name, text.into())))
    }

    fn to_text(&self) -> Option<String> {
        Some(format!("{}/{}", self.namespace, self.name))
    }
}

/// A value of a named type that prints as text, such as an enum.
struct Scalar {
    type_name: &'static str,
    text: Arc<str>,
    basic: Option<Value>,
    json: Value,
}

impl Object for Scalar {
    fn type_of(&self) -> Type {
        Type::named(self.type_name)
    }

    fn basic(&self) -> Option<Value> {
        self.basic.clone()
    }

    fn to_text(&self) -> Option<String> {
        Some(self.text.as_ref().to_owned())
    }

    fn to_json(&self) -> Option<Value> {
        Some(self.json.clone())
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        let text = self.text.as_ref();
        (name == "String").then(|| Arc::new(Function::getter(name, text.into())))
    }
}

/// Returns the text of a JSON scalar.
fn text_of(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        Json::Null => String::new(),
        other => other.to_string(),
    }
}

/// Returns a value as Go's JSON, with escapes for HTML.
pub(super) fn go_json(value: &Value) -> Result<String, Failure> {
    let limits = Limits::default();
    let mut context = Context::new(&limits, &NoHost);
    let bytes = encode_json(&mut context, value, Layout::Compact, Escapes::Html)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
