//! A filter of a cluster's objects by namespace (`discoverySelectors`) and revision.
//!
//! The filter keeps a pointer to every row, including those it hides. Namespace labels, the selectors of the mesh
//! config and revision tags may therefore change at any time and in any order: the visible objects depend on the final
//! state only.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    api::{Diagnostic, Kind, Row, hidden_gateway::HiddenGateway, invalid_route::InvalidRoute},
    base::{ClusterId, Namespace, ObjectKey, Shared, SmolStr, select::LabelSelector},
    model::change::{Change, SourceId},
};

/// An object received from a watch.
#[derive(Clone, Debug, PartialEq)]
pub struct WatchedObject {
    /// The kind.
    pub kind: Kind,
    /// The name.
    pub key: ObjectKey,
    /// Its label `istio.io/rev`.
    pub revision: Option<SmolStr>,
    /// The parsed object; none if it is invalid, and then the last valid row stays.
    pub row: Option<Row>,
    /// The object as an invalid route, if it is one.
    pub invalid: Option<Shared<InvalidRoute>>,
    /// Its diagnostics.
    pub findings: Vec<Diagnostic>,
    /// Its resource version as a number; 0 if it is none.
    pub version: u64,
}

/// The inputs of the filter. They change at run time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filters {
    /// `discoverySelectors`: a namespace is visible if one matches or if there are none.
    pub selectors: Vec<LabelSelector>,
    /// The revision tags that point to this revision.
    pub tags: BTreeSet<SmolStr>,
}

/// The result of an update.
#[derive(Debug, Default)]
pub struct FilterOutput {
    /// Changes of visible objects.
    pub changes: Vec<Change>,
    /// The active diagnostics of objects whose diagnostics changed. Hidden objects have none.
    pub findings: Vec<(Kind, ObjectKey, BTreeSet<Diagnostic>)>,
}

/// An object event, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectEvent {
    /// A new object.
    Added,
    /// A changed object.
    Updated,
    /// An unchanged object.
    Same,
    /// A deleted object.
    Deleted,
}

/// A filter of a cluster's objects by namespace and revision.
#[doc(alias = "DiscoveryNamespacesFilter")]
pub struct DiscoveryFilter {
    cluster: ClusterId,
    revision: SmolStr,
    filters: Filters,
    objects: BTreeMap<Kind, BTreeMap<ObjectKey, KnownObject>>,
}

struct KnownObject {
    revision: Option<SmolStr>,
    row: Option<Row>,
    invalid: Option<Shared<InvalidRoute>>,
    findings: Vec<Diagnostic>,
    is_visible: bool,
}

impl KnownObject {
    fn visible(&self) -> Option<&Row> {
        self.row.as_ref().filter(|_| self.is_visible)
    }

    /// Returns the row of a Gateway that counts only as a gateway to another network.
    fn hidden_gateway(&self) -> Option<Row> {
        let hidden = self.row.as_ref().filter(|_| !self.is_visible)?;
        hidden.hidden_gateway()
    }

    /// Returns the row of a visible route with errors.
    fn invalid_route(&self) -> Option<Row> {
        let invalid = self.invalid.clone().filter(|_| self.is_visible);
        invalid.map(Row::InvalidRoute)
    }

    fn active_diagnostics(&self) -> BTreeSet<Diagnostic> {
        let findings = self.findings.iter().filter(|_| self.is_visible);
        findings.cloned().collect()
    }
}

impl DiscoveryFilter {
    /// Creates an empty filter.
    pub fn new(cluster: ClusterId, revision: SmolStr) -> Self {
        Self {
            cluster,
            revision,
            filters: Filters::default(),
            objects: BTreeMap::new(),
        }
    }

    /// Adds or updates an object.
    pub fn apply(&mut self, item: WatchedObject, output: &mut FilterOutput) -> ObjectEvent {
        let (kind, key) = (item.kind, item.key.clone());
        let selected_before = self.selects_named(kind, &key);
        let counts = self.counts(kind, &key, item.revision.as_ref());
        let objects = self.objects.entry(kind).or_default();
        let before = objects.remove(&key);
        let mut after = KnownObject {
            revision: item.revision,
            row: item.row,
            invalid: item.invalid,
            findings: item.findings,
            is_visible: counts,
        };
        if after.row.is_none() {
            after.row = before.as_ref().and_then(|before| before.row.clone());
        }
        let event = match &before {
            None => ObjectEvent::Added,
            Some(before) if before.row == after.row => ObjectEvent::Same,
            Some(_) => ObjectEvent::Updated,
        };
        record_difference(kind, &key, before.as_ref(), Some(&after), output);
        objects.insert(key.clone(), after);
        self.update_namespace(kind, &key, selected_before, output);
        event
    }

