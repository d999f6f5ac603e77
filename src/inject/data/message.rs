//! Protobuf messages as templates see them: fields and getters with the names of Go, enums, and nil messages whose
//! getters return zero values.

use std::sync::Arc;

use prost_reflect::{DynamicMessage, EnumDescriptor, FieldDescriptor, Kind, MapKey, MessageDescriptor, ReflectMessage};

use super::{Scalar, duration::duration};
use crate::{
    proto::json::dynamic_to_json,
    template::{Context, Failure, Function, IntType, List, Map, Object, Text, Type, UintType, Value},
};

/// Returns a pointer to a message.
pub(in crate::inject) fn message(message: &DynamicMessage) -> Value {
    let descriptor = message.descriptor();
    let fields: Vec<Member> = descriptor.fields().map(|field| Member::of(message, &field)).collect();
    let is_well_known = descriptor.package_name() == "google.protobuf";
    Value::object(Message {
        json: is_well_known.then(|| Value::from_json(&dynamic_to_json(message))),
        descriptor,
        fields,
    })
}

/// Calls a getter of a message.
pub(in crate::inject) fn call(context: &mut Context<'_>, value: &Value, getter: &str) -> Result<Value, Failure> {
    let Value::Object(object) = value else {
        return Err(Failure::message(format!("{} has no method {getter}", value.type_of())));
    };
    match object.method(getter) {
        Some(method) => method.call(context, &[]),
        None => Err(Failure::message(format!("{} has no method {getter}", object.type_of()))),
    }
}

struct Message {
    descriptor: MessageDescriptor,
    fields: Vec<Member>,
    /// The JSON of well-known types.
    json: Option<Value>,
}

struct Member {
    go: String,
    json: String,
    is_set: bool,
    value: Value,
}

impl Member {
    fn of(message: &DynamicMessage, field: &FieldDescriptor) -> Self {
        let is_set = message.has_field(field);
        let value = if is_set {
            reflected(field, &message.get_field(field))
        } else {
            zero(field)
        };
        Self {
            go: go_name(field.name()),
            json: field.json_name().to_owned(),
            is_set,
            value,
        }
    }
}

impl Object for Message {
    fn type_of(&self) -> Type {
        pointer_to(&self.descriptor)
    }

    fn field_names(&self) -> Vec<&str> {
        self.fields.iter().map(|field| field.go.as_str()).collect()
    }

    fn field(&self, name: &str) -> Option<Value> {
        let found = self.fields.iter().find(|field| field.go == name);
        found.map(|field| field.value.clone())
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        let value = match name.strip_prefix("Get") {
            Some(field) => self.field(field)?,
            None => as_duration(&self.descriptor, name, |field| self.field(field))?,
        };
        Some(Arc::new(Function::getter(name, value)))
    }

    fn to_json(&self) -> Option<Value> {
        self.json.clone()
    }

    fn json_members(&self, _: &Context<'_>) -> Option<Vec<(&str, Value)>> {
        let set = self.fields.iter().filter(|field| field.is_set);
        Some(set.map(|field| (field.json.as_str(), field.value.clone())).collect())
    }
}

/// A nil pointer to a message.
struct Nil(MessageDescriptor);

impl Object for Nil {
    fn type_of(&self) -> Type {
        pointer_to(&self.0)
    }

    fn is_nil(&self) -> bool {
        true
    }

    fn method(&self, name: &str) -> Option<Arc<Function>> {
        let value = match name.strip_prefix("Get") {
            Some(name) => zero(&self.0.fields().find(|field| go_name(field.name()) == name)?),
            None => as_duration(&self.0, name, |_| None)?,
        };
        Some(Arc::new(Function::getter(name, value)))
    }
}

/// Returns the result of `AsDuration` of a `google.protobuf.Duration`; `None` for other methods and messages.
fn as_duration(descriptor: &MessageDescriptor, method: &str, field: impl Fn(&str) -> Option<Value>) -> Option<Value> {
    if method != "AsDuration" || descriptor.full_name() != "google.protobuf.Duration" {
        return None;
    }
    let number = |name: &str| match field(name) {
        Some(Value::Int(_, number)) => number,
        _ => 0,
    };
    Some(duration(number("Seconds"), number("Nanos")))
}

fn reflected(field: &FieldDescriptor, value: &prost_reflect::Value) -> Value {
    match value {
        prost_reflect::Value::List(items) => {
            let kind = field.kind();
            let items = items.iter().map(|item| single(&kind, item));
            Value::List(List::of(type_of(&kind), items.collect()))
        }
        prost_reflect::Value::Map(entries) => {
            let kind = field.kind();
            let Some(kind) = kind.as_message().map(|entry| entry.map_entry_value_field().kind()) else {
                return Value::Nil;
            };
            let entries = entries.iter().map(|(key, value)| (key_text(key), single(&kind, value)));
            Value::Map(Map::of(type_of(&kind), entries.collect()))
        }
        value => single(&field.kind(), value),
    }
}

