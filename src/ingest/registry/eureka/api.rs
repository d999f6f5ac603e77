//! Answers of Eureka's API.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde::{Deserialize, Deserializer};
use serde_json::Value;
use smol_str::SmolStr;

/// The lease of instances that declare none. It is that of Eureka's clients.
const DEFAULT_LEASE: Duration = Duration::from_secs(90);
/// The longest time for which an instance stays that is missing after an outage.
const LONGEST_LEASE: Duration = Duration::from_mins(15);

/// A response.
#[derive(Deserialize)]
pub(super) struct Envelope {
    pub(super) applications: Applications,
}

/// Applications with their instances, or with changed instances.
#[derive(Deserialize)]
pub(super) struct Applications {
    #[serde(rename = "apps__hashcode", default)]
    pub(super) hash: String,
    #[serde(default, deserialize_with = "one_or_many")]
    pub(super) application: Vec<Application>,
}

/// An application with its instances.
#[derive(Deserialize)]
pub(super) struct Application {
    #[serde(default)]
    pub(super) name: String,
    #[serde(default, deserialize_with = "one_or_many")]
    pub(super) instance: Vec<Registration>,
}

/// An instance as it was registered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Registration {
    pub(super) instance_id: String,
    pub(super) host_name: String,
    pub(super) ip_addr: String,
    pub(super) status: String,
    #[serde(deserialize_with = "or_empty")]
    pub(super) vip_address: String,
    #[serde(deserialize_with = "or_empty")]
    pub(super) secure_vip_address: String,
    #[serde(deserialize_with = "port")]
    pub(super) port: Option<u32>,
    #[serde(deserialize_with = "port")]
    pub(super) secure_port: Option<u32>,
    #[serde(deserialize_with = "metadata")]
    pub(super) metadata: BTreeMap<String, String>,
    #[serde(deserialize_with = "lease")]
    pub(super) lease_info: Lease,
    pub(super) action_type: String,
}

impl Registration {
    /// Returns the hosts of an instance with their ports: its host name with both ports, and the names of each port.
    /// Such names are lists, in any case, and may have a port.
    pub(super) fn hosts(&self) -> BTreeSet<(SmolStr, u32)> {
        let names = |list: &str| {
            let names = list
                .split(',')
                .map(|name| name.split(':').next().unwrap_or_default().trim());
            names.map(str::to_ascii_lowercase).collect::<Vec<_>>()
        };
        let mut hosts = BTreeSet::new();
        for (port, list) in [
            (self.port, &self.vip_address),
            (self.secure_port, &self.secure_vip_address),
        ] {
            let hosts_of_port = std::iter::once(self.host_name.clone()).chain(names(list));
            let named = hosts_of_port.filter(|host| !host.is_empty());
            hosts.extend(named.filter_map(|host| Some((SmolStr::from(host), port?))));
        }
        hosts
    }
}

/// The time for which an instance is registered without a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lease(pub(super) Duration);

impl Default for Lease {
    fn default() -> Self {
        Self(DEFAULT_LEASE)
    }
}

/// Reads a list, or a lone item of one.
fn one_or_many<'de, D: Deserializer<'de>, T: for<'a> Deserialize<'a>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    let items = match Value::deserialize(deserializer)? {
        Value::Null => Vec::new(),
        Value::Array(items) => items,
        item => vec![item],
    };
    let items = items
        .into_iter()
        .map(|item| serde_json::from_value(item).map_err(serde::de::Error::custom));
    items.collect()
}

/// Reads a text; `null` is empty.
fn or_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.unwrap_or_default())
}

/// Reads a port; `None` if it is disabled.
fn port<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let value = Value::deserialize(deserializer)?;
    let is_enabled = match &value["@enabled"] {
        Value::Bool(enabled) => *enabled,
        Value::String(text) => text == "true",
        _ => false,
    };
    if !is_enabled {
        return Ok(None);
    }
    let number = match &value["$"] {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    };
    let number = number
        .and_then(|number| u32::try_from(number).ok())
        .filter(|number| (1..=65_535).contains(number));
    number
        .map(Some)
        .ok_or_else(|| serde::de::Error::custom(format!("{} is not a port", value["$"])))
}

/// Reads a lease.
fn lease<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Lease, D::Error> {
    let seconds = match &Value::deserialize(deserializer)?["durationInSecs"] {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    };
    let duration = seconds.map(|seconds| Duration::from_secs(seconds).min(LONGEST_LEASE));
    Ok(duration.map_or_else(Lease::default, Lease))
}

/// Reads metadata; values that are not text are ignored.
fn metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error> {
    let Value::Object(map) = Value::deserialize(deserializer)? else {
        return Ok(BTreeMap::new());
    };
    let texts = map
        .into_iter()
        .filter_map(|(key, value)| Some((key, value.as_str()?.to_owned())));
    Ok(texts.collect())
}
