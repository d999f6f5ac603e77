//! The conditions that objects have, those that they must have, and the writes between them.

use std::collections::{BTreeMap, BTreeSet};

use imbl::{OrdMap, ordmap::DiffItem};
use serde_json::{Map, Value, json};

use crate::{
    api::Kind,
    base::{ClusterId, ObjectKey, Shared, SmolStr},
    kube::{Object, watch::WatchEvent},
    model::ambient_status::{Condition, ObjectConditions, StatusTarget, TYPES},
    status::{NamespacedName, store::is_older},
    table::{Cx, Table},
};

/// Attempts to write one object that the API server refuses, after which it waits for a change.
const ATTEMPTS: u32 = 5;

/// An object of the API server, without what does not concern its conditions.
#[derive(Clone, Debug)]
pub(super) struct Published {
    key: NamespacedName,
    uid: SmolStr,
    /// `metadata.resourceVersion`.
    version: SmolStr,
    conditions: Vec<PublishedCondition>,
    /// Conditions of others that a write must repeat.
    others: Vec<Value>,
}

#[derive(Clone, Debug)]
struct PublishedCondition {
    condition_type: SmolStr,
    status: SmolStr,
    reason: SmolStr,
    message: String,
    observed_generation: i64,
    transition: SmolStr,
}

impl Published {
    /// Reads an object.
    pub(super) fn of(kind: Kind, object: &Object) -> Self {
        let conditions = object.value["status"]["conditions"].as_array();
        let (own, mut others): (Vec<&Value>, Vec<&Value>) = conditions
            .into_iter()
            .flatten()
            .partition(|condition| condition["type"].as_str().is_some_and(|name| TYPES.contains(&name)));
        if !is_replaced(kind) {
            others.clear();
        }
        Self {
            key: NamespacedName::of(object),
            uid: object.metadata.uid.as_deref().unwrap_or_default().into(),
            version: object.resource_version().into(),
            conditions: own.into_iter().map(PublishedCondition::of).collect(),
            others: others.into_iter().cloned().collect(),
        }
    }

    fn condition(&self, condition_type: &str) -> Option<&PublishedCondition> {
        self.conditions
            .iter()
            .find(|condition| condition.condition_type == condition_type)
    }
}

impl PublishedCondition {
    fn of(value: &Value) -> Self {
        let text = |name: &str| value[name].as_str().unwrap_or_default();
        // Istio writes this number as text.
        let generation = &value["observedGeneration"];
        let as_text = || generation.as_str()?.parse().ok();
        Self {
            condition_type: text("type").into(),
            status: text("status").into(),
            reason: text("reason").into(),
            message: text("message").to_owned(),
            observed_generation: generation.as_i64().or_else(as_text).unwrap_or_default(),
            transition: text("lastTransitionTime").into(),
        }
    }

    fn equals(&self, condition: &Condition) -> bool {
        self.status == status(condition)
            && self.reason == condition.reason
            && self.message == condition.message
            && self.observed_generation == condition.observed_generation
    }
}

/// Returns true if a write replaces all conditions of an object, those of others included: in Istio's definitions, the
/// list has no keys.
fn is_replaced(kind: Kind) -> bool {
    kind != Kind::Service
}

fn status(condition: &Condition) -> &'static str {
    if condition.is_true { "True" } else { "False" }
}

/// A due write.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Write {
    pub(super) target: StatusTarget,
    pub(super) manager: &'static str,
    /// The object to apply.
    pub(super) fields: Value,
}

/// See the module's documentation.
pub(super) struct Plan {
    cluster: ClusterId,
    rows: OrdMap<StatusTarget, Shared<ObjectConditions>>,
    published: BTreeMap<Kind, BTreeMap<NamespacedName, Published>>,
    /// Objects to compare. One that the watch has not reported yet is compared when it does.
    due: BTreeSet<StatusTarget>,
    /// Objects whose write failed.
    failed: BTreeSet<StatusTarget>,
    attempts: BTreeMap<StatusTarget, u32>,
    /// Objects that have changed since the version that a write named. They are compared when the watch reports that.
    outdated: BTreeSet<StatusTarget>,
}

impl Plan {
    /// Returns the plan of a cluster, whose objects are unknown.
    pub(super) fn new(cluster: ClusterId) -> Self {
        Self {
            cluster,
            rows: OrdMap::new(),
            published: BTreeMap::new(),
            due: BTreeSet::new(),
            failed: BTreeSet::new(),
            attempts: BTreeMap::new(),
            outdated: BTreeSet::new(),
        }
    }

    /// Takes over the rows of a snapshot.
    pub(super) fn observe(&mut self, table: &Table<StatusTarget, ObjectConditions>) {
        let rows = table.rows(&Cx::untracked());
        let before = std::mem::replace(&mut self.rows, rows.clone());
        for change in before.diff(rows) {
            let (DiffItem::Add(target, _) | DiffItem::Update { new: (target, _), .. } | DiffItem::Remove(target, _)) =
                change;
            self.failed.remove(target);
            self.attempts.remove(target);
            self.due.insert(target.clone());
        }
    }

    /// Applies an event of a watch.
    pub(super) fn apply_event(&mut self, kind: Kind, event: WatchEvent<Published>) {
        match event {
            WatchEvent::Restarted(all) => {
                let before = self.published.remove(&kind).unwrap_or_default();
                for object in all {
                    let known = before.get(&object.key);
                    let target = self.target(kind, &object.key);
                    // The conditions of a server that was restored from a backup are those of before, too.
                    let is_restored = known.is_some_and(|known| is_older(&object.version, &known.version));
                    if self.must_compare(&target, known, &object) || is_restored {
                        self.due.insert(target);
                    }
                    self.published
                        .entry(kind)
                        .or_default()
                        .insert(object.key.clone(), object);
                }
            }
            WatchEvent::Applied(object) => self.put(kind, object),
            WatchEvent::Deleted(object) => {
                self.outdated.remove(&self.target(kind, &object.key));
                self.published.entry(kind).or_default().remove(&object.key);
            }
        }
    }

