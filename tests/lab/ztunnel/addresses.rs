//! Workloads and services as a ztunnel knows them, and the way to a destination.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use istiod::proto::istio::workload::gateway_address::Destination;
use istiod::proto::istio::workload::load_balancing::{HealthPolicy, Mode, Scope};
use istiod::proto::istio::workload::{
    Address, GatewayAddress, LoadBalancing, NamespacedHostname, NetworkAddress, Port, Service, TunnelProtocol,
    Workload, WorkloadStatus, address,
};

use super::HBONE;

/// All known workloads and services, by resource name.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    workloads: BTreeMap<String, Arc<Workload>>,
    services: BTreeMap<String, Arc<Service>>,
}

/// A connection whose destination is searched.
#[derive(Clone, Copy)]
pub(super) struct Request<'r> {
    pub(super) source: &'r Workload,
    /// The network of the ztunnel.
    pub(super) network: &'r str,
    pub(super) destination: SocketAddr,
    /// Chooses among equal endpoints.
    pub(super) turn: usize,
}

/// The way to a destination.
#[derive(Debug)]
pub(super) enum Route {
    /// Plaintext.
    Direct(SocketAddr),
    /// One tunnel.
    Tunnel(Hop),
    /// A tunnel to a gateway of another network, and inside it a tunnel to the destination, which has one of these
    /// identities.
    Nested { outer: Hop, inner: Vec<String> },
}

/// A tunnel.
#[derive(Debug)]
pub(super) struct Hop {
    /// The peer that ends it.
    pub(super) to: SocketAddr,
    /// The identities that the peer may have.
    pub(super) peers: Vec<String>,
    /// The destination that the peer is asked for.
    pub(super) authority: String,
}

/// A destination without a way.
#[derive(Debug)]
pub(super) enum NoRoute {
    /// The resource with this name is not known yet.
    Unknown(String),
    /// The reason.
    Unreachable(String),
}

fn unreachable<T>(reason: impl Into<String>) -> Result<T, NoRoute> {
    Err(NoRoute::Unreachable(reason.into()))
}

/// A workload or a service.
enum Found<'a> {
    Workload(&'a Arc<Workload>),
    Service(&'a Arc<Service>),
}

/// The name by which an address is requested.
pub(super) fn alias(network: &str, address: IpAddr) -> String {
    format!("{network}/{address}")
}

/// Returns an IP address of 4 or 16 bytes.
pub(super) fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let four = <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from);
    four.or_else(|| <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from))
}

/// The SPIFFE id of a workload. Default values are left out of the message.
pub(super) fn identity(workload: &Workload) -> String {
    let or = |text: &str, default: &str| {
        if text.is_empty() {
            default.to_owned()
        } else {
            text.to_owned()
        }
    };
    let domain = or(&workload.trust_domain, "cluster.local");
    let account = or(&workload.service_account, "default");
    format!("spiffe://{domain}/ns/{}/sa/{account}", workload.namespace)
}

fn covers(address: &NetworkAddress, network: &str, wanted: IpAddr) -> bool {
    let Some(own) = ip(&address.address).filter(|_| address.network == network) else {
        return false;
    };
    match address.length {
        None => own == wanted,
        Some(length) => IpNet::new(own, u8::try_from(length).unwrap_or(u8::MAX)).is_ok_and(|net| net.contains(&wanted)),
    }
}