    /// Removes an object.
    pub fn delete(&mut self, kind: Kind, key: &ObjectKey, output: &mut FilterOutput) -> Option<ObjectEvent> {
        let selected_before = self.selects_named(kind, key);
        let before = self.objects.get_mut(&kind)?.remove(key)?;
        record_difference(kind, key, Some(&before), None, output);
        self.update_namespace(kind, key, selected_before, output);
        Some(ObjectEvent::Deleted)
    }

    /// Replaces all objects of a kind, in one namespace if it is given. Returns one event for each object.
    pub fn replace(
        &mut self,
        kind: Kind,
        namespace: Option<&str>,
        items: Vec<WatchedObject>,
        output: &mut FilterOutput,
    ) -> Vec<ObjectEvent> {
        let known = self.objects.get(&kind).into_iter().flatten().map(|(key, _)| key);
        let replaced = known.filter(|key| namespace.is_none_or(|namespace| key.namespace.as_str() == namespace));
        let mut gone: BTreeSet<ObjectKey> = replaced.cloned().collect();
        let mut events = Vec::with_capacity(items.len());
        for item in items {
            gone.remove(&item.key);
            events.push(self.apply(item, output));
        }
        for key in gone {
            events.extend(self.delete(kind, &key, output));
        }
        events
    }

    /// Changes the inputs of the filter.
    pub fn set_filters(&mut self, filters: Filters, output: &mut FilterOutput) {
        if self.filters == filters {
            return;
        }
        self.filters = filters;
        for (kind, key) in self.all() {
            self.update_visibility(kind, &key, output);
        }
    }

    /// Returns all visible objects, as replacements of whole kinds, and their active diagnostics.
    pub fn everything(&self, kinds: impl IntoIterator<Item = Kind>) -> FilterOutput {
        let mut output = FilterOutput::default();
        let source = |kind| SourceId {
            cluster: self.cluster.clone(),
            kind,
        };
        let mut has_routes = false;
        for kind in kinds {
            has_routes |= InvalidRoute::may_be(kind);
            let objects = self.objects.get(&kind).into_iter().flatten();
            let (mut rows, mut hidden) = (Vec::new(), Vec::new());
            for (key, held) in objects {
                rows.extend(held.visible().cloned());
                hidden.extend(held.hidden_gateway());
                let standing = held.active_diagnostics();
                if !standing.is_empty() {
                    output.findings.push((kind, key.clone(), standing));
                }
            }
            output.changes.push(Change::Replace(source(kind), rows));
            if kind == Kind::KubeGateway {
                output
                    .changes
                    .push(Change::Replace(source(HiddenGateway::KIND), hidden));
            }
        }
        if has_routes {
            // Those of several kinds are rows of one.
            let routes = self.objects.iter().filter(|(kind, _)| InvalidRoute::may_be(**kind));
            let objects = routes.flat_map(|(_, objects)| objects.values());
            let rows = objects.filter_map(KnownObject::invalid_route).collect();
            output.changes.push(Change::Replace(source(InvalidRoute::KIND), rows));
        }
        output
    }

    fn all(&self) -> Vec<(Kind, ObjectKey)> {
        let keys = |(kind, objects): (&Kind, &BTreeMap<ObjectKey, KnownObject>)| {
            let kind = *kind;
            objects.keys().map(move |key| (kind, key.clone())).collect::<Vec<_>>()
        };
        self.objects.iter().flat_map(keys).collect()
    }

    fn counts(&self, kind: Kind, key: &ObjectKey, revision: Option<&SmolStr>) -> bool {
        // Parity (pkg/config/model.go, LabelsInRevision): without a revision of its own, a control plane reads all.
        // Unlike there, a tag names the revision it points to, as it does for namespaces and pods.
        let of_revision = self.revision.is_empty()
            || revision.is_none_or(|revision| *revision == self.revision || self.filters.tags.contains(revision));
        // Gateways are converted whatever their revision, so that routes of this one attach to them. Only their status
        // and deployment belong to one revision or its tags.
        let has_revision = kind.is_istio() || kind.is_gateway_api() && kind != Kind::KubeGateway;
        // The mesh config is that of the cluster, wherever it is.
        let has_namespace = !kind.is_cluster_scoped() && kind != Kind::MeshConfig;
        (of_revision || !has_revision) && (!has_namespace || self.selects(&key.namespace))
    }

