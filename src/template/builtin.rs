//! The functions of `text/template`.

use super::{
    format,
    limits::Failure,
    types::Type,
    value::{Context, Evaluation, Function, Functions, List, Value},
};

mod compare;
mod escape;

/// Returns the functions by name.
pub(super) fn functions() -> Functions {
    use Type::{Any, Bool, Reflect, String};
    let mut functions = Functions::default();
    functions.extend([
        Function::variadic("and", &[Reflect, Reflect], Reflect, |_, _| Ok(Value::Missing))
            .with_evaluation(Evaluation::And),
        Function::variadic("or", &[Reflect, Reflect], Reflect, |_, _| Ok(Value::Missing))
            .with_evaluation(Evaluation::Or),
        Function::variadic("call", &[Reflect, Reflect], Any, |_, _| Ok(Value::Missing))
            .with_evaluation(Evaluation::Call),
        Function::new("not", &[Reflect], Bool, |context, arguments| {
            Ok(Value::Bool(!context.is_true(arguments[0])))
        }),
        Function::variadic("index", &[Reflect, Reflect], Reflect, |context, arguments| {
            index(context, arguments[0], &arguments[1..]).map_err(Failure::Message)
        }),
        Function::variadic("slice", &[Reflect, Reflect], Reflect, |context, arguments| {
            let sliced = slice(arguments[0], &arguments[1..]).map_err(Failure::Message)?;
            if let Value::List(list) = &sliced {
                context.allocate_elements(list.items().len())?;
            }
            Ok(sliced)
        }),
        Function::new("len", &[Reflect], Type::INT, |context, arguments| {
            length(context, arguments[0]).map_err(Failure::Message)
        }),
        Function::variadic("print", &[Any], String, |context, arguments| {
            Ok(format::print(context, arguments)?.into())
        }),
        Function::variadic("println", &[Any], String, |context, arguments| {
            Ok(format::print_line(context, arguments)?.into())
        }),
        Function::variadic("printf", &[String, Any], String, |context, arguments| {
            let Value::String(text) = arguments[0] else {
                return Ok(Value::Nil);
            };
            Ok(format::printf(context, text.bytes(), &arguments[1..])?.into())
        }),
    ]);
    functions.extend(compare::functions());
    functions.extend(escape::functions());
    functions
}

/// Go's text where a function asks a missing value for its type.
const NO_TYPE: &str = "reflect: call of reflect.Value.Type on zero Value";

fn index(context: &Context<'_>, item: &Value, indexes: &[&Value]) -> Result<Value, String> {
    if matches!(item, Value::Missing | Value::Nil) {
        return Err("index of untyped nil".to_owned());
    }
    let mut item = item.clone();
    for index in indexes {
        if let (Value::Map(map), Value::String(key)) = (&item, index) {
            let found = context.entries(map).get(key).cloned();
            item = found.unwrap_or_else(|| Value::zero(map.element()));
            continue;
        }
        item = item.indirect().ok_or("index of nil pointer")?;
        item = match &item.to_basic() {
            Value::List(list) => {
                let position = position(index, list.items().len())?;
                let found = list.items().get(position).cloned();
                found.ok_or_else(|| out_of_range("reflect: slice index out of range"))?
            }
            Value::String(text) => {
                let position = position(index, text.len())?;
                let byte = text.bytes().get(position);
                let byte = byte.ok_or_else(|| out_of_range("reflect: string index out of range"))?;
                Value::Uint(super::types::UintType::Uint8, u64::from(*byte))
            }
            Value::Map(map) => match index.to_basic() {
                Value::Missing | Value::Nil => return Err("value is nil; should be of type string".to_owned()),
                Value::String(key) if matches!(index, Value::String(_)) => context
                    .entry(map, key.bytes())
                    .unwrap_or_else(|| Value::zero(map.element())),
                _ => return Err(format!("value has type {}; should be string", index.type_of())),
            },
            Value::Missing => return Err(NO_TYPE.to_owned()),
            other => return Err(format!("can't index item of type {}", other.target_type())),
        };
    }
    Ok(item)
}

fn out_of_range(message: &str) -> String {
    message.to_owned()
}

/// Returns an index that is at most a length.
fn position(index: &Value, most: usize) -> Result<usize, String> {
    let number = match index.to_basic() {
        Value::Int(_, number) => number,
        Value::Uint(_, number) => number as i64,
        Value::Missing | Value::Nil => return Err("cannot index slice/array with nil".to_owned()),
        _ => return Err(format!("cannot index slice/array with type {}", index.type_of())),
    };
    let position = usize::try_from(number).ok().filter(|position| *position <= most);
    position.ok_or_else(|| format!("index out of range: {number}"))
}

fn slice(item: &Value, indexes: &[&Value]) -> Result<Value, String> {
    if matches!(item, Value::Missing | Value::Nil) {
        return Err("slice of untyped nil".to_owned());
    }
    let item = item.indirect().ok_or("slice of nil pointer")?;
    if indexes.len() > 3 {
        return Err(format!("too many slice indexes: {}", indexes.len()));
    }
    let length = match &item {
        Value::String(_) if indexes.len() == 3 => return Err("cannot 3-index slice a string".to_owned()),
        Value::String(text) => text.len(),
        Value::List(list) => list.items().len(),
        other => return Err(format!("can't slice item of type {}", other.target_type())),
    };
    let mut bounds = [0, length, length];
    for (bound, index) in bounds.iter_mut().zip(indexes) {
        *bound = position(index, length)?;
    }
    let [begin, end, most] = bounds;
    if begin > end {
        return Err(format!("invalid slice index: {begin} > {end}"));
    }
    if indexes.len() == 3 && end > most {
        return Err(format!("invalid slice index: {end} > {most}"));
    }
    Ok(match &item {
        Value::String(text) => Value::string(&text.bytes()[begin..end]),
        Value::List(list) => Value::List(List::of(list.element().clone(), list.items()[begin..end].to_vec())),
        _ => item,
    })
}

fn length(context: &Context<'_>, item: &Value) -> Result<Value, String> {
    let item = item.indirect().ok_or("len of nil pointer")?;
    let length = match item.to_basic() {
        Value::String(text) => text.len(),
        Value::List(list) => list.items().len(),
        Value::Map(map) => context.entries(&map).len(),
        Value::Missing => return Err(NO_TYPE.to_owned()),
        _ => return Err(format!("len of type {}", item.target_type())),
    };
    Ok(Value::int(length as i64))
}
