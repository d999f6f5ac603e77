//! Objects as Go would write them after it has read them into its types.

use serde_json::{Map, Number, Value};

use super::{Field, Presence, Struct, Type, of, quantity};

/// A form of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::inject) enum Form {
    /// Without fields that Go omits. Two objects that mean the same are equal, and no field is added, so that a patch
    /// between two such forms also fits the objects as they were.
    Sparse,
    /// With empty fields that Go writes, such as `resources: {}`.
    Complete,
}

/// A value that does not fit its type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: expected {expected}, found {found}")]
pub struct TypeError {
    /// Path of the value.
    pub path: String,
    /// Expected type.
    pub expected: &'static str,
    /// Description of the value.
    pub found: String,
}

/// Converts an object of a struct of the table. Unknown fields stay as they are.
pub(in crate::inject) fn canonical(type_name: &str, mut value: Value, form: Form) -> Result<Value, TypeError> {
    let converted = match &mut value {
        Value::Object(entries) => object(of(type_name), entries, form),
        other => Err(TypeError::new("an object", other)),
    };
    converted.map_err(|mut error| {
        error.path = error.path.trim_start_matches('.').to_owned();
        if error.path.is_empty() {
            error.path = type_name.to_owned();
        }
        error
    })?;
    Ok(value)
}

/// Converts a value in place: most values are canonical already, and an injection converts its pod three times.
fn convert(kind: &Type, value: &mut Value, form: Form) -> Result<(), TypeError> {
    match (kind, &mut *value) {
        (Type::Pointer(inner), _) => convert(inner, value, form),
        (Type::Struct(kind), Value::Object(entries)) => object(kind.get(), entries, form),
        (Type::List(element), Value::Array(items)) => {
            for (index, item) in items.iter_mut().enumerate() {
                match item {
                    Value::Null => *item = zero(element),
                    item => convert(element, item, form).map_err(|error| error.within(&format!("[{index}]")))?,
                }
            }
            Ok(())
        }
        (Type::Map(element), Value::Object(entries)) => {
            for (key, value) in entries.iter_mut() {
                match value {
                    Value::Null => *value = zero(element),
                    value => convert(element, value, form).map_err(|error| error.within(&format!("[{key:?}]")))?,
                }
            }
            Ok(())
        }
        (Type::Quantity, Value::String(_) | Value::Number(_)) => {
            *value = quantity_of(value)?;
            Ok(())
        }
        (Type::Int32 | Type::Int64 | Type::IntOrString, Value::Number(number)) => {
            if !number.is_i64() && !number.is_u64() {
                *value = integer(number)?;
            }
            Ok(())
        }
        (Type::String | Type::Time | Type::IntOrString, Value::String(_))
        | (Type::Bool, Value::Bool(_))
        | (Type::Any, _) => Ok(()),
        (kind, value) => Err(TypeError::new(kind.description(), value)),
    }
}

fn object(kind: &Struct, entries: &mut Map<String, Value>, form: Form) -> Result<(), TypeError> {
    let mut outcome = Ok(());
    entries.retain(|key, value| {
        let Some(field) = kind.field(key).filter(|_| outcome.is_ok()) else {
            return true;
        };
        if value.is_null() {
            return false;
        }
        outcome = convert(&field.of, value, form).map_err(|error| error.within(&format!(".{key}")));
        field.presence == Presence::Required || form == Form::Complete && field.is_struct() || !field.is_empty(value)
    });
    outcome?;
    if form == Form::Complete {
        for field in &kind.fields {
            if (field.presence == Presence::Required || field.is_struct()) && !entries.contains_key(field.json) {
                entries.insert(field.json.to_owned(), zero(&field.of));
            }
        }
    }
    Ok(())
}

impl Field {
    /// Returns true for structs that are not pointers; Go does not omit them.
    fn is_struct(&self) -> bool {
        matches!(&self.of, Type::Struct(_) | Type::Quantity)
    }

    /// Returns true for a value that Go omits.
    fn is_empty(&self, value: &Value) -> bool {
        match (&self.of, value) {
            (Type::Pointer(_) | Type::Any | Type::Quantity | Type::Time, _) => false,
            (_, Value::Object(entries)) => entries.is_empty(),
            (_, Value::Array(items)) => items.is_empty(),
            (_, Value::String(text)) => text.is_empty(),
            (_, Value::Bool(value)) => !value,
            (_, Value::Number(number)) => number.as_i64() == Some(0),
            (_, Value::Null) => true,
        }
    }
}

