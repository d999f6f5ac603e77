//! Addresses and instances of waypoints.

use smol_str::SmolStr;

use super::{cluster_network, network_address};
use crate::{
    api::{Config, gateway_api, kube::Pod},
    base::{ClusterId, Labels, Namespace, NetworkId, ObjectKey, cidr},
    model::{MeshSnapshot, network::HBONE_PORT, policy::GATEWAY_NAME_LABEL, waypoint},
    proto::istio::workload::{ApplicationTunnel, GatewayAddress, NamespacedHostname, gateway_address::Destination},
    table::Cx,
};

/// Prefix of the names of policies that admit a waypoint. Names of objects have no underscores.
const IMPLICIT: &str = "istio_allow_waypoint_";

/// The instances of a waypoint.
#[derive(Clone, Debug, PartialEq)]
pub struct WaypointInstances {
    /// The address that workloads and services refer to.
    pub address: Option<GatewayAddress>,
    /// The tunnel into its instances, if they do not accept HBONE.
    pub tunnel: Option<ApplicationTunnel>,
    /// The service accounts of its pods, sorted, one for each pod.
    pub service_accounts: Vec<SmolStr>,
}

/// Emits the index key of a pod that is an instance of a Gateway.
///
/// Parity (pkg/kube/multicluster/cluster.go): a failed pod is not an instance, one that has succeeded is.
pub fn gateway_of_pod(key: &ObjectKey, pod: &Pod, emit: &mut dyn FnMut((ClusterId, Namespace, SmolStr))) {
    let gateway = pod.meta.labels.get(GATEWAY_NAME_LABEL);
    if let Some(gateway) = gateway.filter(|_| pod.phase != "Failed") {
        emit((key.cluster.clone(), key.namespace.clone(), gateway.clone()));
    }
}

/// Derives the instances of a waypoint.
pub fn instances(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<WaypointInstances> {
    mesh.waypoints.get(cx, key)?;
    let gateway = mesh.kube_gateways.get(cx, key)?;
    let network = cluster_network(cx, mesh, &key.cluster);
    let pods = (key.cluster.clone(), key.namespace.clone(), key.name.clone());
    let pods = mesh.pods_by_gateway.get(cx, &pods);
    let mut service_accounts: Vec<SmolStr> = pods.map(|(_, pod)| pod.service_account.clone()).collect();
    service_accounts.sort_unstable();
    Some(WaypointInstances {
        address: address(gateway, &network),
        tunnel: waypoint::inbound_binding(cx, mesh, gateway),
        service_accounts,
    })
}

/// Returns the first host name in the status, or else the first IP address.
fn address(gateway: &Config<gateway_api::Gateway>, network: &NetworkId) -> Option<GatewayAddress> {
    let of_type = |address_type: &'static str| waypoint::addresses_of_type(gateway, address_type);
    let hostname = of_type("Hostname").next().map(|hostname| {
        Destination::Hostname(NamespacedHostname {
            namespace: gateway.meta.namespace().to_string(),
            hostname: hostname.to_owned(),
        })
    });
    let ip = || of_type("IPAddress").find_map(cidr::parse_ip);
    let destination = hostname.or_else(|| Some(Destination::Address(network_address(network, ip()?))))?;
    Some(GatewayAddress {
        destination: Some(destination),
        hbone_mtls_port: HBONE_PORT,
    })
}

/// Waypoint of a workload.
#[derive(Default)]
pub(super) struct Attached {
    /// The Gateway.
    pub(super) gateway: Option<ObjectKey>,
    /// Its address.
    pub(super) address: Option<GatewayAddress>,
    /// The tunnel into the workload, if it is an instance of a waypoint.
    pub(super) tunnel: Option<ApplicationTunnel>,
}

/// Returns the waypoint of a workload of a cluster with these labels.
pub(super) fn of_workload(
    cx: &Cx,
    mesh: &MeshSnapshot,
    cluster: &ClusterId,
    labels: &Labels,
    namespace: &Namespace,
) -> Attached {
    if let Some(name) = labels.get(GATEWAY_NAME_LABEL) {
        let own = ObjectKey::new(cluster, namespace.clone(), name.clone());
        if let Some(instances) = mesh.waypoint_instances.get(cx, &own) {
            return Attached {
                tunnel: instances.tunnel,
                ..Attached::default()
            };
        }
    }
    let gateway = waypoint::workloads::for_workload(cx, mesh, cluster, labels, namespace);
    match gateway {
        Ok(Some(gateway)) => Attached {
            address: address_of(cx, mesh, &gateway),
            gateway: Some(gateway),
            tunnel: None,
        },
        Ok(None) | Err(_) => Attached::default(),
    }
}

/// Returns the address of a waypoint.
pub(super) fn address_of(cx: &Cx, mesh: &MeshSnapshot, gateway: &ObjectKey) -> Option<GatewayAddress> {
    mesh.waypoint_instances.get(cx, gateway)?.address.clone()
}

/// Returns the name of the policy that admits a waypoint; `None` without instances.
///
/// Parity (pilot/pkg/serviceregistry/ambient/policies.go): the policy exists only with
/// `PILOT_AUTO_ALLOW_WAYPOINT_POLICY`. That of a waypoint of another cluster is not sent, although workloads there
/// refer to it.
pub fn implicit_policy(cx: &Cx, mesh: &MeshSnapshot, gateway: &ObjectKey) -> Option<String> {
    if !mesh.installation.features.pilot_auto_allow_waypoint_policy {
        return None;
    }
    let instances = mesh.waypoint_instances.get(cx, gateway)?;
    let name = || format!("{IMPLICIT}{}_{}", gateway.namespace, gateway.name);
    (!instances.service_accounts.is_empty()).then(name)
}

/// Returns the resource names of the policies that admit the waypoints of a workload and of its services.
pub(super) fn implicit_policies(
    cx: &Cx,
    mesh: &MeshSnapshot,
    own: Option<&ObjectKey>,
    of_services: impl Iterator<Item = ObjectKey>,
) -> Vec<String> {
    if !mesh.installation.features.pilot_auto_allow_waypoint_policy {
        return Vec::new();
    }
    let mut gateways: Vec<ObjectKey> = of_services.filter(|gateway| Some(gateway) != own).collect();
    gateways.sort_unstable();
    gateways.dedup();
    gateways.extend(own.cloned());
    let name = |gateway: ObjectKey| {
        let name = implicit_policy(cx, mesh, &gateway)?;
        Some(format!("{}/{name}", gateway.namespace))
    };
    gateways.into_iter().filter_map(name).collect()
}
