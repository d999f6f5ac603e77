//! Services: one row per (namespace, host name), merged over clusters and registries.

mod alias;
pub mod auto_allocation;
pub(super) mod entry;
pub(super) mod kube;
pub mod mcs;
mod protocol;
#[cfg(test)]
mod tests;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use smol_str::SmolStr;

use super::{
    MeshSnapshot,
    export::{self, ExportTo},
    installation::Installation,
};
use crate::{
    api::{Config, Meta, kube::service::TargetPort},
    base::{ClusterId, Hostname, Labels, Namespace, ObjectKey},
    proto::istio::networking::v1alpha3 as networking,
    table::Cx,
};

pub use protocol::Protocol;

/// Key of a service: host first, so that rows of one host are adjacent.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceKey {
    /// The fully qualified host name.
    pub hostname: Hostname,
    /// Namespace that declares it.
    pub namespace: Namespace,
}

/// Registry of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Registry {
    /// A Kubernetes Service.
    Kubernetes,
    /// A ServiceEntry.
    External,
}

/// Resolution of a service's endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resolution {
    /// EDS: ClusterIP services and ServiceEntries with `STATIC`.
    ClientSideLb,
    /// `DNS`: STRICT_DNS.
    DnsLb,
    /// `DNS_ROUND_ROBIN`: LOGICAL_DNS.
    DnsRoundRobinLb,
    /// Headless services and `NONE`: the original destination.
    Passthrough,
    /// An ExternalName that is an alias of another service.
    Alias,
    /// `DYNAMIC_DNS`: the proxy resolves the host of each request.
    DynamicDns,
}

/// One port of a service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServicePort {
    /// Name, unique in the service.
    pub name: SmolStr,
    /// Port that clients use.
    pub number: u32,
    /// Target port, if the service sets it (Kubernetes `targetPort`, ServiceEntry `targetPort`).
    pub target: TargetPort,
    /// The application protocol.
    pub protocol: Protocol,
}

/// `trafficDistribution` of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum TrafficDistribution {
    /// Not set.
    #[default]
    Any,
    /// `PreferClose` or `PreferSameZone`.
    PreferSameZone,
    /// `PreferSameNode`.
    PreferSameNode,
}

/// A service as all proxies see it. Endpoints are separate: this row does not change with pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Host and namespace.
    pub key: ServiceKey,
    /// The name of the object: Kubernetes Service or ServiceEntry.
    pub name: SmolStr,
    /// The registry.
    pub registry: Registry,
    /// ServiceEntry of the row, if any (the oldest of several).
    pub service_entry: Option<ObjectKey>,
    /// Creation time, for order and conflicts.
    pub creation: i64,
    /// The ports, in declared order.
    pub ports: Vec<ServicePort>,
    /// Virtual IPs of a Kubernetes Service by cluster ([`UNSPECIFIED_IP`] without one); empty for ServiceEntries, whose
    /// addresses are in `default_address` and `variants`.
    pub cluster_vips: BTreeMap<ClusterId, Vec<SmolStr>>,
    /// `0.0.0.0` if the service has no address; otherwise the first address (a ServiceEntry may have a CIDR).
    pub default_address: SmolStr,
    /// Auto-allocated IPv4 address (ServiceEntries without addresses), empty if none.
    pub auto_ipv4: SmolStr,
    /// Auto-allocated IPv6 address, empty if none.
    pub auto_ipv6: SmolStr,
    /// For a host with several addresses, or declared by several ServiceEntries: each address with its ports, oldest
    /// first; otherwise empty. See [`Service::variants`].
    pub variants: Vec<Variant>,
    /// Resolution.
    pub resolution: Resolution,
    /// True if it is outside the mesh: `MESH_EXTERNAL`, or a Kubernetes ExternalName.
    pub mesh_external: bool,
    /// Visibility.
    pub export_to: ExportTo,
    /// Additional accounts from annotations or `subjectAltNames`, sorted.
    pub service_accounts: Vec<SmolStr>,
    /// Labels of the object.
    pub labels: Labels,
    /// Label selector of the Kubernetes Service or `workloadSelector` of the ServiceEntry.
    pub selector: Labels,
    /// ExternalName services that resolve to this one, sorted.
    pub aliases: Vec<ServiceKey>,
    /// The external name of a Kubernetes ExternalName service, empty otherwise.
    pub external_name: Hostname,
    /// `internalTrafficPolicy: Local`.
    pub node_local: bool,
    /// Traffic distribution.
    pub traffic_distribution: TrafficDistribution,
    /// `publishNotReadyAddresses`.
    pub publish_not_ready: bool,
    /// ServiceEntry annotation: DNS connect strategy RACE_FIRST_TCP_CONNECT.
    pub race_first_tcp_connect: bool,
    /// The service is headless (`clusterIP: None`).
    pub headless: bool,
    /// External addresses by cluster (load balancer, externalIPs, nodes of a NodePort), for gateways.
    pub external_addresses: BTreeMap<ClusterId, Vec<SmolStr>>,
    /// Service port → node port by cluster, where external addresses are nodes.
    pub external_ports: BTreeMap<ClusterId, BTreeMap<u32, u32>>,
}

