//! Endpoints of Kubernetes Services: from EndpointSlices with their pods, and from WorkloadEntries with fitting labels.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use super::{Endpoint, Health, entry};
use crate::{
    api::kube::{self, EndpointSlice, endpoint_slice::SliceEndpoint, service::TargetPort},
    base::{ClusterId, Labels, ObjectKey, Shared, select},
    model::{
        MeshSnapshot, Service, network,
        service::{Resolution, kube as registry},
        workload::{self, Workload, WorkloadKey, WorkloadSource},
    },
    table::Cx,
};

/// The endpoints in all clusters that have the Service, in the order of cluster ids.
pub(super) fn endpoints(cx: &Cx, mesh: &MeshSnapshot, service: &Service) -> Vec<Endpoint> {
    let mut objects = registry::objects(cx, mesh, &service.key.namespace, &service.name);
    objects.sort_by(|a, b| a.meta.cluster().cmp(b.meta.cluster()));
    let mut endpoints = Vec::new();
    for object in objects {
        endpoints.extend(of_slices(cx, mesh, object));
        endpoints.extend(of_entries(cx, mesh, service, object));
    }
    endpoints
}

/// The endpoints of the Service's slices in its cluster; an address that moves between slices counts once.
fn of_slices(cx: &Cx, mesh: &MeshSnapshot, object: &kube::Service) -> Vec<Endpoint> {
    let meta = &object.meta;
    let key = (meta.cluster().clone(), meta.namespace().clone(), meta.name().clone());
    let mut known: BTreeSet<(SmolStr, SmolStr)> = BTreeSet::new();
    let mut endpoints = Vec::new();
    for (_, slice) in mesh.slices_by_service.get(cx, &key) {
        if slice.address_type == "FQDN" {
            continue;
        }
        for endpoint in of_slice(cx, mesh, object, slice) {
            if known.insert((endpoint.address.clone(), endpoint.port_name.clone())) {
                endpoints.push(endpoint);
            }
        }
    }
    endpoints
}

fn of_slice(cx: &Cx, mesh: &MeshSnapshot, object: &kube::Service, slice: &EndpointSlice) -> Vec<Endpoint> {
    let mut endpoints = Vec::new();
    for listed in &slice.endpoints {
        let health = health(mesh, object, listed);
        for address in &listed.addresses {
            let workload = workload_of(cx, mesh, slice, listed, address);
            // A pod that is not known yet: without its labels and account the endpoint would be served wrongly.
            if workload.is_none() && listed.pod.is_some() {
                continue;
            }
            let pod_addresses = workload.map_or(&[][..], |workload| &workload.addresses);
            let dual = mesh.installation.features.istio_dual_stack
                && listed.pod.is_some()
                && pod_addresses.len() > 1
                && object.cluster_ips.len() > 1;
            // The endpoint of the IPv4 slice has all addresses of the pod.
            if dual && slice.address_type == "IPv6" {
                continue;
            }
            for (port_name, port) in &slice.ports {
                let mut endpoint = match workload {
                    Some(workload) => Endpoint::of_workload(workload, port_name, *port, health),
                    None => without_pod(cx, mesh, slice.meta.cluster(), address, port_name, *port, health),
                };
                endpoint.address.clone_from(address);
                if dual {
                    endpoint = endpoint.with_addresses(pod_addresses);
                }
                endpoints.push(endpoint);
            }
        }
    }
    endpoints
}

/// The pod behind an address: the one that the slice names; for slices written by hand a ready pod of the namespace
/// that has the address.
fn workload_of<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    slice: &EndpointSlice,
    listed: &SliceEndpoint,
    address: &SmolStr,
) -> Option<&'a Shared<Workload>> {
    let cluster = slice.meta.cluster();
    let object = match &listed.pod {
        Some((namespace, name)) => ObjectKey::new(cluster, namespace.clone(), name.clone()),
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

fn without_pod(
    cx: &Cx,
    mesh: &MeshSnapshot,
    cluster: &ClusterId,
    address: &SmolStr,
    port_name: &SmolStr,
    port: u32,
    health: Health,
) -> Endpoint {
    let network = network::of_endpoint(cx, mesh, cluster, &Labels::new(), address);
    Endpoint {
        address: address.clone(),
        extra_addresses: Vec::new(),
        port_name: port_name.clone(),
        port,
        labels: Shared::new(workload::augmented(&Labels::new(), cluster, "", "", &network)),
        identity: SmolStr::default(),
        network,
        cluster: cluster.clone(),
        locality: SmolStr::default(),
        weight: 0,
        tls_mode: SmolStr::new_static("disabled"),
        health,
        workload_name: SmolStr::default(),
        namespace: Default::default(),
        node_name: SmolStr::default(),
        hostname: SmolStr::default(),
        subdomain: SmolStr::default(),
    }
}

/// Health by the conditions of the slice; an absent condition counts as true.
fn health(mesh: &MeshSnapshot, object: &kube::Service, listed: &SliceEndpoint) -> Health {
    let features = &mesh.installation.features;
    let labels = [
        &features.pilot_persistent_session_label,
        &features.pilot_persistent_session_header_label,
    ];
    let keeps_draining = labels
        .into_iter()
        .any(|label| object.meta.labels.get(label).is_some_and(|value| !value.is_empty()));
    let holds = |condition: Option<bool>| condition.unwrap_or(true);
    if holds(listed.ready) {
        Health::Healthy
    } else if keeps_draining && holds(listed.serving) && holds(listed.terminating) {
        Health::Draining
    } else if holds(listed.terminating) {
        Health::Terminating
    } else {
        Health::Unhealthy
    }
}

/// Endpoints on machines: WorkloadEntries of the Service's cluster and namespace whose labels it selects.
fn of_entries(cx: &Cx, mesh: &MeshSnapshot, service: &Service, object: &kube::Service) -> Vec<Endpoint> {
    let features = &mesh.installation.features;
    let own_cluster = *object.meta.cluster() == mesh.installation.cluster;
    let selects = features.pilot_enable_k8s_select_workload_entries
        && (own_cluster || features.pilot_enable_cross_cluster_workload_entry)
        && service.resolution == Resolution::ClientSideLb
        && !object.selector.is_empty();
    if !selects {
        return Vec::new();
    }
    let rows = mesh.entry_workloads_by_namespace.get(cx, object.meta.namespace());
    let workloads = rows.map(|(_, workload)| workload).filter(|workload| {
        workload.ready
            && workload.cluster == *object.meta.cluster()
            && !entry::needs_dns(workload)
            && select::subset(&object.selector, &workload.endpoint_labels)
    });
    let workloads: Vec<_> = workloads.collect();
    let mut endpoints = Vec::new();
    for port in &object.ports {
        let served = workloads.iter().filter_map(|workload| {
            let number = target_port(port, workload)?;
            Some(Endpoint::of_workload(workload, &port.name, number, Health::Unknown))
        });
        endpoints.extend(served);
    }
    endpoints
}

/// Where a WorkloadEntry serves a port: its own port of that name, else the number. A target that is given by name
/// must be among its ports.
fn target_port(port: &kube::service::Port, workload: &Workload) -> Option<u32> {
    let named = |name: &SmolStr| workload.named_ports.get(name).copied().filter(|number| *number > 0);
    match &port.target {
        TargetPort::Name(name) => named(name),
        TargetPort::Number(0) => Some(port.number),
        TargetPort::Number(number) => Some(named(&port.name).unwrap_or(*number)),
    }
}
