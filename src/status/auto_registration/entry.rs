//! Changes of a machine's WorkloadEntry: objects in, objects out. Several replicas work on one entry. The replica of
//! the latest connection owns it, and every decision compares times recorded on the entry itself.

use std::time::{Duration, SystemTime};

use serde_json::{Map, Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{
    base::Labels,
    xds::events::{Binding, Health, Machine, Rejection},
};

/// Annotation with the WorkloadGroup of an entry.
pub const GROUP: &str = "istio.io/autoRegistrationGroup";
/// Annotation with the replica that the machine is connected to.
pub const CONTROLLER: &str = "istio.io/workloadController";
/// Annotation with the time of connection.
pub const CONNECTED_AT: &str = "istio.io/connectedAt";
/// Annotation with the time of disconnection.
pub const DISCONNECTED_AT: &str = "istio.io/disconnectedAt";
/// Annotation that enables health checks (if the value is `true`).
pub const HEALTH_CHECKED: &str = "proxy.istio.io/health-checks-enabled";

/// Label of workloads that accept HBONE.
const TUNNEL: &str = "networking.istio.io/tunnel";
/// Label of a locality on a node; its value is not a valid Kubernetes label.
const LOCALITY: &str = "istio-locality";
/// Type of the health condition.
const HEALTHY: &str = "Healthy";
/// Longest name of an object.
const MAX_NAME: usize = 253;

/// Returns the name of a machine's entry.
pub fn name(machine: &Machine) -> String {
    let group = match &machine.binding {
        Binding::Entry(name) => return name.to_string(),
        Binding::Group(group) => group,
    };
    let mut name = format!("{group}-{}", machine.address.replace(':', "-"));
    if !machine.network.is_empty() {
        name = format!("{name}-{}", machine.network);
    }
    // The end of the name distinguishes machines, the beginning does not.
    let begin = name.len().saturating_sub(MAX_NAME);
    let begin = (begin..=name.len())
        .find(|at| name.is_char_boundary(*at))
        .unwrap_or_default();
    name.split_off(begin)
}

/// Checks whether the machine may have this entry, which may be about to be created.
pub fn permit(validate: bool, machine: &Machine, entry: &Value) -> Result<(), Rejection> {
    if !validate {
        return Ok(());
    }
    let Some(identity) = &machine.identity else {
        return Err(Rejection::Forbidden(format!(
            "registration of a WorkloadEntry for {} requires a verified identity, which plaintext streams do not have; \
             hint: connect over TLS, or set ISTIO_WORKLOAD_ENTRY_VALIDATE_IDENTITY=false",
            machine.proxy
        )));
    };
    let namespace = text(&entry["metadata"]["namespace"]);
    if identity.namespace != namespace {
        return Err(Rejection::Forbidden(format!(
            "registration of a WorkloadEntry in namespace {namespace:?} is not for identities of {:?}",
            identity.namespace
        )));
    }
    let account = text(&entry["spec"]["serviceAccount"]);
    if !account.is_empty() && identity.service_account != account {
        return Err(Rejection::Forbidden(format!(
            "registration of a WorkloadEntry with service account {account:?} is not for {:?}",
            identity.service_account
        )));
    }
    Ok(())
}

/// Returns a new entry from the template of its group. Labels of the machine override those of the group's metadata,
/// which override those of the template.
pub fn of_group(name: &str, machine: &Machine, group: &Value, instance: &str, at: SystemTime) -> Value {
    let metadata = &group["spec"]["metadata"];
    let mut spec = group["spec"]["template"].as_object().cloned().unwrap_or_default();
    let mut labels = object(spec.get("labels"));
    labels.extend(object(metadata.get("labels")));
    labels.extend(values(&machine.labels));
    labels.remove(LOCALITY);
    if machine.hbone && !labels.contains_key(TUNNEL) {
        labels.insert(TUNNEL.into(), "http".into());
    }
    spec.insert("address".into(), machine.address.as_str().into());
    if !labels.is_empty() {
        spec.insert("labels".into(), labels.clone().into());
    }
    if !machine.network.is_empty() {
        spec.insert("network".into(), machine.network.as_str().into());
    }
    if !machine.locality.is_empty() {
        spec.insert("locality".into(), machine.locality.as_str().into());
    }
    let group_name = text(&group["metadata"]["name"]);
    let mut annotations = Map::from_iter([(GROUP.to_owned(), Value::from(group_name))]);
    annotations.extend(object(metadata.get("annotations")));
    if machine.probed {
        annotations.insert(HEALTH_CHECKED.into(), "true".into());
    }
    let mut entry = json!({
        "apiVersion": "networking.istio.io/v1",
        "kind": "WorkloadEntry",
        "metadata": {
            "name": name,
            "namespace": machine.namespace.as_str(),
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [{
                "apiVersion": "networking.istio.io/v1",
                "kind": "WorkloadGroup",
                "name": group_name,
                "uid": group["metadata"]["uid"],
                "controller": true,
            }],
        },
        "spec": spec,
    });
    mark_connected(&mut entry, instance, at);
    entry
}

/// Returns true if an entry belongs to an earlier group of this name, with which Kubernetes deletes it.
pub fn is_left_over(entry: &Value, group: &Value) -> bool {
    let (name, uid) = (&group["metadata"]["name"], &group["metadata"]["uid"]);
    let owners = entry["metadata"]["ownerReferences"].as_array();
    let mut groups = owners
        .into_iter()
        .flatten()
        .filter(|owner| owner["kind"] == "WorkloadGroup" && owner["name"] == *name)
        .peekable();
    groups.peek().is_some() && groups.all(|owner| owner["uid"] != *uid)
}

fn mark_connected(entry: &mut Value, instance: &str, at: SystemTime) {
    annotate(entry, CONTROLLER, Some(instance.to_owned()));
    annotate(entry, CONNECTED_AT, Some(time_text(at)));
    annotate(entry, DISCONNECTED_AT, None);
}

/// Returns the entry of a machine connected to this replica; `None` if it is recorded already, or something newer is.
pub fn connected(entry: &Value, instance: &str, at: SystemTime) -> Option<Value> {
    let later = |key: &str| annotation_time(entry, key).is_some_and(|time| time > at);
    if later(DISCONNECTED_AT) || later(CONNECTED_AT) {
        return None;
    }
    if annotation(entry, CONTROLLER) == instance && annotation_time(entry, CONNECTED_AT) == Some(at) {
        return None;
    }
    let mut entry = entry.clone();
    mark_connected(&mut entry, instance, at);
    Some(entry)
}

/// Returns the entry of a machine disconnected from this replica; `None` if it reconnected since, to any replica.
pub fn disconnected(entry: &Value, instance: &str, connected_at: SystemTime, at: SystemTime) -> Option<Value> {
    let connected = annotation_time(entry, CONNECTED_AT);
    let came_back = connected.is_some_and(|time| time > connected_at || time > at);
    if came_back || annotation(entry, CONTROLLER) != instance {
        return None;
    }
    let mut entry = entry.clone();
    annotate(&mut entry, CONNECTED_AT, None);
    annotate(&mut entry, DISCONNECTED_AT, Some(time_text(at)));
    Some(entry)
}

/// Returns true if health checks are enabled.
pub fn takes_health(entry: &Value) -> bool {
    entry["metadata"]["annotations"].get(HEALTH_CHECKED).is_some()
}

/// Returns the entry with this health in its status; `None` if another replica owns it, or if this report or a newer
/// one is recorded.
pub fn with_health(entry: &Value, instance: &str, health: &Health) -> Option<Value> {
    if annotation(entry, CONTROLLER) != instance {
        return None;
    }
    let mut conditions = entry["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let known = conditions.iter().position(|condition| condition["type"] == HEALTHY);
    if let Some(known) = known {
        let probed = parse_time(text(&conditions[known]["lastProbeTime"]));
        if probed.is_some_and(|probed| probed > health.at) {
            return None;
        }
    }
    // Agents report health only on changes, so both times are that of the report.
    let at = time_text(health.at);
    let mut condition = json!({
        "type": HEALTHY,
        "status": if health.healthy { "True" } else { "False" },
        "lastProbeTime": at,
        "lastTransitionTime": at,
    });
    if !health.message.is_empty() {
        condition["message"] = health.message.as_str().into();
    }
    match known {
        Some(known) if conditions[known] == condition => return None,
        Some(known) => conditions[known] = condition,
        None => conditions.push(condition),
    }
    let mut entry = entry.clone();
    entry["status"]["conditions"] = conditions.into();
    Some(entry)
}

/// Returns the entry without health in its status.
pub fn without_health(entry: &Value) -> Value {
    let mut entry = entry.clone();
    if let Some(conditions) = entry["status"]["conditions"].as_array_mut() {
        conditions.retain(|condition| condition["type"] != HEALTHY);
    }
    entry
}

/// Attributes that show whether an entry is orphaned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnershipRecord<'a> {
    annotations: [&'a str; 4],
    has_health: bool,
}

/// Treatment of an orphaned entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CleanUp {
    /// It was created for the machine: delete it.
    Delete,
    /// It existed before: remove the health of the machine's agent.
    ForgetHealth,
}

/// Limits after which an entry is orphaned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest absence of a machine (`PILOT_WORKLOAD_ENTRY_GRACE_PERIOD`).
    pub grace: Duration,
    /// Longest time that a recorded connection counts as alive, longer than connections live; `None` for no limit.
    pub connection: Option<Duration>,
}

