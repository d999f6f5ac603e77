//! The services that expose a Gateway: which of its ports they serve, and their addresses.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use crate::{
    base::{Hostname, Namespace},
    model::{
        MeshSnapshot,
        endpoint::{Endpoint, Health},
        gateway_api::{Mistake, class::Controller, listener::Declaration},
        service::{Registry, Service, ServiceKey, UNSPECIFIED_IP, kube},
        waypoint::MANAGED_LABEL,
    },
    table::Cx,
};

/// Services of a Gateway.
#[derive(Debug, Default)]
pub(super) struct Resolved {
    /// `host:port` of each port that has endpoints.
    internal: BTreeSet<(String, u16)>,
    /// Cluster IPs of the services.
    cluster_ips: BTreeSet<SmolStr>,
    /// External addresses of the services.
    external: BTreeSet<SmolStr>,
    /// Hosts of services that wait for a load balancer.
    pending: BTreeSet<String>,
    /// Reasons that prevent traffic.
    warnings: Vec<String>,
    /// True if a warning does not go away by itself.
    is_unusable: bool,
}

impl Resolved {
    /// Resolves the services of a Gateway for the ports of its listeners.
    pub(super) fn of(cx: &Cx, mesh: &MeshSnapshot, declaration: &Declaration, ports: &BTreeSet<u16>) -> Self {
        let namespace = declaration.gateway.meta.namespace();
        // Clients use a waypoint as soon as it has an address, so that needs an endpoint that answers.
        let needs_ready = declaration.controller == Controller::Waypoint;
        let mut resolved = Self::default();
        for host in &declaration.services {
            let key = ServiceKey {
                hostname: Hostname::new(host),
                namespace: namespace.clone(),
            };
            match mesh.services.get(cx, &key) {
                Some(service) => {
                    let endpoints = mesh.endpoints.get(cx, &key);
                    let endpoints = endpoints.map_or(&[][..], |row| &row.endpoints).iter();
                    let counted = endpoints.filter(|endpoint| !needs_ready || is_ready(endpoint, service));
                    let served = ServedPorts::of(service, counted);
                    let mut is_served = false;
                    for port in ports {
                        is_served |= resolved.add(host, service, served.as_ref(), *port);
                    }
                    if is_served {
                        resolved.add_addresses(cx, mesh, host, service);
                    }
                }
                None => resolved.add_unknown(cx, mesh, host, namespace),
            }
        }
        resolved.warnings.sort();
        resolved
    }

    fn add_unknown(&mut self, cx: &Cx, mesh: &MeshSnapshot, host: &str, namespace: &Namespace) {
        let others = mesh.services_by_host.get(cx, &Hostname::new(host));
        let others: Vec<String> = others.map(|(key, _)| format!("{:?}", key.namespace.as_str())).collect();
        let warning = if others.is_empty() {
            format!("hostname {host:?} not found")
        } else {
            let (own, others) = (namespace.as_str(), others.join(", "));
            format!("hostname {host:?} not found in namespace {own:?}, but it was found in namespace(s) {others}")
        };
        self.warnings.push(warning);
        self.is_unusable = true;
    }

    /// Adds a port of a service. Returns true if it is served.
    fn add(&mut self, host: &str, service: &Service, served: Option<&ServedPorts>, port: u16) -> bool {
        let Some(served) = served else {
            self.warnings.push(format!("no instances found for hostname {host:?}"));
            return false;
        };
        let number = u32::from(port);
        if served.numbers.contains(&number) {
            self.internal.insert((host.to_owned(), port));
            return true;
        }
        if let Some(hinted) = served.by_endpoint_port.get(&number) {
            let hinted: BTreeSet<String> = hinted.iter().map(ToString::to_string).collect();
            let ports: Vec<String> = hinted.into_iter().collect();
            self.warnings.push(format!(
                "port {port} not found for hostname {host:?} (hint: the service port should be specified, not the \
                 workload port. Did you mean one of these ports: [{}]?)",
                ports.join(" ")
            ));
            self.is_unusable = true;
        } else if !served.declared.contains(&number) || service.label(MANAGED_LABEL).is_none() {
            // The endpoints of a deployed Service follow soon.
            self.warnings
                .push(format!("port {port} not found for hostname {host:?}"));
            self.is_unusable = true;
        }
        false
    }

    /// Adds the addresses of a service that serves a port.
    fn add_addresses(&mut self, cx: &Cx, mesh: &MeshSnapshot, host: &str, service: &Service) {
        let own: &[SmolStr] = if service.registry == Registry::Kubernetes {
            let own = service.cluster_vips.get(&mesh.installation.cluster);
            own.map_or(&[], Vec::as_slice)
        } else {
            std::slice::from_ref(&service.default_address)
        };
        let own = own.iter().filter(|address| *address != UNSPECIFIED_IP);
        self.cluster_ips.extend(own.cloned());
        let external = service
            .external_addresses
            .values()
            .flat_map(|addresses| addresses.iter());
        if external.clone().next().is_some() {
            self.external.extend(external.cloned());
        } else if is_load_balancer(cx, mesh, service) && self.pending.insert(host.to_owned()) {
            self.warnings.push(format!("address pending for hostname {host:?}"));
        }
    }

