//! The known objects of a cluster for analysis: events of watches in, objects and due status writes out.
//!
//! Note: nothing is analyzed before every kind is known. A kind whose list is missing would look as if it had no
//! objects, and everything that refers to them would be reported.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::message::{Found, Published, Target};
use crate::{
    analyze::{Object, Settings, Type, is_of_revision, reduce},
    api::{Diagnostic, Kind, mesh_config},
    base::{SmolStr, select::LabelSelector},
    kube::{self, watch::WatchEvent},
    model::snapshot::MeshSnapshot,
    proto::json::to_json,
    status::{NamespacedName, watching::WatchedNamespaces},
    table::Cx,
};

/// Parts of a snapshot that an analysis depends on.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MeshInputs {
    config: Value,
    networks: Value,
    selectors: Vec<LabelSelector>,
    scopes_gateways: bool,
    /// Objects that exceed limits of generation.
    pub(super) exceeded: BTreeSet<Diagnostic>,
}

impl MeshInputs {
    /// Returns the parts of a snapshot; `None` before the mesh config is known.
    pub(super) fn of(mesh: &MeshSnapshot) -> Option<Self> {
        if mesh.revision.0 == 0 {
            return None;
        }
        let cx = Cx::untracked();
        let config = mesh.mesh_config(&cx);
        let networks = mesh.mesh_networks.get(&cx, &mesh.installation.mesh_config_key());
        Some(Self {
            config: to_json(config),
            networks: networks.map_or_else(|| Value::Object(Map::new()), |networks| to_json(&networks.spec)),
            selectors: mesh_config::discovery_selectors(config),
            scopes_gateways: mesh.installation.features.pilot_scope_gateway_to_namespace,
            exceeded: mesh.exceeded_limits(&cx),
        })
    }
}

/// An object from a watch.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    key: NamespacedName,
    /// The part that analyzers read; `None` for an object that is not analyzed, whatever its revision.
    object: Option<Object>,
    /// The messages in its status.
    published: Published,
    /// Of a CustomResourceDefinition, its served versions.
    versions: Vec<SmolStr>,
    /// True if the last analysis read this content.
    is_analyzed: bool,
}

impl Entry {
    /// Converts an object of the API server.
    pub(super) fn of(kind: Type, object: kube::Object) -> Self {
        let key = NamespacedName::of(&object);
        let mut manifest = object.value;
        let published = Published::take(&mut manifest);
        let versions = served_versions(kind, &manifest);
        let is_read = kind != Kind::ConfigMap.into() || is_configuration(&manifest);
        reduce(kind, &mut manifest);
        Self {
            key,
            object: is_read.then(|| Object::of_any_namespace(kind, manifest, "")),
            published,
            versions,
            is_analyzed: false,
        }
    }

    /// Returns the entry, which is not analyzed unless its namespace counts.
    pub(super) fn within(mut self, only: &WatchedNamespaces) -> Self {
        if !only.contains(&self.key.namespace) {
            self.object = None;
        }
        self
    }
}

fn served_versions(kind: Type, manifest: &Value) -> Vec<SmolStr> {
    if kind != Type::Definition {
        return Vec::new();
    }
    let versions = manifest["spec"]["versions"].as_array();
    let served = versions
        .into_iter()
        .flatten()
        .filter(|version| version["served"] == true);
    served
        .filter_map(|version| version["name"].as_str())
        .map(SmolStr::new)
        .collect()
}

/// Returns true for ConfigMaps of the control plane. Locks, which change every few seconds, are none.
///
/// Parity (pkg/config/analysis/local/istiod_analyze.go).
fn is_configuration(manifest: &Value) -> bool {
    let metadata = &manifest["metadata"];
    let is_lock = !metadata["annotations"]["control-plane.alpha.kubernetes.io/leader"].is_null();
    !is_lock && metadata["name"].as_str().is_some_and(|name| name.starts_with("istio"))
}

/// A due write of messages.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Write {
    pub(super) kind: Type,
    pub(super) key: NamespacedName,
    /// The fields to merge into the object.
    pub(super) fields: Value,
}

