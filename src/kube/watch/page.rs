//! Parses responses of the API server. Lists are parsed object by object, so that one whole object at a time is in
//! memory.
//!
//! Note: API servers store objects that are nested much deeper than the JSON parser accepts, wherever a schema allows
//! any value. Such an object is skipped. An error would keep all other objects of its kind from istiod.

use std::{borrow::Cow, cell::RefCell, fmt, ops::Range};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Value, json};

use super::machine::Page;
use crate::base::SmolStr;

/// The maximum nesting of an object with the list that it is in. The parser refuses 128 levels.
const MAX_DEPTH: usize = 120;
/// The nesting of the objects of a list.
const ITEM_DEPTH: usize = 3;

/// A line of a watch.
#[derive(Debug, Deserialize)]
pub(super) struct Line {
    /// `ADDED`, `MODIFIED`, `DELETED`, `BOOKMARK`, `ERROR`.
    #[serde(rename = "type")]
    pub(super) kind: SmolStr,
    /// Object, or a `Status`.
    #[serde(default)]
    pub(super) object: Value,
}

/// A line of a watch whose object is nested too deeply. The parser skips everything but the identity of the object.
#[derive(Debug, Deserialize)]
struct DeepLine {
    #[serde(rename = "type")]
    kind: SmolStr,
    object: DeepObject,
}

#[derive(Debug, Deserialize)]
struct DeepObject {
    metadata: Identity,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Identity {
    namespace: SmolStr,
    name: SmolStr,
    resource_version: SmolStr,
}

/// Returns the line for an object that was changed into one that cannot be parsed: it is deleted, as it will be missing
/// from the next list. `None` for other lines that cannot be parsed.
pub(super) fn deleted(line: &[u8]) -> Option<Line> {
    let DeepLine { kind, object } = serde_json::from_slice(line).ok()?;
    let Identity {
        namespace,
        name,
        resource_version,
    } = object.metadata;
    let is_change = matches!(kind.as_str(), "ADDED" | "MODIFIED" | "DELETED");
    (is_change && !name.is_empty()).then(|| Line {
        kind: SmolStr::new_static("DELETED"),
        object: json!({"metadata": {"namespace": namespace, "name": name, "resourceVersion": resource_version}}),
    })
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ListMetadata {
    resource_version: Option<SmolStr>,
    #[serde(rename = "continue")]
    token: Option<SmolStr>,
}

/// Parses a page; `object` converts each object, or receives the reason why it cannot be parsed. `None` skips it.
pub(super) fn page<T>(
    bytes: &[u8],
    object: &mut dyn FnMut(Result<Value, String>) -> Option<T>,
) -> Result<Page<T>, serde_json::Error> {
    let deep = deep_items(bytes);
    for item in &deep {
        object(Err(too_deep(&bytes[item.clone()])));
    }
    let bytes = without(bytes, &deep);
    let mut reader = serde_json::Deserializer::from_slice(&bytes);
    let page = List(RefCell::new(object)).deserialize(&mut reader)?;
    reader.end()?;
    Ok(page)
}

/// Returns the places of objects that are nested too deeply.
fn deep_items(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut items = Vec::new();
    let (mut depth, mut deepest, mut start) = (0_usize, 0, 0);
    let (mut is_text, mut is_escaped) = (false, false);
    for (at, byte) in bytes.iter().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_text => is_escaped = true,
            b'"' => is_text = !is_text,
            _ if is_text => {}
            b'{' | b'[' => {
                depth += 1;
                if depth == ITEM_DEPTH {
                    (start, deepest) = (at, 0);
                }
                deepest = deepest.max(depth);
            }
            b'}' | b']' => {
                if depth == ITEM_DEPTH && deepest > MAX_DEPTH {
                    let end = at + 1;
                    items.push(start..end);
                }
                depth = depth.saturating_sub(1);
            }
            _ => {}
        }
    }
    items
}

/// Returns the reason why an object is skipped.
fn too_deep(item: &[u8]) -> String {
    let Identity { namespace, name, .. } = serde_json::from_slice(item)
        .map(|object: DeepObject| object.metadata)
        .unwrap_or_default();
    format!(
        "{namespace}/{name} is nested deeper than {} levels",
        MAX_DEPTH + 1 - ITEM_DEPTH
    )
}

/// Replaces these objects by null.
fn without<'a>(bytes: &'a [u8], items: &[Range<usize>]) -> Cow<'a, [u8]> {
    if items.is_empty() {
        return Cow::Borrowed(bytes);
    }
    let (mut out, mut end) = (Vec::with_capacity(bytes.len()), 0);
    for item in items {
        out.extend_from_slice(&bytes[end..item.start]);
        out.extend_from_slice(b"null");
        end = item.end;
    }
    out.extend_from_slice(&bytes[end..]);
    Cow::Owned(out)
}

