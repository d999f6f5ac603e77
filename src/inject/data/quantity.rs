//! Kubernetes' quantities and lists of resources, and ports that are numbers or names, with their methods in Go.

use std::sync::Arc;

use serde_json::Value as Json;

use super::text_of;
use crate::{
    inject::schema::quantity_in_nanos,
    template::{Function, IntType, Map, Object, Type, Value},
};

const ONE: i128 = 1_000_000_000;
const MILLI: i128 = 1_000_000;

/// A quantity such as `100m`.
struct Quantity(String);

/// Returns a quantity; 0 if it is unset.
pub(super) fn quantity(value: Option<&Json>) -> Value {
    Value::object(Quantity(value.map_or_else(|| "0".to_owned(), text_of)))
}

impl Quantity {
    /// Returns the number of units, rounded away from zero; 0 if there are too many.
    fn in_units(&self, nanos: i128) -> Value {
        let own = quantity_in_nanos(&self.0).unwrap_or_default();
        let units = own / nanos + (own % nanos).signum();
        Value::int64(i64::try_from(units).unwrap_or_default())
    }
}

impl Object for Quantity {
    fn type_of(&self) -> Type {
        Type::named("resource.Quantity")
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        let value = match name {
            "String" => self.0.as_str().into(),
            "Value" => self.in_units(ONE),
            "MilliValue" => self.in_units(MILLI),
            "IsZero" => (quantity_in_nanos(&self.0).unwrap_or_default() == 0).into(),
            _ => return None,
        };
        Some(getter(name, value))
    }

    fn to_text(&self) -> Option<String> {
        Some(self.0.clone())
    }

    fn to_json(&self) -> Option<Value> {
        Some(self.0.as_str().into())
    }
}

/// The name of the type of lists of resources.
pub(super) const RESOURCE_LIST: &str = "v1.ResourceList";

/// Quantities by the names of resources, such as limits of a container.
struct ResourceList(Map);

/// Returns a list of resources.
pub(super) fn resource_list(quantities: Map) -> Value {
    Value::object(ResourceList(quantities))
}

impl Object for ResourceList {
    fn type_of(&self) -> Type {
        Type::named(RESOURCE_LIST)
    }

    fn basic(&self) -> Option<Value> {
        Some(Value::Map(self.0.clone()))
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        let resource = match name {
            "Cpu" => "cpu",
            "Memory" => "memory",
            "Storage" => "storage",
            "StorageEphemeral" => "ephemeral-storage",
            "Pods" => "pods",
            _ => return None,
        };
        let found = self.0.initial_entries().get(resource.as_bytes()).cloned();
        Some(getter(name, found.unwrap_or_else(|| quantity(None))))
    }
}

/// A number, or a text such as the name of a port.
enum IntOrString {
    Int(i64),
    Text(String),
}

/// Returns a number or a text; 0 if it is unset.
pub(super) fn int_or_string(value: Option<&Json>) -> Value {
    Value::object(match value {
        Some(Json::String(text)) => IntOrString::Text(text.clone()),
        value => IntOrString::Int(value.and_then(Json::as_i64).unwrap_or_default()),
    })
}

impl IntOrString {
    fn value(&self) -> Value {
        match self {
            Self::Int(number) => Value::Int(IntType::Int32, *number),
            Self::Text(text) => text.as_str().into(),
        }
    }
}

impl Object for IntOrString {
    fn type_of(&self) -> Type {
        Type::named("intstr.IntOrString")
    }

    fn field_names(&self) -> Vec<&str> {
        vec!["Type", "IntVal", "StrVal"]
    }

    fn field(&self, name: &str) -> Option<Value> {
        Some(match (name, self) {
            ("Type", Self::Int(_)) => Value::int64(0),
            ("Type", Self::Text(_)) => Value::int64(1),
            ("IntVal", Self::Text(_)) => Value::Int(IntType::Int32, 0),
            ("StrVal", Self::Int(_)) => "".into(),
            ("IntVal" | "StrVal", value) => value.value(),
            _ => return None,
        })
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        let value = match (name, self) {
            ("String", value) => value.to_text().unwrap_or_default().into(),
            ("IntValue", Self::Int(number)) => Value::int(*number),
            ("IntValue", Self::Text(text)) => Value::int(text.parse().unwrap_or_default()),
            _ => return None,
        };
        Some(getter(name, value))
    }

    fn to_text(&self) -> Option<String> {
        Some(match self {
            Self::Int(number) => number.to_string(),
            Self::Text(text) => text.clone(),
        })
    }

    fn to_json(&self) -> Option<Value> {
        Some(self.value())
    }
}

fn getter(name: &str, value: Value) -> Arc<Function> {
    Arc::new(Function::getter(name, value))
}
