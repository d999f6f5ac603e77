//! Conditions of ambient objects: which waypoint a Service, ServiceEntry or WorkloadEntry uses, and which
//! AuthorizationPolicies ztunnels and waypoints enforce.
//!
//! Parity (pilot/pkg/model/service.go, pilot/pkg/serviceregistry/ambient/status.go): types, reasons and texts. Unlike
//! in Istio, hosts of one ServiceEntry that differ lead to one result, a ServiceEntry that no longer counts loses its
//! conditions, and a policy has the condition of one kind of proxy.

pub mod policy;
#[cfg(test)]
mod tests;

use super::{
    MeshSnapshot, ServiceKey,
    ambient::service::{ClusterServiceKey, ServiceSource},
    inputs::InputWriters,
    service::entry::races_connections,
    waypoint::{self, Attachment, NotAttached, Refusal, workloads},
};
use crate::{
    api::{Config, Kind, Meta},
    base::{Hostname, ObjectKey},
    proto::istio::networking::v1alpha3::ServiceEntry,
    table::{Cx, TableWriter},
};

/// Type of the condition that names the waypoint.
const WAYPOINT_BOUND: &str = "istio.io/WaypointBound";
/// Type of the condition of a ServiceEntry that has no effect without a waypoint.
const WAYPOINT_MISSING: &str = "istio.io/WaypointMissing";
/// Types of all conditions.
pub const TYPES: [&str; 4] = [
    WAYPOINT_BOUND,
    WAYPOINT_MISSING,
    policy::ZTUNNEL_ACCEPTED,
    policy::WAYPOINT_ACCEPTED,
];

/// An object with conditions.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StatusTarget {
    /// The kind.
    pub kind: Kind,
    /// The object.
    pub object: ObjectKey,
}

/// Conditions of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectConditions {
    /// The field manager that writes them.
    pub manager: &'static str,
    /// Every type of condition that the manager writes; `None` if the object must not have it.
    pub conditions: Vec<(&'static str, Option<Condition>)>,
}

/// A condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// True if its status is `True`.
    pub is_true: bool,
    /// The reason.
    pub reason: &'static str,
    /// The text for people.
    pub message: String,
    /// The generation that it is about; 0 if it has none.
    pub observed_generation: i64,
}

impl Condition {
    /// Returns a condition with the status `True`.
    fn met(reason: &'static str, message: String) -> Self {
        Self::new(true, reason, message)
    }

    /// Returns a condition with the status `False`.
    fn unmet(reason: &'static str, message: String) -> Self {
        Self::new(false, reason, message)
    }

    fn new(is_true: bool, reason: &'static str, message: String) -> Self {
        Self {
            is_true,
            reason,
            message,
            observed_generation: 0,
        }
    }
}

/// Returns the objects of the config cluster whose conditions may have changed.
pub fn candidates(mesh: &MeshSnapshot, inputs: &InputWriters) -> Vec<StatusTarget> {
    let features = &mesh.installation.features;
    if !features.pilot_enable_ambient || !features.ambient_enable_status {
        return Vec::new();
    }
    let all = [
        changed(Kind::Service, &inputs.kube_services),
        changed(Kind::ServiceEntry, &inputs.service_entries),
        changed(Kind::WorkloadEntry, &inputs.workload_entries),
        changed(Kind::AuthorizationPolicy, &inputs.authorization_policies),
    ];
    let all = all.into_iter().flatten();
    all.filter(|target| target.object.cluster == mesh.installation.cluster)
        .collect()
}

fn changed<V: PartialEq>(kind: Kind, table: &TableWriter<ObjectKey, V>) -> Vec<StatusTarget> {
    let keys = table.changes().iter().map(|(key, ..)| key.clone());
    keys.map(|object| StatusTarget { kind, object }).collect()
}

/// Derives the conditions of an object; no row for one that ztunnels are not sent.
pub fn of_object(cx: &Cx, mesh: &MeshSnapshot, target: &StatusTarget) -> Option<ObjectConditions> {
    let key = &target.object;
    match target.kind {
        Kind::Service => {
            let service = mesh.kube_services.get(cx, key)?;
            if service.is_external_name() {
                return None;
            }
            let (cluster, labels) = (&key.cluster, &service.meta.labels);
            let attachment = waypoint::for_service(cx, mesh, cluster, labels, &key.namespace);
            let ingress = waypoint::ingress_label(cx, mesh, cluster, labels, &key.namespace);
            Some(ObjectConditions {
                manager: "istio-ambient-service",
                conditions: vec![
                    (WAYPOINT_BOUND, bound(&attachment, "service", ingress)),
                    (WAYPOINT_MISSING, None),
                ],
            })
        }
        Kind::ServiceEntry => {
            let entry = mesh.service_entries.get(cx, key)?;
            Some(of_entry(cx, mesh, entry))
        }
        Kind::WorkloadEntry => {
            let entry = mesh.workload_entries.get(cx, key)?;
            if entry.spec.address.is_empty() && entry.spec.network.is_empty() {
                return None;
            }
            let attachment = workloads::for_entry(cx, mesh, entry);
            Some(ObjectConditions {
                manager: "istio-ambient-workloadentry",
                conditions: vec![(WAYPOINT_BOUND, bound(&attachment, "workload", None))],
            })
        }
        Kind::AuthorizationPolicy => {
            let policy = mesh.authorization_policies.get(cx, key)?;
            Some(policy::conditions(cx, mesh, policy))
        }
        _ => None,
    }
}

