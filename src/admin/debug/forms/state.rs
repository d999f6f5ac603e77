//! Internal state: tables, generated resources and the findings of generation.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::{
    generate::{
        ResourceKey,
        patch::set,
        resource::{Built, Note},
    },
    model::{MeshSnapshot, inputs::RelationKeys},
    table::{Cx, Table},
};

/// Every table and index with its keys, in the form of Istio's dump of krt collections. They are written one after the
/// other: as one value, half a million keys take 250 MB.
pub(in crate::admin::debug) struct Tables<'a>(pub(in crate::admin::debug) &'a MeshSnapshot);

impl Serialize for Tables<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let is_synced = self.0.revision.0 > 0;
        let relations = self.0.relations().into_iter();
        serializer.collect_seq(relations.map(|relation| collection(&relation, is_synced)))
    }
}

/// Returns a table or index with its keys.
fn collection(relation: &RelationKeys<'_>, is_synced: bool) -> Value {
    let mut state = Map::new();
    let keys = (relation.keys)();
    if !keys.is_empty() {
        let outputs: Map<String, Value> = keys.into_iter().map(|key| (key, json!({}))).collect();
        state.insert("outputs".to_owned(), Value::Object(outputs));
    }
    if let Some(source) = relation.source {
        state.insert("inputCollection".to_owned(), json!(source));
    }
    state.insert("synced".to_owned(), json!(is_synced));
    json!({ "name": relation.name, "state": state, "uid": relation.id.0 })
}

/// The generated resources: each is held once for all proxies.
pub(in crate::admin::debug) struct Generated(pub(in crate::admin::debug) Table<ResourceKey, Built>);

impl Generated {
    /// Returns the type, name and size of each resource.
    fn resources(&self) -> Vec<(String, String, usize)> {
        let cx = Cx::untracked();
        let rows = self.0.iter(&cx);
        let resources = rows.filter_map(|(_, built)| built.resource.as_ref());
        let described = resources.map(|resource| {
            let any = resource.any();
            (any.type_url, resource.name.to_string(), any.value.len())
        });
        described.collect()
    }

    /// Returns the names of the resources by type.
    pub(in crate::admin::debug) fn names(&self) -> Value {
        let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (type_url, name, _) in self.resources() {
            names.entry(type_url).or_default().push(name);
        }
        for names in names.values_mut() {
            names.sort_unstable();
        }
        json!(names)
    }

    /// Returns the sizes of the resources by type, and their sum.
    pub(in crate::admin::debug) fn sizes(&self) -> Value {
        let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
        for (type_url, _, size_bytes) in self.resources() {
            *sizes.entry(type_url).or_default() += size_bytes;
        }
        sizes.insert("total".to_owned(), sizes.values().sum());
        json!(
            sizes
                .into_iter()
                .map(|(name, bytes)| (name, byte_count(bytes)))
                .collect::<BTreeMap<_, _>>()
        )
    }
}

/// Returns a size as text, in units of 1000 bytes.
///
/// Parity (pilot/pkg/networking/util/util.go).
fn byte_count(bytes: usize) -> String {
    if bytes < 1000 {
        return format!("{bytes}B");
    }
    let (mut size, mut unit) = (bytes as f64 / 1000.0, 'k');
    for larger in ['M', 'G', 'T'] {
        if size >= 1000.0 {
            (size, unit) = (size / 1000.0, larger);
        }
    }
    format!("{size:.1}{unit}B")
}

/// Returns the findings of generation by code and object. Istio names a proxy too; here a resource is generated once
/// for all proxies.
pub(in crate::admin::debug) fn push_status(notes: &BTreeSet<Note>) -> Value {
    let mut codes: BTreeMap<&str, BTreeMap<&str, Value>> = BTreeMap::new();
    for note in notes.iter().filter(|note| note.code != set::STATUS) {
        let of_code = codes.entry(note.code).or_default();
        of_code.insert(&note.detail, json!({ "message": note.detail.as_str() }));
    }
    json!(codes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_by_istio() {
        let sizes = [0, 999, 1000, 1550, 12_300_000, 5_000_000_000_000].map(byte_count);
        assert_eq!(sizes, ["0B", "999B", "1.0kB", "1.6kB", "12.3MB", "5.0TB"]);
    }
}
