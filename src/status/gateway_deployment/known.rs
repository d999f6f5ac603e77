//! The reports of the watches: Gateways, parameters, and the objects of deployments as fingerprints.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::Value;

use crate::{
    api::label::REVISION,
    base::SmolStr,
    inject::gateway::{self, CLASS_DEFAULTS, GATEWAY_NAME, OVERLAY_KEYS, ObjectKind, Parameters},
    kube::{Object, watch::WatchEvent},
    status::{NamespacedName, owned_object::fingerprint},
};

/// The watched kinds. DaemonSets are read when they are applied.
pub(super) const WATCHED: [ObjectKind; 5] = [
    ObjectKind::ServiceAccount,
    ObjectKind::Deployment,
    ObjectKind::Service,
    ObjectKind::HorizontalPodAutoscaler,
    ObjectKind::PodDisruptionBudget,
];

/// A Gateway, without its status.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Gateway {
    pub(super) value: Arc<Value>,
}

impl Gateway {
    pub(super) fn of(object: Object) -> (NamespacedName, Self) {
        let key = NamespacedName::of(&object);
        let value = Arc::new(gateway::without_status(object.value));
        (key, Self { value })
    }

    /// Returns the name of the class.
    pub(super) fn class(&self) -> &str {
        self.value["spec"]["gatewayClassName"].as_str().unwrap_or_default()
    }

    /// Returns the revision or tag of its label.
    pub(super) fn revision(&self) -> Option<&str> {
        self.value["metadata"]["labels"][REVISION].as_str()
    }
}

/// An object of a deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Owned {
    fingerprint: u64,
    /// The Gateway.
    owner: Option<NamespacedName>,
}

impl Owned {
    pub(super) fn of(object: Object) -> (NamespacedName, Self) {
        let key = NamespacedName::of(&object);
        let owners = object.metadata.owner_references.iter().flatten();
        let mut gateways = owners
            .filter(|owner| owner.kind == "Gateway" && owner.api_version.starts_with("gateway.networking.k8s.io/"));
        let owner = gateways.next().map(|owner| owner.name.as_str());
        // ServiceAccounts had no owner before Kubernetes 1.28.
        let labels = object.metadata.labels.as_ref();
        let owner = owner.or_else(|| labels?.get(GATEWAY_NAME).map(String::as_str));
        let owner = owner.map(|name| NamespacedName::new(key.namespace.clone(), name));
        let fingerprint = fingerprint(object.value);
        (key, Self { fingerprint, owner })
    }
}

/// Parameters of a ConfigMap, the class that they are for, and its creation time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ConfigMap {
    parameters: Parameters,
    class: Option<SmolStr>,
    creation: String,
}

/// Returns the parameters of a ConfigMap. Of other ConfigMaps, only the name of one key stays.
pub(super) fn parameters(mut object: Object) -> (NamespacedName, ConfigMap) {
    let key = NamespacedName::of(&object);
    let labels = object.metadata.labels.as_ref();
    let class = labels.and_then(|labels| labels.get(CLASS_DEFAULTS)).map(SmolStr::new);
    let mut data = BTreeMap::new();
    if let Value::Object(entries) = object.value["data"].take() {
        for (key, value) in entries {
            let Value::String(text) = value else { continue };
            if OVERLAY_KEYS.contains(&key.as_str()) {
                data.insert(key, text);
            } else if data.keys().all(|known: &String| OVERLAY_KEYS.contains(&known.as_str())) {
                data.insert(key, String::new());
            }
        }
    }
    let creation = object.value["metadata"]["creationTimestamp"].as_str();
    let config_map = ConfigMap {
        parameters: Parameters {
            namespace: key.namespace.to_string(),
            name: key.name.to_string(),
            data,
        },
        class,
        creation: creation.unwrap_or_default().to_owned(),
    };
    (key, config_map)
}

/// An event of a watch.
pub(super) enum Event {
    Gateway(WatchEvent<(NamespacedName, Gateway)>),
    Owned(ObjectKind, WatchEvent<(NamespacedName, Owned)>),
    Parameters(WatchEvent<(NamespacedName, ConfigMap)>),
}