/// One address of a host, with its ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variant {
    /// The address: an IP, a CIDR, or [`UNSPECIFIED_IP`].
    pub address: SmolStr,
    /// Auto-allocated IPv4 address, empty when none.
    pub auto_ipv4: SmolStr,
    /// Auto-allocated IPv6 address, empty when none.
    pub auto_ipv6: SmolStr,
    /// The ports.
    pub ports: Vec<ServicePort>,
    /// Resolution.
    pub resolution: Resolution,
}

/// Address of services without one.
pub const UNSPECIFIED_IP: &str = "0.0.0.0";

impl Service {
    /// Returns the port with this number that leads to a workload's port, or else the first one with this number. UDP
    /// ports count.
    pub fn inbound_port(&self, number: u32, target_port: u32) -> Option<&ServicePort> {
        let mut same = self.ports.iter().filter(|port| port.number == number);
        let first = same.clone().next();
        same.find(|port| port.target == TargetPort::Number(target_port))
            .or(first)
    }

    /// Returns the port with this number; UDP ports are ignored.
    pub fn port(&self, number: u32) -> Option<&ServicePort> {
        port_numbered(&self.ports, number)
    }

    /// Returns the service once per address, with the ports of that address, for listeners, virtual hosts and the name
    /// table. Clusters use the service itself, which has all ports.
    pub fn variants(&self) -> Vec<Cow<'_, Self>> {
        if self.variants.is_empty() {
            return vec![Cow::Borrowed(self)];
        }
        let variants = self.variants.iter();
        variants.map(|variant| Cow::Owned(self.with_address(variant))).collect()
    }

    /// Returns the service with the youngest address that serves the port, or, for port 0, the youngest of all.
    pub fn at_port(&self, number: u32) -> Cow<'_, Self> {
        let serves = |variant: &&Variant| number == 0 || port_numbered(&variant.ports, number).is_some();
        match self.variants.iter().rfind(serves) {
            Some(variant) => Cow::Owned(self.with_address(variant)),
            None => Cow::Borrowed(self),
        }
    }

    /// Returns the service with one of its addresses. Fields are copied one by one: a host declared by many
    /// ServiceEntries has so many ports and variants that full copies would be quadratic.
    fn with_address(&self, variant: &Variant) -> Self {
        Self {
            key: self.key.clone(),
            name: self.name.clone(),
            registry: self.registry,
            service_entry: self.service_entry.clone(),
            creation: self.creation,
            ports: variant.ports.clone(),
            cluster_vips: self.cluster_vips.clone(),
            default_address: variant.address.clone(),
            auto_ipv4: variant.auto_ipv4.clone(),
            auto_ipv6: variant.auto_ipv6.clone(),
            variants: Vec::new(),
            resolution: variant.resolution,
            mesh_external: self.mesh_external,
            export_to: self.export_to.clone(),
            service_accounts: self.service_accounts.clone(),
            labels: self.labels.clone(),
            selector: self.selector.clone(),
            aliases: self.aliases.clone(),
            external_name: self.external_name.clone(),
            node_local: self.node_local,
            traffic_distribution: self.traffic_distribution,
            publish_not_ready: self.publish_not_ready,
            race_first_tcp_connect: self.race_first_tcp_connect,
            headless: self.headless,
            external_addresses: self.external_addresses.clone(),
            external_ports: self.external_ports.clone(),
        }
    }

    /// Returns the value of a label.
    pub fn label(&self, key: &str) -> Option<&SmolStr> {
        self.labels.get(key)
    }
}

fn port_numbered(ports: &[ServicePort], number: u32) -> Option<&ServicePort> {
    let mut served = ports.iter().filter(|port| port.protocol != Protocol::Udp);
    served.find(|port| port.number == number)
}

/// Attributes that decide the visibility and precedence of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visibility {
    /// Visibility.
    pub export_to: ExportTo,
    /// The registry.
    pub registry: Registry,
    /// Creation time.
    pub creation: i64,
    /// Tie-breaker for services of the same age: the object's name, or the host of ServiceEntries.
    pub name: SmolStr,
    /// The port numbers, sorted (an egress listener may name one).
    pub ports: Vec<u32>,
    /// ExternalName services that resolve to this one.
    pub aliases: Vec<ServiceKey>,
    /// The external name of a Kubernetes ExternalName service, empty otherwise.
    pub external_name: Hostname,
}

/// Emits the index keys of a service: the namespaces that see it, for all and for its own declaring namespace.
pub fn export_keys(
    key: &ServiceKey,
    visibility: &Visibility,
    emit: &mut dyn FnMut((Option<Namespace>, Option<Namespace>)),
) {
    let mut both = |audience: Option<Namespace>| {
        emit((audience.clone(), None));
        emit((audience, Some(key.namespace.clone())));
    };
    match &visibility.export_to {
        ExportTo::Public => both(None),
        ExportTo::None => {}
        ExportTo::Namespaces(namespaces) => namespaces.iter().for_each(|namespace| both(Some(namespace.clone()))),
    }
}

