//! Dictionaries: maps from strings to any values. `set`, `unset` and `merge` change the map for all its holders.

use super::{
    super::{
        limits::{Context, Failure},
        text::Text,
        types::Type,
        value::{Entries, Function, List, Map, Value},
    },
    bytes,
    convert::to_text,
    map,
};

pub(super) fn functions() -> Vec<Function> {
    use Type::{Any, Bool, String};
    let dict = || Any.map();
    vec![
        Function::variadic("dict", &[Any], dict(), |context, arguments| {
            context.allocate_elements(arguments.len())?;
            let mut entries = Entries::new();
            for pair in arguments.chunks(2) {
                let key = to_text(context, &pair[0])?;
                entries.insert(key, pair.get(1).cloned().unwrap_or_else(|| "".into()));
            }
            Ok(Map::new(entries).into())
        }),
        Function::new("get", &[dict(), String], Any, |_, arguments| {
            Ok(map(arguments, 0).get(bytes(arguments, 1)).unwrap_or_else(|| "".into()))
        }),
        Function::new("set", &[dict(), String, Any], dict(), |context, arguments| {
            insert(context, &map(arguments, 0), bytes(arguments, 1).into(), &arguments[2])?;
            Ok(arguments[0].clone())
        }),
        Function::new("unset", &[dict(), String], dict(), |_, arguments| {
            let removed = map(arguments, 0).entries_mut().remove(bytes(arguments, 1));
            drop(removed);
            Ok(arguments[0].clone())
        }),
        Function::new("hasKey", &[dict(), String], Bool, |_, arguments| {
            Ok(map(arguments, 0).entries().contains_key(bytes(arguments, 1)).into())
        }),
        Function::variadic("pluck", &[String, dict()], Any.list(), |context, arguments| {
            context.allocate_elements(arguments.len())?;
            let maps = (1..arguments.len()).map(|position| map(arguments, position));
            Ok(Value::list(
                maps.filter_map(|map| map.get(bytes(arguments, 0))).collect(),
            ))
        }),
        Function::variadic("keys", &[dict()], String.list(), |context, arguments| {
            let mut keys = Vec::new();
            for position in 0..arguments.len() {
                let map = map(arguments, position);
                context.allocate_elements(map.entries().len())?;
                keys.extend(map.entries().keys().cloned());
            }
            Ok(List::of_strings(keys).into())
        }),
        Function::new("values", &[dict()], Any.list(), |context, arguments| {
            let map = map(arguments, 0);
            context.allocate_elements(map.entries().len())?;
            let values = map.entries().values().cloned().collect();
            Ok(Value::list(values))
        }),
        Function::variadic("pick", &[dict(), String], dict(), |context, arguments| {
            context.allocate_elements(arguments.len())?;
            let from = map(arguments, 0);
            let keys = (1..arguments.len()).map(|position| bytes(arguments, position));
            let picked = keys.filter_map(|key| Some((key.into(), from.get(key)?)));
            Ok(Map::new(picked.collect()).into())
        }),
        Function::variadic("omit", &[dict(), String], dict(), |context, arguments| {
            let from = map(arguments, 0);
            context.allocate_elements(from.entries().len())?;
            let mut entries = from.entries().clone();
            for position in 1..arguments.len() {
                entries.remove(bytes(arguments, position));
            }
            Ok(Map::new(entries).into())
        }),
        Function::variadic("merge", &[dict(), dict()], Any, |context, arguments| {
            merge_all(context, arguments, Precedence::Destination)
        }),
        Function::variadic("mergeOverwrite", &[dict(), dict()], Any, |context, arguments| {
            merge_all(context, arguments, Precedence::Source)
        }),
        Function::new("deepCopy", &[Any], Any, |context, arguments| {
            deep_copy(context, &arguments[0], 0)
        }),
        Function::variadic("dig", &[Any], Any, dig),
    ]
}

/// Sets an entry. A map must not contain itself: printing it would not end, and it would never be freed.
fn insert(context: &mut Context<'_>, map: &Map, key: Text, value: &Value) -> Result<(), Failure> {
    if map.is_nil() {
        return Err(Failure::message("assignment to entry in nil map"));
    }
    if value.is_container() && reaches(context, value, map, 0)? {
        return Err(Failure::message("a map cannot contain itself"));
    }
    context.allocate_elements(1)?;
    let replaced = map.entries_mut().insert(key, value.clone());
    drop(replaced);
    Ok(())
}