    /// Returns true if a version of an object must be compared because of the version that was known before.
    fn must_compare(&mut self, target: &StatusTarget, known: Option<&Published>, object: &Published) -> bool {
        let is_new = known.is_none_or(|known| known.uid != object.uid);
        let has_changed = known.is_none_or(|known| known.version != object.version);
        (has_changed && self.outdated.remove(target)) || is_new
    }

    fn target(&self, kind: Kind, key: &NamespacedName) -> StatusTarget {
        StatusTarget {
            kind,
            object: ObjectKey::new(&self.cluster, key.namespace.as_str(), key.name.clone()),
        }
    }

    /// Puts an object, unless a newer one is known: an event may be older than the result of a write. A new object must
    /// be compared.
    fn put(&mut self, kind: Kind, object: Published) {
        let target = self.target(kind, &object.key);
        let mut objects = self.published.remove(&kind).unwrap_or_default();
        let known = objects.get(&object.key);
        if known.is_none_or(|known| !is_older(&object.version, &known.version)) {
            if self.must_compare(&target, known, &object) {
                self.due.insert(target);
            }
            objects.insert(object.key.clone(), object);
        }
        self.published.insert(kind, objects);
    }

    /// Returns true if an object must be compared.
    pub(super) fn is_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Returns the number of attempts of the failed write with the fewest; `None` if no write must be tried again.
    pub(super) fn failed_attempts(&self) -> Option<u32> {
        let attempts = self.failed.iter().filter_map(|target| self.attempts.get(target));
        attempts.min().copied()
    }

    /// Tries failed writes again.
    pub(super) fn retry(&mut self) {
        self.due.append(&mut self.failed);
    }

    /// Returns the next write. `now` is the time of transitions.
    pub(super) fn next(&mut self, now: &str) -> Option<Write> {
        while let Some(target) = self.due.pop_first() {
            let key = NamespacedName::new(target.object.namespace.as_str(), target.object.name.clone());
            let published = self.published.get(&target.kind).and_then(|objects| objects.get(&key));
            let (Some(row), Some(published)) = (self.rows.get(&target), published) else {
                continue;
            };
            let Some(conditions) = due(row, published, now) else {
                continue;
            };
            let (group, version) = (target.kind.group(), target.kind.version());
            let api_version = if group.is_empty() {
                version.to_owned()
            } else {
                format!("{group}/{version}")
            };
            let mut fields = json!({
                "apiVersion": api_version,
                "kind": target.kind.name(),
                "metadata": { "name": target.object.name.as_str() },
                "status": { "conditions": conditions },
            });
            if is_replaced(target.kind) {
                fields["metadata"]["resourceVersion"] = published.version.as_str().into();
            }
            return Some(Write {
                manager: row.manager,
                target,
                fields,
            });
        }
        None
    }

    /// Records the object after a write, unless its deletion was reported in the meantime.
    pub(super) fn written(&mut self, target: &StatusTarget, object: Published) {
        self.attempts.remove(target);
        let published = self.published.get(&target.kind);
        if published.is_some_and(|all| all.contains_key(&object.key)) {
            self.put(target.kind, object);
        }
    }

    /// Records a write that was refused because the object has changed.
    pub(super) fn conflicted(&mut self, target: &StatusTarget) {
        self.outdated.insert(target.clone());
    }

    /// Records a write that failed because the API server does not work. It is tried again until it does.
    pub(super) fn unanswered(&mut self, target: &StatusTarget) {
        let attempts = self.attempts.entry(target.clone()).or_default();
        *attempts = (*attempts + 1).min(ATTEMPTS);
        self.failed.insert(target.clone());
    }

    /// Records a refused write.
    pub(super) fn failed(&mut self, target: &StatusTarget) {
        let attempts = self.attempts.entry(target.clone()).or_default();
        *attempts += 1;
        if *attempts < ATTEMPTS {
            self.failed.insert(target.clone());
        } else {
            self.attempts.remove(target);
        }
    }
}

/// Returns the conditions to apply; `None` if the object has exactly these.
fn due(row: &ObjectConditions, published: &Published, now: &str) -> Option<Vec<Value>> {
    let is_equal =
        row.conditions.iter().all(
            |(condition_type, wanted)| match (published.condition(condition_type), wanted) {
                (None, None) => true,
                (Some(present), Some(wanted)) => present.equals(wanted),
                _ => false,
            },
        );
    if is_equal {
        return None;
    }
    let wanted = row.conditions.iter();
    let wanted = wanted.filter_map(|(condition_type, wanted)| Some((*condition_type, wanted.as_ref()?)));
    let rendered = wanted.map(|(condition_type, condition)| {
        let before = published
            .condition(condition_type)
            .filter(|before| before.status == status(condition) && !before.transition.is_empty());
        let transition = before.map_or(now, |before| before.transition.as_str());
        let mut fields = Map::from_iter([
            ("type".to_owned(), condition_type.into()),
            ("status".to_owned(), status(condition).into()),
            ("lastTransitionTime".to_owned(), transition.into()),
            ("reason".to_owned(), condition.reason.into()),
            ("message".to_owned(), condition.message.as_str().into()),
        ]);
        if condition.observed_generation != 0 {
            fields.insert("observedGeneration".to_owned(), condition.observed_generation.into());
        }
        Value::Object(fields)
    });
    Some(published.others.iter().cloned().chain(rendered).collect())
}

#[cfg(test)]
mod tests;