/// Emits the index keys of a ServiceEntry: its (host, namespace) pairs.
pub fn entry_keys(key: &ObjectKey, entry: &Config<networking::ServiceEntry>, emit: &mut dyn FnMut(ServiceKey)) {
    for host in &entry.spec.hosts {
        emit(ServiceKey {
            hostname: Hostname::new(host),
            namespace: key.namespace.clone(),
        });
    }
}

/// Emits the index keys of a ServiceEntry: the addresses of its inline endpoints.
pub fn endpoint_address_keys(_: &ObjectKey, entry: &Config<networking::ServiceEntry>, emit: &mut dyn FnMut(SmolStr)) {
    let addresses: BTreeSet<&str> = entry
        .spec
        .endpoints
        .iter()
        .map(|endpoint| endpoint.address.as_str())
        .collect();
    for address in addresses {
        emit(SmolStr::new(address));
    }
}

/// Emits the index key of a ServiceEntry that selects workloads: its namespace.
pub fn selecting_entry_key(key: &ObjectKey, entry: &Config<networking::ServiceEntry>, emit: &mut dyn FnMut(Namespace)) {
    if entry.spec.workload_selector.is_some() {
        emit(key.namespace.clone());
    }
}

/// Returns the services that changes of Kubernetes Services, ServiceImports or ServiceEntries may affect.
pub fn candidates(
    installation: &Installation,
    kube: &BTreeSet<(Namespace, SmolStr)>,
    imports: &BTreeSet<(Namespace, SmolStr)>,
    entries: &BTreeSet<ServiceKey>,
) -> Vec<ServiceKey> {
    let own = kube.iter().map(|(namespace, name)| ServiceKey {
        hostname: Hostname::from(format!("{name}.{namespace}.svc.{}", installation.domain)),
        namespace: namespace.clone(),
    });
    let has_imports = mcs::has_hosts(&installation.features);
    let imported = kube.union(imports).filter(|_| has_imports);
    let imported = imported.map(|(namespace, name)| ServiceKey {
        hostname: mcs::hostname(name, namespace),
        namespace: namespace.clone(),
    });
    own.chain(imported).chain(entries.iter().cloned()).collect()
}

/// Derives one service: the Kubernetes Services of this name in all clusters, or else the ServiceEntries of the
/// namespace that declare the host. Kubernetes Services take precedence, so that a ServiceEntry cannot take over their
/// name.
pub fn service(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<Service> {
    let mut service = kube::service(cx, mesh, key).or_else(|| entry::service(cx, mesh, key))?;
    if service.resolution != Resolution::Alias {
        service.aliases = alias::aliases(cx, mesh, &key.hostname);
    }
    Some(service)
}

/// Returns the visibility of a service, by default the mesh's.
fn export_to(cx: &Cx, mesh: &MeshSnapshot, written: &[String], own: &Namespace) -> ExportTo {
    export::read(written, &mesh.mesh_config(cx).default_service_export_to, own)
}

/// Returns the traffic distribution: the Service's field, or else the object's annotation, or else that of its
/// namespace.
fn traffic_distribution(cx: &Cx, mesh: &MeshSnapshot, spec: &str, meta: &Meta) -> TrafficDistribution {
    const ANNOTATION: &str = "networking.istio.io/traffic-distribution";
    match spec {
        "PreferSameZone" | "PreferClose" => return TrafficDistribution::PreferSameZone,
        "PreferSameNode" => return TrafficDistribution::PreferSameNode,
        _ => {}
    }
    let of = |annotations: &Labels| {
        let value = annotations.get(ANNOTATION).filter(|value| !value.is_empty())?;
        Some(match value.to_ascii_lowercase().as_str() {
            "prefersamezone" | "preferclose" => TrafficDistribution::PreferSameZone,
            "prefersamenode" => TrafficDistribution::PreferSameNode,
            _ => TrafficDistribution::Any,
        })
    };
    of(&meta.annotations).unwrap_or_else(|| {
        let namespace = ObjectKey::new(meta.cluster(), "", SmolStr::new(meta.namespace().as_str()));
        let namespace = mesh.namespaces.get(cx, &namespace);
        namespace
            .and_then(|namespace| of(&namespace.meta.annotations))
            .unwrap_or_default()
    })
}

/// Derives the visibility of one service.
pub fn visibility(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<Visibility> {
    let service = mesh.services.get(cx, key)?;
    let mut ports: Vec<u32> = service.ports.iter().map(|port| port.number).collect();
    ports.sort_unstable();
    Some(Visibility {
        export_to: service.export_to.clone(),
        registry: service.registry,
        creation: service.creation,
        name: match service.registry {
            Registry::Kubernetes => service.name.clone(),
            Registry::External => SmolStr::new(&*key.hostname),
        },
        ports,
        aliases: service.aliases.clone(),
        external_name: service.external_name.clone(),
    })
}
