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
mod route;
mod statuses;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use serde_json::Value;
use smol_str::SmolStr;

pub use self::{
    condition::{Condition, Verdict},
    statuses::{KINDS, Statuses, Written},
};
use crate::{
    api::{Kind, Meta},
    base::{Labels, ObjectKey},
    model::MeshSnapshot,
    table::Cx,
};

/// Controller in entries for targets of policies.
const MESH_CONTROLLER: &str = super::class::WAYPOINT;
/// Label with the revision or tag of an object or namespace.
const REVISION: &str = "istio.io/rev";
/// Revision of objects without a label, and of control planes without a name.
const DEFAULT_REVISION: &str = "default";

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
    /// Addresses; empty if none are known, and then those that were reported before stay.
    pub addresses: Vec<Address>,
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

/// Returns true if this revision writes the status of an object: the object's label, or else that of its namespace,
/// names the revision or one of its tags. Without a label, an object in a namespace belongs to the default revision,
/// and one of the cluster to all.
///
/// Parity (pkg/revisions/tag_watcher.go, pilot/pkg/status/collections.go).
fn is_own(cx: &Cx, mesh: &MeshSnapshot, tags: &BTreeSet<SmolStr>, meta: &Meta) -> bool {
    let label = |labels: &Labels| labels.get(REVISION).cloned();
    let namespace = || {
        let key = ObjectKey::new(meta.cluster(), "", SmolStr::new(meta.namespace().as_str()));
        mesh.namespaces.get(cx, &key).and_then(|row| label(&row.meta.labels))
    };
    let named = label(&meta.labels);
    if named.is_none() && meta.namespace().is_empty() {
        return true;
    }
    let named = named.or_else(namespace).filter(|named| !named.is_empty());
    let named = named.unwrap_or(SmolStr::new_static(DEFAULT_REVISION));
    let revision = &mesh.installation.revision;
    let own = if revision.is_empty() {
        DEFAULT_REVISION
    } else {
        revision
    };
    named == own || tags.contains(&named)
}
