//! Plugin configuration as text in Istio's form: compact, sorted keys, Go's numbers and escapes.

use std::fmt::Write;

use prost_types::{Struct, Value, value::Kind};

/// Returns an object as text.
pub(super) fn object(object: &Struct) -> String {
    let mut text = String::new();
    write_object(&mut text, object);
    text
}

fn write_object(text: &mut String, object: &Struct) {
    text.push('{');
    for (index, (key, value)) in object.fields.iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        write_text(text, key);
        text.push(':');
        write_value(text, value);
    }
    text.push('}');
}

fn write_value(text: &mut String, value: &Value) {
    match &value.kind {
        None | Some(Kind::NullValue(_)) => text.push_str("null"),
        Some(Kind::BoolValue(value)) => text.push_str(if *value { "true" } else { "false" }),
        Some(Kind::NumberValue(value)) => text.push_str(&number(*value)),
        Some(Kind::StringValue(value)) => write_text(text, value),
        Some(Kind::StructValue(value)) => write_object(text, value),
        Some(Kind::ListValue(list)) => {
            text.push('[');
            for (index, value) in list.values.iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                write_value(text, value);
            }
            text.push(']');
        }
    }
}

/// Formats a number: very large and very small ones with an exponent, others without.
fn number(value: f64) -> String {
    let size = value.abs();
    if value.is_nan() {
        return "\"NaN\"".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "\"Infinity\"" } else { "\"-Infinity\"" }.to_owned();
    }
    if size == 0.0 || (1e-6..1e21).contains(&size) {
        return value.to_string();
    }
    let text = format!("{value:e}");
    match text.split_once('e') {
        Some((digits, exponent)) if !exponent.starts_with('-') => format!("{digits}e+{exponent}"),
        _ => text,
    }
}

/// Writes a quoted string, escaped for HTML.
fn write_text(text: &mut String, value: &str) {
    text.push('"');
    for character in value.chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\u{8}' => text.push_str("\\b"),
            '\u{c}' => text.push_str("\\f"),
            '\0'..='\u{1f}' | '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                write!(text, "\\u{:04x}", u32::from(character)).expect("because text can be written to");
            }
            other => text.push(other),
        }
    }
    text.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{
        istio::extensions::v1alpha1::WasmConfig,
        json::{self, Unknown},
    };

    #[test]
    fn text_is_compact_and_sorted() {
        let value = serde_json::json!({"b": [1, 2.5, null, true], "a": {"x": "<é\n\u{1}>"}, "c": {}});
        let value = serde_json::json!({ "pluginConfig": value });
        let config: WasmConfig = json::from_json(&value, Unknown::Deny).expect("an object");
        let text = r#"{"a":{"x":"\u003cé\n\u0001\u003e"},"b":[1,2.5,null,true],"c":{}}"#;
        assert_eq!(object(&config.plugin_config.expect("settings")), text);
    }

    #[test]
    fn numbers_are_formatted_as_in_go() {
        let pairs = [
            (0.0, "0"),
            (1e20, "100000000000000000000"),
            (1e21, "1e+21"),
            (1.5e-7, "1.5e-7"),
            (0.000_001, "0.000001"),
            (-3.0, "-3"),
        ];
        for (value, text) in pairs {
            assert_eq!(number(value), text);
        }
    }
}
