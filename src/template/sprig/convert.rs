//! Conversions between types, as sprig makes them.

use super::super::{
    format,
    limits::Failure,
    number::{parse_float, parse_int},
    text::Text,
    value::{Context, Object, Value},
};

/// Returns a value as a string, as `toString` does.
pub(super) fn to_text(context: &mut Context<'_>, value: &Value) -> Result<Text, Failure> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Object(object) if shown_by_method(object.as_ref()).is_some() => {
            Ok(shown_by_method(object.as_ref()).unwrap_or_default().into())
        }
        value => Ok(format::display(context, value)?.into()),
    }
}

fn shown_by_method(object: &dyn Object) -> Option<String> {
    object.to_text()
}

/// Returns the strings of a list without nil, or the only string of another value, as `toStrings` does.
pub(super) fn to_texts(context: &mut Context<'_>, value: &Value) -> Result<Vec<Text>, Failure> {
    match value {
        Value::Nil | Value::Missing => Ok(Vec::new()),
        Value::List(list) => {
            context.allocate_elements(list.items().len())?;
            let items = list.items().iter().filter(|item| !matches!(item, Value::Nil));
            items.map(|item| to_text(context, item)).collect()
        }
        value => Ok(vec![to_text(context, value)?]),
    }
}

/// Returns a number as `int64`; 0 for other values.
///
/// Parity (github.com/spf13/cast, number.go): texts lose their fraction, and values of named types have a number.
pub(super) fn to_int(value: &Value) -> i64 {
    match value {
        Value::Int(_, number) => *number,
        Value::Uint(_, number) => *number as i64,
        Value::Float(number) => truncated(*number),
        Value::Float32(number) => truncated(f64::from(*number)),
        Value::Bool(value) => i64::from(*value),
        Value::String(text) => parse_int(without_fraction(&text.to_str())).unwrap_or(0),
        Value::Pointer(target) => to_int(target),
        Value::Object(object) => object.basic().map_or(0, |value| to_int(&value)),
        _ => 0,
    }
}

/// Converts as Go does on amd64, where numbers that do not fit become the smallest one.
pub(super) fn truncated(number: f64) -> i64 {
    const TWO_TO_63: f64 = 9_223_372_036_854_775_808.0;
    if (-TWO_TO_63..TWO_TO_63).contains(&number) {
        number as i64
    } else {
        i64::MIN
    }
}

/// Returns the sign and the digits in front of the point of a decimal number; other texts stay as they are.
fn without_fraction(text: &str) -> &str {
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    match text.split_once('.') {
        Some((whole, fraction))
            if is_number(whole.strip_prefix(['-', '+']).unwrap_or(whole)) && is_number(fraction) =>
        {
            whole
        }
        _ => text,
    }
}

/// Returns a number as `float64`; 0 for other values.
pub(super) fn to_float(value: &Value) -> f64 {
    match value {
        Value::Int(_, number) => *number as f64,
        Value::Uint(_, number) => *number as f64,
        Value::Float(number) => *number,
        Value::Float32(number) => f64::from(*number),
        Value::Bool(value) => f64::from(u8::from(*value)),
        Value::String(text) => parse_float(&text.to_str()).unwrap_or(0.0),
        Value::Pointer(target) => to_float(target),
        Value::Object(object) => object.basic().map_or(0.0, |value| to_float(&value)),
        _ => 0.0,
    }
}
