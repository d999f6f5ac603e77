//! Node metadata of virtual machines.

use std::collections::BTreeMap;

use serde_json::Value;
use smol_str::SmolStr;

use super::{is_on, parsed_json, scalar_text};

/// The metadata of a proxy on a virtual machine, which has a WorkloadEntry or is registered by one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineMetadata {
    /// The WorkloadGroup to register in (`AUTO_REGISTER_GROUP`); may be empty.
    pub group: SmolStr,
    /// The WorkloadEntry of the machine (`WORKLOAD_ENTRY`); may be empty.
    pub entry: SmolStr,
    /// True if the proxy accepts HBONE where the mesh permits it (`ENABLE_HBONE`).
    pub accepts_hbone: bool,
    /// True if the agent probes the workload (`readinessProbe` of `PROXY_CONFIG`).
    pub is_probed: bool,
}

impl MachineMetadata {
    /// Returns the metadata of a machine; `None` for all other proxies.
    pub(super) fn of(metadata: &BTreeMap<String, Value>) -> Option<Self> {
        let text = |key: &str| metadata.get(key).map(scalar_text).unwrap_or_default();
        let (group, entry) = (text("AUTO_REGISTER_GROUP"), text("WORKLOAD_ENTRY"));
        if group.is_empty() && entry.is_empty() {
            return None;
        }
        let config = metadata.get("PROXY_CONFIG").map(parsed_json);
        let probe = config.as_ref().and_then(|config| config.get("readinessProbe"));
        Some(Self {
            group,
            entry,
            accepts_hbone: is_on(&text("ENABLE_HBONE")),
            is_probed: probe.is_some_and(|probe| *probe != Value::Null),
        })
    }
}