struct List<'a, T>(RefCell<&'a mut dyn FnMut(Result<Value, String>) -> Option<T>>);

impl<'de, T> DeserializeSeed<'de> for List<'_, T> {
    type Value = Page<T>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Page<T>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, T> Visitor<'de> for List<'_, T> {
    type Value = Page<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of Kubernetes objects")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Page<T>, A::Error> {
        let (mut items, mut metadata) = (Vec::new(), ListMetadata::default());
        while let Some(name) = map.next_key::<SmolStr>()? {
            match name.as_str() {
                "metadata" => metadata = map.next_value()?,
                "items" => items = map.next_value_seed(Items(&self))?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        let version = metadata.resource_version.filter(|version| !version.is_empty());
        Ok(Page {
            items,
            version: version.ok_or_else(|| serde::de::Error::missing_field("metadata.resourceVersion"))?,
            token: metadata.token.filter(|token| !token.is_empty()),
        })
    }
}

struct Items<'a, 'b, T>(&'a List<'b, T>);

impl<'de, T> DeserializeSeed<'de> for Items<'_, '_, T> {
    type Value = Vec<T>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<T>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, T> Visitor<'de> for Items<'_, '_, T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("items")
    }

    /// Go encodes an empty list as `null`.
    fn visit_unit<E>(self) -> Result<Vec<T>, E> {
        Ok(Vec::new())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Vec<T>, A::Error> {
        let mut items = Vec::new();
        while let Some(value) = sequence.next_element::<Value>()? {
            // A null stands for an object that was skipped.
            if !value.is_null() {
                items.extend((self.0.0.borrow_mut())(Ok(value)));
            }
        }
        Ok(items)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the JSON of an object with so many levels.
    fn nested(name: &str, levels: usize) -> String {
        let value = (2..levels).fold("{}".to_owned(), |inner, _| format!("{{\"a\":{inner}}}"));
        format!(r#"{{"metadata":{{"name":"{name}","namespace":"app","resourceVersion":"8"}},"spec":{value}}}"#)
    }

    #[test]
    fn r2_objects_that_are_nested_too_deeply_are_skipped() {
        let mut skipped = Vec::new();
        let mut names = |value: Result<Value, String>| match value {
            Ok(value) => value["metadata"]["name"].as_str().map(str::to_owned),
            Err(error) => {
                skipped.push(error);
                None
            }
        };
        let items = [
            nested("a", 118),
            nested("b", 119),
            nested("c", 5000),
            nested("}\\\"]", 2),
        ];
        let text = format!(
            r#"{{"metadata":{{"resourceVersion":"9"}},"items":[{}]}}"#,
            items.join(" , ")
        );
        let read = page(text.as_bytes(), &mut names).expect("a page");
        assert_eq!(read.items, ["a", "}\"]"]);
        let reasons = ["b", "c"].map(|name| format!("app/{name} is nested deeper than 118 levels"));
        assert_eq!(skipped, reasons);
    }

    #[test]
    fn objects_that_become_too_deep_are_deleted() {
        let line = |kind: &str, object: &str| format!(r#"{{"type":"{kind}","object":{object}}}"#);
        let object = nested("a", 5000);
        for kind in ["ADDED", "MODIFIED", "DELETED"] {
            let line = line(kind, &object);
            assert!(serde_json::from_str::<Line>(&line).is_err());
            let deleted = deleted(line.as_bytes()).expect("a line");
            let metadata = json!({"namespace": "app", "name": "a", "resourceVersion": "8"});
            assert_eq!(deleted.kind, "DELETED");
            assert_eq!(deleted.object, json!({ "metadata": metadata }));
        }
        for other in [
            line("BOOKMARK", &object),
            line("ADDED", "{}"),
            line("ADDED", "[]"),
            "{".into(),
        ] {
            assert!(deleted(other.as_bytes()).is_none(), "{other:.40}");
        }
    }

    #[test]
    fn pages_are_read_object_by_object() {
        let mut names = |value: Result<Value, String>| value.ok()?["name"].as_str().map(str::to_owned);
        let text = br#"{"kind":"PodList","items":[{"name":"a"},3,{"name":"b"}],"metadata":{"resourceVersion":"9","continue":"x"}}"#;
        let read = page(text, &mut names).unwrap();
        assert_eq!(
            (read.items, read.version, read.token),
            (vec!["a".into(), "b".into()], "9".into(), Some("x".into()))
        );
        let read = page(
            br#"{"metadata":{"resourceVersion":"9","continue":""},"items":null}"#,
            &mut names,
        )
        .unwrap();
        assert_eq!((read.items.len(), read.token), (0, None));
        assert!(
            page(br#"{"metadata":{},"items":[]}"#, &mut names).is_err(),
            "a list without version cannot be watched"
        );
        assert!(page(br#"{"metadata":{"resourceVersion":"9"},"items":["#, &mut names).is_err());
    }
}