/// Returns the value of an unset field in JSON.
fn zero(kind: &Type) -> Value {
    match kind {
        Type::String => Value::String(String::new()),
        Type::Bool => Value::Bool(false),
        Type::Int32 | Type::Int64 | Type::IntOrString => Value::from(0),
        Type::Quantity => Value::from("0"),
        Type::Struct(kind) => {
            let mut empty = Map::new();
            object(kind.get(), &mut empty, Form::Complete).expect("because nothing is converted");
            Value::Object(empty)
        }
        Type::Time | Type::Any | Type::Pointer(_) | Type::List(_) | Type::Map(_) => Value::Null,
    }
}

fn quantity_of(value: &Value) -> Result<Value, TypeError> {
    let text = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let canonical = quantity::canonical(&text).map(Value::String);
    canonical.ok_or_else(|| TypeError::new(Type::Quantity.description(), value))
}

/// Returns the integer of a float. YAML may have read one such as `1e3`.
fn integer(number: &Number) -> Result<Value, TypeError> {
    let float = number.as_f64().unwrap_or(f64::NAN);
    if float.fract() == 0.0 && float.abs() < 9e15 {
        return Ok(Value::from(float as i64));
    }
    Err(TypeError {
        path: String::new(),
        expected: "an integer",
        found: number.to_string(),
    })
}

impl Type {
    fn description(&self) -> &'static str {
        match self {
            Self::String | Self::Time => "a string",
            Self::Bool => "a boolean",
            Self::Int32 | Self::Int64 => "an integer",
            Self::Quantity => "a quantity such as 100m or 1Gi",
            Self::IntOrString => "an integer or a string",
            Self::Any => "a value",
            Self::Struct(_) | Self::Map(_) => "an object",
            Self::Pointer(inner) => inner.description(),
            Self::List(_) => "a list",
        }
    }
}

impl TypeError {
    fn new(expected: &'static str, found: &Value) -> Self {
        Self {
            path: String::new(),
            expected,
            found: described(found),
        }
    }

    fn within(mut self, parent: &str) -> Self {
        self.path.insert_str(0, parent);
        self
    }
}

/// Describes a value without printing large ones.
fn described(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::String(text) => format!("the string {:?}", text.chars().take(64).collect::<String>()),
        Value::Bool(value) => format!("the boolean {value}"),
        Value::Number(number) => format!("the number {number}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sparse_form_omits_what_go_omits() {
        let pod = json!({
            "metadata": {"annotations": null, "labels": {}, "name": ""},
            "spec": {
                "hostNetwork": false,
                "enableServiceLinks": false,
                "vendor": {"kept": null},
                "containers": [{"name": "app", "resources": {"limits": {"cpu": "2000m"}},
                    "env": [{"name": "A", "value": ""}],
                    "readinessProbe": {"initialDelaySeconds": 0, "grpc": {"port": 1}}}],
            }
        });
        let expected = json!({
            "spec": {
                "enableServiceLinks": false,
                "vendor": {"kept": null},
                "containers": [{"name": "app", "resources": {"limits": {"cpu": "2"}}, "env": [{"name": "A"}],
                    "readinessProbe": {"grpc": {"port": 1}}}],
            }
        });
        assert_eq!(canonical("Pod", pod, Form::Sparse), Ok(expected));
    }

    #[test]
    fn complete_form_has_structs_and_required_fields() {
        let deployment = json!({"spec": {"template": {"spec": {"containers": [{"name": "app"}]}}}});
        let expected = json!({
            "metadata": {},
            "spec": {"strategy": {}, "template": {"metadata": {},
                "spec": {"containers": [{"name": "app", "resources": {}}]}}},
            "status": {},
        });
        assert_eq!(canonical("Deployment", deployment, Form::Complete), Ok(expected));
    }

    #[test]
    fn errors_name_the_path() {
        let error = |pod| canonical("Pod", pod, Form::Sparse).unwrap_err().to_string();
        assert_eq!(
            error(json!({"spec": {"containers": [{"name": "a"}, {"name": "b", "args": [1]}]}})),
            "spec.containers[1].args[0]: expected a string, found the number 1"
        );
        assert_eq!(
            error(json!({"spec": {"containers": [{"resources": {"limits": {"cpu": "two"}}}]}})),
            "spec.containers[0].resources.limits[\"cpu\"]: expected a quantity such as 100m or 1Gi, \
             found the string \"two\""
        );
        assert_eq!(error(json!({"spec": []})), "spec: expected an object, found a list");
    }
}
