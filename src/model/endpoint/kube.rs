//! Endpoints of Kubernetes Services: EndpointSlices with their pods, and WorkloadEntries with matching labels.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{Endpoint, Health, Origin, entry};
use crate::{
    api::{
        Kind,
        kube::{self, EndpointSlice, endpoint_slice::SliceEndpoint, service::TargetPort},
    },
    base::{ClusterId, Labels, ObjectKey, Shared, select},
    model::{
        MeshSnapshot, Service, network,
        output_limit::Limits,
        service::{Resolution, kube as registry, mcs},
        workload::{self, Workload, WorkloadKey, WorkloadSource},
    },
    table::Cx,
};

/// A service in one cluster.
struct ServiceInCluster<'a> {
    cluster: &'a ClusterId,
    /// Service, unless the cluster has only its slices.
    object: Option<&'a Shared<kube::Service>>,
    /// Labels that decide the treatment of terminating endpoints; `None` if the cluster does not know the service.
    labels: Option<&'a Labels>,
    /// True if the endpoints are cluster-local.
    cluster_local: bool,
    /// The maximum number of endpoints, as of the first host of a ServiceEntry. A slice may have thousands of addresses
    /// and thousands of ports.
    most: usize,
}

/// Returns the endpoints in all clusters that have the Service or slices of it, in the order of cluster ids, and the
/// number of addresses omitted because their pods are not known yet.
pub(super) fn endpoints(cx: &Cx, mesh: &MeshSnapshot, service: &Service) -> (Vec<Endpoint>, usize) {
    let name = (service.key.namespace.clone(), service.name.clone());
    let mut slices: BTreeMap<&ClusterId, Vec<&Shared<EndpointSlice>>> = BTreeMap::new();
    for (key, slice) in mesh.slices_by_service.get(cx, &name) {
        slices.entry(&key.cluster).or_default().push(slice);
    }
    let objects = registry::objects(cx, mesh, &service.key.namespace, &service.name);
    let objects: BTreeMap<_, _> = objects
        .into_iter()
        .map(|object| (object.meta.cluster(), object))
        .collect();
    let clusters: BTreeSet<&ClusterId> = slices.keys().chain(objects.keys()).copied().collect();
    let limit = Limits::of(mesh, Kind::ServiceEntry).object;
    let most = limit.saturating_mul(entry::FIRST_HOST_MULTIPLE);
    let (mut endpoints, mut pending) = (Vec::new(), 0);
    for cluster in clusters {
        let object = objects.get(cluster).copied();
        let labels = if mcs::is_imported(service) {
            mcs::is_known(cx, mesh, service, cluster).then_some(&*service.labels)
        } else {
            object.map(|object| &*object.meta.labels)
        };
        let in_cluster = ServiceInCluster {
            cluster,
            object,
            labels,
            cluster_local: mcs::is_cluster_local_in(cx, mesh, service, cluster),
            most: usize::try_from(most).unwrap_or(usize::MAX),
        };
        let slices = slices.get(cluster).map_or(&[][..], Vec::as_slice);
        let listed = of_slices(cx, mesh, &in_cluster, slices, &mut pending);
        let is_unexported = object.is_some_and(|object| is_unexported(object));
        let counts = |endpoint: &Endpoint| !is_unexported || endpoint.health != Health::Healthy;
        endpoints.extend(listed.into_iter().filter(counts));
        // The host of an imported service exists only in clusters that import it.
        if let Some(object) = object.filter(|_| labels.is_some()) {
            endpoints.extend(of_entries(cx, mesh, object, in_cluster.most));
        }
    }
    (endpoints, pending)
}

/// Returns true if the annotation for visibility contains `~`. A VirtualService may nevertheless route to the service.
///
/// Parity (pilot/pkg/serviceregistry/kube/controller/endpointslice.go, `serviceNeedsPush`): events of such a service's
/// slices are not published. Only an event of the Service itself publishes the endpoints that are known then
/// (controller.go, `addOrUpdateService`), so Istio's result depends on the order of events. Here ready endpoints never
/// count; others, which receive no traffic, count for the identities of the servers.
fn is_unexported(object: &kube::Service) -> bool {
    let exported = object.meta.annotations.get(registry::EXPORT_TO);
    exported.is_some_and(|list| list.split(',').any(|entry| entry.trim() == "~"))
}

