//! Workloads that use waypoints: pods, WorkloadEntries and inline endpoints of ServiceEntries.
//!
//! Parity (pilot/pkg/serviceregistry/ambient/workloads.go and multicluster.go): readiness does not matter. With several
//! networks, only workloads in the network of the config cluster count, among them pods of other clusters.

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::{Attachment, NotAttached, Refusal, USE_WAYPOINT, WaypointTraffic, is_one_network, requested};
use crate::{
    api::Config,
    base::{ClusterId, Labels, Namespace, ObjectKey, cidr},
    model::{
        MeshSnapshot,
        inputs::InputWriters,
        policy::GATEWAY_NAME_LABEL,
        workload::{entry_labels, label_map},
    },
    proto::istio::networking::v1alpha3::WorkloadEntry,
    table::Cx,
};

/// Kind of an object with workloads, in the order of workloads of the same age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkloadKind {
    /// A Pod.
    Pod,
    /// A ServiceEntry with inline endpoints.
    ServiceEntry,
    /// A WorkloadEntry.
    WorkloadEntry,
}

/// Object with workloads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkloadsKey {
    /// The kind.
    pub kind: WorkloadKind,
    /// The object.
    pub object: ObjectKey,
}

/// Workloads of one object that use waypoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaypointWorkloads {
    creation: i64,
    /// Workloads with their Gateways. Each has the part of its name that follows the object's name.
    workloads: Vec<(ObjectKey, SmolStr, Addresses)>,
}

/// IP addresses of a workload; none for a host name.
type Addresses = Vec<SmolStr>;

impl WaypointWorkloads {
    /// Emits the Gateways of the workloads.
    pub fn gateways(&self, emit: &mut dyn FnMut(ObjectKey)) {
        self.workloads.iter().for_each(|(gateway, ..)| emit(gateway.clone()));
    }
}

/// Returns the objects whose workloads may have changed.
pub fn candidates(mesh: &MeshSnapshot, inputs: &InputWriters) -> Vec<WorkloadsKey> {
    if !mesh.installation.features.pilot_enable_ambient {
        return Vec::new();
    }
    let workloads_key = |kind: WorkloadKind| {
        move |object: &ObjectKey| WorkloadsKey {
            kind,
            object: object.clone(),
        }
    };
    let (pods, services) = (inputs.pods.changes(), inputs.service_entries.changes());
    let pods = pods.iter().map(|(key, ..)| key).map(workloads_key(WorkloadKind::Pod));
    let services = services.iter().map(|(key, ..)| key);
    let entries = inputs.workload_entries.changes().iter().map(|(key, ..)| key);
    pods.chain(services.map(workloads_key(WorkloadKind::ServiceEntry)))
        .chain(entries.map(workloads_key(WorkloadKind::WorkloadEntry)))
        .filter(|WorkloadsKey { kind, object }| {
            let is_own = object.cluster == mesh.installation.cluster;
            is_own || *kind == WorkloadKind::Pod && mesh.installation.is_ambient(&object.cluster)
        })
        .collect()
}

/// Derives the workloads of an object that use waypoints; no row without any.
pub fn of_object(cx: &Cx, mesh: &MeshSnapshot, key: &WorkloadsKey) -> Option<WaypointWorkloads> {
    let (cluster, namespace) = (&key.object.cluster, &key.object.namespace);
    let (meta, workloads) = match key.kind {
        WorkloadKind::Pod => {
            let pod = mesh.pods.get(cx, &key.object)?;
            let addresses = pod.ips.iter().map(|ip| canonical(ip)).collect::<Option<Addresses>>()?;
            if addresses.is_empty() || pod.is_finished() {
                return None;
            }
            let gateway = for_workload(cx, mesh, cluster, &pod.meta.labels, namespace).ok()??;
            if !is_one_network(cx, mesh, cluster, &mesh.installation.cluster) {
                return None;
            }
            (&pod.meta, vec![(gateway, SmolStr::default(), addresses)])
        }
        WorkloadKind::WorkloadEntry => {
            let entry = mesh.workload_entries.get(cx, &key.object)?;
            let gateway = for_entry(cx, mesh, entry).ok()??;
            if !is_own_network(cx, mesh, &entry.spec.network) {
                return None;
            }
            let addresses = canonical(&entry.spec.address).into_iter().collect();
            (&entry.meta, vec![(gateway, SmolStr::default(), addresses)])
        }
        WorkloadKind::ServiceEntry => {
            let entry = mesh.service_entries.get(cx, &key.object)?;
            // One workload per address.
            let mut by_address: BTreeMap<&str, (&WorkloadEntry, &str)> = BTreeMap::new();
            let mut network = "";
            for endpoint in &entry.spec.endpoints {
                // The network of an endpoint stays in force for those after it.
                if !endpoint.network.is_empty() {
                    network = &endpoint.network;
                }
                by_address.insert(&endpoint.address, (endpoint, network));
            }
            let attached = by_address.into_iter().filter_map(|(address, (endpoint, network))| {
                let gateway = for_workload(cx, mesh, cluster, &label_map(&endpoint.labels), namespace).ok()??;
                let addresses: Addresses = canonical(address).into_iter().collect();
                let attached = (gateway, SmolStr::from(format!("/{address}")), addresses);
                is_own_network(cx, mesh, network).then_some(attached)
            });
            let attached: Vec<_> = attached.collect();
            let endpoints = || mesh.entry_endpoints.get(cx, &key.object);
            let are_workloads = || endpoints().is_some_and(|endpoints| endpoints.are_workloads());
            if attached.is_empty() || !are_workloads() {
                return None;
            }
            (&entry.meta, attached)
        }
    };
    let creation = meta.creation;
    (!workloads.is_empty()).then_some(WaypointWorkloads { creation, workloads })
}

