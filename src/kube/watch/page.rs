//! Parses responses of the API server. Lists are parsed object by object, so that one whole object at a time is in
//! memory.

use std::{cell::RefCell, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::Value;

use super::machine::Page;
use crate::base::SmolStr;

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

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ListMetadata {
    resource_version: Option<SmolStr>,
    #[serde(rename = "continue")]
    token: Option<SmolStr>,
}

/// Parses a page; `object` converts each object, `None` skips it.
pub(super) fn page<T>(bytes: &[u8], object: &mut dyn FnMut(Value) -> Option<T>) -> Result<Page<T>, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let page = List(RefCell::new(object)).deserialize(&mut reader)?;
    reader.end()?;
    Ok(page)
}

struct List<'a, T>(RefCell<&'a mut dyn FnMut(Value) -> Option<T>>);

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
            items.extend((self.0.0.borrow_mut())(value));
        }
        Ok(items)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_read_object_by_object() {
        let mut names = |value: Value| value["name"].as_str().map(str::to_owned);
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
