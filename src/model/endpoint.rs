//! Endpoints of services, and traits of all endpoints of a service that clusters and listeners depend on.

mod entry;
mod kube;

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{
    MeshSnapshot,
    service::{Registry, Resolution, Service, ServiceKey, ServicePort},
    workload::{Origin, PLAINTEXT, TUNNEL_HTTP, TUNNEL_LABEL, Workload, address_name},
};
use crate::{
    base::{ClusterId, NetworkId, Shared},
    table::Cx,
};

pub use entry::{SelectedWorkloads, demand, may_be_large, selected_workloads};
pub use kube::target_port;

/// Health, with Istio's distinctions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Health {
    /// Unknown (ServiceEntries, WorkloadEntries): no `health_status` is set.
    #[default]
    Unknown,
    /// Ready.
    Healthy,
    /// Not ready: sent only if a feature variable or the traffic distribution of the service asks for it.
    Unhealthy,
    /// Serving while terminating, for services with persistent sessions.
    Draining,
    /// Terminating: never sent.
    Terminating,
}

/// One endpoint of one service port. There are more of these than of any other row, so shared attributes are in
/// [`Origin`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// IP address, host name (DNS services) or `unix://` path; empty if only a network gateway can reach it.
    pub address: SmolStr,
    /// Further addresses of the same pod (dual stack).
    pub extra_addresses: Box<[SmolStr]>,
    /// The service port's name that this endpoint serves.
    pub port_name: SmolStr,
    /// Number of the service port, if a ServiceEntry sets it; 0 if only the name is known.
    pub service_port: u32,
    /// Listening port (0 for a Unix socket).
    pub port: u32,
    /// Readiness as the registry reports it.
    pub health: Health,
    /// True if only clients of the same cluster may use it, because its cluster does not export the service.
    pub cluster_local: bool,
    /// True if ztunnels know a workload at one of the addresses that accepts HBONE.
    pub at_tunnelled_address: bool,
    /// Attributes of the workload, which its endpoints share.
    pub origin: Shared<Origin>,
}

/// All endpoints of a service in all clusters, in a fixed order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceEndpoints {
    /// Those of ServiceEntries first, then by cluster, each in the order of the registry.
    pub endpoints: Shared<[Endpoint]>,
    /// Number of addresses that are omitted because their pods are not known yet.
    pub pending: usize,
}

/// Traits of a service's endpoints that clusters and listeners depend on; they change far less often than endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointTraits {
    /// SPIFFE identities of all endpoints, sorted and unique.
    pub identities: Vec<SmolStr>,
    /// Traits of each port with endpoints, by number.
    pub ports: BTreeMap<u32, PortTraits>,
    /// For DNS services: the endpoints, which are inline in the cluster.
    pub inline: Shared<[Endpoint]>,
    /// For headless (passthrough) services: each address with its port name, cluster, network and readiness, for
    /// per-pod listeners and the name table.
    pub addresses: Vec<HeadlessAddress>,
}

/// Traits of the endpoints of one port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PortTraits {
    /// True if some endpoint does not use mutual TLS.
    pub plaintext: bool,
    /// True if every endpoint is reached by HBONE.
    pub all_tunnel: bool,
}

/// One address of a headless service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HeadlessAddress {
    /// IP address of the endpoint, the main one.
    pub address: SmolStr,
    /// Further addresses of the same pod (dual stack).
    pub extra_addresses: Box<[SmolStr]>,
    /// The service port's name.
    pub port_name: SmolStr,
    /// Number of the service port, if a ServiceEntry sets it; 0 if only the name is known.
    pub service_port: u32,
    /// Cluster of the endpoint.
    pub cluster: ClusterId,
    /// Network of the endpoint; empty when unknown.
    pub network: NetworkId,
    /// `hostname` of the pod.
    pub hostname: SmolStr,
    /// `subdomain` of the pod.
    pub subdomain: SmolStr,
    /// True if it is healthy enough for the name table.
    pub healthy: bool,
}

/// The addresses of a headless host by what decides which port they serve, for its services in turn. There may be tens
/// of thousands of ports with an address for each, and thousands of services, each of which has the addresses of all.
pub struct PortAddresses<'a> {
    /// Those of which the number of the port is known, with their places.
    by_number: BTreeMap<u32, Vec<(usize, &'a HeadlessAddress)>>,
    /// The others.
    by_name: BTreeMap<&'a str, Vec<(usize, &'a HeadlessAddress)>>,
    /// The number of addresses that services may still take.
    left: usize,
}

/// The number of addresses that the services of a headless host may take together, however few the host has.
const FEW_TAKEN: usize = 10_000;
/// The number of times that they may take each of many addresses. The first service of a port takes all of the port;
/// further ones add nothing to them, as a rule.
const TIMES_TAKEN: usize = 4;

