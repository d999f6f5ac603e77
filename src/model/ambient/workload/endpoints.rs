//! Tables between the inputs and the workloads: the pods of EndpointSlices, and the endpoints of ServiceEntries.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{
    super::{
        cluster_network,
        service::{ClusterService, ClusterServiceKey, is_own},
    },
    declared_by, has_implicit_endpoints,
};
use crate::{
    api::kube::endpoint_slice::PodReference,
    base::{NetworkId, ObjectKey, Shared, select},
    model::{MeshSnapshot, inputs::InputWriters},
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
    let pods: BTreeSet<PodReference> = targets.filter(|target| !is_selected(target)).cloned().collect();
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
