//! Services: one row for each (namespace, host name), merged over clusters and registries.

mod alias;
pub mod auto_allocation;
pub(super) mod entry;
pub(super) mod kube;
mod protocol;
#[cfg(test)]
mod tests;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use smol_str::SmolStr;

use super::{MeshSnapshot, export, installation::Installation, mcs};
use crate::{
    api::{Config, Meta, kube::service::TargetPort},
    base::{ClusterId, Hostname, Labels, Namespace, ObjectKey},
    proto::istio::networking::v1alpha3 as networking,
    table::Cx,
};

pub use protocol::Protocol;

/// Names a service: host first, so that rows of one host stand together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceKey {
    /// The fully qualified host name.
    pub hostname: Hostname,
    /// The namespace that declares it.
    pub namespace: Namespace,
}

/// Where a service comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Registry {
    /// A Kubernetes Service.
    Kubernetes,
    /// A ServiceEntry.
    External,
}

/// How proxies find a service's endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resolution {
    /// EDS: ClusterIP services and ServiceEntries with `STATIC`.
    ClientSideLb,
    /// `DNS`: STRICT_DNS.
    DnsLb,
    /// `DNS_ROUND_ROBIN`: LOGICAL_DNS.
    DnsRoundRobinLb,
    /// Headless services and `NONE`: the address that the client asked for.
    Passthrough,
    /// An ExternalName that stands for another service.
    Alias,
    /// `DYNAMIC_DNS`: resolved by the proxy from the request.
    DynamicDns,
}

/// One port of a service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServicePort {
    /// The name, unique in the service.
    pub name: SmolStr,
    /// The port that clients use.
    pub number: u32,
    /// Where it leads, when the service itself tells (Kubernetes `targetPort`, ServiceEntry `targetPort`).
    pub target: TargetPort,
    /// The application protocol.
    pub protocol: Protocol,
}

/// Who may see a config object: the reading of `exportTo`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExportTo {
    /// `*`.
    Public,
    /// `~`: nobody.
    Nobody,
    /// These namespaces (`.` already replaced by the own one).
    Namespaces(BTreeSet<Namespace>),
}

impl ExportTo {
    /// True if the namespace may see the object.
    pub fn visible_to(&self, namespace: &Namespace) -> bool {
        match self {
            Self::Public => true,
            Self::Nobody => false,
            Self::Namespaces(namespaces) => namespaces.contains(namespace),
        }
    }
}

/// `trafficDistribution` of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum TrafficDistribution {
    /// Not given.
    #[default]
    Any,
    /// `PreferClose` or `PreferSameZone`.
    PreferSameZone,
    /// `PreferSameNode`.
    PreferSameNode,
}

/// A service as every proxy sees it. Endpoints are elsewhere: this row does not change when pods do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Host and namespace.
    pub key: ServiceKey,
    /// The name of the object: Kubernetes Service or ServiceEntry.
    pub name: SmolStr,
    /// The registry.
    pub registry: Registry,
    /// The ServiceEntry that the row was made from, if any (the oldest where several were merged).
    pub service_entry: Option<ObjectKey>,
    /// Age, for order and conflicts.
    pub creation: i64,
    /// The ports, in declared order.
    pub ports: Vec<ServicePort>,
    /// Virtual IPs of a Kubernetes Service by cluster ([`UNSPECIFIED_IP`] where it has none); empty for ServiceEntries,
    /// whose addresses are in `default_address` and `variants`.
    pub cluster_vips: BTreeMap<ClusterId, Vec<SmolStr>>,
    /// `0.0.0.0` when the service has no address of its own; else the first address (a ServiceEntry may give a CIDR).
    pub default_address: SmolStr,
    /// Auto-allocated IPv4 address (ServiceEntries without addresses), empty when none.
    pub auto_ipv4: SmolStr,
    /// Auto-allocated IPv6 address, empty when none.
    pub auto_ipv6: SmolStr,
    /// For a host that has several addresses, or that several ServiceEntries declare: each address with the ports
    /// there, oldest first; otherwise empty. See [`Service::variants`].
    pub variants: Vec<Variant>,
    /// How endpoints are found.
    pub resolution: Resolution,
    /// Outside the mesh: `MESH_EXTERNAL`, or a Kubernetes ExternalName.
    pub mesh_external: bool,
    /// Who may see it.
    pub export_to: ExportTo,
    /// Extra accounts from annotations or `subjectAltNames`, sorted.
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