/// The revision whose objects are analyzed.
#[derive(Default)]
struct Revision {
    /// The name; empty for all.
    name: SmolStr,
    /// The tags that point to it; `None` while unknown.
    tags: Option<BTreeSet<SmolStr>>,
}

impl Revision {
    /// Returns true for an entry whose object is analyzed: those of other revisions are left to their control planes.
    fn includes(&self, entry: &Entry) -> bool {
        let object = entry.object.as_ref();
        object.is_some_and(|object| is_of_revision(object, &self.name, self.tags.as_ref()))
    }
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct AnalysisInputs {
    revision: Revision,
    mesh: Option<MeshInputs>,
    /// Objects by kind. A kind without an entry is unknown.
    kinds: BTreeMap<Type, BTreeMap<NamespacedName, Entry>>,
}

impl AnalysisInputs {
    /// Returns the inputs of a control plane of this revision, of which nothing is known.
    pub(super) fn new(revision: SmolStr) -> Self {
        Self {
            revision: Revision {
                name: revision,
                tags: None,
            },
            ..Self::default()
        }
    }

    /// Sets the tags of the revision; returns true on a change.
    pub(super) fn set_tags(&mut self, tags: BTreeSet<SmolStr>) -> bool {
        let is_changed = self.revision.tags.as_ref() != Some(&tags);
        self.revision.tags = Some(tags);
        is_changed
    }

    /// Sets what the snapshot says; returns true on a change.
    pub(super) fn observe(&mut self, mesh: &MeshSnapshot) -> bool {
        let Some(seen) = MeshInputs::of(mesh) else {
            return false;
        };
        let is_changed = self.mesh.as_ref() != Some(&seen);
        self.mesh = Some(seen);
        is_changed
    }

    /// Applies an event; returns true if an analysis may come to another result. An event may be older than the result
    /// of a write.
    pub(super) fn apply_event(&mut self, kind: Type, event: WatchEvent<Entry>) -> bool {
        match event {
            WatchEvent::Restarted(all) => {
                let before = self.kinds.insert(kind, BTreeMap::new());
                let mut is_changed = before.is_none();
                let mut left = before.unwrap_or_default();
                for entry in all {
                    let known = left.remove(&entry.key);
                    is_changed |= self.put(kind, entry, known);
                }
                is_changed || left.values().any(|entry| self.revision.includes(entry))
            }
            WatchEvent::Applied(entry) => {
                let all = self.kinds.entry(kind).or_default();
                let known = all.get(&entry.key);
                if known.is_some_and(|known| entry.published.precedes(&known.published)) {
                    return false;
                }
                let known = all.remove(&entry.key);
                self.put(kind, entry, known)
            }
            WatchEvent::Deleted(entry) => {
                let known = self.kinds.get_mut(&kind).and_then(|all| all.remove(&entry.key));
                known.is_some_and(|known| self.revision.includes(&known))
            }
        }
    }

    /// Takes an object as a write left it, unless the watch has reported a newer version or the deletion in the
    /// meantime; returns true if an analysis may come to another result.
    pub(super) fn take_written(&mut self, kind: Type, entry: Entry) -> bool {
        let is_known = self.kinds.get(&kind).is_some_and(|all| all.contains_key(&entry.key));
        is_known && self.apply_event(kind, WatchEvent::Applied(entry))
    }

    fn put(&mut self, kind: Type, mut entry: Entry, known: Option<Entry>) -> bool {
        let is_included = |entry: &Entry| self.revision.includes(entry);
        let mut is_changed = is_included(&entry) || known.as_ref().is_some_and(is_included);
        if let Some(known) = known
            && known.object == entry.object
        {
            (entry.object, entry.is_analyzed) = (known.object, known.is_analyzed);
            is_changed = known.versions != entry.versions;
        }
        self.kinds.entry(kind).or_default().insert(entry.key.clone(), entry);
        is_changed
    }

    /// Sets that the cluster has no such kind; returns true on a change.
    pub(super) fn is_absent(&mut self, kind: Type) -> bool {
        let before = self.kinds.insert(kind, BTreeMap::new());
        before.is_none_or(|before| !before.is_empty())
    }