/// Returns the endpoints of the service's slices in a cluster; an address that moves between slices counts once.
fn of_slices(
    cx: &Cx,
    mesh: &MeshSnapshot,
    in_cluster: &ServiceInCluster<'_>,
    slices: &[&Shared<EndpointSlice>],
    pending: &mut usize,
) -> Vec<Endpoint> {
    let mut known: BTreeSet<(SmolStr, SmolStr)> = BTreeSet::new();
    let mut endpoints = Vec::new();
    // Slices of host names are not supported.
    for slice in slices.iter().filter(|slice| slice.address_type != "FQDN") {
        let most = in_cluster.most - endpoints.len();
        for endpoint in of_slice(cx, mesh, in_cluster, slice, most, pending) {
            if known.insert((endpoint.address.clone(), endpoint.port_name.clone())) {
                endpoints.push(endpoint);
            }
        }
    }
    endpoints
}

/// Returns the endpoints of a slice, at most some: each address with each port.
fn of_slice(
    cx: &Cx,
    mesh: &MeshSnapshot,
    in_cluster: &ServiceInCluster<'_>,
    slice: &EndpointSlice,
    most: usize,
    pending: &mut usize,
) -> Vec<Endpoint> {
    let (mut endpoints, mut last) = (Vec::new(), None);
    let has_both_families = in_cluster.object.is_some_and(|object| object.cluster_ips.len() > 1);
    for listed in &slice.endpoints {
        let health = health(mesh, in_cluster, listed);
        for address in &listed.addresses {
            if endpoints.len() >= most {
                return endpoints;
            }
            let workload = workload_of(cx, mesh, slice, listed, address);
            // The pod is not known yet: without its labels and account the endpoint would be wrong.
            if workload.is_none() && listed.pod.is_some() {
                *pending += 1;
                continue;
            }
            let pod_addresses = workload.map_or(&[][..], |workload| &workload.addresses);
            let dual = mesh.installation.features.istio_dual_stack
                && listed.pod.is_some()
                && pod_addresses.len() > 1
                && has_both_families;
            // The endpoint of the IPv4 slice has all addresses of the pod.
            if dual && slice.address_type == "IPv6" {
                continue;
            }
            let origin = match workload {
                Some(workload) => origin_at(cx, mesh, workload, address),
                None => origin_without_pod(cx, mesh, in_cluster.cluster, address, &mut last),
            };
            for (port_name, port) in slice.ports.iter().take(most - endpoints.len()) {
                let endpoint = Endpoint::new(address, (port_name, *port), health, &origin);
                let mut endpoint = Endpoint {
                    cluster_local: in_cluster.cluster_local,
                    ..endpoint
                };
                if dual {
                    endpoint = endpoint.with_addresses(pod_addresses);
                }
                endpoints.push(endpoint);
            }
        }
    }
    endpoints
}

/// Returns the pod of an address: the one that the slice refers to, or for manual slices a ready pod of the namespace
/// with the address.
fn workload_of<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    slice: &EndpointSlice,
    listed: &SliceEndpoint,
    address: &SmolStr,
) -> Option<&'a Shared<Workload>> {
    let cluster = slice.meta.cluster();
    let object = match &listed.pod {
        Some(pod) => ObjectKey::new(cluster, pod.namespace.clone(), pod.name.clone()),
        None => {
            let mut pods = mesh.pods_by_address.get(cx, &(cluster.clone(), address.clone()));
            let found = pods.find(|(key, pod)| {
                key.namespace == *slice.meta.namespace() && pod.is_serving() && pod.ips.first() == Some(address)
            });
            found?.0.clone()
        }
    };
    let source = WorkloadSource::Pod;
    mesh.workloads.get(cx, &WorkloadKey { source, object })
}

/// Returns the origin of a pod at one of its addresses. If its main address is in no network, another one may be in a
/// range of meshNetworks.
fn origin_at(cx: &Cx, mesh: &MeshSnapshot, workload: &Workload, address: &SmolStr) -> Shared<Origin> {
    let origin = &workload.origin;
    if !origin.network.is_empty() || workload.addresses.first() == Some(address) {
        return origin.clone();
    }
    let network = network::of_endpoint(cx, mesh, &origin.cluster, &Labels::new(), address);
    if network.is_empty() {
        return origin.clone();
    }
    let (cluster, locality, node) = (&origin.cluster, &origin.locality, &origin.node_name);
    Shared::new(Origin {
        labels: Shared::new(workload::augmented(&workload.labels, cluster, locality, node, &network)),
        network,
        ..Origin::clone(origin)
    })
}

