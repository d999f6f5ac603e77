//! Endpoints of services, and the traits of the whole set that clusters and listeners depend on.

use smol_str::SmolStr;

use super::{MeshSnapshot, service::ServiceKey};
use crate::base::{ClusterId, Labels, Namespace, NetworkId, Shared};
use crate::table::Cx;

/// Health as Istio distinguishes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Health {
    /// No health is known (ServiceEntries, WorkloadEntries): no `health_status` is written.
    #[default]
    Unknown,
    /// Ready.
    Healthy,
    /// Not ready.
    Unhealthy,
    /// Serving while terminating, for services with persistent sessions.
    Draining,
    /// Terminating.
    Terminating,
}

/// One endpoint of one service port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// IP address, host name (DNS services) or `unix://` path.
    pub address: SmolStr,
    /// Further addresses of the same pod (dual stack).
    pub extra_addresses: Vec<SmolStr>,
    /// The service port's name that this endpoint serves.
    pub port_name: SmolStr,
    /// The port it listens on (0 for a Unix socket).
    pub port: u32,
    /// Labels with the augmented ones.
    pub labels: Shared<Labels>,
    /// The SPIFFE identity, empty when unknown.
    pub identity: SmolStr,
    /// The network, empty when unknown.
    pub network: NetworkId,
    /// The cluster.
    pub cluster: ClusterId,
    /// `region/zone/subzone`, empty when unknown.
    pub locality: SmolStr,
    /// Load-balancing weight, 0 when unset.
    pub weight: u32,
    /// `istio`, `disabled`, or another text of the label.
    pub tls_mode: SmolStr,
    /// Health.
    pub health: Health,
    /// Workload name (see networking.md section 5), empty when unknown.
    pub workload_name: SmolStr,
    /// Namespace of the workload, empty when unknown.
    pub namespace: Namespace,
    /// The node that runs it, empty when unknown.
    pub node_name: SmolStr,
    /// `hostname` of the pod, for names of headless services.
    pub hostname: SmolStr,
    /// `subdomain` of the pod.
    pub subdomain: SmolStr,
}

/// All endpoints of a service in all clusters, in a fixed order.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ServiceEndpoints {
    /// Sorted by cluster, then as the registry lists them.
    pub endpoints: Vec<Shared<Endpoint>>,
}

/// What clusters and listeners need to know of a service's endpoints; changes far less often than they do.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct EndpointTraits {
    /// SPIFFE identities of all endpoints, sorted and unique.
    pub identities: Vec<SmolStr>,
    /// There is at least one endpoint.
    pub any: bool,
    /// Some endpoint has a TLS mode other than `istio`.
    pub any_plaintext: bool,
    /// Every endpoint is reached by HBONE.
    pub all_tunnel: bool,
    /// For DNS services: the endpoints themselves, which stand inline in the cluster.
    pub inline: Vec<Shared<Endpoint>>,
    /// For headless (passthrough) services: each address with its port name, cluster, network and readiness,
    /// for per-pod listeners and the name table.
    pub addresses: Vec<HeadlessAddress>,
}

/// One address of a headless service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HeadlessAddress {
    /// The address.
    pub address: SmolStr,
    /// The service port's name.
    pub port_name: SmolStr,
    /// The cluster.
    pub cluster: ClusterId,
    /// The network.
    pub network: NetworkId,
    /// `hostname` of the pod.
    pub hostname: SmolStr,
    /// `subdomain` of the pod.
    pub subdomain: SmolStr,
    /// Healthy enough to be in the name table.
    pub healthy: bool,
}

/// The addresses of a service's endpoints: keys of the index by address.
pub fn addresses(_key: &ServiceKey, endpoints: &ServiceEndpoints, emit: &mut dyn FnMut(SmolStr)) {
    endpoints
        .endpoints
        .iter()
        .for_each(|endpoint| emit(endpoint.address.clone()));
}

/// Derives the endpoints of one service.
pub fn endpoints(_cx: &Cx, _mesh: &MeshSnapshot, _key: &ServiceKey) -> Option<ServiceEndpoints> {
    None
}

/// Derives the traits of one service's endpoints.
pub fn traits(_cx: &Cx, _mesh: &MeshSnapshot, _key: &ServiceKey) -> Option<EndpointTraits> {
    None
}