/// True if a value contains a map.
fn reaches(context: &mut Context<'_>, value: &Value, target: &Map, depth: usize) -> Result<bool, Failure> {
    context.step(1)?;
    let depth = context.deeper(depth)?;
    match value {
        Value::Map(map) if map.is_same(target) => Ok(true),
        Value::Map(map) => {
            let inner = map.snapshot();
            let mut containers = inner.iter().filter(|(_, value)| value.is_container());
            containers.try_fold(false, |found, (_, value)| {
                Ok(found || reaches(context, value, target, depth)?)
            })
        }
        Value::List(list) => {
            let mut containers = list.items().iter().filter(|value| value.is_container());
            containers.try_fold(false, |found, value| {
                Ok(found || reaches(context, value, target, depth)?)
            })
        }
        _ => Ok(false),
    }
}

/// The side whose values win in a merge.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Precedence {
    Destination,
    Source,
}

fn merge_all(context: &mut Context<'_>, arguments: &[Value], precedence: Precedence) -> Result<Value, Failure> {
    let destination = map(arguments, 0);
    for position in 1..arguments.len() {
        merge(context, &destination, &map(arguments, position), precedence, 0)?;
    }
    Ok(arguments[0].clone())
}

fn merge(
    context: &mut Context<'_>,
    destination: &Map,
    source: &Map,
    precedence: Precedence,
    depth: usize,
) -> Result<(), Failure> {
    let depth = context.deeper(depth)?;
    if destination.is_same(source) {
        return Ok(());
    }
    for (key, value) in source.snapshot() {
        context.step(1)?;
        let present = destination.get(key.bytes());
        if matches!(value, Value::Nil) {
            if precedence == Precedence::Source {
                insert(context, destination, key, &value)?;
            }
            continue;
        }
        if let (Some(Value::Map(inner)), Value::Map(other)) = (&present, &value) {
            merge(context, inner, other, precedence, depth)?;
            if present.as_ref().is_some_and(Value::is_true) && !inner.entries().is_empty() {
                continue;
            }
        }
        let is_free = present.as_ref().is_none_or(|present| !present.is_true());
        if is_free || precedence == Precedence::Source {
            insert(context, destination, key, &value)?;
        }
    }
    Ok(())
}

fn deep_copy(context: &mut Context<'_>, value: &Value, depth: usize) -> Result<Value, Failure> {
    let depth = context.deeper(depth)?;
    match value {
        Value::List(list) if !list.is_nil() => {
            context.allocate_elements(list.items().len())?;
            let items = list.items().iter().map(|item| deep_copy(context, item, depth));
            Ok(List::of(list.element().clone(), items.collect::<Result<_, _>>()?).into())
        }
        Value::Map(map) if !map.is_nil() => {
            let entries = map.snapshot();
            context.allocate_elements(entries.len())?;
            let copies = entries
                .into_iter()
                .map(|(key, value)| Ok((key, deep_copy(context, &value, depth)?)));
            Ok(Map::of(map.element().clone(), copies.collect::<Result<_, Failure>>()?).into())
        }
        value => Ok(value.clone()),
    }
}

fn dig(_: &mut Context<'_>, arguments: &[Value]) -> Result<Value, Failure> {
    let [keys @ .., default, from] = arguments else {
        return Err(Failure::message("dig needs at least three arguments"));
    };
    if keys.is_empty() {
        return Err(Failure::message("dig needs at least three arguments"));
    }
    let mut value = from.clone();
    let dict = |value: &Value| match value {
        Value::Map(map) if *map.element() == Type::Any => Ok(map.clone()),
        other => Err(conversion(other, "map[string]interface {}")),
    };
    // All arguments are converted before the search begins.
    dict(&value)?;
    let texts: Result<Vec<Text>, Failure> = keys
        .iter()
        .map(|key| match key {
            Value::String(text) => Ok(text.clone()),
            other => Err(conversion(other, "string")),
        })
        .collect();
    for key in texts? {
        match dict(&value)?.get(key.bytes()) {
            Some(inner) => value = inner,
            None => return Ok(default.clone()),
        }
    }
    Ok(value)
}

/// Go's error for a failed type assertion.
fn conversion(value: &Value, wanted: &str) -> Failure {
    let is = match value {
        Value::Nil | Value::Missing => "nil".to_owned(),
        value => value.type_of().to_string(),
    };
    Failure::Message(format!("interface conversion: interface {{}} is {is}, not {wanted}"))
}