/// Returns the origin of an address without a pod: its cluster, and possibly a network. Most have the same network as
/// their neighbour in the slice.
fn origin_without_pod(
    cx: &Cx,
    mesh: &MeshSnapshot,
    cluster: &ClusterId,
    address: &SmolStr,
    last: &mut Option<Shared<Origin>>,
) -> Shared<Origin> {
    let network = network::of_endpoint(cx, mesh, cluster, &Labels::new(), address);
    if let Some(last) = last.as_ref().filter(|last| last.network == network) {
        return last.clone();
    }
    let origin = Shared::new(Origin {
        labels: Shared::new(workload::augmented(&Labels::new(), cluster, "", "", &network)),
        network,
        cluster: cluster.clone(),
        tls_mode: SmolStr::new_static(workload::PLAINTEXT),
        ..Origin::default()
    });
    last.insert(origin).clone()
}

/// Returns the health by the conditions of the slice; an absent condition counts as true. A cluster that does not know
/// the service cannot distinguish terminating endpoints.
fn health(mesh: &MeshSnapshot, in_cluster: &ServiceInCluster<'_>, listed: &SliceEndpoint) -> Health {
    let features = &mesh.installation.features;
    let labels = [
        &features.pilot_persistent_session_label,
        &features.pilot_persistent_session_header_label,
    ];
    let keeps_draining = labels.into_iter().any(|label| {
        in_cluster
            .labels
            .is_some_and(|labels| labels.get(label).is_some_and(|value| !value.is_empty()))
    });
    let holds = |condition: Option<bool>| condition.unwrap_or(true);
    if holds(listed.ready) {
        Health::Healthy
    } else if keeps_draining && holds(listed.serving) && holds(listed.terminating) {
        Health::Draining
    } else if in_cluster.labels.is_some() && holds(listed.terminating) {
        Health::Terminating
    } else {
        Health::Unhealthy
    }
}

/// Returns the endpoints on virtual machines, at most some: WorkloadEntries of the Service's cluster and namespace that
/// it selects.
fn of_entries(cx: &Cx, mesh: &MeshSnapshot, object: &kube::Service, most: usize) -> Vec<Endpoint> {
    let features = &mesh.installation.features;
    let own_cluster = *object.meta.cluster() == mesh.installation.cluster;
    let selects = features.pilot_enable_k8s_select_workload_entries
        && (own_cluster || features.pilot_enable_cross_cluster_workload_entry)
        && Resolution::of_kube(object) == Resolution::ClientSideLb
        && !object.selector.is_empty();
    if !selects {
        return Vec::new();
    }
    let rows = mesh.entry_workloads_by_namespace.get(cx, object.meta.namespace());
    let workloads = rows.map(|(_, workload)| workload).filter(|workload| {
        workload.ready
            && workload.origin.cluster == *object.meta.cluster()
            && !entry::needs_dns(workload)
            && select::subset(&object.selector, &workload.origin.labels)
    });
    let workloads: Vec<_> = workloads.collect();
    let mut endpoints = Vec::new();
    for port in &object.ports {
        let served = workloads.iter().filter_map(|workload| {
            let number = target_port(port, workload)?;
            Some(Endpoint::of_workload(workload, &port.name, number, Health::Unknown))
        });
        let left = most - endpoints.len();
        endpoints.extend(served.take(left));
    }
    endpoints
}

/// Returns the port of a WorkloadEntry for a service port: its own port of that name, or else the number. A named
/// target port must be among its ports.
pub fn target_port(port: &kube::service::Port, workload: &Workload) -> Option<u32> {
    let named = |name: &SmolStr| workload.named_ports.get(name).copied().filter(|number| *number > 0);
    match &port.target {
        TargetPort::Name(name) => named(name),
        TargetPort::Number(0) => Some(port.number),
        TargetPort::Number(number) => Some(named(&port.name).unwrap_or(*number)),
    }
}