impl<'a> OwnershipRecord<'a> {
    /// Reads the attributes of an object.
    pub fn of_object(entry: &'a Value) -> Self {
        Self::new(|key| annotation(entry, key), &entry["status"])
    }

    /// Reads the attributes of a row.
    pub fn of_row(annotations: &'a Labels, status: Option<&Value>) -> Self {
        let annotation = |key: &str| annotations.get(key).map_or("", |value| value.as_str());
        Self::new(annotation, status.unwrap_or(&Value::Null))
    }

    fn new(annotation: impl Fn(&str) -> &'a str, status: &Value) -> Self {
        let conditions = status["conditions"].as_array();
        Self {
            annotations: [GROUP, CONTROLLER, CONNECTED_AT, DISCONNECTED_AT].map(annotation),
            has_health: conditions.is_some_and(|list| list.iter().any(|condition| condition["type"] == HEALTHY)),
        }
    }

    /// Returns the treatment at this time.
    pub fn clean_up(&self, now: SystemTime, limits: Limits) -> Option<CleanUp> {
        let [group, controller, connected_at, disconnected_at] = self.annotations;
        let clean_up = match (group.is_empty(), controller.is_empty()) {
            (false, _) => CleanUp::Delete,
            (true, false) if self.has_health => CleanUp::ForgetHealth,
            _ => return None,
        };
        let since = |text: &str| parse_time(text).map(|time| now.duration_since(time).unwrap_or_default());
        let left_behind = if !connected_at.is_empty() {
            // Machine and replica ended together, without recording the time.
            let age = since(connected_at);
            age.is_some_and(|age| limits.connection.is_some_and(|limit| age > limit))
        } else if !disconnected_at.is_empty() {
            since(disconnected_at).is_none_or(|away| away >= limits.grace)
        } else {
            false
        };
        left_behind.then_some(clean_up)
    }
}

