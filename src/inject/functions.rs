//! Istio's functions of templates, beside sprig's. Where both have a function, Istio's takes its place.
//!
//! Parity (pkg/kube/inject/template.go).

mod lists;
mod otel;

use std::{collections::BTreeMap, sync::LazyLock};

use serde_json::Value as Json;

use super::data;
use crate::{
    api::{mesh_config, yaml},
    proto::json::to_json,
    template::{
        Context, Escapes, Failure, Function, Functions, Layout, Map, Type, Value, decode_json, encode_json, print,
        sprig_functions,
    },
};

/// Returns the functions that templates of injection may call.
pub(super) fn functions() -> Functions {
    static FUNCTIONS: LazyLock<Functions> = LazyLock::new(|| {
        let mut functions = sprig_functions();
        functions.extend(texts());
        functions.extend(maps());
        functions.extend(formats());
        functions.extend(lists::functions());
        functions.add(otel::function());
        functions
    });
    FUNCTIONS.clone()
}

fn texts() -> [Function; 8] {
    use Type::{Any, Bool, String as Text};
    [
        Function::new("annotation", &[Any, Text, Any], Text, |context, arguments| {
            let Value::Object(meta) = arguments[0] else {
                return Err(Failure::message("annotation: the first argument must be ObjectMeta"));
            };
            let annotations = meta.field("Annotations").unwrap_or(Value::Nil);
            match entry(context, &annotations, arguments[1]) {
                Some(value) => Ok(value),
                None => Ok(print(context, &arguments[2..])?.into()),
            }
        }),
        Function::new("contains", &[Text, Text], Bool, |_, arguments| {
            Ok(text(arguments[1]).contains(&text(arguments[0])).into())
        }),
        Function::new("directory", &[Text], Text, |_, arguments| {
            let path = text(arguments[0]);
            let end = path.rfind('/').map_or(0, |slash| slash + 1);
            Ok(path[..end].into())
        }),
        Function::new("toLower", &[Text], Text, |context, arguments| {
            let text = text(arguments[0]);
            context.allocate(text.len())?;
            Ok(text.to_lowercase().into())
        }),
        Function::new("indent", &[Type::INT, Text], Text, |context, arguments| {
            let &Value::Int(_, spaces) = arguments[0] else {
                return Ok(Value::Nil);
            };
            let spaces = usize::try_from(spaces).unwrap_or(0);
            let text = text(arguments[1]);
            let breaks = text.matches('\n').count();
            context.allocate(text.len().saturating_add(breaks.saturating_mul(spaces)))?;
            if breaks == 0 {
                // The spaces were not paid for.
                return Ok(text.into());
            }
            Ok(text.replace('\n', &format!("\n{}", " ".repeat(spaces))).into())
        }),
        Function::new("env", &[Text, Text], Text, |context, arguments| {
            let found = context
                .host
                .variable(&text(arguments[0]))
                .filter(|value| !value.is_empty());
            Ok(found.map_or_else(|| arguments[1].clone(), Value::from))
        }),
        Function::new("formatDuration", &[Any], Text, |context, arguments| {
            let duration = data::call(context, arguments[0], "AsDuration")?;
            Ok(print(context, &[&duration])?.into())
        }),
        Function::new("valueOrDefault", &[Any, Any], Any, |_, arguments| {
            let is_set = match arguments[0] {
                Value::Missing | Value::Nil => false,
                Value::String(text) => !text.is_empty(),
                _ => true,
            };
            Ok(arguments[usize::from(!is_set)].clone())
        }),
    ]
}

