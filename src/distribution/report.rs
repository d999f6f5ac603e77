//! The reports, in the JSON form of the API. The command line reads what the daemon writes.

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};
use smol_str::SmolStr;

use crate::{api::Kind, base::ObjectKey};

/// The name of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectName {
    /// The kind.
    pub kind: String,
    /// The API group; empty for core.
    pub group: String,
    /// The namespace; empty for cluster-scoped kinds.
    pub namespace: String,
    /// The name.
    pub name: String,
}

impl ObjectName {
    /// Returns the name of an object.
    pub fn of(kind: Kind, key: &ObjectKey) -> Self {
        Self {
            kind: kind.name().to_owned(),
            group: kind.group().to_owned(),
            namespace: key.namespace.to_string(),
            name: key.name.to_string(),
        }
    }
}

impl std::fmt::Display for ObjectName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.namespace.is_empty() {
            write!(f, "{} {}", self.kind, self.name)
        } else {
            write!(f, "{} {}/{}", self.kind, self.namespace, self.name)
        }
    }
}

/// The state of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectState {
    /// There is no such object, and none was removed recently.
    #[default]
    Unknown,
    /// The control plane has not seen this resource version yet.
    Awaited,
    /// The object has errors: its last valid version applies, if there was one.
    Invalid,
    /// No connected proxy has a resource that would be different without the object.
    Unused,
    /// Proxies have not acknowledged everything yet.
    Pending,
    /// All proxies acknowledged everything.
    Acknowledged,
    /// Replicas of the control plane did not answer, so the state of their proxies is unknown. Nothing else is missing.
    Incomplete,
    /// A proxy refused a resource that the object has an effect on.
    Refused,
    /// The object was removed, and all proxies have answered the change.
    Removed,
}

/// The state of a proxy or of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ProxyState {
    /// The proxy does not subscribe to it.
    Unrequested,
    /// Acknowledged.
    Acknowledged,
    /// Sent, and not answered yet.
    Sent,
    /// Not sent yet.
    #[default]
    Waiting,
    /// Refused by the proxy, or by a proxy of the same build.
    Refused,
}

/// The number of proxies by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Counts {
    /// Proxies that should run the object.
    pub proxies: usize,
    /// Proxies that acknowledged everything.
    pub acknowledged: usize,
    /// Proxies that were sent everything and have not answered.
    pub sent: usize,
    /// Proxies that were not sent everything.
    pub waiting: usize,
    /// Proxies that refused a resource.
    pub refused: usize,
    /// Connected proxies whose configuration the object affects, but that do not subscribe to the resources.
    pub unrequested: usize,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        let Self {
            proxies,
            acknowledged,
            sent,
            waiting,
            refused,
            unrequested,
        } = other;
        self.proxies += proxies;
        self.acknowledged += acknowledged;
        self.sent += sent;
        self.waiting += waiting;
        self.refused += refused;
        self.unrequested += unrequested;
    }
}

/// A replica of the control plane that was asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ReplicaReport {
    /// The name of the pod; empty if unknown.
    pub name: String,
    /// The address that it was asked at; empty for the replica that answers for all.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub address: String,
    /// The identity of its process, which changes with a restart; empty if unknown.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub id: String,
    /// True if its proxies are part of the report.
    pub answered: bool,
    /// The reason why it did not answer.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
}

/// The status of an object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectReport {
    /// The object.
    pub object: ObjectName,
    /// The state.
    pub state: ObjectState,
    /// True if the time was over before the state was final.
    pub timed_out: bool,
    /// True if the state will not change without a change of the mesh.
    #[serde(rename = "final")]
    pub is_final: bool,
    /// The revision of the mesh that the report is about, in the replica that answers.
    pub revision: u64,
    /// The replicas that were asked, the one that answers first.
    pub replicas: Vec<ReplicaReport>,
    /// The number of proxies by state.
    pub counts: Counts,
    /// The number of proxies that have not answered the last push with a change of the object.
    pub unanswered: usize,
    /// The time from the last change to the last answer, if all proxies have answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Errors and warnings of the object.
    pub diagnostics: Vec<String>,
    /// The proxies: those with problems first.
    pub proxies: Vec<ProxyReport>,
}

impl ObjectReport {
    /// Returns true if the state of one replica's proxies will not change without a change of the mesh.
    pub(super) fn is_settled(&self) -> bool {
        match self.state {
            ObjectState::Awaited | ObjectState::Pending | ObjectState::Incomplete => false,
            ObjectState::Refused => self.counts.sent + self.counts.waiting == 0 && self.has_reasons(),
            ObjectState::Acknowledged | ObjectState::Unused => self.unanswered == 0,
            ObjectState::Unknown | ObjectState::Invalid | ObjectState::Removed => true,
        }
    }

    /// Returns true if the objects of all refused resources are known, or cannot be known.
    fn has_reasons(&self) -> bool {
        let resources = self.proxies.iter().flat_map(|proxy| &proxy.resources);
        let mut refused = resources.filter(|resource| resource.state == ProxyState::Refused);
        refused.all(|resource| resource.is_attributed)
    }

    /// Returns true if the change has arrived, as far as it has to.
    pub fn has_arrived(&self) -> bool {
        let arrived = [ObjectState::Acknowledged, ObjectState::Unused, ObjectState::Removed];
        arrived.contains(&self.state) && !self.timed_out
    }

    /// Returns the report without rows.
    #[must_use]
    pub fn into_summary(self) -> Self {
        Self {
            proxies: Vec::new(),
            ..self
        }
    }
}

/// A proxy that should run the object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProxyReport {
    /// The id, `<pod>.<namespace>`.
    pub proxy: SmolStr,
    /// The cluster.
    pub cluster: SmolStr,
    /// The name of the replica that it is connected to.
    #[serde(skip_serializing_if = "SmolStr::is_empty")]
    pub replica: SmolStr,
    /// The worst state of its resources.
    pub state: ProxyState,
    /// The resources that the object has an effect on.
    pub resources: Vec<ResourceReport>,
}

/// A resource of a proxy that the object has an effect on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ResourceReport {
    /// The type, `cds`.
    #[serde(rename = "type")]
    pub resource_type: SmolStr,
    /// The name.
    pub name: SmolStr,
    /// `adds`, `changes` or `removes`.
    pub effect: SmolStr,
    /// The state.
    pub state: ProxyState,
    /// The reason of a refusal, in the words of the proxy.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The objects that are blamed for a refusal.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blamed: Vec<ObjectName>,
    /// True if the objects that cause a refusal were searched.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_attributed: bool,
    /// True if the resource is withheld until it changes.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub quarantined: bool,
}