impl Addresses {
    /// Adds or replaces a resource.
    pub(super) fn insert(&mut self, name: &str, resource: Address) -> Result<(), String> {
        self.remove(name);
        match resource.r#type {
            Some(address::Type::Workload(workload)) => {
                self.workloads.insert(name.to_owned(), Arc::new(workload));
            }
            Some(address::Type::Service(service)) => {
                self.services.insert(name.to_owned(), Arc::new(service));
            }
            None => return Err(format!("{name} is neither a workload nor a service")),
        }
        Ok(())
    }

    /// Removes a resource, if it is known.
    pub(super) fn remove(&mut self, name: &str) {
        self.workloads.remove(name);
        self.services.remove(name);
    }

    /// Returns the workload with this address.
    pub(super) fn workload_at(&self, network: &str, address: IpAddr) -> Option<&Arc<Workload>> {
        let has = |workload: &&Arc<Workload>| {
            workload.network == network && workload.addresses.iter().any(|own| ip(own) == Some(address))
        };
        self.workloads.values().find(has)
    }

    fn at(&self, network: &str, address: IpAddr) -> Option<Found<'_>> {
        let has = |service: &&Arc<Service>| service.addresses.iter().any(|own| covers(own, network, address));
        let mut services: Vec<_> = self.services.values().filter(has).collect();
        // Of several services with an address, the canonical one counts.
        services.sort_by_key(|service| !service.canonical);
        let workload = || self.workload_at(network, address).map(Found::Workload);
        services.first().copied().map(Found::Service).or_else(workload)
    }

    /// Returns the way to a destination. `is_settled` tells whether the absence of a name is certain.
    pub(super) fn route(&self, request: Request<'_>, is_settled: &dyn Fn(&str) -> bool) -> Result<Route, NoRoute> {
        let Request {
            network, destination, ..
        } = request;
        let name = alias(network, destination.ip());
        match self.at(network, destination.ip()) {
            None if !is_settled(&name) => Err(NoRoute::Unknown(name)),
            // The mesh does not know it.
            None => Ok(Route::Direct(destination)),
            Some(Found::Workload(workload)) => match &workload.waypoint {
                Some(waypoint) => self.through(waypoint, destination.to_string(), request, is_settled),
                None => self.to_workload(workload, destination.port(), None, request, is_settled),
            },
            Some(Found::Service(service)) => {
                let port = u32::from(destination.port());
                if !service.ports.iter().any(|one| one.service_port == port) {
                    return unreachable(format!("{} has no port {port}", service.hostname));
                }
                if let Some(waypoint) = &service.waypoint {
                    return self.through(waypoint, destination.to_string(), request, is_settled);
                }
                let (workload, target) = self.endpoint(service, port, request)?;
                self.to_workload(workload, target, Some((&**service, port)), request, is_settled)
            }
        }
    }

    /// Returns the tunnel to an instance of a waypoint, for a destination behind it.
    fn through(
        &self,
        waypoint: &GatewayAddress,
        authority: String,
        request: Request<'_>,
        is_settled: &dyn Fn(&str) -> bool,
    ) -> Result<Route, NoRoute> {
        let found = match &waypoint.destination {
            Some(Destination::Hostname(NamespacedHostname { namespace, hostname })) => {
                let name = format!("{namespace}/{hostname}");
                match self.services.get(&name) {
                    Some(service) => Found::Service(service),
                    None if !is_settled(&name) => return Err(NoRoute::Unknown(name)),
                    None => return unreachable(format!("the waypoint {name} is unknown")),
                }
            }
            Some(Destination::Address(address)) => {
                let own = ip(&address.address).ok_or(NoRoute::Unreachable("no address of a waypoint".to_owned()))?;
                let name = alias(&address.network, own);
                match self.at(&address.network, own) {
                    Some(found) => found,
                    None if !is_settled(&name) => return Err(NoRoute::Unknown(name)),
                    None => return unreachable(format!("the waypoint {name} is unknown")),
                }
            }
            None => return unreachable("a waypoint without an address"),
        };
        let (workload, port, mut peers) = match found {
            Found::Workload(workload) => (workload, waypoint.hbone_mtls_port, Vec::new()),
            Found::Service(service) => {
                let (workload, port) = self.endpoint(service, waypoint.hbone_mtls_port, request)?;
                (workload, u32::from(port), service.subject_alt_names.clone())
            }
        };
        peers.push(identity(workload));
        Ok(Route::Tunnel(Hop {
            to: SocketAddr::new(first_address(workload)?, port_number(port)?),
            peers,
            authority,
        }))
    }

    /// Returns the way to a workload. `service` is the service and port of the destination, if it is one.
    fn to_workload(
        &self,
        workload: &Workload,
        port: u16,
        service: Option<(&Service, u32)>,
        request: Request<'_>,
        is_settled: &dyn Fn(&str) -> bool,
    ) -> Result<Route, NoRoute> {
        if let Some(gateway) = &workload.network_gateway
            && workload.network != request.network
        {
            let (service, port) = service.ok_or(NoRoute::Unreachable(
                "only services are reached in other networks".to_owned(),
            ))?;
            let authority = format!("{}:{port}", service.hostname);
            return self.through_network(gateway, authority, &service.subject_alt_names, is_settled);
        }
        let address = first_address(workload)?;
        let to = SocketAddr::new(address, port);
        match workload.tunnel_protocol() {
            TunnelProtocol::Hbone => Ok(Route::Tunnel(Hop {
                to: SocketAddr::new(address, HBONE),
                peers: vec![identity(workload)],
                authority: to.to_string(),
            })),
            TunnelProtocol::None | TunnelProtocol::LegacyIstioMtls => Ok(Route::Direct(to)),
        }
    }

    /// Returns the two tunnels through a gateway of another network.
    fn through_network(
        &self,
        gateway: &GatewayAddress,
        authority: String,
        inner: &[String],
        is_settled: &dyn Fn(&str) -> bool,
    ) -> Result<Route, NoRoute> {
        let Some(Destination::Address(address)) = &gateway.destination else {
            return unreachable("the model resolves no names of gateways");
        };
        let own = ip(&address.address).ok_or(NoRoute::Unreachable("no address of a gateway".to_owned()))?;
        let Some(workload) = self.workload_at(&address.network, own) else {
            let name = alias(&address.network, own);
            if is_settled(&name) {
                return unreachable(format!("the gateway {name} is unknown"));
            }
            return Err(NoRoute::Unknown(name));
        };
        Ok(Route::Nested {
            outer: Hop {
                to: SocketAddr::new(own, port_number(gateway.hbone_mtls_port)?),
                peers: vec![identity(workload)],
                authority,
            },
            inner: inner.to_vec(),
        })
    }

    /// Chooses an endpoint of a service, and returns its port: a healthy one in the place that the service prefers.
    fn endpoint(&self, service: &Service, port: u32, request: Request<'_>) -> Result<(&Arc<Workload>, u16), NoRoute> {
        let name = format!("{}/{}", service.namespace, service.hostname);
        let balancing = service.load_balancing.clone().unwrap_or_default();
        let admits_all = balancing.health_policy() == HealthPolicy::AllowAll;
        let target = |workload: &Workload| -> Option<u32> {
            let served = &workload.services.get(&name)?.ports;
            let served: &Port = served.iter().find(|one| one.service_port == port)?;
            Some(served.target_port)
        };
        let candidates = self.workloads.values().filter_map(|workload| {
            let target = target(workload)?;
            let is_usable = admits_all || workload.status() == WorkloadStatus::Healthy;
            is_usable.then_some((workload, target))
        });
        let rank = |workload: &Workload| rank(&balancing, request, workload);
        let candidates: Vec<_> = candidates.filter(|(workload, _)| rank(workload).is_some()).collect();
        let best = candidates.iter().filter_map(|(workload, _)| rank(workload)).max();
        let best: Vec<_> = candidates
            .into_iter()
            .filter(|(workload, _)| rank(workload) == best)
            .collect();
        if best.is_empty() {
            return unreachable(format!("{name} has no healthy endpoint for port {port}"));
        }
        let (workload, target) = best[request.turn % best.len()];
        Ok((workload, port_number(target)?))
    }
}