fn maps() -> [Function; 7] {
    use Type::{Any, Bool, String as Text};
    [
        Function::new("isset", &[Text.map(), Text], Bool, |context, arguments| {
            Ok(entry(context, arguments[0], arguments[1]).is_some().into())
        }),
        Function::variadic("omit", &[Any, Text], Any, |context, arguments| {
            let Value::Map(map) = arguments[0] else {
                return Ok(arguments[0].clone());
            };
            context.allocate_elements(context.entries(map).len())?;
            let mut entries = context.entries(map).clone();
            for key in &arguments[1..] {
                entries.remove(text(key).as_bytes());
            }
            Ok(Value::Map(Map::of(map.element().clone(), entries)))
        }),
        Function::variadic("strdict", &[Text], Text.map(), |context, arguments| {
            context.allocate_elements(arguments.len())?;
            let pairs = arguments.chunks(2);
            let pairs = pairs.map(|pair| (text(pair[0]), pair.get(1).copied().map(text).unwrap_or_default()));
            Ok(Map::of_strings(pairs).into())
        }),
        Function::variadic("mergeMaps", &[Any], Any, merged),
        Function::variadic("toJsonMap", &[Any], Text, |context, arguments| {
            let merged = merged(context, arguments)?;
            Ok(encode_json(context, &merged, Layout::Compact, Escapes::Html)?.into())
        }),
        Function::new("omitNil", &[Any], Any, |context, arguments| {
            let changed = without_nil(context, arguments[0], 0)?;
            Ok(changed.unwrap_or_else(|| arguments[0].clone()))
        }),
        Function::new("fromJSON", &[Text], Any, |context, arguments| {
            let Value::String(text) = arguments[0] else {
                return Ok("{}".into());
            };
            match decode_json(context, text.bytes()) {
                // As in Istio, a text that is not JSON becomes the text of an empty object.
                Err(Failure::Message(_)) => Ok("{}".into()),
                outcome => outcome,
            }
        }),
    ]
}

fn formats() -> [Function; 4] {
    use Type::{Any, String as Text};
    [
        Function::new("toYaml", &[Any], Text, |context, arguments| {
            let json = encode_json(context, arguments[0], Layout::Compact, Escapes::Necessary)?;
            pay_for_yaml(context, &json)?;
            let value: Json = serde_json::from_slice(&json).map_err(|error| Failure::message(error.to_string()))?;
            Ok(yaml::to_text(&value).into())
        }),
        Function::new("toJSON", &[Text.map()], Text, |context, arguments| match arguments[0] {
            Value::Map(map) if map.is_nil() => Ok("{}".into()),
            value => Ok(encode_json(context, value, Layout::Compact, Escapes::Html)?.into()),
        }),
        Function::new("structToJSON", &[Any], Text, |context, arguments| match arguments[0] {
            Value::Nil | Value::Missing => Ok("{}".into()),
            value => Ok(encode_json(context, value, Layout::Compact, Escapes::Html)?.into()),
        }),
        Function::new("protoToJSON", &[Any], Text, |context, arguments| {
            let Value::Object(message) = arguments[0] else {
                return Ok("{}".into());
            };
            let members = message.json_members(context).unwrap_or_default();
            let is_proxy_config = message.type_of().to_string() == "*v1alpha1.ProxyConfig";
            let mut text = String::from("{");
            for (name, value) in members {
                let encoded = encode_json(context, &value, Layout::Compact, Escapes::Html)?;
                if is_proxy_config && is_default(name, &encoded) {
                    continue;
                }
                if text.len() > 1 {
                    text.push(',');
                }
                text.push_str(&[&format!("{name:?}:"), &*String::from_utf8_lossy(&encoded)].concat());
            }
            text.push('}');
            Ok(text.into())
        }),
    ]
}

/// The least memory of a list that is not empty, in bytes: `serde_json` reserves four values.
const LIST_BYTES: usize = 128;

/// The least memory of a map that is not empty, in bytes: a node of a B-tree with eleven entries.
const MAP_BYTES: usize = 640;

/// The memory of a key or of a further value, in bytes. Lists double, and nodes of maps may be half empty.
const ITEM_BYTES: usize = 64;

/// Takes the memory of the values in a JSON text, and of the YAML text with their indentation.
fn pay_for_yaml(context: &mut Context<'_>, json: &[u8]) -> Result<(), Failure> {
    let (mut values, mut breaks, mut depth, mut deepest) = (1_usize, 0_usize, 0_usize, 0_usize);
    let mut memory = 0_usize;
    let mut is_string = false;
    let mut bytes = json.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => is_string = !is_string,
            b'\\' => {
                // A line break of a string may become one of a block.
                breaks += 1;
                bytes.next();
            }
            _ if is_string => {}
            b'[' | b'{' => {
                values += 1;
                depth += 1;
                deepest = deepest.max(depth);
                memory += match (byte, bytes.as_slice().first()) {
                    (_, Some(b']' | b'}')) => 0,
                    (b'[', _) => LIST_BYTES,
                    _ => MAP_BYTES,
                };
            }
            b']' | b'}' => depth -= 1,
            b',' => {
                values += 1;
                memory += ITEM_BYTES;
            }
            b':' => memory += ITEM_BYTES,
            _ => {}
        }
    }
    context.step(values)?;
    context.allocate(memory)?;
    // A line has two spaces for each level, and a dash.
    let indentation = values.saturating_add(breaks).saturating_mul(2 * deepest + 2);
    context.allocate(json.len().saturating_add(indentation))?;
    Ok(())
}

