//! Defaults, JSON, types and equality.

use std::sync::Arc;

use super::{
    super::{
        json::{Escapes, Layout, decode, encode},
        limits::Failure,
        types::Type,
        value::{Context, Function, Value},
    },
    bytes,
    convert::{to_float, to_int},
    of_strings,
};

pub(super) fn functions() -> Vec<Function> {
    use Type::{Any, Bool, String};
    let mut functions = vec![
        Function::variadic("default", &[Any, Any], Any, |context, arguments| {
            let given = arguments.get(1).copied().filter(|value| context.is_true(value));
            Ok(given.unwrap_or(arguments[0]).clone())
        }),
        Function::new("empty", &[Any], Bool, |context, arguments| {
            Ok((!context.is_true(arguments[0])).into())
        }),
        Function::variadic("coalesce", &[Any], Any, |context, arguments| {
            let first = arguments.iter().copied().find(|value| context.is_true(value));
            Ok(first.cloned().unwrap_or(Value::Nil))
        }),
        Function::variadic("all", &[Any], Bool, |context, arguments| {
            Ok(arguments.iter().all(|value| context.is_true(value)).into())
        }),
        Function::variadic("any", &[Any], Bool, |context, arguments| {
            Ok(arguments.iter().any(|value| context.is_true(value)).into())
        }),
        Function::new("ternary", &[Any, Any, Bool], Any, |context, arguments| {
            Ok(arguments[usize::from(!context.is_true(arguments[2]))].clone())
        }),
        Function::new(
            "typeOf",
            &[Any],
            String,
            |_, arguments| Ok(type_of(arguments[0]).into()),
        ),
        Function::new("typeIs", &[String, Any], Bool, |_, arguments| {
            Ok((type_of(arguments[1]).as_bytes() == bytes(arguments, 0)).into())
        }),
        Function::new("typeIsLike", &[String, Any], Bool, |_, arguments| {
            let name = type_of(arguments[1]);
            let wanted = bytes(arguments, 0);
            let is_pointer = name.strip_prefix('*').is_some_and(|name| name.as_bytes() == wanted);
            Ok((name.as_bytes() == wanted || is_pointer).into())
        }),
        Function::new("kindOf", &[Any], String, |_, arguments| {
            Ok(arguments[0].kind().name().into())
        }),
        Function::new("kindIs", &[String, Any], Bool, |_, arguments| {
            Ok((arguments[1].kind().name().as_bytes() == bytes(arguments, 0)).into())
        }),
        Function::new("deepEqual", &[Any, Any], Bool, |context, arguments| {
            Ok(deep_equal(context, arguments[0], arguments[1])?.into())
        }),
        Function::new("int64", &[Any], Type::INT64, |_, arguments| {
            Ok(Value::int64(to_int(arguments[0])))
        }),
        Function::new("int", &[Any], Type::INT, |_, arguments| {
            Ok(Value::int(to_int(arguments[0])))
        }),
        Function::new("float64", &[Any], Type::Float64, |_, arguments| {
            Ok(to_float(arguments[0]).into())
        }),
        of_strings("fromJson", 1, Any, |context, arguments| {
            match decode(context, bytes(arguments, 0)) {
                Err(Failure::Message(_)) => Ok(Value::Nil),
                decoded => decoded,
            }
        }),
        of_strings("mustFromJson", 1, Any, |context, arguments| {
            decode(context, bytes(arguments, 0))
        }),
    ];
    let encoders = [
        ("toJson", Layout::Compact, Escapes::Html),
        ("toPrettyJson", Layout::Indented, Escapes::Html),
        ("toRawJson", Layout::Compact, Escapes::Necessary),
    ];
    for (name, layout, escapes) in encoders {
        let is_raw = escapes == Escapes::Necessary;
        functions.push(Function::new(name, &[Any], String, move |context, arguments| {
            match encode(context, arguments[0], layout, escapes) {
                // Without "must", errors give an empty text.
                Err(Failure::Message(_)) if !is_raw => Ok("".into()),
                encoded => Ok(encoded?.into()),
            }
        }));
    }
    for (name, layout) in [("mustToJson", Layout::Compact), ("mustToPrettyJson", Layout::Indented)] {
        functions.push(Function::new(name, &[Any], String, move |context, arguments| {
            Ok(encode(context, arguments[0], layout, Escapes::Html)?.into())
        }));
    }
    functions
}

