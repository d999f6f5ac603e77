//! Services: one row per (namespace, host name), with the services of all clusters and registries.

pub mod alias;
pub mod auto_allocation;
pub(super) mod entry;
pub mod entry_lists;
pub(super) mod kube;
pub mod mcs;
pub mod member;
pub mod node_selector;
mod ports;
mod protocol;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use litemap::LiteMap;
use smol_str::SmolStr;

use super::{
    MeshSnapshot,
    export::{self, ExportTo},
    installation::Installation,
};
use crate::{
    api::{Config, Meta, kube::service::TargetPort},
    base::{ClusterId, Hostname, Labels, Namespace, ObjectKey, Shared},
    proto::istio::networking::v1alpha3 as networking,
    table::Cx,
};

pub use member::{InboundPorts, MergedPort, MergedService, ScopedService, ServiceRef};
pub use ports::ServicePorts;
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

impl Resolution {
    /// Returns true if proxies resolve the endpoints, which are part of the cluster.
    pub fn is_dns(self) -> bool {
        matches!(self, Self::DnsLb | Self::DnsRoundRobinLb)
    }
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
///
/// The lists without a limit are shared: a small ServiceEntry may have 65,536 services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Host and namespace.
    pub key: ServiceKey,
    /// The name of the object: Kubernetes Service or ServiceEntry.
    pub name: SmolStr,
    /// The registry that declares it.
    pub registry: Registry,
    /// ServiceEntry that declares it, if any.
    pub service_entry: Option<ObjectKey>,
    /// Creation time in seconds since 1970; the older service wins conflicts.
    pub creation: i64,
    /// The ports, in declared order.
    pub ports: ServicePorts,
    /// Virtual IPs of a Kubernetes Service by cluster ([`UNSPECIFIED_IP`] without one); empty for ServiceEntries, whose
    /// address is in `default_address`. Most have one entry, for which a `BTreeMap` would take 640 bytes.
    pub cluster_vips: LiteMap<ClusterId, Vec<SmolStr>>,
    /// `0.0.0.0` if the service has no address; otherwise the first address (a ServiceEntry may have a CIDR).
    pub default_address: SmolStr,
    /// Auto-allocated IPv4 address (ServiceEntries without addresses), empty if none.
    pub auto_ipv4: SmolStr,
    /// Auto-allocated IPv6 address, empty if none.
    pub auto_ipv6: SmolStr,
    /// Every service of the host and namespace, oldest first, if there are several; otherwise empty. The row itself is
    /// the one that represents the host, with the ports that others of its class add.
    pub members: Vec<Shared<Service>>,
    /// Services of one row and class agree in all that prevents merging their ports.
    pub merge_class: u32,
    /// The way in which proxies find its endpoints.
    pub resolution: Resolution,
    /// True if it is outside the mesh: `MESH_EXTERNAL`, or a Kubernetes ExternalName.
    pub mesh_external: bool,
    /// The namespaces that see it.
    pub export_to: Shared<ExportTo>,
    /// Additional accounts from annotations or `subjectAltNames`, sorted.
    pub service_accounts: Shared<[SmolStr]>,
    /// Labels of the object.
    pub labels: Shared<Labels>,
    /// Label selector of the Kubernetes Service or `workloadSelector` of the ServiceEntry.
    pub selector: Shared<Labels>,
    /// True for a ServiceEntry with `workloadSelector`, which may be without labels.
    pub selects_workloads: bool,
    /// ExternalName services that resolve to this one, sorted.
    pub aliases: Shared<[ServiceKey]>,
    /// The external name of a Kubernetes ExternalName service, empty otherwise.
    pub external_name: Hostname,
    /// True for `internalTrafficPolicy: Local`.
    pub node_local: bool,
    /// Preference for near endpoints: of the Service, or else of annotations of the object or its namespace.
    pub traffic_distribution: TrafficDistribution,
    /// `publishNotReadyAddresses`.
    pub publish_not_ready: bool,
    /// True if an annotation of the ServiceEntry sets the connect strategy RACE_FIRST_TCP_CONNECT.
    pub race_first_tcp_connect: bool,
    /// True if the service is headless (`clusterIP: None`).
    pub headless: bool,
    /// External addresses (load balancer, externalIPs, nodes of a NodePort) in the first cluster that has the Service,
    /// for gateways.
    pub external_addresses: BTreeMap<ClusterId, Shared<[SmolStr]>>,
    /// Service port → node port in that cluster, if its external addresses are those of nodes.
    pub external_ports: BTreeMap<ClusterId, BTreeMap<u32, u32>>,
}

/// Address of services without one.
pub const UNSPECIFIED_IP: &str = "0.0.0.0";

impl Service {
    /// Returns the value of a label.
    pub fn label(&self, key: &str) -> Option<&SmolStr> {
        self.labels.get(key)
    }
}

