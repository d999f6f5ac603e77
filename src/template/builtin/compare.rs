//! `eq`, `ne`, `lt`, `le`, `gt` and `ge`.

use std::{cmp::Ordering, sync::Arc};

use crate::template::{
    format,
    limits::Failure,
    types::Type,
    value::{Context, Function, Value},
};

/// A comparison of two values.
type Comparison = fn(&mut Context<'_>, &Value, &Value) -> Result<bool, Failure>;

pub(super) fn functions() -> Vec<Function> {
    let mut functions = vec![Function::variadic(
        "eq",
        &[Type::Reflect, Type::Reflect],
        Type::Bool,
        |context, arguments| {
            if arguments.len() < 2 {
                return Err(Failure::message("missing argument for comparison"));
            }
            for other in &arguments[1..] {
                if equal(context, arguments[0], other)? {
                    return Ok(Value::Bool(true));
                }
            }
            Ok(Value::Bool(false))
        },
    )];
    let comparisons: [(&str, Comparison); 5] = [
        ("ne", |context, left, right| Ok(!equal(context, left, right)?)),
        ("lt", |_, left, right| less(left, right)),
        ("le", less_or_equal),
        ("gt", |context, left, right| Ok(!less_or_equal(context, left, right)?)),
        ("ge", |_, left, right| Ok(!less(left, right)?)),
    ];
    functions.extend(comparisons.map(|(name, comparison)| {
        Function::new(
            name,
            &[Type::Reflect, Type::Reflect],
            Type::Bool,
            move |context, arguments| comparison(context, arguments[0], arguments[1]).map(Value::Bool),
        )
    }));
    functions
}

/// The kinds that can be compared with values of the same kind.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Basic {
    Bool,
    Complex,
    Int,
    Float,
    String,
    Uint,
}

fn basic(value: &Value) -> Option<Basic> {
    Some(match value {
        Value::Bool(_) => Basic::Bool,
        Value::Int(..) => Basic::Int,
        Value::Uint(..) => Basic::Uint,
        Value::Float(_) | Value::Float32(_) => Basic::Float,
        Value::Complex(..) => Basic::Complex,
        Value::String(_) => Basic::String,
        _ => return None,
    })
}

fn float(value: &Value) -> f64 {
    match value {
        Value::Float(number) => *number,
        Value::Float32(number) => f64::from(*number),
        _ => 0.0,
    }
}

fn incompatible(left: &Value, right: &Value) -> Failure {
    Failure::Message(format!(
        "incompatible types for comparison: {} and {}",
        left.type_of(),
        right.type_of()
    ))
}

fn equal(context: &mut Context<'_>, left: &Value, right: &Value) -> Result<bool, Failure> {
    context.step(1)?;
    // The usual case, without copies.
    if let (Value::String(left), Value::String(right)) = (left, right) {
        return Ok(left == right);
    }
    let (plain_left, plain_right) = (left.to_basic(), right.to_basic());
    match (&plain_left, &plain_right) {
        (Value::Bool(left), Value::Bool(right)) => return Ok(left == right),
        (Value::Int(_, left), Value::Int(_, right)) => return Ok(left == right),
        (Value::Uint(_, left), Value::Uint(_, right)) => return Ok(left == right),
        (Value::Int(_, signed), Value::Uint(_, unsigned)) | (Value::Uint(_, unsigned), Value::Int(_, signed)) => {
            return Ok(u64::try_from(*signed).is_ok_and(|signed| signed == *unsigned));
        }
        (Value::String(left), Value::String(right)) => return Ok(left == right),
        (Value::Complex(a, b), Value::Complex(c, d)) => return Ok(numbers_equal(*a, *c) && numbers_equal(*b, *d)),
        _ => {}
    }
    match (basic(&plain_left), basic(&plain_right)) {
        (Some(Basic::Float), Some(Basic::Float)) => Ok(numbers_equal(float(&plain_left), float(&plain_right))),
        (None, None) => identical(context, left, right),
        _ if matches!(left, Value::Missing | Value::Nil) || matches!(right, Value::Missing | Value::Nil) => Ok(false),
        _ => Err(incompatible(left, right)),
    }
}