    /// Returns true if the namespace is visible. A namespace that is not known yet has no labels.
    fn selects(&self, namespace: &Namespace) -> bool {
        if self.filters.selectors.is_empty() {
            return true;
        }
        let key = ObjectKey::new(&self.cluster, "", namespace.as_str());
        let held = self.objects.get(&Kind::Namespace).and_then(|objects| objects.get(&key));
        let Some(Row::Namespace(row)) = held.and_then(|held| held.row.as_ref()) else {
            return false;
        };
        let mut selectors = self.filters.selectors.iter();
        selectors.any(|selector| selector.matches(&row.meta.labels))
    }

    fn selects_named(&self, kind: Kind, key: &ObjectKey) -> bool {
        kind == Kind::Namespace && self.selects(&Namespace::new(&key.name))
    }

    /// Updates the objects of a namespace after a change of its labels.
    fn update_namespace(&mut self, kind: Kind, key: &ObjectKey, before: bool, output: &mut FilterOutput) {
        if kind != Kind::Namespace || self.selects_named(kind, key) == before {
            return;
        }
        let namespace = Namespace::new(&key.name);
        let first = ObjectKey {
            namespace: namespace.clone(),
            ..ObjectKey::default()
        };
        let mut inside = Vec::new();
        for (kind, objects) in &self.objects {
            let keys = objects.range(&first..).map(|(key, _)| key);
            let keys = keys.take_while(|key| key.namespace == namespace);
            inside.extend(keys.map(|key| (*kind, key.clone())));
        }
        for (kind, key) in inside {
            self.update_visibility(kind, &key, output);
        }
    }

    fn update_visibility(&mut self, kind: Kind, key: &ObjectKey, output: &mut FilterOutput) {
        let find = |objects: &BTreeMap<Kind, BTreeMap<ObjectKey, KnownObject>>| {
            let held = objects.get(&kind)?.get(key)?;
            Some((held.is_visible, held.revision.clone()))
        };
        let Some((before, revision)) = find(&self.objects) else {
            return;
        };
        let counts = self.counts(kind, key, revision.as_ref());
        let held = self.objects.get_mut(&kind).and_then(|objects| objects.get_mut(key));
        let Some(held) = held.filter(|_| counts != before) else {
            return;
        };
        let (hidden, invalid) = (held.hidden_gateway(), held.invalid_route());
        held.is_visible = counts;
        record_internal(hidden, held.hidden_gateway(), output);
        record_internal(invalid, held.invalid_route(), output);
        let change = match (counts, &held.row) {
            (true, Some(row)) => Some(Change::Upsert(row.clone())),
            (false, Some(_)) => Some(Change::Remove(kind, key.clone())),
            (_, None) => None,
        };
        output.changes.extend(change);
        if !held.findings.is_empty() {
            output.findings.push((kind, key.clone(), held.active_diagnostics()));
        }
    }
}

/// Records the difference between two states of an object.
fn record_difference(
    kind: Kind,
    key: &ObjectKey,
    before: Option<&KnownObject>,
    after: Option<&KnownObject>,
    output: &mut FilterOutput,
) {
    let hidden = |held: Option<&KnownObject>| held.and_then(KnownObject::hidden_gateway);
    record_internal(hidden(before), hidden(after), output);
    let invalid = |held: Option<&KnownObject>| held.and_then(KnownObject::invalid_route);
    record_internal(invalid(before), invalid(after), output);
    let visible_before = before.and_then(KnownObject::visible);
    match after.and_then(KnownObject::visible) {
        Some(row) if visible_before != Some(row) => output.changes.push(Change::Upsert(row.clone())),
        None if visible_before.is_some() => output.changes.push(Change::Remove(kind, key.clone())),
        _ => {}
    }
    let standing = |held: Option<&KnownObject>| held.map(KnownObject::active_diagnostics).unwrap_or_default();
    let (stood, stands) = (standing(before), standing(after));
    if stood != stands {
        output.findings.push((kind, key.clone(), stands));
    }
}

/// Records the difference between two states of a row beside that of the object.
fn record_internal(before: Option<Row>, after: Option<Row>, output: &mut FilterOutput) {
    let change = match (before, after) {
        (Some(before), Some(after)) if before == after => None,
        (_, Some(after)) => Some(Change::Upsert(after)),
        (Some(before), None) => Some(Change::Remove(before.kind(), before.key().clone())),
        (None, None) => None,
    };
    output.changes.extend(change);
}

#[cfg(test)]
mod tests;