/// Attributes that decide the visibility and precedence of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visibility {
    /// The namespaces that see it.
    pub export_to: Shared<ExportTo>,
    /// The registry that declares it.
    pub registry: Registry,
    /// Creation time in seconds since 1970.
    pub creation: i64,
    /// Tie-breaker for services of the same age: the object's name, or the host of ServiceEntries.
    pub name: SmolStr,
    /// The port numbers, sorted (an egress listener may name one); those of a row with members include merged ones.
    pub ports: Vec<u32>,
    /// ExternalName services that resolve to this one.
    pub aliases: Shared<[ServiceKey]>,
    /// The external name of a Kubernetes ExternalName service, empty otherwise.
    pub external_name: Hostname,
    /// Services of one row and class agree in all that prevents merging their ports.
    pub merge_class: u32,
    /// The same of every service of the row, oldest first, if there are several; otherwise empty.
    pub members: Box<[Visibility]>,
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
    if visibility.members.is_empty() {
        audiences(&visibility.export_to).for_each(&mut both);
        return;
    }
    let members = visibility.members.iter();
    let all: BTreeSet<Option<Namespace>> = members.flat_map(|member| audiences(&member.export_to)).collect();
    all.into_iter().for_each(both);
}

/// Returns the namespaces that see a service; `None` for all.
fn audiences(export_to: &ExportTo) -> impl Iterator<Item = Option<Namespace>> {
    let public = (*export_to == ExportTo::Public).then_some(None);
    let some = match export_to {
        ExportTo::Namespaces(namespaces) => Some(namespaces),
        ExportTo::Public | ExportTo::None => None,
    };
    public.into_iter().chain(some.into_iter().flatten().cloned().map(Some))
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

/// Derives the services of a host: that of the Kubernetes Services of this name in all clusters, and those of the
/// ServiceEntries of the namespace that declare the host.
pub fn service(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<Service> {
    let own = kube::service(cx, mesh, key);
    let entries = entry::services(cx, mesh, key);
    let concrete = own.as_ref().is_some_and(|own| own.resolution != Resolution::Alias) || !entries.is_empty();
    let aliases = if concrete {
        alias::of_host(cx, mesh, &key.hostname)
    } else {
        Shared::default()
    };
    member::combined(own, entries, &aliases)
}

/// Returns the visibility of a service, by default the mesh's.
fn export_to(cx: &Cx, mesh: &MeshSnapshot, written: &[String], own: &Namespace) -> Shared<ExportTo> {
    export::read(written, &mesh.mesh_config(cx).default_service_export_to, own).into()
}

/// Returns the traffic distribution: the Service's field, or else the object's annotation, or else that of its
/// namespace.
pub(super) fn traffic_distribution(cx: &Cx, mesh: &MeshSnapshot, spec: &str, meta: &Meta) -> TrafficDistribution {
    match spec {
        "PreferSameZone" | "PreferClose" => return TrafficDistribution::PreferSameZone,
        "PreferSameNode" => return TrafficDistribution::PreferSameNode,
        _ => {}
    }
    annotated_distribution(&meta.annotations).unwrap_or_else(|| {
        let namespace = ObjectKey::new(meta.cluster(), "", SmolStr::new(meta.namespace().as_str()));
        let namespace = mesh.namespaces.get(cx, &namespace);
        namespace
            .and_then(|namespace| annotated_distribution(&namespace.meta.annotations))
            .unwrap_or_default()
    })
}

/// Returns the traffic distribution that annotations set; `None` if they do not.
fn annotated_distribution(annotations: &Labels) -> Option<TrafficDistribution> {
    let value = annotations.get("networking.istio.io/traffic-distribution")?;
    Some(match value.to_ascii_lowercase().as_str() {
        "" => return None,
        "prefersamezone" | "preferclose" => TrafficDistribution::PreferSameZone,
        "prefersamenode" => TrafficDistribution::PreferSameNode,
        _ => TrafficDistribution::Any,
    })
}

/// Derives the visibility of one row.
pub fn visibility(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<Visibility> {
    let service = mesh.services.get(cx, key)?;
    let members = service.members.iter();
    Some(Visibility {
        members: members.map(|member| visibility_of(member)).collect(),
        ..visibility_of(service)
    })
}

fn visibility_of(service: &Service) -> Visibility {
    let mut ports: Vec<u32> = service.ports.iter().map(|port| port.number).collect();
    ports.sort_unstable();
    Visibility {
        export_to: service.export_to.clone(),
        registry: service.registry,
        creation: service.creation,
        name: match service.registry {
            Registry::Kubernetes => service.name.clone(),
            Registry::External => SmolStr::new(&*service.key.hostname),
        },
        ports,
        aliases: service.aliases.clone(),
        external_name: service.external_name.clone(),
        merge_class: service.merge_class,
        members: Box::default(),
    }
}
