//! Tables between the inputs and the workloads: the pods of EndpointSlices, and the endpoints of ServiceEntries.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{
    super::{
        cluster_network,
        service::{ClusterService, ClusterServiceKey, is_own},
    },
    declared_by, has_implicit_endpoints, service_of_slice, without_pods,
};
use crate::{
    api::kube::{EndpointSlice, endpoint_slice::PodReference},
    base::{NetworkId, ObjectKey, Shared, select},
    model::{MeshSnapshot, inputs::InputWriters},
    proto::istio::workload::Port,
    table::Cx,
};

/// The pods that a slice refers to and the selector of its Service does not match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceTargets {
    pub(super) service: SmolStr,
    pub(super) pods: BTreeSet<PodReference>,
}

/// Returns the slices that may have changed.
pub fn slice_candidates(mesh: &MeshSnapshot, inputs: &InputWriters) -> Vec<ObjectKey> {
    let slices = inputs.endpoint_slices.changes().iter().map(|(key, ..)| key);
    slices
        .filter(|key| mesh.installation.is_ambient(&key.cluster))
        .cloned()
        .collect()
}

/// Derives the pods of a slice. Those that the Service selects are found by their labels, so that most slices have no
/// row.
pub fn slice_targets(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<SliceTargets> {
    let slice = mesh.endpoint_slices.get(cx, key)?;
    if slice.address_type == "FQDN" || slice.service_name.is_empty() {
        return None;
    }
    let service = ObjectKey::new(&key.cluster, key.namespace.clone(), slice.service_name.clone());
    let selector = &mesh.kube_services.get(cx, &service)?.selector;
    let is_selected = |target: &PodReference| {
        if selector.is_empty() || key.namespace != target.namespace.as_str() {
            return false;
        }
        let pod = ObjectKey::new(&key.cluster, target.namespace.clone(), target.name.clone());
        let pod = mesh.pods.get(cx, &pod);
        pod.is_none_or(|pod| select::subset(selector, &pod.meta.labels))
    };
    let targets = slice.endpoints.iter().filter_map(|endpoint| endpoint.pod.as_ref());
    // Many endpoints may refer to one pod, which may have a hundred thousand labels.
    let mut known: BTreeMap<(&SmolStr, &SmolStr), bool> = BTreeMap::new();
    let mut pods: BTreeSet<PodReference> = BTreeSet::new();
    for target in targets {
        let pod = (&target.namespace, &target.name);
        if !*known.entry(pod).or_insert_with(|| is_selected(target)) {
            pods.insert(target.clone());
        }
    }
    (!pods.is_empty()).then(|| SliceTargets {
        service: slice.service_name.clone(),
        pods,
    })
}

/// Emits the pods of a slice.
pub fn target_pods(key: &ObjectKey, targets: &SliceTargets, emit: &mut dyn FnMut(ObjectKey)) {
    for pod in &targets.pods {
        emit(ObjectKey::new(&key.cluster, pod.namespace.clone(), pod.name.clone()));
    }
}

/// The workloads of a slice: its endpoints without a pod. All of them read this row: a slice and its Service may have
/// tens of thousands of ports, which must not be compared for each endpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct SliceWorkloads {
    /// Positions of the endpoints by their first address.
    pub(super) by_address: BTreeMap<SmolStr, usize>,
    /// TCP ports that have the name of a service port.
    pub(super) ports: Box<[Port]>,
}

/// Returns the changed slices that have workloads or had them before. Those of pods have no row, so that they record no
/// reads.
pub fn slices_with_workloads(mesh: &MeshSnapshot, inputs: &InputWriters) -> Vec<ObjectKey> {
    let slices = inputs.endpoint_slices.changes().iter();
    let slices = slices.filter(|(key, old, new)| {
        let mut versions = [old, new].into_iter().flatten();
        mesh.installation.is_ambient(&key.cluster) && versions.any(|slice| without_pods(slice).next().is_some())
    });
    slices.map(|(key, ..)| key.clone()).collect()
}

