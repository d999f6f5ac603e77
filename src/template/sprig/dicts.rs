//! Dictionaries: maps from strings to any values. `set`, `unset` and `merge` change the map for all its holders.

use super::{
    super::{
        limits::Failure,
        text::Text,
        types::Type,
        value::{Context, Entries, Function, List, Map, Value},
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
                let key = to_text(context, pair[0])?;
                entries.insert(key, pair.get(1).copied().cloned().unwrap_or_else(|| "".into()));
            }
            Ok(Map::new(entries).into())
        }),
        Function::new("get", &[dict(), String], Any, |context, arguments| {
            let value = context.entry(&map(arguments, 0), bytes(arguments, 1));
            Ok(value.unwrap_or_else(|| "".into()))
        }),
        Function::new("set", &[dict(), String, Any], dict(), |context, arguments| {
            insert(context, &map(arguments, 0), bytes(arguments, 1).into(), arguments[2])?;
            Ok(arguments[0].clone())
        }),
        Function::new("unset", &[dict(), String], dict(), |context, arguments| {
            context.entries_mut(&map(arguments, 0))?.remove(bytes(arguments, 1));
            Ok(arguments[0].clone())
        }),
        Function::new("hasKey", &[dict(), String], Bool, |context, arguments| {
            let map = map(arguments, 0);
            Ok(context.entries(&map).contains_key(bytes(arguments, 1)).into())
        }),
        Function::variadic("pluck", &[String, dict()], Any.list(), |context, arguments| {
            context.allocate_elements(arguments.len())?;
            let maps = (1..arguments.len()).map(|position| map(arguments, position));
            Ok(Value::list(
                maps.filter_map(|map| context.entry(&map, bytes(arguments, 0)))
                    .collect(),
            ))
        }),
        Function::variadic("keys", &[dict()], String.list(), |context, arguments| {
            let mut keys = Vec::new();
            for position in 0..arguments.len() {
                let map = map(arguments, position);
                context.allocate_elements(context.entries(&map).len())?;
                keys.extend(context.entries(&map).keys().cloned());
            }
            Ok(List::of_strings(keys).into())
        }),
        Function::new("values", &[dict()], Any.list(), |context, arguments| {
            let map = map(arguments, 0);
            context.allocate_elements(context.entries(&map).len())?;
            let values = context.entries(&map).values().cloned().collect();
            Ok(Value::list(values))
        }),
        Function::variadic("pick", &[dict(), String], dict(), |context, arguments| {
            context.allocate_elements(arguments.len())?;
            let from = map(arguments, 0);
            let keys = (1..arguments.len()).map(|position| bytes(arguments, position));
            let picked = keys.filter_map(|key| Some((key.into(), context.entry(&from, key)?)));
            Ok(Map::new(picked.collect()).into())
        }),
        Function::variadic("omit", &[dict(), String], dict(), |context, arguments| {
            let from = map(arguments, 0);
            context.allocate_elements(context.entries(&from).len())?;
            let mut entries = context.entries(&from).clone();
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
            deep_copy(context, arguments[0], 0)
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
    context.entries_mut(map)?.insert(key, value.clone());
    Ok(())
}

/// Returns true if a value contains a map.
fn reaches(context: &mut Context<'_>, value: &Value, target: &Map, depth: usize) -> Result<bool, Failure> {
    context.step(1)?;
    let depth = context.deeper(depth)?;
    match value {
        Value::Map(map) if map.is_same(target) => Ok(true),
        Value::Map(map) => {
            let inner = context.snapshot(map);
            let mut containers = inner.values().filter(|value| value.is_container());
            containers.try_fold(false, |found, value| {
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

fn merge_all(context: &mut Context<'_>, arguments: &[&Value], precedence: Precedence) -> Result<Value, Failure> {
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
    for (key, value) in context.snapshot(source).as_ref() {
        context.step(1)?;
        let present = context.entry(destination, key.bytes());
        if matches!(value, Value::Nil) {
            if precedence == Precedence::Source {
                insert(context, destination, key.clone(), value)?;
            }
            continue;
        }
        if let (Some(Value::Map(inner)), Value::Map(other)) = (&present, value) {
            merge(context, inner, other, precedence, depth)?;
            if !context.entries(inner).is_empty() {
                continue;
            }
        }
        let is_free = present.as_ref().is_none_or(|present| !context.is_true(present));
        if is_free || precedence == Precedence::Source {
            insert(context, destination, key.clone(), value)?;
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
            let entries = context.snapshot(map);
            context.allocate_elements(entries.len())?;
            let copies = entries
                .iter()
                .map(|(key, value)| Ok((key.clone(), deep_copy(context, value, depth)?)));
            Ok(Map::of(map.element().clone(), copies.collect::<Result<_, Failure>>()?).into())
        }
        value => Ok(value.clone()),
    }
}

fn dig(context: &mut Context<'_>, arguments: &[&Value]) -> Result<Value, Failure> {
    let &[ref keys @ .., default, from] = arguments else {
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
        match context.entry(&dict(&value)?, key.bytes()) {
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