/// A difference that an event makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// A Gateway is new, changed or gone.
    Gateway(NamespacedName),
    /// An object of a deployment has this fingerprint; `None` if it is gone.
    Owned {
        object: (ObjectKind, NamespacedName),
        fingerprint: Option<u64>,
        owner: Option<NamespacedName>,
    },
    /// A ConfigMap is new, changed or gone.
    Parameters(NamespacedName),
}

/// The rows of a watch; `None` before the first list.
type Rows<T> = Option<BTreeMap<NamespacedName, T>>;

/// Applies an event, and returns each changed key with the row before and after.
fn apply_event<T: Clone + PartialEq>(
    known: &mut Rows<T>,
    event: WatchEvent<(NamespacedName, T)>,
) -> Vec<(NamespacedName, Option<T>, Option<T>)> {
    let mut changes = Vec::new();
    let mut put = |rows: &mut BTreeMap<NamespacedName, T>, key: NamespacedName, row: Option<T>| {
        let before = match &row {
            Some(row) => rows.insert(key.clone(), row.clone()),
            None => rows.remove(&key),
        };
        if before != row {
            changes.push((key, before, row));
        }
    };
    let rows = known.get_or_insert_default();
    match event {
        WatchEvent::Restarted(all) => {
            let all: BTreeMap<NamespacedName, T> = all.into_iter().collect();
            let gone: Vec<NamespacedName> = rows.keys().filter(|key| !all.contains_key(*key)).cloned().collect();
            for key in gone {
                put(rows, key, None);
            }
            for (key, row) in all {
                put(rows, key, Some(row));
            }
        }
        WatchEvent::Applied((key, row)) => put(rows, key, Some(row)),
        WatchEvent::Deleted((key, _)) => put(rows, key, None),
    }
    changes
}

/// Everything that the watches have reported.
#[derive(Default)]
pub(super) struct Known {
    gateways: Rows<Gateway>,
    owned: BTreeMap<ObjectKind, Rows<Owned>>,
    parameters: Rows<ConfigMap>,
}

impl Known {
    /// Applies an event.
    pub(super) fn apply_event(&mut self, event: Event) -> Vec<Change> {
        match event {
            Event::Gateway(event) => {
                let changes = apply_event(&mut self.gateways, event).into_iter();
                changes.map(|(key, ..)| Change::Gateway(key)).collect()
            }
            Event::Owned(kind, event) => {
                let changes = apply_event(self.owned.entry(kind).or_default(), event).into_iter();
                let change = |(key, before, after): (NamespacedName, Option<Owned>, Option<Owned>)| Change::Owned {
                    object: (kind, key),
                    fingerprint: after.as_ref().map(|row| row.fingerprint),
                    owner: before.and_then(|row| row.owner).or(after.and_then(|row| row.owner)),
                };
                changes.map(change).collect()
            }
            Event::Parameters(event) => {
                let changes = apply_event(&mut self.parameters, event).into_iter();
                changes.map(|(key, ..)| Change::Parameters(key)).collect()
            }
        }
    }

    /// Returns true once every watch has reported its first list.
    pub(super) fn is_complete(&self) -> bool {
        self.gateways.is_some()
            && self.parameters.is_some()
            && WATCHED
                .iter()
                .all(|kind| self.owned.get(kind).is_some_and(Option::is_some))
    }

    /// Returns a Gateway.
    pub(super) fn gateway(&self, key: &NamespacedName) -> Option<&Gateway> {
        self.gateways.as_ref()?.get(key)
    }

    /// Returns the keys of all Gateways.
    pub(super) fn gateways(&self) -> impl Iterator<Item = &NamespacedName> {
        self.gateways.iter().flat_map(BTreeMap::keys)
    }

    /// Returns the fingerprint of an object.
    pub(super) fn fingerprint(&self, (kind, key): &(ObjectKind, NamespacedName)) -> Option<u64> {
        let row = self.owned.get(kind)?.as_ref()?.get(key)?;
        Some(row.fingerprint)
    }

