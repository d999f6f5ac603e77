//! Comparison of injected objects, and application of JSON patches.

use libtest_mimic::Failed;
use serde_json::Value;

/// Fails with the first differences of two objects.
pub(super) fn assert_same(mut actual: Value, mut expected: Value) -> Result<(), Failed> {
    without_version(&mut actual);
    without_version(&mut expected);
    let mut differences = Vec::new();
    compare("", &actual, &expected, &mut differences);
    if differences.is_empty() {
        return Ok(());
    }
    differences.truncate(10);
    Err(differences.join("\n").into())
}

/// Removes what depends on the build of Istio, and timestamps that are not set.
fn without_version(value: &mut Value) {
    match value {
        Value::Object(entries) => {
            if entries.get("creationTimestamp").is_some_and(Value::is_null) {
                entries.remove("creationTimestamp");
            }
            entries.values_mut().for_each(without_version);
        }
        Value::Array(items) => items.iter_mut().for_each(without_version),
        _ => {}
    }
}

fn compare(path: &str, actual: &Value, expected: &Value, differences: &mut Vec<String>) {
    match (actual, expected) {
        _ if actual == expected => {}
        (Value::Object(left), Value::Object(right)) => {
            let keys = left.keys().chain(right.keys().filter(|key| !left.contains_key(*key)));
            for key in keys {
                let (left, right) = (left.get(key), right.get(key));
                compare(
                    &format!("{path}.{key}"),
                    left.unwrap_or(&Value::Null),
                    right.unwrap_or(&Value::Null),
                    differences,
                );
            }
        }
        (Value::Array(left), Value::Array(right)) if left.len() == right.len() => {
            for (index, (left, right)) in left.iter().zip(right).enumerate() {
                compare(&format!("{path}[{index}]"), left, right, differences);
            }
        }
        _ => differences.push(format!("{path}: {actual}, expected {expected}")),
    }
}

/// Applies a JSON patch as the API server does.
pub(crate) fn patched(document: &Value, operations: &[Value]) -> Result<Value, Failed> {
    let mut document = document.clone();
    for operation in operations {
        apply(&mut document, operation).ok_or_else(|| format!("{operation} does not apply"))?;
    }
    Ok(document)
}

fn apply(document: &mut Value, operation: &Value) -> Option<()> {
    let (parent, member) = operation["path"].as_str()?.rsplit_once('/')?;
    let member = member.replace("~1", "/").replace("~0", "~");
    let value = || operation["value"].clone();
    match (operation["op"].as_str()?, document.pointer_mut(parent)?) {
        ("remove", Value::Object(entries)) => entries.remove(&member).map(drop),
        ("add", Value::Object(entries)) => {
            entries.insert(member, value());
            Some(())
        }
        ("replace", Value::Object(entries)) => entries.insert(member, value()).map(drop),
        (operation, Value::Array(items)) => {
            let index: usize = member.parse().ok()?;
            match operation {
                "add" if index <= items.len() => items.insert(index, value()),
                "replace" => *items.get_mut(index)? = value(),
                "remove" if index < items.len() => drop(items.remove(index)),
                _ => return None,
            }
            Some(())
        }
        _ => None,
    }
}