/// Fields of ProxyConfig that are left out of the pod if they have their default.
const DEFAULTED: &[&str] = &[
    "configPath",
    "binaryPath",
    "controlPlaneAuthPolicy",
    "serviceCluster",
    "drainDuration",
    "terminationDrainDuration",
    "discoveryAddress",
    "envoyMetricsService",
    "envoyAccessLogService",
    "tracing",
    "proxyAdminPort",
    "statNameLength",
    "statusPort",
    "concurrency",
];

/// Returns true for a field of ProxyConfig with its default.
fn is_default(name: &str, encoded: &[u8]) -> bool {
    static DEFAULTS: LazyLock<Json> = LazyLock::new(|| to_json(&mesh_config::default_proxy_config()));
    let value = || serde_json::from_slice::<Json>(encoded).ok();
    DEFAULTED.contains(&name)
        && DEFAULTS
            .get(name)
            .is_some_and(|default| value().as_ref() == Some(default))
}

/// Returns the entries of all maps; later maps take precedence.
fn merged(context: &mut Context<'_>, maps: &[&Value]) -> Result<Value, Failure> {
    let mut entries = BTreeMap::new();
    let mut element = None;
    for map in maps {
        match map {
            Value::Map(map) => {
                context.allocate_elements(context.entries(map).len())?;
                element.get_or_insert_with(|| map.element().clone());
                entries.extend(context.snapshot(map).into_owned());
            }
            Value::Missing | Value::Nil => {}
            other => return Err(Failure::message(format!("{} is not a map", other.type_of()))),
        }
    }
    Ok(Value::Map(Map::of(element.unwrap_or(Type::String), entries)))
}

/// Returns a value without nil in its maps and lists; `None` if they have none. A map or list that loses its
/// last member becomes nil as well.
fn without_nil(context: &mut Context<'_>, value: &Value, depth: usize) -> Result<Option<Value>, Failure> {
    let mut is_changed = false;
    let mut member = |context: &mut Context<'_>, value: &Value, depth| {
        let changed = without_nil(context, value, depth)?;
        is_changed |= changed.is_some();
        let value = changed.unwrap_or_else(|| value.clone());
        Ok::<_, Failure>(Some(value).filter(|value| !matches!(value, Value::Nil)))
    };
    let kept = match value {
        Value::Missing | Value::Nil => return Ok(Some(Value::Nil)),
        Value::Map(map) if *map.element() == Type::Any => {
            let depth = context.deeper(depth)?;
            let entries = context.snapshot(map);
            context.allocate_elements(entries.len())?;
            let mut kept = BTreeMap::new();
            for (key, value) in entries.as_ref() {
                if let Some(value) = member(context, value, depth)? {
                    kept.insert(key.clone(), value);
                }
            }
            Some(kept).filter(|kept| !kept.is_empty()).map(Map::new).map(Value::Map)
        }
        Value::List(list) if *list.element() == Type::Any => {
            let depth = context.deeper(depth)?;
            context.allocate_elements(list.items().len())?;
            let mut kept = Vec::new();
            for value in list.items() {
                kept.extend(member(context, value, depth)?);
            }
            Some(kept).filter(|kept| !kept.is_empty()).map(Value::list)
        }
        _ => return Ok(None),
    };
    Ok(is_changed.then(|| kept.unwrap_or(Value::Nil)))
}

fn entry(context: &Context<'_>, map: &Value, key: &Value) -> Option<Value> {
    match map {
        Value::Map(map) => context.entry(map, text(key).as_bytes()),
        _ => None,
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.to_str().into_owned(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests;