/// One address of a host, with what is served there.
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
    /// How endpoints are found.
    pub resolution: Resolution,
}

/// The address of services that have none.
pub const UNSPECIFIED_IP: &str = "0.0.0.0";

impl Service {
    /// The port with this number; UDP is not served and does not count.
    pub fn port(&self, number: u32) -> Option<&ServicePort> {
        port_numbered(&self.ports, number)
    }

    /// The service once for each of its addresses, with the ports of that address: what listeners, virtual hosts and
    /// the name table are made from. Clusters are made from the service itself, which has the ports of all.
    pub fn variants(&self) -> Vec<Cow<'_, Self>> {
        if self.variants.is_empty() {
            return vec![Cow::Borrowed(self)];
        }
        let variants = self.variants.iter();
        variants.map(|variant| Cow::Owned(self.with_address(variant))).collect()
    }

    /// The service as it is reached at a port: with the youngest of its addresses that serves the port, or, for port 0,
    /// the youngest of all.
    pub fn at_port(&self, number: u32) -> Cow<'_, Self> {
        let serves = |variant: &&Variant| number == 0 || port_numbered(&variant.ports, number).is_some();
        match self.variants.iter().rfind(serves) {
            Some(variant) => Cow::Owned(self.with_address(variant)),
            None => Cow::Borrowed(self),
        }
    }

    /// The service with this one of its addresses and what is served there. Field by field: a service whose host many
    /// ServiceEntries declare has so many ports and variants that a copy of all, for each, would cost their square.
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

    /// The value of a label, if it is there.
    pub fn label(&self, key: &str) -> Option<&SmolStr> {
        self.labels.get(key)
    }
}

fn port_numbered(ports: &[ServicePort], number: u32) -> Option<&ServicePort> {
    let mut served = ports.iter().filter(|port| port.protocol != Protocol::Udp);
    served.find(|port| port.number == number)
}

/// What decides whether and in which order a service is seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visibility {
    /// Who may see it.
    pub export_to: ExportTo,
    /// The registry.
    pub registry: Registry,
    /// Age.
    pub creation: i64,
    /// Settles the order among services of one age: the object's name, for ServiceEntries the host.
    pub name: SmolStr,
    /// The port numbers, sorted (an egress listener may name one).
    pub ports: Vec<u32>,
    /// ExternalName services that resolve to this one.
    pub aliases: Vec<ServiceKey>,
    /// The external name of a Kubernetes ExternalName service, empty otherwise.
    pub external_name: Hostname,
}

/// Index keys of a service: who may see it, from all namespaces and from its own.
pub fn audience_keys(
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
        ExportTo::Nobody => {}
        ExportTo::Namespaces(namespaces) => namespaces.iter().for_each(|namespace| both(Some(namespace.clone()))),
    }
}

/// The (host, namespace) pairs of a ServiceEntry: keys of the index by host.
pub fn entry_keys(key: &ObjectKey, entry: &Config<networking::ServiceEntry>, emit: &mut dyn FnMut(ServiceKey)) {
    for host in &entry.spec.hosts {
        emit(ServiceKey {
            hostname: Hostname::new(host),
            namespace: key.namespace.clone(),
        });
    }
}

/// Index keys of a ServiceEntry: the addresses of its inline endpoints.
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

/// Index key of a ServiceEntry that selects workloads: its namespace.
pub fn selecting_entry_key(key: &ObjectKey, entry: &Config<networking::ServiceEntry>, emit: &mut dyn FnMut(Namespace)) {
    if entry.spec.workload_selector.is_some() {
        emit(key.namespace.clone());
    }
}

/// The services that a change of Kubernetes Services, ServiceImports or ServiceEntries may concern.
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

/// Derives one service: the Kubernetes Services of this name in all clusters, else the ServiceEntries of the namespace
/// that declare the host. A Kubernetes Service wins over ServiceEntries, so that nobody can occupy its name.
pub fn service(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<Service> {
    let mut service = kube::service(cx, mesh, key).or_else(|| entry::service(cx, mesh, key))?;
    if service.resolution != Resolution::Alias {
        service.aliases = alias::aliases(cx, mesh, &key.hostname);
    }
    Some(service)
}

/// The audience of a service, with the mesh's default for objects that name none.
fn export_to(cx: &Cx, mesh: &MeshSnapshot, written: &[String], own: &Namespace) -> ExportTo {
    export::read(written, &mesh.mesh_config(cx).default_service_export_to, own)
}

/// The traffic distribution: the Service's field, else the object's annotation, else that of its namespace.
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