    /// Forgets a kind, whose objects are unknown until its next list.
    pub(super) fn forget(&mut self, kind: Type) {
        self.kinds.remove(&kind);
    }

    /// Returns the version in which the cluster serves a custom kind, once the definitions are known.
    pub(super) fn served_version(&self, kind: Type) -> Option<&'static str> {
        let definitions = self.kinds.get(&Type::Definition)?;
        let name = format!("{}.{}", kind.plural(), kind.group());
        let definition = definitions.get(&NamespacedName::new("", name));
        let served = definition
            .map(|definition| &definition.versions[..])
            .unwrap_or_default();
        let mut readable = kind.served_versions().iter().copied();
        readable.find(|version| served.iter().any(|served_version| served_version == version))
    }

    /// Returns true once everything that analyzers read is known.
    pub(super) fn are_complete(&self) -> bool {
        self.mesh.is_some() && self.revision.tags.is_some() && Type::all().all(|kind| self.kinds.contains_key(&kind))
    }

    /// Returns the input of an analysis, and remembers which objects it contains; `None` while something is unknown.
    pub(super) fn analysis(&mut self, istio_namespace: &str, now: i64) -> Option<(Vec<Object>, Settings)> {
        if !self.are_complete() {
            return None;
        }
        let mesh = self.mesh.as_ref()?;
        let namespaces = self.kinds.get(&Kind::Namespace.into());
        let is_selected = |namespace: &SmolStr| {
            let object = || {
                let key = NamespacedName::new("", namespace.clone());
                namespaces?.get(&key)?.object.as_ref()
            };
            let labels = |object: &Object| mesh.selectors.iter().any(|selector| selector.matches(&object.labels));
            namespace.is_empty() || *namespace == istio_namespace || object().is_some_and(labels)
        };
        let selects_all = mesh.selectors.is_empty();
        let entries = self.kinds.values().flat_map(BTreeMap::values);
        let included = entries.filter(|entry| self.revision.includes(entry));
        let objects = included.filter_map(|entry| entry.object.as_ref());
        // Namespaces count themselves, so that policies may name those whose objects do not.
        let objects = objects.filter(|object| selects_all || is_selected(&object.namespace));
        let objects = objects.cloned().collect();
        let settings = Settings {
            config: mesh.config.clone(),
            networks: mesh.networks.clone(),
            istio_namespace: istio_namespace.to_owned(),
            scopes_gateways: mesh.scopes_gateways,
            now,
        };
        for entry in self.kinds.values_mut().flat_map(BTreeMap::values_mut) {
            entry.is_analyzed = self.revision.includes(entry);
        }
        Some((objects, settings))
    }

    /// Returns the objects that exceed limits of generation.
    pub(super) fn exceeded(&self) -> BTreeSet<Diagnostic> {
        self.mesh.as_ref().map(|mesh| mesh.exceeded.clone()).unwrap_or_default()
    }

    /// Returns the writes after which all statuses have the messages that were found. An object that has changed since
    /// the analysis waits for the next one.
    pub(super) fn due(&self, found: &Found) -> Vec<Write> {
        let kinds = self.kinds.iter().filter(|(kind, _)| has_messages(**kind));
        let entries = kinds.flat_map(|(kind, all)| all.iter().map(|(key, entry)| (*kind, key, entry)));
        let analyzed = entries.filter(|(_, _, entry)| entry.is_analyzed && self.revision.includes(entry));
        let due = analyzed.filter_map(|(kind, key, entry)| {
            let target = Target::new(kind, &key.namespace, &key.name);
            let fields = entry.published.due(found.of(&target))?;
            Some(Write {
                kind,
                key: key.clone(),
                fields,
            })
        });
        due.collect()
    }
}

/// Returns true for kinds whose statuses have messages: those of Istio.
///
/// Parity (pkg/config/analysis/incluster/controller.go).
fn has_messages(kind: Type) -> bool {
    matches!(kind, Type::Known(kind) if kind.is_istio())
}

#[cfg(test)]
mod tests;