/// Returns the object's resource version.
pub fn resource_version(entry: &Value) -> &str {
    text(&entry["metadata"]["resourceVersion"])
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn object(value: Option<&Value>) -> Map<String, Value> {
    value.and_then(Value::as_object).cloned().unwrap_or_default()
}

fn values(labels: &Labels) -> impl Iterator<Item = (String, Value)> {
    labels
        .iter()
        .map(|(key, value)| (key.to_string(), value.as_str().into()))
}

fn annotation<'e>(entry: &'e Value, key: &str) -> &'e str {
    text(&entry["metadata"]["annotations"][key])
}

fn annotation_time(entry: &Value, key: &str) -> Option<SystemTime> {
    parse_time(annotation(entry, key))
}

fn annotate(entry: &mut Value, key: &str, value: Option<String>) {
    let annotations = &mut entry["metadata"]["annotations"];
    match value {
        Some(value) => annotations[key] = value.into(),
        None => {
            if let Some(annotations) = annotations.as_object_mut() {
                annotations.remove(key);
            }
        }
    }
}

fn parse_time(text: &str) -> Option<SystemTime> {
    OffsetDateTime::parse(text, &Rfc3339).ok().map(SystemTime::from)
}

/// Formats a time like Go's `RFC3339Nano`, without trailing zeros.
fn time_text(time: SystemTime) -> String {
    OffsetDateTime::from(time).format(&Rfc3339).unwrap_or_default()
}

#[cfg(test)]
mod tests;
