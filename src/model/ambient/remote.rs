//! Workloads that represent other networks: their gateways, and for each service that spans clusters one workload with
//! all of its workloads in a network.
//!
//! Parity (pilot/pkg/serviceregistry/ambient/multicluster.go).

use smol_str::SmolStr;

use super::{
    gateway::Gateway,
    service, trust_domain,
    workload::{AmbientWorkload, WorkloadUid},
};
use crate::{
    base::{NetworkId, cidr},
    model::{MeshSnapshot, ServiceKey},
    proto::istio::workload::{PortList, TunnelProtocol, Workload, WorkloadType},
    table::{Cx, RowChange},
};

/// A workload that represents others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RemoteKey {
    /// All gateways to networks.
    Gateways,
    /// The workloads of a service in a network.
    Service(NetworkId, ServiceKey),
}

/// Workloads with their names.
pub type RemoteWorkloads = Vec<(WorkloadUid, AmbientWorkload)>;

/// Returns the keys that changes of workloads may affect.
pub fn candidates(mesh: &MeshSnapshot, changes: &[RowChange<WorkloadUid, AmbientWorkload>]) -> Vec<RemoteKey> {
    let versions = changes
        .iter()
        .flat_map(|(_, old, new)| [old, new].into_iter().flatten());
    let hidden = versions.filter(|workload| workload.is_hidden);
    let keys = hidden.flat_map(|workload| {
        let services = workload.services.iter().cloned();
        services.map(|service| RemoteKey::Service(workload.network.clone(), service))
    });
    let is_first = mesh.revision.0 == 0 && mesh.installation.features.pilot_enable_ambient;
    keys.chain(is_first.then_some(RemoteKey::Gateways)).collect()
}

/// Emits the services of a workload that is not sent.
pub fn hidden_services(_: &WorkloadUid, workload: &AmbientWorkload, emit: &mut dyn FnMut(ServiceKey)) {
    if workload.is_hidden {
        workload.services.iter().for_each(|service| emit(service.clone()));
    }
}

/// Derives the workloads that represent gateways, or a service in another network that has workloads of it.
pub fn workloads(cx: &Cx, mesh: &MeshSnapshot, key: &RemoteKey) -> Option<RemoteWorkloads> {
    let found = match key {
        RemoteKey::Gateways => of_gateways(cx, mesh),
        RemoteKey::Service(network, service) => of_service(cx, mesh, network, service).into_iter().collect(),
    };
    (!found.is_empty()).then_some(found)
}

/// Emits the names of workloads, and those of their addresses.
pub fn names(_: &RemoteKey, workloads: &RemoteWorkloads, emit: &mut dyn FnMut(SmolStr)) {
    for (uid, workload) in workloads {
        emit(uid.text().clone());
        workload.aliases().for_each(&mut *emit);
    }
}

/// Emits the services of workloads.
pub fn services(_: &RemoteKey, workloads: &RemoteWorkloads, emit: &mut dyn FnMut(ServiceKey)) {
    for (_, workload) in workloads {
        workload.services.iter().for_each(|service| emit(service.clone()));
    }
}

fn of_gateways(cx: &Cx, mesh: &MeshSnapshot) -> RemoteWorkloads {
    let gateways = mesh.ambient_gateways.get(cx, &());
    let all = gateways.iter().flat_map(|gateways| gateways.all());
    let workload = |gateway: &Gateway| {
        let message = gateway.workload(cx, mesh);
        let addresses = cidr::parse_ip(&gateway.address).into_iter().collect();
        (
            WorkloadUid::new(gateway.uid()),
            AmbientWorkload::new(&message, addresses, Vec::new()),
        )
    };
    let mut workloads: RemoteWorkloads = all.map(workload).collect();
    workloads.sort_by(|(one, _), (other, _)| one.cmp(other));
    workloads.dedup_by(|(one, _), (other, _)| one == other);
    workloads
}

fn of_service(
    cx: &Cx,
    mesh: &MeshSnapshot,
    network: &NetworkId,
    key: &ServiceKey,
) -> Option<(WorkloadUid, AmbientWorkload)> {
    let service = service::base(cx, mesh, key).filter(|service| service.declared.is_global)?;
    let gateways = mesh.ambient_gateways.get(cx, &())?;
    let gateway = gateways.of_network(network).first()?;
    let workloads = mesh.hidden_workloads_by_service.get(cx, key);
    let mut workloads = workloads
        .filter(|(_, workload)| workload.network == *network)
        .peekable();
    workloads.peek()?;
    // A workload without a weight counts once.
    let weight = |workload: Workload| workload.capacity.filter(|weight| *weight > 0).unwrap_or(1);
    let weights = workloads.map(|(_, workload)| weight(workload.decoded()));
    let capacity: u32 = weights.fold(0, u32::saturating_add);
    let name = service::resource_name(key);
    let ports = service.declared.message.ports.clone();
    let source = format!("{}/{}/{}", gateway.namespace, gateway.name, gateway.address);
    let uid = SmolStr::from(format!("{network}/SplitHorizonWorkload/{source}/{name}"));
    let message = Workload {
        uid: uid.to_string(),
        name: uid.to_string(),
        namespace: key.namespace.to_string(),
        network: network.to_string(),
        trust_domain: trust_domain(cx, mesh),
        capacity: Some(capacity),
        workload_type: WorkloadType::Pod.into(),
        tunnel_protocol: TunnelProtocol::Hbone.into(),
        network_gateway: Some(gateway.tunnel_address()),
        cluster_id: gateway.cluster.to_string(),
        services: [(name.to_string(), PortList { ports })].into(),
        ..Workload::default()
    };
    Some((
        WorkloadUid::new(uid),
        AmbientWorkload::new(&message, Vec::new(), vec![key.clone()]),
    ))
}
