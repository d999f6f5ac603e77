//! Lists.

use super::{
    super::{
        limits::Failure,
        types::Type,
        value::{Context, Function, List, Value},
    },
    convert::to_int,
    defaults::deep_equal,
    int, nil_pointer,
};

pub(super) fn functions() -> Vec<Function> {
    use Type::{Any, Bool};
    let list = || Any.list();
    let make = |name: &str, body: fn(&mut Context<'_>, &[&Value]) -> Result<Value, Failure>| {
        Function::new(name, &[Any], list(), body)
    };
    vec![
        Function::variadic("list", &[Any], list(), |context, arguments| {
            collected(context, arguments.iter().copied().cloned().collect())
        }),
        Function::new("push", &[Any, Any], list(), |context, arguments| {
            let mut items = items(arguments[0], "push on")?.to_vec();
            items.push(arguments[1].clone());
            collected(context, items)
        }),
        Function::new("prepend", &[Any, Any], list(), |context, arguments| {
            let mut all = vec![arguments[1].clone()];
            all.extend_from_slice(items(arguments[0], "prepend on")?);
            collected(context, all)
        }),
        Function::new("first", &[Any], Any, |_, arguments| {
            Ok(items(arguments[0], "find first on")?
                .first()
                .cloned()
                .unwrap_or(Value::Nil))
        }),
        Function::new("last", &[Any], Any, |_, arguments| {
            Ok(items(arguments[0], "find last on")?
                .last()
                .cloned()
                .unwrap_or(Value::Nil))
        }),
        make("rest", |context, arguments| {
            match items(arguments[0], "find rest on")?.split_first() {
                Some((_, rest)) => collected(context, rest.to_vec()),
                None => Ok(List::nil(Type::Any).into()),
            }
        }),
        make("initial", |context, arguments| {
            match items(arguments[0], "find initial on")?.split_last() {
                Some((_, initial)) => collected(context, initial.to_vec()),
                None => Ok(List::nil(Type::Any).into()),
            }
        }),
        make("reverse", |context, arguments| {
            let items = items(arguments[0], "find reverse on")?;
            collected(context, items.iter().rev().cloned().collect())
        }),
        make("compact", |context, arguments| {
            let items = items(arguments[0], "compact on")?;
            let kept = items.iter().filter(|item| context.is_true(item)).cloned().collect();
            collected(context, kept)
        }),
        make("uniq", |context, arguments| {
            let mut unique: Vec<Value> = Vec::new();
            for item in items(arguments[0], "find uniq on")? {
                if !contains(context, &unique, item)? {
                    unique.push(item.clone());
                }
            }
            collected(context, unique)
        }),
        Function::variadic("without", &[Any, Any], list(), |context, arguments| {
            let mut kept = Vec::new();
            for item in items(arguments[0], "find without on")? {
                if !contains(context, arguments[1..].iter().copied(), item)? {
                    kept.push(item.clone());
                }
            }
            collected(context, kept)
        }),
        Function::new("has", &[Any, Any], Bool, |context, arguments| {
            if matches!(arguments[1], Value::Nil) {
                return Ok(false.into());
            }
            let items = items(arguments[1], "find has on")?;
            Ok(contains(context, items, arguments[0])?.into())
        }),
        Function::variadic("slice", &[Any, Any], Any, slice),
        Function::variadic("concat", &[Any], Any, |context, arguments| {
            let mut all = Vec::new();
            for argument in arguments {
                match argument {
                    Value::List(list) => all.extend_from_slice(list.items()),
                    Value::Nil => return Err(nil_pointer()),
                    other => {
                        let kind = other.kind().name();
                        return Err(Failure::Message(format!("Cannot concat type {kind} as list")));
                    }
                }
                context.allocate_elements(all.len())?;
            }
            if all.is_empty() {
                return Ok(List::nil(Type::Any).into());
            }
            collected(context, all)
        }),
        Function::new("chunk", &[Type::INT, Any], list().list(), chunk),
    ]
}

/// Returns the elements of a list. `action` is part of the error for other values.
fn items<'a>(value: &'a Value, action: &str) -> Result<&'a [Value], Failure> {
    match value {
        Value::List(list) => Ok(list.items()),
        Value::Nil | Value::Missing => Err(nil_pointer()),
        other => {
            let kind = other.kind().name();
            Err(Failure::Message(format!("Cannot {action} type {kind}")))
        }
    }
}

fn collected(context: &mut Context<'_>, items: Vec<Value>) -> Result<Value, Failure> {
    context.allocate_elements(items.len())?;
    Ok(Value::list(items))
}

fn contains<'v>(
    context: &mut Context<'_>,
    items: impl IntoIterator<Item = &'v Value>,
    wanted: &Value,
) -> Result<bool, Failure> {
    for item in items {
        if deep_equal(context, wanted, item)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn slice(context: &mut Context<'_>, arguments: &[&Value]) -> Result<Value, Failure> {
    let list = match arguments[0] {
        Value::List(list) => list,
        Value::Nil => return Err(nil_pointer()),
        other => {
            let kind = other.kind().name();
            let message = format!("list should be type of slice or array but {kind}");
            return Err(Failure::Message(message));
        }
    };
    let items = list.items();
    if items.is_empty() {
        return Ok(Value::Nil);
    }
    let start = arguments.get(1).copied().map_or(0, to_int);
    let end = arguments.get(2).copied().map_or(items.len() as i64, to_int);
    let part = usize::try_from(start)
        .ok()
        .zip(usize::try_from(end).ok())
        .and_then(|(start, end)| items.get(start..end));
    let part = part.ok_or_else(|| Failure::message("reflect.Value.Slice: slice index out of bounds"))?;
    context.allocate_elements(part.len())?;
    Ok(List::of(list.element().clone(), part.to_vec()).into())
}

fn chunk(context: &mut Context<'_>, arguments: &[&Value]) -> Result<Value, Failure> {
    let items = match arguments[1] {
        Value::List(list) => list.items(),
        Value::Nil => return Err(nil_pointer()),
        other => {
            let kind = other.kind().name();
            return Err(Failure::Message(format!("Cannot chunk type {kind}")));
        }
    };
    let size = int(arguments, 0);
    let count = ((items.len() as f64 - 1.0) / size as f64).floor() + 1.0;
    if size < 1 && count != 0.0 {
        return Err(Failure::message("runtime error: makeslice: len out of range"));
    }
    context.allocate_elements(items.len())?;
    let size = usize::try_from(size).unwrap_or(1).max(1);
    let chunks = if count == 0.0 { [].chunks(1) } else { items.chunks(size) };
    let lists: Vec<Value> = chunks.map(|chunk| Value::list(chunk.to_vec())).collect();
    Ok(List::of(Type::Any.list(), lists).into())
}
