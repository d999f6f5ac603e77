//! The difference of two JSON documents as a JSON Patch (RFC 6902).

use serde_json::{Value, json};

/// Returns the operations that turn one document into another; empty if they are equal.
pub(super) fn difference(from: &Value, to: &Value) -> Vec<Value> {
    let mut operations = Vec::new();
    compare(&mut operations, &mut String::new(), from, to);
    operations
}

fn compare(operations: &mut Vec<Value>, path: &mut String, from: &Value, to: &Value) {
    match (from, to) {
        _ if from == to => {}
        (Value::Object(before), Value::Object(after)) => {
            for (key, value) in before {
                within(path, &escaped(key), |path| match after.get(key) {
                    Some(other) => compare(operations, path, value, other),
                    None => operations.push(json!({"op": "remove", "path": path})),
                });
            }
            for (key, value) in after.iter().filter(|(key, _)| !before.contains_key(*key)) {
                within(path, &escaped(key), |path| operations.push(add(path, value)));
            }
        }
        (Value::Array(before), Value::Array(after)) => lists(operations, path, before, after),
        _ => operations.push(json!({"op": "replace", "path": path, "value": to})),
    }
}

/// Compares lists. Equal elements at both ends stay; of the rest, elements of one name are compared.
fn lists(operations: &mut Vec<Value>, path: &mut String, before: &[Value], after: &[Value]) {
    let start = before.iter().zip(after).take_while(|(a, b)| a == b).count();
    let (before, after) = (&before[start..], &after[start..]);
    let end = before
        .iter()
        .rev()
        .zip(after.iter().rev())
        .take_while(|(a, b)| a == b)
        .count();
    let (before, after) = (&before[..before.len() - end], &after[..after.len() - end]);
    if let Some(inserted) = insertions(before, after) {
        return insert(operations, path, start, before, after, &inserted);
    }
    let shared = before.len().min(after.len());
    for (index, (value, other)) in before.iter().zip(after).enumerate() {
        let is_same = value.get("name").is_some() && value.get("name") == other.get("name");
        within(path, &(start + index).to_string(), |path| {
            if is_same {
                compare(operations, path, value, other);
            } else if value != other {
                operations.push(json!({"op": "replace", "path": path, "value": other}));
            }
        });
    }
    for index in (shared..before.len()).rev() {
        within(path, &(start + index).to_string(), |path| {
            operations.push(json!({"op": "remove", "path": path}));
        });
    }
    for (index, value) in after.iter().enumerate().skip(shared) {
        within(path, &(start + index).to_string(), |path| {
            operations.push(add(path, value));
        });
    }
}

/// Returns the positions of new elements if all named elements are kept in order; `None` otherwise.
fn insertions(before: &[Value], after: &[Value]) -> Option<Vec<usize>> {
    let name = |value: &Value| value.get("name").and_then(Value::as_str).map(str::to_owned);
    let mut kept = before.iter();
    let mut next = kept.next();
    let mut inserted = Vec::new();
    for (index, value) in after.iter().enumerate() {
        let own = name(value)?;
        match next {
            Some(other) if name(other)? == own => next = kept.next(),
            _ => inserted.push(index),
        }
    }
    next.is_none().then_some(inserted)
}

fn insert(
    operations: &mut Vec<Value>,
    path: &mut String,
    start: usize,
    before: &[Value],
    after: &[Value],
    inserted: &[usize],
) {
    let mut kept = before.iter();
    for (index, value) in after.iter().enumerate() {
        let is_new = inserted.binary_search(&index).is_ok();
        let old = if is_new { None } else { kept.next() };
        within(path, &(start + index).to_string(), |path| match old {
            Some(old) => compare(operations, path, old, value),
            None => operations.push(add(path, value)),
        });
    }
}

fn add(path: &str, value: &Value) -> Value {
    json!({"op": "add", "path": path, "value": value})
}

fn within(path: &mut String, member: &str, visit: impl FnOnce(&mut String)) {
    let length = path.len();
    path.push('/');
    path.push_str(member);
    visit(path);
    path.truncate(length);
}

/// Escapes a key for a JSON Pointer (RFC 6901).
fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_differences_are_patched() {
        let from = json!({"a": {"b/c": 1, "d~": 2}, "same": [1, 2]});
        let to = json!({"a": {"b/c": 3}, "same": [1, 2], "e": null});
        assert_eq!(
            difference(&from, &to),
            [
                json!({"op": "replace", "path": "/a/b~1c", "value": 3}),
                json!({"op": "remove", "path": "/a/d~0"}),
                json!({"op": "add", "path": "/e", "value": null}),
            ]
        );
        assert!(difference(&from, &from).is_empty());
    }

    #[test]
    fn inserted_elements_leave_others_alone() {
        let from = json!([{"name": "app", "image": "1"}, {"name": "b"}]);
        let to = json!([{"name": "proxy"}, {"name": "app", "image": "2"}, {"name": "b"}, {"name": "z"}]);
        assert_eq!(
            difference(&from, &to),
            [
                json!({"op": "add", "path": "/0", "value": {"name": "proxy"}}),
                json!({"op": "replace", "path": "/1/image", "value": "2"}),
                json!({"op": "add", "path": "/3", "value": {"name": "z"}}),
            ]
        );
    }

    #[test]
    fn lists_shrink_from_the_end() {
        assert_eq!(
            difference(&json!(["a", "b", "c", "d"]), &json!(["x", "d"])),
            [
                json!({"op": "replace", "path": "/0", "value": "x"}),
                json!({"op": "remove", "path": "/2"}),
                json!({"op": "remove", "path": "/1"}),
            ]
        );
    }
}
