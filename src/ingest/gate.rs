//! Which objects of a cluster count, and what changes when that does.
//!
//! The gate holds every row of the cluster, as pointers, also those that do not count: so a label of a namespace, the
//! selectors of the mesh config and the tags of revisions may change at any time and in any order, and what was let
//! through is always what a gate that had known the final state from the beginning would let through.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    api::{Diagnostic, Kind, Row},
    base::{ClusterId, Namespace, ObjectKey, SmolStr, select::LabelSelector},
    model::change::{Change, SourceId},
};

/// An object as a watch hands it over.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// The kind.
    pub kind: Kind,
    /// The name.
    pub key: ObjectKey,
    /// Its label `istio.io/rev`.
    pub revision: Option<SmolStr>,
    /// What it says; none if it is invalid, then what it said before stays.
    pub row: Option<Row>,
    /// What is wrong with it.
    pub findings: Vec<Diagnostic>,
}

/// What decides which objects count; it changes at run time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filters {
    /// `discoverySelectors`: a namespace counts if one of them matches; all count when there is none.
    pub selectors: Vec<LabelSelector>,
    /// The tags that point to the own revision.
    pub tags: BTreeSet<SmolStr>,
}

/// What came of a step.
#[derive(Debug, Default)]
pub struct Passed {
    /// Changes of what counts.
    pub changes: Vec<Change>,
    /// What stands about objects whose findings changed; nothing stands about objects that do not count.
    pub findings: Vec<(Kind, ObjectKey, BTreeSet<Diagnostic>)>,
}

/// What happened to the objects that the gate holds, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It is new.
    Added,
    /// It is different.
    Updated,
    /// It is as it was.
    Same,
    /// It is gone.
    Deleted,
}

/// See the module's text.
pub struct Gate {
    cluster: ClusterId,
    revision: SmolStr,
    filters: Filters,
    objects: BTreeMap<Kind, BTreeMap<ObjectKey, Held>>,
}

struct Held {
    revision: Option<SmolStr>,
    row: Option<Row>,
    findings: Vec<Diagnostic>,
    counts: bool,
}

impl Held {
    fn visible(&self) -> Option<&Row> {
        self.row.as_ref().filter(|_| self.counts)
    }

    fn standing(&self) -> BTreeSet<Diagnostic> {
        let findings = self.findings.iter().filter(|_| self.counts);
        findings.cloned().collect()
    }
}

impl Gate {
    /// A gate that holds nothing.
    pub fn new(cluster: ClusterId, revision: SmolStr) -> Self {
        Self {
            cluster,
            revision,
            filters: Filters::default(),
            objects: BTreeMap::new(),
        }
    }

    /// An object is there, with this content.
    pub fn apply(&mut self, item: Item, passed: &mut Passed) -> Effect {
        let (kind, key) = (item.kind, item.key.clone());
        let selected_before = self.selects_named(kind, &key);
        let counts = self.counts(kind, &key, item.revision.as_ref());
        let objects = self.objects.entry(kind).or_default();
        let before = objects.remove(&key);
        let mut after = Held {
            revision: item.revision,
            row: item.row,
            findings: item.findings,
            counts,
        };
        if after.row.is_none() {
            after.row = before.as_ref().and_then(|before| before.row.clone());
        }
        let effect = match &before {
            None => Effect::Added,
            Some(before) if before.row == after.row => Effect::Same,
            Some(_) => Effect::Updated,
        };
        tell(kind, &key, before.as_ref(), Some(&after), passed);
        objects.insert(key.clone(), after);
        self.namespace_may_differ(kind, &key, selected_before, passed);
        effect
    }

    /// An object is gone.
    pub fn delete(&mut self, kind: Kind, key: &ObjectKey, passed: &mut Passed) -> Option<Effect> {
        let selected_before = self.selects_named(kind, key);
        let before = self.objects.get_mut(&kind)?.remove(key)?;
        tell(kind, key, Some(&before), None, passed);
        self.namespace_may_differ(kind, key, selected_before, passed);
        Some(Effect::Deleted)
    }