fn type_of(value: &Value) -> String {
    match value {
        Value::Nil | Value::Missing => "<nil>".to_owned(),
        value => value.type_of().to_string(),
    }
}

/// Compares types and contents.
pub(super) fn deep_equal(context: &mut Context<'_>, left: &Value, right: &Value) -> Result<bool, Failure> {
    equal(context, left, right, 0)
}

fn equal(context: &mut Context<'_>, left: &Value, right: &Value, depth: usize) -> Result<bool, Failure> {
    context.step(1)?;
    let depth = context.deeper(depth)?;
    Ok(match (left, right) {
        (Value::Nil | Value::Missing, Value::Nil | Value::Missing) => true,
        (Value::Bool(left), Value::Bool(right)) => left == right,
        (Value::Int(a, left), Value::Int(b, right)) => a == b && left == right,
        (Value::Uint(a, left), Value::Uint(b, right)) => a == b && left == right,
        (Value::Float(left), Value::Float(right)) => left.partial_cmp(right) == Some(std::cmp::Ordering::Equal),
        (Value::Float32(left), Value::Float32(right)) => left.partial_cmp(right) == Some(std::cmp::Ordering::Equal),
        (Value::String(left), Value::String(right)) => {
            context.step(left.len() / 64)?;
            left == right
        }
        (Value::List(left), Value::List(right)) => {
            if left.is_same(right) {
                return Ok(true);
            }
            if left.element() != right.element()
                || left.is_nil() != right.is_nil()
                || left.items().len() != right.items().len()
            {
                return Ok(false);
            }
            for (left, right) in left.items().iter().zip(right.items()) {
                if !equal(context, left, right, depth)? {
                    return Ok(false);
                }
            }
            true
        }
        (Value::Map(left), Value::Map(right)) => {
            if left.is_same(right) {
                return Ok(true);
            }
            let (of_left, of_right) = (context.snapshot(left), context.snapshot(right));
            if left.element() != right.element() || left.is_nil() != right.is_nil() || of_left.len() != of_right.len() {
                return Ok(false);
            }
            for ((left_key, left), (right_key, right)) in of_left.iter().zip(of_right.iter()) {
                if left_key != right_key || !equal(context, left, right, depth)? {
                    return Ok(false);
                }
            }
            true
        }
        (Value::Pointer(left), Value::Pointer(right)) => equal(context, left, right, depth)?,
        (Value::NilPointer(left), Value::NilPointer(right)) => left == right,
        (Value::Object(left), Value::Object(right)) => {
            if Arc::ptr_eq(left, right) {
                return Ok(true);
            }
            if left.type_of() != right.type_of() || left.is_nil() != right.is_nil() {
                return Ok(false);
            }
            match (left.basic(), right.basic()) {
                (Some(left), Some(right)) => return equal(context, &left, &right, depth),
                (None, None) => {}
                _ => return Ok(false),
            }
            let names = left.field_names();
            // Only the text tells values without fields apart, such as quantities.
            if names.is_empty() && left.to_text() != right.to_text() {
                return Ok(false);
            }
            for name in names {
                let (left, right) = (left.field(name), right.field(name));
                let (left, right) = (left.unwrap_or(Value::Nil), right.unwrap_or(Value::Nil));
                if !equal(context, &left, &right, depth)? {
                    return Ok(false);
                }
            }
            true
        }
        _ => false,
    })
}