/// Returns true if a workload of the config cluster that declares this network counts. One that declares none is in the
/// network of its cluster.
fn is_own_network(cx: &Cx, mesh: &MeshSnapshot, network: &str) -> bool {
    if network.is_empty() || !mesh.installation.features.ambient_enable_multi_network {
        return true;
    }
    let own = mesh.cluster_networks.get(cx, &mesh.installation.cluster);
    own.is_some_and(|own| own.as_str() == network)
}

/// Returns the waypoint that a WorkloadEntry uses.
pub fn for_entry(cx: &Cx, mesh: &MeshSnapshot, entry: &Config<WorkloadEntry>) -> Attachment {
    let (cluster, namespace) = (entry.meta.cluster(), entry.meta.namespace());
    for_workload(cx, mesh, cluster, &entry_labels(entry), namespace)
}

/// Returns the waypoint that a workload of a cluster with these labels uses. Instances of a waypoint use none. A
/// waypoint of the namespace that is for services is not an error.
pub fn for_workload(
    cx: &Cx,
    mesh: &MeshSnapshot,
    cluster: &ClusterId,
    labels: &Labels,
    namespace: &Namespace,
) -> Attachment {
    let is_waypoint = |name: &SmolStr| {
        let own = ObjectKey::new(cluster, namespace.clone(), name.clone());
        mesh.waypoints.get(cx, &own).is_some()
    };
    if labels.get(GATEWAY_NAME_LABEL).is_some_and(is_waypoint) {
        return Ok(None);
    }
    let Some((gateway, waypoint)) = requested(cx, mesh, cluster, labels, namespace)? else {
        return Ok(None);
    };
    match waypoint.traffic {
        WaypointTraffic::Workload | WaypointTraffic::All => Ok(Some(gateway)),
        WaypointTraffic::Service | WaypointTraffic::None if !labels.contains_key(USE_WAYPOINT) => Ok(None),
        WaypointTraffic::Service | WaypointTraffic::None => Err(NotAttached {
            gateway,
            reason: Refusal::Unsupported,
        }),
    }
}

/// Returns an IP address in its canonical form.
fn canonical(address: &str) -> Option<SmolStr> {
    cidr::parse_ip(address).map(|ip| SmolStr::from(ip.to_string()))
}

/// Returns the IP addresses of the workloads that use these waypoints, oldest workload first; `None` without a
/// workload.
pub fn addresses(cx: &Cx, mesh: &MeshSnapshot, waypoints: &[ObjectKey]) -> Option<Vec<SmolStr>> {
    let mut found = Vec::new();
    for waypoint in waypoints {
        for (key, row) in mesh.workloads_by_waypoint.get(cx, waypoint) {
            let cluster = &key.object.cluster;
            let own = row.workloads.iter().filter(|(gateway, ..)| gateway == waypoint);
            // Parity (pilot/pkg/model/service.go, `SortWorkloadsByCreationTime`): by age, then by the text of the UID.
            found.extend(own.map(|(_, rest, addresses)| {
                let name = format!("{}/{}{rest}", key.object.namespace, key.object.name);
                ((row.creation, cluster, key.kind, name), addresses)
            }));
        }
    }
    found.sort_unstable();
    let addresses = found.iter().flat_map(|(_, addresses)| addresses.iter().cloned());
    (!found.is_empty()).then(|| addresses.collect())
}