    /// Exactly these objects of a kind are there. Tells the effects, by their number.
    pub fn replace(&mut self, kind: Kind, items: Vec<Item>, passed: &mut Passed) -> Vec<Effect> {
        let mut gone: BTreeSet<ObjectKey> = self
            .objects
            .get(&kind)
            .into_iter()
            .flatten()
            .map(|(key, _)| key.clone())
            .collect();
        let mut effects = Vec::with_capacity(items.len());
        for item in items {
            gone.remove(&item.key);
            effects.push(self.apply(item, passed));
        }
        for key in gone {
            effects.extend(self.delete(kind, &key, passed));
        }
        effects
    }

    /// What counts is decided differently from now on.
    pub fn set_filters(&mut self, filters: Filters, passed: &mut Passed) {
        if self.filters == filters {
            return;
        }
        self.filters = filters;
        for (kind, key) in self.all() {
            self.reconsider(kind, &key, passed);
        }
    }

    /// Everything that counts, as replacements of whole kinds, and all that stands about it.
    pub fn everything(&self, kinds: impl IntoIterator<Item = Kind>) -> Passed {
        let mut passed = Passed::default();
        for kind in kinds {
            let objects = self.objects.get(&kind).into_iter().flatten();
            let mut rows = Vec::new();
            for (key, held) in objects {
                rows.extend(held.visible().cloned());
                let standing = held.standing();
                if !standing.is_empty() {
                    passed.findings.push((kind, key.clone(), standing));
                }
            }
            let cluster = self.cluster.clone();
            passed.changes.push(Change::Replace(SourceId { cluster, kind }, rows));
        }
        passed
    }

    fn all(&self) -> Vec<(Kind, ObjectKey)> {
        let keys = |(kind, objects): (&Kind, &BTreeMap<ObjectKey, Held>)| {
            let kind = *kind;
            objects.keys().map(move |key| (kind, key.clone())).collect::<Vec<_>>()
        };
        self.objects.iter().flat_map(keys).collect()
    }

    fn counts(&self, kind: Kind, key: &ObjectKey, revision: Option<&SmolStr>) -> bool {
        let of_revision =
            revision.is_none_or(|revision| *revision == self.revision || self.filters.tags.contains(revision));
        let has_revision = kind.is_istio() || kind.is_gateway_api();
        (of_revision || !has_revision) && (kind.is_cluster_scoped() || self.selects(&key.namespace))
    }

    /// True if objects of the namespace count. A namespace that nobody has seen yet has no labels.
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

    /// After a change of a Namespace: its objects may count now, or no longer.
    fn namespace_may_differ(&mut self, kind: Kind, key: &ObjectKey, before: bool, passed: &mut Passed) {
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
            self.reconsider(kind, &key, passed);
        }
    }

    fn reconsider(&mut self, kind: Kind, key: &ObjectKey, passed: &mut Passed) {
        let find = |objects: &BTreeMap<Kind, BTreeMap<ObjectKey, Held>>| {
            let held = objects.get(&kind)?.get(key)?;
            Some((held.counts, held.revision.clone()))
        };
        let Some((before, revision)) = find(&self.objects) else {
            return;
        };
        let counts = self.counts(kind, key, revision.as_ref());
        let held = self.objects.get_mut(&kind).and_then(|objects| objects.get_mut(key));
        let Some(held) = held.filter(|_| counts != before) else {
            return;
        };
        held.counts = counts;
        let change = match (counts, &held.row) {
            (true, Some(row)) => Some(Change::Upsert(row.clone())),
            (false, Some(_)) => Some(Change::Remove(kind, key.clone())),
            (_, None) => None,
        };
        passed.changes.extend(change);
        if !held.findings.is_empty() {
            passed.findings.push((kind, key.clone(), held.standing()));
        }
    }
}

/// Tells the difference between two states of one object.
fn tell(kind: Kind, key: &ObjectKey, before: Option<&Held>, after: Option<&Held>, passed: &mut Passed) {
    let visible_before = before.and_then(Held::visible);
    match after.and_then(Held::visible) {
        Some(row) if visible_before != Some(row) => passed.changes.push(Change::Upsert(row.clone())),
        None if visible_before.is_some() => passed.changes.push(Change::Remove(kind, key.clone())),
        _ => {}
    }
    let standing = |held: Option<&Held>| held.map(Held::standing).unwrap_or_default();
    let (stood, stands) = (standing(before), standing(after));
    if stood != stands {
        passed.findings.push((kind, key.clone(), stands));
    }
}

#[cfg(test)]
mod tests;