/// Returns how many of the preferred scopes a workload shares with the source, from the first on; `None` if it may not
/// be used.
fn rank(balancing: &LoadBalancing, request: Request<'_>, workload: &Workload) -> Option<usize> {
    let scopes: Vec<Scope> = balancing.routing_preference().collect();
    let shares = |scope: &Scope| {
        let source = request.source;
        let [own, other] = [source, workload].map(|one| one.locality.clone().unwrap_or_default());
        match scope {
            Scope::Region => own.region == other.region,
            Scope::Zone => own.zone == other.zone,
            Scope::Subzone => own.subzone == other.subzone,
            Scope::Node => source.node == workload.node,
            Scope::Cluster => source.cluster_id == workload.cluster_id,
            Scope::Network => source.network == workload.network,
            Scope::UnspecifiedScope => true,
        }
    };
    let shared = scopes.iter().take_while(|scope| shares(scope)).count();
    match balancing.mode() {
        Mode::Strict => (shared == scopes.len()).then_some(shared),
        Mode::Failover => Some(shared),
        Mode::UnspecifiedMode | Mode::Passthrough => Some(0),
    }
}

fn first_address(workload: &Workload) -> Result<IpAddr, NoRoute> {
    let first = workload.addresses.first().and_then(|bytes| ip(bytes));
    first.ok_or_else(|| NoRoute::Unreachable(format!("{} has no address", workload.uid)))
}

fn port_number(port: u32) -> Result<u16, NoRoute> {
    u16::try_from(port).map_err(|_| NoRoute::Unreachable(format!("{port} is no port")))
}