/// Equality of numbers as Go has it: exact, and NaN differs from all.
fn numbers_equal(left: f64, right: f64) -> bool {
    left.partial_cmp(&right) == Some(Ordering::Equal)
}

/// Compares values of other kinds, which may be nil.
fn identical(context: &mut Context<'_>, left: &Value, right: &Value) -> Result<bool, Failure> {
    let is_invalid = |value: &Value| matches!(value, Value::Missing | Value::Nil);
    if left.kind() != right.kind() && !is_invalid(left) && !is_invalid(right) {
        let shown = String::from_utf8_lossy(&format::display(context, right)?).into_owned();
        let (of_left, of_right) = (left.type_of(), right.type_of());
        return Err(Failure::Message(format!(
            "non-comparable types {}: {of_left}, {of_right}: {shown}",
            described(context, left)?
        )));
    }
    if left.is_nil() || right.is_nil() {
        return Ok(left.is_nil() == right.is_nil());
    }
    if !is_comparable(right) {
        let shown = described(context, right)?;
        let of_right = right.type_of();
        return Err(Failure::Message(format!("non-comparable type {shown}: {of_right}")));
    }
    match (left, right) {
        (Value::Object(left), Value::Object(right)) => {
            if Arc::ptr_eq(left, right) {
                return Ok(true);
            }
            if left.type_of() != right.type_of() {
                return Ok(false);
            }
            if matches!(left.type_of(), Type::Pointer(_)) {
                return Ok(left.address().is_some() && left.address() == right.address());
            }
            for name in left.field_names() {
                let (left, right) = (left.field(name), right.field(name));
                let (left, right) = (left.unwrap_or(Value::Nil), right.unwrap_or(Value::Nil));
                if !equal(context, &left, &right)? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        (Value::Pointer(left), Value::Pointer(right)) => Ok(Arc::ptr_eq(left, right)),
        _ => Ok(false),
    }
}

/// Returns true for types that Go can compare: structs without slices, maps and functions.
fn is_comparable(value: &Value) -> bool {
    match value {
        Value::List(_) | Value::Map(_) | Value::Function(_) => false,
        Value::Object(object) if !matches!(object.type_of(), Type::Pointer(_)) => {
            let fields = object.field_names().into_iter().filter_map(|name| object.field(name));
            fields.into_iter().all(|field| is_comparable(&field))
        }
        _ => true,
    }
}

/// Returns a value as Go's reflection prints it with `%s`.
fn described(context: &mut Context<'_>, value: &Value) -> Result<String, Failure> {
    let shown = format::printf(context, b"%s", &[value])?;
    Ok(String::from_utf8_lossy(&shown).into_owned())
}

fn less(left: &Value, right: &Value) -> Result<bool, Failure> {
    let (plain_left, plain_right) = (left.to_basic(), right.to_basic());
    let (Some(of_left), Some(of_right)) = (basic(&plain_left), basic(&plain_right)) else {
        return Err(Failure::message("invalid type for comparison"));
    };
    match (&plain_left, &plain_right) {
        (Value::Int(_, left), Value::Int(_, right)) => Ok(left < right),
        (Value::Uint(_, left), Value::Uint(_, right)) => Ok(left < right),
        (Value::Int(_, left), Value::Uint(_, right)) => Ok(u64::try_from(*left).map_or(true, |left| left < *right)),
        (Value::Uint(_, left), Value::Int(_, right)) => Ok(u64::try_from(*right).is_ok_and(|right| *left < right)),
        (Value::String(left), Value::String(right)) => Ok(left < right),
        _ if of_left != of_right => Err(incompatible(left, right)),
        _ if of_left == Basic::Float => Ok(float(&plain_left) < float(&plain_right)),
        _ => Err(Failure::message("invalid type for comparison")),
    }
}

fn less_or_equal(context: &mut Context<'_>, left: &Value, right: &Value) -> Result<bool, Failure> {
    Ok(less(left, right)? || equal(context, left, right)?)
}