fn key_text(key: &MapKey) -> Text {
    match key {
        MapKey::Bool(key) => key.to_string().into(),
        MapKey::I32(key) => key.to_string().into(),
        MapKey::I64(key) => key.to_string().into(),
        MapKey::U32(key) => key.to_string().into(),
        MapKey::U64(key) => key.to_string().into(),
        MapKey::String(key) => key.as_str().into(),
    }
}

fn single(kind: &Kind, value: &prost_reflect::Value) -> Value {
    match (kind, value) {
        (_, prost_reflect::Value::Bool(value)) => Value::Bool(*value),
        (_, prost_reflect::Value::I32(value)) => Value::Int(IntType::Int32, i64::from(*value)),
        (_, prost_reflect::Value::I64(value)) => Value::int64(*value),
        (_, prost_reflect::Value::U32(value)) => Value::Uint(UintType::Uint32, u64::from(*value)),
        (_, prost_reflect::Value::U64(value)) => Value::Uint(UintType::Uint64, *value),
        (_, prost_reflect::Value::F32(value)) => Value::Float32(*value),
        (_, prost_reflect::Value::F64(value)) => Value::Float(*value),
        (_, prost_reflect::Value::String(value)) => Value::string(value.as_str()),
        (_, prost_reflect::Value::Bytes(value)) => Value::string(&value[..]),
        (_, prost_reflect::Value::Message(value)) => message(value),
        (Kind::Enum(descriptor), prost_reflect::Value::EnumNumber(number)) => enum_value(descriptor, *number),
        _ => Value::Nil,
    }
}

fn enum_value(descriptor: &EnumDescriptor, number: i32) -> Value {
    let value = descriptor.get_value(number);
    let text = value.map_or_else(|| number.to_string(), |value| value.name().to_owned());
    Value::object(Scalar {
        type_name: "v1alpha1.Enum",
        json: text.as_str().into(),
        text: text.into(),
        basic: Some(Value::Int(IntType::Int32, i64::from(number))),
    })
}

/// Returns the value of an unset field.
fn zero(field: &FieldDescriptor) -> Value {
    let kind = field.kind();
    if field.is_map() {
        let value = kind.as_message().map(|entry| entry.map_entry_value_field().kind());
        return Value::Map(Map::nil(value.as_ref().map_or(Type::Any, type_of)));
    }
    if field.is_list() {
        return Value::List(List::nil(type_of(&kind)));
    }
    match &kind {
        Kind::Message(descriptor) => Value::object(Nil(descriptor.clone())),
        Kind::Enum(descriptor) => enum_value(descriptor, descriptor.default_value().number()),
        kind => single(kind, &prost_reflect::Value::default_value(kind)),
    }
}

fn type_of(kind: &Kind) -> Type {
    match kind {
        Kind::Bool => Type::Bool,
        Kind::String => Type::String,
        Kind::Message(descriptor) => pointer_to(descriptor),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => Type::Int(IntType::Int32),
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => Type::INT64,
        Kind::Uint32 | Kind::Fixed32 => Type::Uint(UintType::Uint32),
        Kind::Uint64 | Kind::Fixed64 => Type::Uint(UintType::Uint64),
        Kind::Double => Type::Float64,
        Kind::Float => Type::Float32,
        Kind::Bytes | Kind::Enum(_) => Type::Any,
    }
}

/// Returns the type in Go's notation, such as `*v1alpha1.ProxyConfig`.
fn pointer_to(descriptor: &MessageDescriptor) -> Type {
    let package = descriptor.package_name();
    let name = descriptor.full_name().strip_prefix(package).unwrap_or_default();
    let name = name.trim_start_matches('.').replace('.', "_");
    let package = package.rsplit('.').next().unwrap_or_default();
    Type::named(&format!("{package}.{name}")).pointer()
}

/// Returns the name that the Go plugin of protoc gives a field.
fn go_name(name: &str) -> String {
    let mut go = String::with_capacity(name.len());
    let mut characters = name.chars().peekable();
    let mut starts_word = true;
    while let Some(character) = characters.next() {
        if character == '_' && characters.peek().is_some_and(char::is_ascii_lowercase) {
            starts_word = true;
        } else {
            go.push(if starts_word {
                character.to_ascii_uppercase()
            } else {
                character
            });
            starts_word = character.is_ascii_digit();
        }
    }
    go
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_have_names_of_go() {
        assert_eq!(go_name("proxy_listen_port"), "ProxyListenPort");
        assert_eq!(go_name("mesh_mTLS"), "MeshMTLS");
        assert_eq!(go_name("h2_upgrade_policy"), "H2UpgradePolicy");
        assert_eq!(go_name("k8s_sa_jwt_path"), "K8SSaJwtPath");
    }
}
