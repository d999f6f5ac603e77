//! Record of a lock, in the two forms of Istio and client-go: an annotation of a ConfigMap, or the specification of a
//! Lease.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339, macros::format_description};

/// Annotation of a ConfigMap with the record.
pub const RECORD_ANNOTATION: &str = "control-plane.alpha.kubernetes.io/leader";
/// Annotation of a Lease with the holder's key.
pub const KEY_ANNOTATION: &str = "leader.istio.io/holder-key";

/// Holder of a lock. The order of fields is that of the written text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct Record {
    /// Name of the holder; empty if there is none.
    pub holder_identity: String,
    /// Revision of the holder, after `^` if it is remote to this cluster. Decides which candidates may evict it.
    pub holder_key: String,
    /// Time for which the lock is held without renewal.
    pub lease_duration_seconds: i64,
    /// Time of acquisition.
    #[serde(serialize_with = "seconds", deserialize_with = "optional_time")]
    pub acquire_time: Option<OffsetDateTime>,
    /// Time of the last renewal.
    #[serde(serialize_with = "seconds", deserialize_with = "optional_time")]
    pub renew_time: Option<OffsetDateTime>,
    /// Number of changes of the holder.
    pub leader_transitions: i64,
}

/// Malformed lock. It stays until it is repaired or deleted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed lock record: {0}; hint: delete the object, it is created again")]
pub struct RecordError(String);

/// Kind of a lock's object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockForm {
    /// An annotation of a ConfigMap.
    ConfigMap,
    /// A Lease.
    Lease,
}

impl LockForm {
    /// Returns group, version, kind and plural.
    pub fn resource(self) -> (&'static str, &'static str, &'static str, &'static str) {
        match self {
            Self::ConfigMap => ("", "v1", "ConfigMap", "configmaps"),
            Self::Lease => ("coordination.k8s.io", "v1", "Lease", "leases"),
        }
    }

    /// Returns a new object with the record.
    pub fn object(self, namespace: &str, name: &str, record: &Record) -> Value {
        let (group, version, kind, _) = self.resource();
        let api_version = if group.is_empty() {
            version.to_owned()
        } else {
            format!("{group}/{version}")
        };
        let mut object = json!({
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {"name": name, "namespace": namespace},
        });
        self.write(&mut object, record);
        object
    }

    /// Returns the record of an object; without one, the lock has no holder.
    pub fn read(self, object: &Value) -> Result<Record, RecordError> {
        let annotations = &object["metadata"]["annotations"];
        match self {
            Self::ConfigMap => match annotations[RECORD_ANNOTATION].as_str() {
                None => Ok(Record::default()),
                Some(text) => serde_json::from_str(text).map_err(|error| RecordError(error.to_string())),
            },
            Self::Lease => {
                let spec = &object["spec"];
                Ok(Record {
                    holder_identity: spec["holderIdentity"].as_str().unwrap_or_default().to_owned(),
                    holder_key: annotations[KEY_ANNOTATION].as_str().unwrap_or_default().to_owned(),
                    lease_duration_seconds: spec["leaseDurationSeconds"].as_i64().unwrap_or_default(),
                    acquire_time: time_of(&spec["acquireTime"]),
                    renew_time: time_of(&spec["renewTime"]),
                    leader_transitions: spec["leaseTransitions"].as_i64().unwrap_or_default(),
                })
            }
        }
    }

    /// Sets the record in an object; the rest of the object stays.
    pub fn write(self, object: &mut Value, record: &Record) {
        match self {
            Self::ConfigMap => {
                let text = serde_json::to_string(record).expect("because the record holds only texts and numbers");
                annotate(object, RECORD_ANNOTATION, Some(text));
            }
            Self::Lease => {
                let micros = |time: Option<OffsetDateTime>| time.map(micro_time);
                object["spec"] = json!({
                    "holderIdentity": record.holder_identity,
                    "leaseDurationSeconds": record.lease_duration_seconds,
                    "acquireTime": micros(record.acquire_time),
                    "renewTime": micros(record.renew_time),
                    "leaseTransitions": record.leader_transitions,
                });
                let key = Some(record.holder_key.clone()).filter(|key| !key.is_empty());
                annotate(object, KEY_ANNOTATION, key);
            }
        }
    }
}

fn annotate(object: &mut Value, key: &str, text: Option<String>) {
    let annotations = &mut object["metadata"]["annotations"];
    match text {
        Some(text) => annotations[key] = Value::String(text),
        None => {
            if let Some(annotations) = annotations.as_object_mut() {
                annotations.remove(key);
            }
        }
    }
    if object["metadata"]["annotations"].is_null()
        && let Some(metadata) = object["metadata"].as_object_mut()
    {
        metadata.remove("annotations");
    }
}

/// Kubernetes' `Time`: whole seconds.
#[expect(clippy::ref_option, reason = "serde passes references to fields")]
fn seconds<S: Serializer>(time: &Option<OffsetDateTime>, serializer: S) -> Result<S::Ok, S::Error> {
    let text = time.map(|time| {
        time.to_offset(time::UtcOffset::UTC)
            .format(format_description!("[year]-[month]-[day]T[hour]:[minute]:[second]Z"))
            .unwrap_or_default()
    });
    text.serialize(serializer)
}

/// Kubernetes' `MicroTime`: six digits.
fn micro_time(time: OffsetDateTime) -> String {
    let form = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");
    time.to_offset(time::UtcOffset::UTC).format(form).unwrap_or_default()
}

fn optional_time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<OffsetDateTime>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    let parsed = text.map(|text| OffsetDateTime::parse(&text, &Rfc3339).map_err(serde::de::Error::custom));
    parsed.transpose()
}

fn time_of(value: &Value) -> Option<OffsetDateTime> {
    OffsetDateTime::parse(value.as_str()?, &Rfc3339).ok()
}