    /// Returns the parameters in a ConfigMap.
    pub(super) fn parameters(&self, key: &NamespacedName) -> Option<&Parameters> {
        self.parameters.as_ref()?.get(key).map(|row| &row.parameters)
    }

    /// Returns the parameters of a class: the oldest ConfigMap with its label in the control plane's namespace.
    pub(super) fn class_parameters(&self, namespace: &str, class: &str) -> Option<&Parameters> {
        let rows = self.parameters.iter().flatten();
        let own = rows.filter(|(own, row)| own.namespace == namespace && row.class.as_deref() == Some(class));
        let oldest = own.min_by(|(a, left), (b, right)| left.creation.cmp(&right.creation).then_with(|| a.cmp(b)));
        oldest.map(|(_, row)| &row.parameters)
    }

    /// Returns the Gateways that may read a ConfigMap: those that refer to it, and all if it is in the control plane's
    /// namespace, since it may have had the label of their class.
    pub(super) fn reading(&self, key: &NamespacedName, namespace: &str) -> Vec<NamespacedName> {
        let all = key.namespace == namespace;
        let rows = self.gateways.iter().flatten();
        let reads = |(own, gateway): (&NamespacedName, &Gateway)| {
            let name = gateway::parameters_name(&gateway.value).ok().flatten();
            let refers = own.namespace == key.namespace && name == Some(key.name.as_str());
            (refers || all).then(|| own.clone())
        };
        rows.filter_map(reads).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(value: Value) -> Object {
        Object::from_value(value).expect("an object")
    }

    #[test]
    fn statuses_do_not_count() {
        let deployment = |replicas: u32, version: &str| {
            Owned::of(object(
                json!({"metadata": {"name": "a", "namespace": "n", "resourceVersion": version,
                "ownerReferences": [{"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "name": "g",
                    "uid": "u"}]},
                "spec": {"replicas": 1}, "status": {"replicas": replicas}}),
            ))
        };
        assert_eq!(deployment(0, "1"), deployment(1, "2"));
        let mut known = Known::default();
        let kind = ObjectKind::Deployment;
        let changes = known.apply_event(Event::Owned(kind, WatchEvent::Restarted(vec![deployment(0, "1")])));
        assert_eq!(changes.len(), 1);
        let changes = known.apply_event(Event::Owned(kind, WatchEvent::Applied(deployment(1, "2"))));
        assert_eq!(changes, []);
        let changes = known.apply_event(Event::Owned(kind, WatchEvent::Deleted(deployment(1, "2"))));
        let owner = Some(NamespacedName::new("n", "g"));
        let object = (kind, NamespacedName::new("n", "a"));
        assert_eq!(
            changes,
            [Change::Owned {
                object,
                fingerprint: None,
                owner
            }]
        );
    }

    #[test]
    fn parameters_of_classes_are_of_the_oldest() {
        let config_map = |namespace: &str, name: &str, created: &str, data: Value| {
            parameters(object(json!({"metadata": {"name": name, "namespace": namespace,
                "creationTimestamp": created, "labels": {CLASS_DEFAULTS: "istio"}}, "data": data})))
        };
        let mut known = Known::default();
        known.apply_event(Event::Parameters(WatchEvent::Restarted(vec![
            config_map("istio-system", "new", "2026-01-02T00:00:00Z", json!({"service": "b"})),
            config_map(
                "istio-system",
                "old",
                "2026-01-01T00:00:00Z",
                json!({"service": "a", "x": "y", "z": "y"}),
            ),
            config_map("other", "older", "2025-01-01T00:00:00Z", json!({"service": "c"})),
        ])));
        let found = known.class_parameters("istio-system", "istio").expect("parameters");
        assert_eq!(found.name, "old");
        let data: Vec<(&str, &str)> = found
            .data
            .iter()
            .map(|(key, text)| (key.as_str(), text.as_str()))
            .collect();
        assert_eq!(data, [("service", "a"), ("x", "")]);
        assert_eq!(known.class_parameters("istio-system", "other"), None);
    }
}