/// Returns the conditions of a ServiceEntry: none if others declare all of its hosts.
fn of_entry(cx: &Cx, mesh: &MeshSnapshot, entry: &Config<ServiceEntry>) -> ObjectConditions {
    let (key, labels) = (&entry.meta.key, &entry.meta.labels);
    let counts = |host: &String| counts_for(cx, mesh, key, host);
    let (mut bound_to, mut without) = (None, None);
    if entry.spec.hosts.iter().any(counts) {
        let attachment = waypoint::for_service(cx, mesh, &key.cluster, labels, &key.namespace);
        let ingress = waypoint::ingress_label(cx, mesh, &key.cluster, labels, &key.namespace);
        bound_to = bound(&attachment, "service", ingress);
        if !matches!(attachment, Ok(Some(_))) {
            let mut wildcards = entry.spec.hosts.iter().filter(|host| host.starts_with('*'));
            without = missing(&entry.meta, || wildcards.any(counts));
        }
    }
    ObjectConditions {
        manager: "istio-ambient-service",
        conditions: vec![(WAYPOINT_BOUND, bound_to), (WAYPOINT_MISSING, without)],
    }
}

/// Returns true if ztunnels know a host of a ServiceEntry by this object, and not by a Service or an older ServiceEntry
/// of its namespace.
///
/// Parity (pilot/pkg/serviceregistry/ambient/services.go, `ServicesCollection`).
fn counts_for(cx: &Cx, mesh: &MeshSnapshot, entry: &ObjectKey, host: &str) -> bool {
    let key = ClusterServiceKey {
        cluster: entry.cluster.clone(),
        service: ServiceKey {
            hostname: Hostname::new(host),
            namespace: entry.namespace.clone(),
        },
    };
    let service = mesh.cluster_services.get(cx, &key);
    service.is_some_and(|service| {
        let declared = &service.declared.key;
        declared.source == ServiceSource::ServiceEntry && declared.object == *entry
    })
}

/// Returns [`WAYPOINT_BOUND`] of an object that receives this traffic, with the label for gateways, if it has one.
fn bound(attachment: &Attachment, traffic: &str, ingress: Option<bool>) -> Option<Condition> {
    let name = |gateway: &ObjectKey| format!("{}/{}", gateway.namespace, gateway.name);
    match attachment {
        Ok(None) => None,
        Ok(Some(gateway)) => {
            let note = match ingress {
                None => "",
                Some(true) => ". Ingress traffic will traverse the waypoint",
                Some(false) => {
                    ". Ingress traffic is not using the waypoint, set the istio.io/ingress-use-waypoint label to true if \
                     desired."
                }
            };
            let message = format!("Successfully attached to waypoint {}{note}", name(gateway));
            Some(Condition::met(policy::WAYPOINT_ACCEPTED, message))
        }
        Err(NotAttached { gateway, reason }) => {
            let name = name(gateway);
            let (reason, message) = match reason {
                Refusal::NotReady => ("WaypointIsNotReady", format!("waypoint \"{name}\" is not ready")),
                Refusal::Denied => (
                    "AttachmentDenied",
                    format!("we are not permitted to attach to waypoint \"{name}\" (missing allowedRoutes?)"),
                ),
                Refusal::Unsupported => (
                    "UnsupportedTrafficType",
                    format!(
                        "attempting to bind to traffic type \"{traffic}\" which the waypoint \"{name}\" does not support"
                    ),
                ),
            };
            Some(Condition::unmet(reason, message))
        }
    }
}

/// Returns [`WAYPOINT_MISSING`] of a ServiceEntry without a waypoint; `None` if it needs none.
fn missing(meta: &Meta, has_wildcard: impl FnOnce() -> bool) -> Option<Condition> {
    let (reason, message) = if races_connections(meta) {
        (
            "NoWaypointForRacingConnectStrategy",
            "ServiceEntry has a non-default connect strategy but no waypoint bound. A waypoint is required for connect \
             strategies to take effect for ambient clients.",
        )
    } else if has_wildcard() {
        (
            "NoWaypointForWildcardService",
            "ServiceEntry will not apply until it is bound to a valid waypoint.",
        )
    } else {
        return None;
    };
    Some(Condition::met(reason, message.to_owned()))
}
