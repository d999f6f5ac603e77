//! Kubernetes' objects as templates see them: structs of Go with all their fields.

use std::sync::{Arc, OnceLock};

use serde_json::Value as Json;

use super::{
    Scalar,
    quantity::{RESOURCE_LIST, int_or_string, quantity, resource_list},
    text_of,
};
use crate::{
    inject::schema::{self, Field, Presence, Struct, Type as Schema},
    template::{Context, Function, IntType, List, Map, Object, Text, Type, Value},
};

/// Returns the value of an object of a struct of the table.
pub(in crate::inject) fn value(type_name: &str, object: &Json) -> Value {
    structure(schema::of(type_name), object)
}

/// Returns a slice of objects of a struct of the table.
pub(in crate::inject) fn list(type_name: &str, objects: &[Json]) -> Value {
    let kind = schema::of(type_name);
    let items = objects.iter().map(|object| structure(kind, object));
    Value::List(List::of(named(kind), items.collect()))
}

/// The struct of metadata, which others embed under its name.
const METADATA: &str = "ObjectMeta";

/// A struct of Kubernetes' API.
struct Kube {
    kind: &'static Struct,
    object: Json,
    /// The values of fields that were read. Templates read few of the hundreds that a pod has.
    fields: Vec<OnceLock<Value>>,
}

impl Kube {
    /// Returns the value of a field of the struct by its position.
    fn value(&self, position: usize) -> &Value {
        self.fields[position].get_or_init(|| {
            let field = &self.kind.fields[position];
            of(&field.of, self.object.get(field.json).filter(|value| !value.is_null()))
        })
    }

    fn own_field(&self, name: &str) -> Option<&Value> {
        let position = self.kind.fields.iter().position(|field| field.go == name)?;
        Some(self.value(position))
    }

    /// Returns an embedded struct by its name.
    fn embedded(&self, name: &str) -> Option<Value> {
        let part = self.kind.embedded.iter().find(|part| part.name == name)?;
        Some(structure(part, &self.object))
    }

    /// Returns the embedded metadata, whose fields and methods are also those of the struct.
    fn metadata(&self) -> Option<&Arc<dyn Object>> {
        match self.own_field(METADATA)? {
            Value::Object(metadata) => Some(metadata),
            _ => None,
        }
    }
}

impl Object for Kube {
    fn type_of(&self) -> Type {
        named(self.kind)
    }

    fn field_names(&self) -> Vec<&str> {
        self.kind.fields.iter().map(|field| field.go.as_str()).collect()
    }

    fn field(&self, name: &str) -> Option<Value> {
        match self.own_field(name) {
            Some(value) => Some(value.clone()),
            None => self.embedded(name).or_else(|| self.metadata()?.field(name)),
        }
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        if self.kind.name != METADATA {
            return self.metadata()?.method(name);
        }
        let value = self.own_field(name.strip_prefix("Get")?)?;
        Some(Arc::new(Function::getter(name, value.clone())))
    }

    fn json_members(&self, context: &Context<'_>) -> Option<Vec<(&str, Value)>> {
        let fields = self.kind.fields.iter().enumerate();
        let members = fields.map(|(position, field)| (field, self.value(position)));
        let written =
            members.filter(|(field, value)| field.presence == Presence::Required || !is_empty(context, field, value));
        Some(written.map(|(field, value)| (field.json, value.clone())).collect())
    }
}

/// Returns true for a value that Go omits from JSON.
fn is_empty(context: &Context<'_>, field: &Field, value: &Value) -> bool {
    match value {
        Value::Missing | Value::Nil | Value::NilPointer(_) => true,
        Value::Bool(value) => !value,
        Value::Int(_, number) => *number == 0,
        Value::String(text) => text.is_empty(),
        Value::List(list) => list.items().is_empty(),
        Value::Map(map) => context.entries(map).is_empty(),
        Value::Object(object) => match object.basic() {
            Some(Value::Map(map)) => context.entries(&map).is_empty(),
            _ => field.of == Schema::Time && object.to_text().is_some_and(|text| text.is_empty()),
        },
        _ => false,
    }
}

fn named(kind: &Struct) -> Type {
    let package = if kind.name == METADATA { "metav1" } else { "v1" };
    Type::named(&format!("{package}.{}", kind.name))
}

fn structure(kind: &'static Struct, object: &Json) -> Value {
    Value::object(Kube {
        kind,
        object: object.clone(),
        fields: vec![OnceLock::new(); kind.fields.len()],
    })
}

/// Returns a value of a type, or its zero value.
fn of(kind: &Schema, value: Option<&Json>) -> Value {
    match kind {
        Schema::String => Value::string(value.and_then(Json::as_str).unwrap_or_default()),
        Schema::Bool => Value::Bool(value.and_then(Json::as_bool).unwrap_or_default()),
        Schema::Int32 => Value::Int(IntType::Int32, value.and_then(Json::as_i64).unwrap_or_default()),
        Schema::Int64 => Value::int64(value.and_then(Json::as_i64).unwrap_or_default()),
        Schema::Quantity => quantity(value),
        Schema::IntOrString => int_or_string(value),
        Schema::Time => time(value),
        Schema::Any => value.map_or(Value::Nil, Value::from_json),
        Schema::Struct(kind) => structure(kind.get(), value.unwrap_or(&Json::Null)),
        Schema::Pointer(target) => match (value, target.as_ref()) {
            (None, Schema::Any) => Value::Nil,
            (None, target) => Value::NilPointer(template_type(target)),
            (Some(_), Schema::Struct(_) | Schema::Any | Schema::Quantity | Schema::IntOrString | Schema::Time) => {
                of(target, value)
            }
            (Some(_), target) => Value::Pointer(Arc::new(of(target, value))),
        },
        Schema::List(element) => match value.and_then(Json::as_array) {
            None => Value::List(List::nil(template_type(element))),
            Some(items) => {
                let items = items.iter().map(|item| of(element, Some(item)));
                Value::List(List::of(template_type(element), items.collect()))
            }
        },
        Schema::Map(element) => {
            let map = match value.and_then(Json::as_object) {
                None => Map::nil(template_type(element)),
                Some(entries) => {
                    let entries = entries.iter();
                    let entries = entries.map(|(key, value)| (Text::from(key.as_str()), of(element, Some(value))));
                    Map::of(template_type(element), entries.collect())
                }
            };
            match element.as_ref() {
                Schema::Quantity => resource_list(map),
                _ => Value::Map(map),
            }
        }
    }
}

fn time(value: Option<&Json>) -> Value {
    Value::object(Scalar {
        type_name: "metav1.Time",
        text: value.map(text_of).unwrap_or_default().into(),
        basic: None,
        json: value.map_or_else(|| Value::string(""), Value::from_json),
    })
}

fn template_type(kind: &Schema) -> Type {
    match kind {
        Schema::String => Type::String,
        Schema::Bool => Type::Bool,
        Schema::Int32 => Type::Int(IntType::Int32),
        Schema::Int64 => Type::INT64,
        Schema::Quantity => Type::named("resource.Quantity"),
        Schema::IntOrString => Type::named("intstr.IntOrString"),
        Schema::Time => Type::named("metav1.Time"),
        Schema::Any => Type::Any,
        Schema::Struct(kind) => named(kind.get()),
        Schema::Pointer(target) => template_type(target).pointer(),
        Schema::List(element) => template_type(element).list(),
        Schema::Map(element) if **element == Schema::Quantity => Type::named(RESOURCE_LIST),
        Schema::Map(element) => template_type(element).map(),
    }
}