impl<'a> PortAddresses<'a> {
    /// Indexes the addresses of a host.
    pub fn of(addresses: &'a [HeadlessAddress]) -> Self {
        Self::indexed(addresses.iter(), addresses.len())
    }

    /// Indexes the addresses of a host for its listeners: each address of a port once, though many ServiceEntries may
    /// select the same workload.
    pub fn distinct(addresses: &'a [HeadlessAddress]) -> Self {
        let mut known = BTreeSet::new();
        let mut is_new = |address: &'a HeadlessAddress| {
            let name = match address.service_port {
                0 => address.port_name.as_str(),
                _ => "",
            };
            known.insert((address.service_port, name, &address.address, &address.extra_addresses))
        };
        Self::indexed(addresses.iter().filter(|&address| is_new(address)), addresses.len())
    }

    fn indexed(addresses: impl Iterator<Item = &'a HeadlessAddress>, count: usize) -> Self {
        let (mut by_number, mut by_name) = (BTreeMap::new(), BTreeMap::new());
        for (place, address) in addresses.enumerate() {
            let of_port: &mut Vec<_> = match address.service_port {
                0 => by_name.entry(address.port_name.as_str()).or_default(),
                number => by_number.entry(number).or_default(),
            };
            of_port.push((place, address));
        }
        Self {
            by_number,
            by_name,
            left: count.saturating_mul(TIMES_TAKEN).max(FEW_TAKEN),
        }
    }

    /// Returns true if an address serves a port, by the port's number if the address has one.
    pub fn serves(&self, number: u32, name: &str) -> bool {
        self.by_number.contains_key(&number) || self.has_name(name)
    }

    /// Returns true if the name of a port decides about an address.
    pub fn has_name(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// Returns the addresses that serve a port, in order; none beyond what the services of the host may take.
    pub fn take(&mut self, number: u32, name: &str) -> Vec<&'a HeadlessAddress> {
        if self.left == 0 {
            return Vec::new();
        }
        let lists = [self.by_number.get(&number), self.by_name.get(name)];
        let by_place: BTreeMap<usize, &HeadlessAddress> = lists.into_iter().flatten().flatten().copied().collect();
        let taken: Vec<_> = by_place.into_values().take(self.left).collect();
        self.left -= taken.len();
        taken
    }
}

/// Emits the index keys by address.
pub fn addresses(_key: &ServiceKey, endpoints: &ServiceEndpoints, emit: &mut dyn FnMut(SmolStr)) {
    endpoints
        .endpoints
        .iter()
        .flat_map(Endpoint::addresses)
        .for_each(|address| emit(address.clone()));
}

/// Emits the index key of a service that waits for pods.
pub fn pending(_key: &ServiceKey, endpoints: &ServiceEndpoints, emit: &mut dyn FnMut(())) {
    if endpoints.pending > 0 {
        emit(());
    }
}

