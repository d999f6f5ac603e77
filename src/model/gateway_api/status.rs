//! Statuses of the Gateway API's objects, derived from a snapshot, and how they become part of an object's status.
//!
//! Only the replica that writes statuses derives them ([`Statuses`]); others pay nothing. What a status says of an
//! object is a [`Status`]. Entries and conditions of other controllers, and the times of transitions, come from the
//! object's present status ([`Status::merged`]).
//!
//! Parity (pilot/pkg/config/kube/gateway/, gatewaycommon/): conditions, reasons and messages are Istio's.

mod address;
mod condition;
mod gateway;
mod merge;
mod policy;
mod pool;
mod revisions;
mod route;
mod statuses;
mod surplus;
#[cfg(test)]
mod tests;

use serde_json::Value;
use smol_str::SmolStr;

pub use self::{
    condition::{Condition, Verdict},
    revisions::Revisions,
    statuses::{KINDS, Statuses, Written},
};
use crate::{
    api::{Kind, Meta, label::REVISION},
    base::ObjectKey,
    model::MeshSnapshot,
    table::Cx,
};

/// Type of the condition that an object is accepted, and its reason if it is.
const ACCEPTED: &str = "Accepted";
/// Type of the condition that references are resolved, and its reason if they are.
const RESOLVED_REFS: &str = "ResolvedRefs";
/// Controller in entries for targets of policies.
const MESH_CONTROLLER: &str = super::class::WAYPOINT;

/// Key of a [`Status`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StatusKey {
    /// Kind of the object.
    pub kind: Kind,
    /// The object.
    pub object: ObjectKey,
}

/// Status of an object, as far as this control plane is responsible for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    /// Generation of the object that the status describes.
    pub generation: i64,
    /// The content.
    pub content: Content,
}

/// Content of a status.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Conditions of a GatewayClass.
    Class(Vec<Condition>),
    /// Status of a Gateway or ListenerSet.
    Gateway(GatewayStatus),
    /// Entries of a route, a policy or an InferencePool.
    Entries(Entries),
}

/// Status of a Gateway or ListenerSet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GatewayStatus {
    /// Conditions.
    pub conditions: Vec<Condition>,
    /// Listeners.
    pub listeners: Vec<ListenerStatus>,
    /// Addresses; `None` if those that were reported before stay.
    pub addresses: Option<Vec<Address>>,
    /// Number of attached ListenerSets.
    pub attached_sets: usize,
}

/// Status of a listener.
#[derive(Clone, Debug, PartialEq)]
pub struct ListenerStatus {
    /// Name.
    pub name: SmolStr,
    /// Number of attached routes.
    pub attached_routes: usize,
    /// Kinds of routes that may attach.
    pub kinds: Vec<Kind>,
    /// Conditions.
    pub conditions: Vec<Condition>,
}

/// An address of a Gateway.
#[derive(Clone, Debug, PartialEq)]
pub struct Address {
    /// `IPAddress` or `Hostname`.
    pub address_type: SmolStr,
    /// The address.
    pub value: SmolStr,
}

/// Entries in the status of a route, a policy or an InferencePool: one for each object that it belongs to.
#[derive(Clone, Debug, PartialEq)]
pub struct Entries {
    /// Fields of the list.
    pub list: List,
    /// Controller of Gateways; entries of it belong to this control plane.
    pub controller: SmolStr,
    /// The entries, in the order in which new ones are appended.
    pub entries: Vec<Entry>,
    /// References of entries without a controller that no longer apply.
    pub dropped: Vec<Value>,
}

/// A list of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// `parents` of a route.
    RouteParents,
    /// `parents` of an InferencePool, which name no controller.
    PoolParents,
    /// `ancestors` of a policy.
    Ancestors,
}

/// An entry of a list.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The controller; empty where entries name none.
    pub controller: SmolStr,
    /// Reference to the parent or ancestor.
    pub reference: Value,
    /// Conditions.
    pub conditions: Vec<Condition>,
}

/// Returns true if this control plane writes the status of an object.
///
/// Parity (pilot/pkg/status/collections.go).
pub(in crate::model) fn is_own(cx: &Cx, mesh: &MeshSnapshot, revisions: &Revisions, meta: &Meta) -> bool {
    let label = meta.labels.get(REVISION).map(SmolStr::as_str);
    revisions.is_own(cx, mesh, &meta.key, label)
}