    /// Returns the mistake because of which a Gateway is not programmed, or else the message of the condition.
    pub(super) fn programmed(&self, hosts: &[String]) -> Result<String, Mistake> {
        let assigned = joined(&self.internal);
        if hosts.is_empty() {
            return Err(Mistake::new("UnsupportedAddress", super::gateway::NO_ADDRESS));
        }
        if self.warnings.is_empty() {
            return Ok(match assigned {
                Some(assigned) => format!("Resource programmed, assigned to service(s) {assigned}"),
                None => "Resource programmed".to_owned(),
            });
        }
        let reason = if self.is_unusable {
            "AddressNotUsable"
        } else {
            "AddressNotAssigned"
        };
        let warnings = self.warnings.join("; ");
        let message = match assigned {
            Some(assigned) => format!(
                "Assigned to service(s) {assigned}, but failed to assign to all requested addresses: {warnings}"
            ),
            None => format!("{}: {warnings}", super::gateway::NO_ADDRESS),
        };
        Err(Mistake::new(reason, message))
    }

    /// Returns the addresses to report: external ones, else those of a type, or of both types.
    pub(super) fn addresses(&self, address_type: Option<&str>) -> Vec<SmolStr> {
        if !self.external.is_empty() {
            return self.external.iter().cloned().collect();
        }
        let mut addresses = Vec::new();
        if address_type != Some("Hostname") {
            addresses.extend(self.cluster_ips.iter().cloned());
        }
        if address_type != Some("IPAddress") {
            let mut hosts: Vec<&String> = self.internal.iter().map(|(host, _)| host).collect();
            hosts.dedup();
            hosts.retain(|host| !self.pending.contains(*host));
            addresses.extend(hosts.into_iter().map(SmolStr::new));
        }
        addresses
    }
}

fn is_ready(endpoint: &Endpoint, service: &Service) -> bool {
    match endpoint.health {
        Health::Unknown | Health::Healthy | Health::Draining => true,
        Health::Unhealthy => service.publish_not_ready,
        Health::Terminating => false,
    }
}

/// The service ports that endpoints serve. A service may have a million endpoints and ten thousand ports, and a Gateway
/// with ListenerSets thousands of ports, so the endpoints are read once for all of these.
struct ServedPorts {
    /// The ports of the service.
    declared: BTreeSet<u32>,
    /// Those with an endpoint.
    numbers: BTreeSet<u32>,
    /// The same by the ports of their endpoints.
    by_endpoint_port: BTreeMap<u32, BTreeSet<u32>>,
}

impl ServedPorts {
    /// Returns the ports of some endpoints; `None` without endpoints.
    fn of<'e>(service: &Service, endpoints: impl Iterator<Item = &'e Endpoint>) -> Option<Self> {
        let mut endpoints = endpoints.peekable();
        endpoints.peek()?;
        let mut by_name: BTreeMap<&SmolStr, u32> = BTreeMap::new();
        for port in &service.ports {
            by_name.entry(&port.name).or_insert(port.number);
        }
        let mut served = Self {
            declared: service.ports.iter().map(|port| port.number).collect(),
            numbers: BTreeSet::new(),
            by_endpoint_port: BTreeMap::new(),
        };
        for endpoint in endpoints {
            let number = match endpoint.service_port {
                0 => by_name.get(&endpoint.port_name).copied(),
                number => Some(number),
            };
            if let Some(number) = number {
                served.numbers.insert(number);
                served.by_endpoint_port.entry(endpoint.port).or_default().insert(number);
            }
        }
        Some(served)
    }
}

/// Returns true if the Service of the cluster whose external addresses count has the type LoadBalancer.
fn is_load_balancer(cx: &Cx, mesh: &MeshSnapshot, service: &Service) -> bool {
    if service.registry != Registry::Kubernetes {
        return false;
    }
    let objects = kube::objects(cx, mesh, &service.key.namespace, &service.name);
    let first = objects.first();
    first.is_some_and(|object| object.service_type == "LoadBalancer")
}

/// Returns `a`, `a and b` or `a, b, and c`.
fn joined(assigned: &BTreeSet<(String, u16)>) -> Option<String> {
    let mut texts: Vec<String> = assigned.iter().map(|(host, port)| format!("{host}:{port}")).collect();
    texts.sort();
    match texts.as_slice() {
        [] => None,
        [one] => Some(one.clone()),
        [first, second] => Some(format!("{first} and {second}")),
        [all @ .., last] => Some(format!("{}, and {last}", all.join(", "))),
    }
}