/// Derives the endpoints of one service.
pub fn endpoints(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<ServiceEndpoints> {
    let service = mesh.services.get(cx, key)?;
    // A ServiceEntry adds endpoints even to a Kubernetes Service with the same host.
    let mut endpoints = entry::endpoints(cx, mesh, key);
    let mut pending = 0;
    if service.registry == Registry::Kubernetes {
        let (own, missing) = kube::endpoints(cx, mesh, service);
        endpoints.extend(own);
        pending = missing;
    }
    if mesh.installation.features.pilot_enable_ambient {
        mark_tunnelled(cx, mesh, &mut endpoints);
    }
    Some(ServiceEndpoints {
        endpoints: endpoints.into(),
        pending,
    })
}

/// Marks the endpoints at tunnelled addresses. The address may belong to another workload than the endpoint's own: a
/// ServiceEntry or a slice may list the address of any pod.
///
/// Parity (pilot/pkg/model/push_context.go, `SupportsTunnel`): workloads are known by the canonical form of an address,
/// in the network that ztunnels have for them.
fn mark_tunnelled(cx: &Cx, mesh: &MeshSnapshot, endpoints: &mut [Endpoint]) {
    // The ports of a workload are usually neighbours.
    let has_same_addresses = |one: &Endpoint, other: &Endpoint| {
        one.addresses().eq(other.addresses()) && one.origin.network == other.origin.network
    };
    for neighbours in endpoints.chunk_by_mut(has_same_addresses) {
        let network = &neighbours[0].origin.network;
        let is_tunnelled = neighbours[0].addresses().any(|address| {
            let name = address_name(network, address);
            mesh.tunnelled_addresses.get(cx, &name).is_some()
        });
        for endpoint in neighbours {
            endpoint.at_tunnelled_address = is_tunnelled;
        }
    }
}

/// Derives the traits of one service's endpoints.
pub fn traits(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<EndpointTraits> {
    let service = mesh.services.get(cx, key)?;
    let endpoints = &mesh.endpoints.get(cx, key)?.endpoints;
    let identities: BTreeSet<&SmolStr> = endpoints.iter().map(|endpoint| &endpoint.origin.identity).collect();
    let is_dns = service.all().any(|member| member.resolution.is_dns());
    let headless = if service.all().any(|member| member.resolution == Resolution::Passthrough) {
        &**endpoints
    } else {
        &[]
    };
    Some(EndpointTraits {
        identities: identities
            .into_iter()
            .filter(|identity| !identity.is_empty())
            .cloned()
            .collect(),
        ports: port_traits(service, endpoints),
        inline: if is_dns { endpoints.clone() } else { Vec::new().into() },
        addresses: headless
            .iter()
            .map(|endpoint| HeadlessAddress::of(endpoint, service))
            .collect(),
    })
}

/// Returns the traits of each port of the services of a row. Of several ports with one number, the youngest that has
/// endpoints counts.
///
/// Parity (pilot/pkg/model/push_context.go, `instancesByPort`).
fn port_traits(service: &Service, endpoints: &[Endpoint]) -> BTreeMap<u32, PortTraits> {
    // A ServiceEntry has its ports, and its endpoints, once for each of its addresses.
    let (mut numbered, mut named) = (BTreeMap::new(), BTreeMap::new());
    for endpoint in endpoints {
        let traits = PortTraits {
            plaintext: endpoint.origin.tls_mode == PLAINTEXT,
            all_tunnel: endpoint.supports_tunnel(),
        };
        let known = match endpoint.service_port {
            0 => named.entry(endpoint.port_name.as_str()).or_insert(traits),
            number => numbered.entry(number).or_insert(traits),
        };
        *known = known.with(traits);
    }
    let of_port = |port: &ServicePort| {
        let found = [numbered.get(&port.number), named.get(port.name.as_str())];
        let traits = found.into_iter().flatten().copied().reduce(PortTraits::with)?;
        Some((port.number, traits))
    };
    let ports = service.all().flat_map(|member| &member.ports);
    ports.filter_map(of_port).collect()
}

impl PortTraits {
    /// Returns the traits of all endpoints, given those of two groups of them.
    fn with(self, other: Self) -> Self {
        Self {
            plaintext: self.plaintext || other.plaintext,
            all_tunnel: self.all_tunnel && other.all_tunnel,
        }
    }
}

impl Endpoint {
    /// Returns true if the endpoint serves a service port, by its number if known. EDS matches the name alone.
    pub fn serves(&self, port: &ServicePort) -> bool {
        match self.service_port {
            0 => self.port_name == port.name,
            number => number == port.number,
        }
    }

    /// Returns true if the endpoint itself accepts HBONE.
    pub fn supports_tunnel(&self) -> bool {
        let label = self.origin.labels.get(TUNNEL_LABEL);
        self.at_tunnelled_address
            || label.is_some_and(|protocols| protocols.split(',').any(|protocol| protocol == TUNNEL_HTTP))
    }

    /// Returns all addresses, the main one first.
    fn addresses(&self) -> impl Iterator<Item = &SmolStr> {
        std::iter::once(&self.address).chain(&*self.extra_addresses)
    }

    /// Returns an endpoint for one service port.
    fn new(address: &SmolStr, (port_name, port): (&SmolStr, u32), health: Health, origin: &Shared<Origin>) -> Self {
        Self {
            address: address.clone(),
            extra_addresses: Box::default(),
            port_name: port_name.clone(),
            service_port: 0,
            port,
            health,
            cluster_local: false,
            at_tunnelled_address: false,
            origin: origin.clone(),
        }
    }

    /// Returns an endpoint of a workload for one service port.
    fn of_workload(workload: &Workload, port_name: &SmolStr, port: u32, health: Health) -> Self {
        let address = workload.addresses.first().cloned().unwrap_or_default();
        Self::new(&address, (port_name, port), health, &workload.origin)
    }

    /// Sets the addresses of a pod with several; the first one is the main one.
    fn with_addresses(mut self, addresses: &[SmolStr]) -> Self {
        if let Some((first, others)) = addresses.split_first() {
            self.address = first.clone();
            self.extra_addresses = others.into();
        }
        self
    }
}

impl HeadlessAddress {
    fn of(endpoint: &Endpoint, service: &Service) -> Self {
        Self {
            address: endpoint.address.clone(),
            extra_addresses: endpoint.extra_addresses.clone(),
            port_name: endpoint.port_name.clone(),
            service_port: endpoint.service_port,
            cluster: endpoint.origin.cluster.clone(),
            network: endpoint.origin.network.clone(),
            hostname: endpoint.origin.hostname.clone(),
            subdomain: endpoint.origin.subdomain.clone(),
            healthy: service.publish_not_ready || endpoint.health == Health::Healthy,
        }
    }
}

#[cfg(test)]
mod tests;