/// Derives the workloads of a slice; no row without any. Of several endpoints with one address, the first one counts.
pub fn slice_workloads(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<SliceWorkloads> {
    let slice = mesh.endpoint_slices.get(cx, key)?;
    let mut by_address = BTreeMap::new();
    for (position, endpoint) in without_pods(slice) {
        if let Some(address) = endpoint.addresses.first() {
            by_address.entry(address.clone()).or_insert(position);
        }
    }
    if by_address.is_empty() {
        return None;
    }
    let (_, service) = service_of_slice(cx, mesh, key, &slice.service_name)?;
    let ports = slice_ports(service, slice);
    Some(SliceWorkloads { by_address, ports })
}

/// Returns the TCP ports of a slice that have the name of a service port; of several with one name, the first one.
fn slice_ports(service: &ClusterService, slice: &EndpointSlice) -> Box<[Port]> {
    let declared = &service.declared;
    let mut numbers: BTreeMap<&SmolStr, u32> = BTreeMap::new();
    for Port { service_port, .. } in &declared.message.ports {
        if let Some(names) = declared.port_names.get(service_port) {
            numbers.entry(&names.name).or_insert(*service_port);
        }
    }
    let not_tcp: BTreeSet<&SmolStr> = slice.not_tcp.iter().collect();
    let ports = slice
        .ports
        .iter()
        .filter(|(name, number)| *number > 0 && !not_tcp.contains(name));
    let found = ports.filter_map(|(name, number)| {
        Some(Port {
            service_port: *numbers.get(name)?,
            target_port: *number,
            ..Port::default()
        })
    });
    found.collect()
}

/// The endpoints of a ServiceEntry. All of its workloads read this row, so that its lists are not read again for each
/// workload.
#[derive(Clone, Debug, PartialEq)]
pub struct EntryEndpoints {
    pub(super) by_address: BTreeMap<SmolStr, EntryEndpoint>,
    /// The services that listed endpoints serve. A host that is its own endpoint serves only its own service.
    pub(super) services: Vec<(ClusterServiceKey, Shared<ClusterService>)>,
}

impl EntryEndpoints {
    /// Returns true if listed endpoints are workloads: other objects do not declare all hosts of the ServiceEntry.
    pub fn are_workloads(&self) -> bool {
        !self.services.is_empty()
    }
}

/// An endpoint of a ServiceEntry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EntryEndpoint {
    /// Position in the list; `None` for a host.
    pub(super) position: Option<usize>,
    pub(super) network: NetworkId,
}

/// Returns the ServiceEntries whose endpoints may have changed.
pub fn entry_candidates(mesh: &MeshSnapshot, inputs: &InputWriters) -> Vec<ObjectKey> {
    let entries = inputs.service_entries.changes().iter().map(|(key, ..)| key);
    entries.filter(|key| is_own(mesh, key)).cloned().collect()
}

