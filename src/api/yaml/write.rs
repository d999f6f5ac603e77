//! Writes JSON values as YAML text that all YAML readers understand alike: block style, sorted keys, and quotes
//! wherever a reader of YAML 1.1 could read something other than a string.

use std::fmt::Write;

use serde_json::{Map, Value};

/// Plain words that YAML 1.1 does not read as strings.
const RESERVED: &[&str] = &[
    "true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf",
];

/// Returns one document, without a marker and with a final line break.
pub fn to_text(value: &Value) -> String {
    let mut text = String::new();
    match value {
        Value::Object(entries) if !entries.is_empty() => mapping(&mut text, entries, 0),
        Value::Array(items) if !items.is_empty() => list(&mut text, items, 0),
        other => {
            scalar(&mut text, other);
            text.push('\n');
        }
    }
    text
}

fn mapping(text: &mut String, entries: &Map<String, Value>, indent: usize) {
    let mut sorted: Vec<_> = entries.iter().collect();
    sorted.sort_by_key(|(key, _)| *key);
    for (position, (key, value)) in sorted.into_iter().enumerate() {
        // The first entry continues the current line: after a dash, or at its beginning.
        if position > 0 || text.ends_with('\n') || text.is_empty() {
            text.extend(std::iter::repeat_n(' ', indent));
        }
        string(text, key);
        text.push(':');
        match value {
            Value::Object(entries) if !entries.is_empty() => {
                text.push('\n');
                mapping(text, entries, indent + 2);
            }
            Value::Array(items) if !items.is_empty() => {
                text.push('\n');
                list(text, items, indent);
            }
            Value::String(lines) if is_block(lines) => block(text, lines, indent + 2),
            other => {
                text.push(' ');
                scalar(text, other);
                text.push('\n');
            }
        }
    }
}

/// Returns true if the string can be written as a literal block: printable lines, the last one with a line break.
fn is_block(value: &str) -> bool {
    let is_line = |line: &str| {
        let harmless = |character: char| character == ' ' || character.is_ascii_graphic();
        !line.is_empty() && !line.ends_with(' ') && line.chars().all(harmless)
    };
    value.ends_with('\n') && !value.starts_with(' ') && value.lines().all(is_line)
}

fn block(text: &mut String, value: &str, indent: usize) {
    text.push_str(" |\n");
    for line in value.lines() {
        text.extend(std::iter::repeat_n(' ', indent));
        text.push_str(line);
        text.push('\n');
    }
}

fn list(text: &mut String, items: &[Value], indent: usize) {
    for (position, item) in items.iter().enumerate() {
        if position > 0 || text.ends_with('\n') || text.is_empty() {
            text.extend(std::iter::repeat_n(' ', indent));
        }
        text.push_str("- ");
        match item {
            Value::Object(entries) if !entries.is_empty() => mapping(text, entries, indent + 2),
            Value::Array(items) if !items.is_empty() => list(text, items, indent + 2),
            other => {
                scalar(text, other);
                text.push('\n');
            }
        }
    }
}

fn scalar(text: &mut String, value: &Value) {
    match value {
        Value::String(value) => string(text, value),
        other => write!(text, "{other}").expect("because writing to a string cannot fail"),
    }
}

fn string(text: &mut String, value: &str) {
    if is_plain(value) {
        text.push_str(value);
    } else {
        // A JSON string is a double-quoted YAML scalar.
        write!(text, "{}", Value::from(value)).expect("because writing to a string cannot fail");
    }
}

/// Returns true if the string needs no quotes: letters and harmless signs, beginning with a letter.
fn is_plain(value: &str) -> bool {
    let harmless = |character: char| character.is_ascii_alphanumeric() || " ._/-,()".contains(character);
    value.starts_with(|first: char| first.is_ascii_alphabetic())
        && !value.ends_with(' ')
        && value.chars().all(harmless)
        && !RESERVED.contains(&value.to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::yaml::documents;

    #[test]
    fn written_text_parses_to_the_same_value() {
        let value = json!({
            "z": [], "a": {}, "b": null, "list": [1, -2.5, true, [[], [1, 2]], {"x": {"y": [{"k": "v", "l": "w"}]}}],
            "words": ["yes", "On", "n", "", " a", "a ", "1e3", "0x1F", "~", "a: b", "a #b", "-", "plain words",
                "^a\\d$",
                      "line\nbreak", "\u{e9}", "12", "NaN", "2024-01-01", "a,b (c)", "*", "&x", "!t", "%d", "@a", "`"],
            "block": "a: 1\n  - b\n# c\n", "tabs": "a\tb\n", "gap": "a\n\nb\n", "blank": "\n", "deep": " a\n",
            "end": "a \n",
            "yes": {"x-kubernetes-int-or-string": true},
        });
        let text = to_text(&value);
        let read = documents(&text)[0].parse().expect("the text is YAML");
        assert_eq!(read, value, "{text}");
    }

    #[test]
    fn text_has_sorted_keys_and_block_style() {
        let value = json!({"b": {"c": ["x", {"w": 1, "z": "2"}]}, "a": "on"});
        assert_eq!(to_text(&value), "a: \"on\"\nb:\n  c:\n  - x\n  - w: 1\n    z: \"2\"\n");
        assert_eq!(to_text(&json!({})), "{}\n");
        assert_eq!(
            to_text(&json!({"a": {"b": "c: d\ne\n"}})),
            "a:\n  b: |\n    c: d\n    e\n"
        );
    }
}