/// Derives the endpoints of a ServiceEntry. Of several with one address, the last one counts.
pub fn entry_endpoints(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<EntryEndpoints> {
    let spec = &mesh.service_entries.get(cx, key)?.spec;
    let is_implicit = has_implicit_endpoints(spec);
    if spec.endpoints.is_empty() && !is_implicit {
        return None;
    }
    let mut network = cluster_network(cx, mesh, &key.cluster);
    let mut by_address = BTreeMap::new();
    for (position, endpoint) in spec.endpoints.iter().enumerate() {
        // The network of an endpoint stays in force for those after it.
        if !endpoint.network.is_empty() {
            network = NetworkId::new(&endpoint.network);
        }
        let listed = EntryEndpoint {
            position: Some(position),
            network: network.clone(),
        };
        by_address.insert(SmolStr::new(&endpoint.address), listed);
    }
    let mut services = Vec::new();
    if is_implicit {
        let host = |host: &String| {
            let position = None;
            let network = network.clone();
            (SmolStr::new(host), EntryEndpoint { position, network })
        };
        by_address.extend(spec.hosts.iter().map(host));
    } else {
        let declared = declared_by(cx, mesh, key, spec.hosts.iter().map(String::as_str));
        services.extend(declared.into_iter().map(|(key, row)| (key.clone(), row.clone())));
    }
    Some(EntryEndpoints { by_address, services })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{features::Features, fixture, installation::Installation};

    #[test]
    fn r21_labels_of_a_pod_are_compared_once_for_all_endpoints() {
        let target = |name: &str, uid: &str| {
            format!("{{addresses: [192.0.2.3], targetRef: {{kind: Pod, name: {name}, namespace: a, uid: {uid}}}}}")
        };
        let endpoints = [
            target("p", "u1"),
            target("p", "u2"),
            target("q", "u3"),
            target("p", "u1"),
        ]
        .join(", ");
        let objects = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: s, namespace: a}}\n\
             spec: {{selector: {{app: x}}, ports: [{{name: web, port: 80}}]}}\n\
             ---\napiVersion: v1\nkind: Pod\nmetadata: {{name: p, namespace: a, labels: {{app: y}}}}\n\
             ---\napiVersion: v1\nkind: Pod\nmetadata: {{name: q, namespace: a, labels: {{app: x}}}}\n\
             ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: s-1, namespace: a, labels: {{kubernetes.io/service-name: s}}}}\n\
             addressType: IPv4\nports: [{{name: web, port: 80}}]\nendpoints: [{endpoints}]\n"
        );
        let installation = Installation {
            features: Features {
                pilot_enable_ambient: true,
                ..Features::default()
            },
            ..Installation::default()
        };
        let world = fixture::folder_world(installation, &[("objects.yaml", &objects)]);
        let (cx, mesh) = (Cx::untracked(), world.snapshot());
        let row = mesh.slice_targets.get(&cx, &fixture::key("a/s-1"));
        let pods = row.expect("the selector does not match a pod").pods.iter();
        let found: Vec<String> = pods.map(|pod| format!("{} {}", pod.name, pod.uid)).collect();
        assert_eq!(found, ["p u1", "p u2"]);
    }

    #[test]
    fn r21_ports_of_a_slice_are_compared_once_for_all_endpoints() {
        let slice = |name: &str, ports: &str, endpoints: &str| {
            format!(
                "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
                 metadata: {{name: {name}, namespace: a, labels: {{kubernetes.io/service-name: s}}}}\n\
                 addressType: IPv4\nports: [{ports}]\nendpoints: [{endpoints}]\n"
            )
        };
        let service = "apiVersion: v1\nkind: Service\nmetadata: {name: s, namespace: a}\nspec:\n  \
            ports: [{name: web, port: 80}, {name: admin, port: 81}, {name: dns, port: 53}]\n";
        let ports = "{name: other, port: 1}, {name: admin, port: 9091}, {name: dns, port: 5353, protocol: UDP}, \
            {name: web, port: 9090}";
        let pod = "{addresses: [192.0.2.3], targetRef: {kind: Pod, name: p, namespace: a}}";
        let others = "{addresses: [192.0.2.2]}, {addresses: [192.0.2.1]}, {addresses: [192.0.2.2]}";
        let manual = slice("manual", ports, &format!("{pod}, {others}"));
        let of_pods = slice("of-pods", ports, pod);
        let installation = Installation {
            features: Features {
                pilot_enable_ambient: true,
                ..Features::default()
            },
            ..Installation::default()
        };
        let world = fixture::folder_world(
            installation,
            &[("objects.yaml", &[service, &manual, &of_pods].concat())],
        );
        let (cx, mesh) = (Cx::untracked(), world.snapshot());
        assert!(mesh.slice_workloads.get(&cx, &fixture::key("a/of-pods")).is_none());
        let row = mesh.slice_workloads.get(&cx, &fixture::key("a/manual"));
        let row = row.expect("some endpoints have no pod");
        let positions = [("192.0.2.1", 2), ("192.0.2.2", 1)].map(|(address, at)| (SmolStr::new(address), at));
        assert_eq!(row.by_address, BTreeMap::from(positions), "the first one of an address");
        let ports = row.ports.iter().map(|port| (port.service_port, port.target_port));
        assert_eq!(ports.collect::<Vec<_>>(), [(81, 9091), (80, 9090)]);
    }
}
