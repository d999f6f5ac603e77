//! Services as ztunnels know them: those that objects declare, and one for each host of a namespace.
//!
//! Parity (pilot/pkg/serviceregistry/ambient/services.go): of several objects that declare a host in one namespace, the
//! Service counts, or else the oldest ServiceEntry. One service of each host is canonical, which clients of namespaces
//! without one of their own use: that of a Service, or else of the oldest ServiceEntry.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use smol_str::SmolStr;

use super::{SelectorKey, cluster_network, from_octets, network_address, selector_keys, waypoint};
use crate::{
    api::{Config, Meta, kube, kube::service::TargetPort},
    base::{ClusterId, Hostname, Labels, Namespace, NetworkId, ObjectKey, Shared, cidr, host},
    model::{
        MeshSnapshot, ServiceKey,
        identity::spiffe_id,
        inputs::InputWriters,
        service::{
            Protocol, TrafficDistribution, entry, entry_lists::EntryLists, kube::spans_clusters, traffic_distribution,
        },
        waypoint::{ServedService, for_service, ingress_label},
        workload::address_name,
    },
    proto::istio::{
        networking::v1alpha3::{ServiceEntry, service_entry::Resolution},
        workload::{
            AppProtocol, IpFamilies, LoadBalancing, NetworkAddress, Port, Service, Workload,
            load_balancing::{HealthPolicy, Mode, Scope},
        },
    },
    table::Cx,
};

/// Kind of an object that declares services, in the order of precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ServiceSource {
    /// A Service.
    Service,
    /// A ServiceEntry.
    ServiceEntry,
}

/// A host that an object declares.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeclaredKey {
    /// The kind.
    pub source: ServiceSource,
    /// The object.
    pub object: ObjectKey,
    /// The host.
    pub hostname: Hostname,
}

/// A service that an object declares.
#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredService {
    /// Its key.
    pub key: DeclaredKey,
    /// Creation time of the object.
    pub creation: i64,
    /// The service as it is sent, if it is the only one of its host; without `subject_alt_names`.
    pub message: Service,
    /// Its names in certificates. All hosts of a ServiceEntry share them, because their number has no limit.
    pub subject_alt_names: Shared<[SmolStr]>,
    /// Names of the ports by number.
    pub port_names: BTreeMap<u32, PortNames>,
    /// Labels of the workloads that it selects; empty for none.
    pub selector: Shared<Labels>,
    /// Its waypoint.
    pub waypoint: Option<ObjectKey>,
    /// True if it spans clusters (`serviceScopeConfigs`).
    pub is_global: bool,
}

/// Names of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortNames {
    /// The name of the port.
    pub name: SmolStr,
    /// The named target port of a Service; empty for a number.
    pub target: SmolStr,
}

/// Returns the hosts whose declarations may have changed.
pub fn candidates(mesh: &MeshSnapshot, inputs: &InputWriters) -> Vec<DeclaredKey> {
    let services = inputs.kube_services.changes().iter();
    let services = services.filter(|(key, ..)| mesh.installation.is_ambient(&key.cluster));
    let services = services.map(|(key, ..)| DeclaredKey {
        source: ServiceSource::Service,
        object: key.clone(),
        hostname: hostname(mesh, &key.namespace, &key.name),
    });
    let entries = inputs.service_entries.changes().iter();
    let entries = entries.filter(|(key, ..)| is_own(mesh, key));
    let entries = entries.flat_map(|(key, old, new)| {
        let versions = [old, new].into_iter().flatten();
        let hosts: BTreeSet<&String> = versions.flat_map(|entry| &entry.spec.hosts).collect();
        hosts.into_iter().map(|hostname| DeclaredKey {
            source: ServiceSource::ServiceEntry,
            object: key.clone(),
            hostname: Hostname::new(hostname),
        })
    });
    services.chain(entries).collect()
}

/// Returns true for objects of the config cluster in ambient mode.
pub(super) fn is_own(mesh: &MeshSnapshot, key: &ObjectKey) -> bool {
    mesh.installation.features.pilot_enable_ambient && key.cluster == mesh.installation.cluster
}

/// Returns the host of a Service.
pub(super) fn hostname(mesh: &MeshSnapshot, namespace: &Namespace, name: &str) -> Hostname {
    Hostname::from(format!("{name}.{namespace}.svc.{}", mesh.installation.domain))
}

/// Derives the service of one host of an object.
pub fn declared(cx: &Cx, mesh: &MeshSnapshot, key: &DeclaredKey) -> Option<DeclaredService> {
    match key.source {
        ServiceSource::Service => of_service(cx, mesh, key, mesh.kube_services.get(cx, &key.object)?),
        ServiceSource::ServiceEntry => of_entry(cx, mesh, key, mesh.service_entries.get(cx, &key.object)?),
    }
}

fn of_service(cx: &Cx, mesh: &MeshSnapshot, key: &DeclaredKey, object: &kube::Service) -> Option<DeclaredService> {
    if object.is_external_name() {
        return None;
    }
    let is_global = mesh.installation.features.ambient_enable_multi_network && spans_clusters(cx, mesh, object);
    if !is_global && !is_own(mesh, &key.object) {
        return None;
    }
    let network = cluster_network(cx, mesh, &key.object.cluster);
    let vips = object.cluster_ips.iter().filter(|ip| !ip.is_empty() && *ip != "None");
    let addresses = vips.map(|ip| Some(network_address(&network, cidr::parse_ip(ip)?)));
    let message = Service {
        addresses: addresses.collect::<Option<_>>()?,
        ports: object.ports.iter().map(port).collect(),
        load_balancing: load_balancing(cx, mesh, object),
        ip_families: ip_families(&object.ip_families).into(),
        canonical: true,
        ..Service::default()
    };
    let names = object.ports.iter().map(|port| {
        let target = match &port.target {
            TargetPort::Name(name) => name.clone(),
            TargetPort::Number(_) => SmolStr::default(),
        };
        let name = port.name.clone();
        (port.number, PortNames { name, target })
    });
    let mut service = DeclaredService::new(cx, mesh, key, &object.meta, message);
    service.port_names = names.collect();
    service.selector = object.selector.clone().into();
    service.is_global = is_global;
    Some(service)
}

impl DeclaredService {
    /// Creates a service with what all kinds have in common: its names and its waypoint.
    fn new(cx: &Cx, mesh: &MeshSnapshot, key: &DeclaredKey, meta: &Meta, message: Service) -> Self {
        let (cluster, namespace) = (&key.object.cluster, meta.namespace());
        let waypoint = for_service(cx, mesh, cluster, &meta.labels, namespace).ok().flatten();
        let address = waypoint.as_ref().map(|gateway| waypoint::address_of(cx, mesh, gateway));
        let ingress = || ingress_label(cx, mesh, cluster, &meta.labels, namespace).unwrap_or_default();
        Self {
            key: key.clone(),
            creation: meta.creation,
            message: Service {
                name: meta.name().to_string(),
                namespace: namespace.to_string(),
                hostname: key.hostname.to_string(),
                waypoint: address.flatten(),
                ingress_use_waypoint: waypoint.is_some() && ingress(),
                ..message
            },
            subject_alt_names: Shared::default(),
            port_names: BTreeMap::new(),
            selector: Shared::default(),
            waypoint,
            is_global: false,
        }
    }

    /// Returns host and namespace.
    pub fn name(&self) -> ServiceKey {
        ServiceKey {
            hostname: self.key.hostname.clone(),
            namespace: self.key.object.namespace.clone(),
        }
    }

    /// Returns the order of precedence among the services of a host.
    fn precedence(&self) -> (ServiceSource, i64, &SmolStr, &Namespace) {
        let object = &self.key.object;
        (self.key.source, self.creation, &object.name, &object.namespace)
    }
}

fn port(port: &kube::service::Port) -> Port {
    Port {
        service_port: port.number,
        target_port: match port.target {
            TargetPort::Number(number) => number,
            TargetPort::Name(_) => 0,
        },
        app_protocol: app_protocol(Protocol::of_kube_port(port)).into(),
    }
}

fn app_protocol(protocol: Protocol) -> AppProtocol {
    match protocol {
        Protocol::Http => AppProtocol::Http11,
        Protocol::Http2 => AppProtocol::Http2,
        Protocol::Grpc => AppProtocol::Grpc,
        Protocol::Tls | Protocol::Https => AppProtocol::Tls,
        Protocol::Tcp => AppProtocol::Tcp,
        _ => AppProtocol::Unknown,
    }
}

fn ip_families(families: &[SmolStr]) -> IpFamilies {
    match families {
        [one] if one == "IPv4" => IpFamilies::Ipv4Only,
        [_] => IpFamilies::Ipv6Only,
        [_, _] => IpFamilies::Dual,
        _ => IpFamilies::Automatic,
    }
}

fn load_balancing(cx: &Cx, mesh: &MeshSnapshot, object: &kube::Service) -> Option<LoadBalancing> {
    let found = if object.node_local {
        Some(LoadBalancing {
            routing_preference: vec![Scope::Node.into()],
            mode: Mode::Strict.into(),
            ..LoadBalancing::default()
        })
    } else {
        preference(traffic_distribution(
            cx,
            mesh,
            &object.traffic_distribution,
            &object.meta,
        ))
    };
    if !object.publish_not_ready {
        return found;
    }
    Some(LoadBalancing {
        health_policy: HealthPolicy::AllowAll.into(),
        ..found.unwrap_or_default()
    })
}

fn preference(distribution: TrafficDistribution) -> Option<LoadBalancing> {
    let scopes: &[Scope] = match distribution {
        TrafficDistribution::Any => return None,
        TrafficDistribution::PreferSameZone => &[Scope::Network, Scope::Region, Scope::Zone],
        TrafficDistribution::PreferSameNode => {
            &[Scope::Network, Scope::Region, Scope::Zone, Scope::Subzone, Scope::Node]
        }
    };
    Some(LoadBalancing {
        routing_preference: scopes.iter().map(|scope| (*scope).into()).collect(),
        mode: Mode::Failover.into(),
        ..LoadBalancing::default()
    })
}

fn of_entry(cx: &Cx, mesh: &MeshSnapshot, key: &DeclaredKey, entry: &Config<ServiceEntry>) -> Option<DeclaredService> {
    let spec = &entry.spec;
    let is_declared = spec.hosts.iter().any(|hostname| *hostname == *key.hostname);
    if !is_declared || !entry::applies(cx, mesh, entry, &key.hostname) {
        return None;
    }
    let network = cluster_network(cx, mesh, &key.object.cluster);
    let addresses = spec.addresses.iter().map(|text| range(&network, text));
    let mut addresses: Vec<NetworkAddress> = addresses.collect::<Option<_>>()?;
    if addresses.is_empty() {
        addresses = allocated(mesh, entry, &key.hostname, &network);
    }
    let load_balancing = if spec.resolution() == Resolution::None {
        Some(LoadBalancing {
            mode: Mode::Passthrough.into(),
            health_policy: HealthPolicy::AllowAll.into(),
            ..LoadBalancing::default()
        })
    } else {
        preference(traffic_distribution(cx, mesh, "", &entry.meta))
    };
    let ports = spec.ports.iter().map(|port| Port {
        service_port: port.number,
        target_port: if port.target_port == 0 {
            port.number
        } else {
            port.target_port
        },
        app_protocol: app_protocol(Protocol::parse(&port.protocol)).into(),
    });
    let message = Service {
        addresses,
        ports: ports.collect(),
        load_balancing,
        ..Service::default()
    };
    let names = spec.ports.iter().map(|port| {
        let (name, target) = (SmolStr::new(&port.name), SmolStr::default());
        (port.number, PortNames { name, target })
    });
    let lists = EntryLists::of(cx, mesh, entry);
    let mut service = DeclaredService::new(cx, mesh, key, &entry.meta, message);
    service.subject_alt_names = lists.subject_alt_names.clone();
    service.port_names = names.collect();
    service.selector = lists.selector.clone();
    Some(service)
}

/// Returns an address or a range, without the bits beyond its length.
fn range(network: &NetworkId, text: &str) -> Option<NetworkAddress> {
    let net: IpNet = cidr::parse(text)?.trunc();
    let is_range = net.prefix_len() != net.max_prefix_len();
    Some(NetworkAddress {
        length: is_range.then(|| u32::from(net.prefix_len())),
        ..network_address(network, net.addr())
    })
}

/// Returns the addresses allocated to a host, as the status has them.
fn allocated(
    mesh: &MeshSnapshot,
    entry: &Config<ServiceEntry>,
    hostname: &Hostname,
    network: &NetworkId,
) -> Vec<NetworkAddress> {
    let resolution = entry.spec.resolution();
    let label = entry.meta.labels.get("networking.istio.io/enable-autoallocate-ip");
    let is_refused = label.is_some_and(|value| value.eq_ignore_ascii_case("false"));
    let is_suited = match resolution {
        Resolution::None => false,
        Resolution::DynamicDns => true,
        Resolution::Static | Resolution::Dns | Resolution::DnsRoundRobin => !host::is_wildcard(hostname),
    };
    if is_refused || !is_suited || !mesh.installation.features.pilot_enable_ip_autoallocate {
        return Vec::new();
    }
    let status = entry.status.as_ref();
    let listed = status.and_then(|status| status.get("addresses")?.as_array());
    let of_host = listed
        .into_iter()
        .flatten()
        .filter(|address| address["host"].as_str() == Some(hostname.as_str()));
    let parsed = of_host.filter_map(|address| cidr::parse_ip(address["value"].as_str()?));
    parsed.map(|address| network_address(network, address)).collect()
}

/// Emits the index key of a declared service: its host in its cluster.
pub fn host_key(key: &DeclaredKey, _: &DeclaredService, emit: &mut dyn FnMut((ClusterId, Hostname))) {
    emit((key.object.cluster.clone(), key.hostname.clone()));
}

/// A service in one cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterServiceKey {
    /// The cluster.
    pub cluster: ClusterId,
    /// Host and namespace.
    pub service: ServiceKey,
}

/// The service that counts for a host of a namespace in one cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterService {
    /// The service.
    pub declared: Shared<DeclaredService>,
    /// True if it is the canonical one of its host.
    pub is_canonical: bool,
}

impl ClusterService {
    /// Returns the service as it is sent, without its names in certificates.
    fn message(&self) -> Service {
        Service {
            canonical: self.is_canonical || self.declared.message.canonical,
            ..self.declared.message.clone()
        }
    }
}

/// The services that count for a host in one cluster, one for each namespace. The rows of its namespaces read this row,
/// so that they need not compare all declarations of the host, of which each tenant may have one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostServices {
    /// The services, by namespace.
    services: Box<[DeclaredKey]>,
    /// Position of the canonical one.
    canonical: usize,
}

/// Derives the services of a host in one cluster. A host that one object declares has no row.
pub fn of_host(cx: &Cx, mesh: &MeshSnapshot, host: &(ClusterId, Hostname)) -> Option<HostServices> {
    let rows = mesh.declared_services_by_host.get(cx, host);
    let mut rows: Vec<&DeclaredService> = rows.map(|(_, row)| &**row).collect();
    if rows.len() < 2 {
        return None;
    }
    rows.sort_by(|one, other| one.precedence().cmp(&other.precedence()));
    let first = rows[0];
    // This keeps the precedence within each namespace.
    rows.sort_by(|one, other| one.key.object.namespace.cmp(&other.key.object.namespace));
    rows.dedup_by(|later, earlier| later.key.object.namespace == earlier.key.object.namespace);
    Some(HostServices {
        services: rows.iter().map(|row| row.key.clone()).collect(),
        canonical: rows.iter().position(|row| row.key == first.key)?,
    })
}

/// Derives the service of a host in one cluster.
pub fn in_cluster(cx: &Cx, mesh: &MeshSnapshot, key: &ClusterServiceKey) -> Option<ClusterService> {
    let host = (key.cluster.clone(), key.service.hostname.clone());
    let namespace = &key.service.namespace;
    let Some(several) = mesh.host_services.get(cx, &host) else {
        let (only, declared) = mesh.declared_services_by_host.get(cx, &host).next()?;
        return (only.object.namespace == *namespace).then(|| ClusterService {
            declared: declared.clone(),
            is_canonical: true,
        });
    };
    let services = &several.services;
    let position = services
        .binary_search_by(|service| service.object.namespace.cmp(namespace))
        .ok()?;
    Some(ClusterService {
        declared: mesh.declared_services.get(cx, &services[position])?.clone(),
        is_canonical: position == several.canonical,
    })
}

/// The index key of a selector in a cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterSelectorKey {
    pub(super) cluster: ClusterId,
    pub(super) selector: SelectorKey,
}

/// Emits the index keys of a service that selects workloads.
pub fn selector_entry(key: &ClusterServiceKey, row: &ClusterService, emit: &mut dyn FnMut(ClusterSelectorKey)) {
    for selector in selector_keys(&key.service.namespace, &row.declared.selector) {
        emit(ClusterSelectorKey {
            cluster: key.cluster.clone(),
            selector,
        });
    }
}

/// A service as ztunnels receive it.
#[derive(Clone, Debug, PartialEq)]
pub struct AmbientService {
    /// The service, without `subject_alt_names`.
    pub message: Service,
    /// Its names in certificates; see [`DeclaredService::subject_alt_names`].
    pub subject_alt_names: Shared<[SmolStr]>,
    /// True if it spans clusters.
    pub is_global: bool,
    /// The service of its waypoint, if that is known.
    pub waypoint: Option<ServiceKey>,
}

impl AmbientService {
    /// Returns the service as it is sent.
    pub fn sent(&self) -> Service {
        let names = self.subject_alt_names.iter();
        Service {
            subject_alt_names: names.map(ToString::to_string).collect(),
            ..self.message.clone()
        }
    }

    /// Returns the addresses in a network, without ranges; all of them if the network is unknown.
    pub fn addresses_in<'a>(&'a self, network: &'a NetworkId) -> impl Iterator<Item = IpAddr> + 'a {
        let all = self.message.addresses.iter();
        let there = all.filter(move |address| network.is_empty() || network.as_str() == address.network);
        there.filter_map(|address| from_octets(&address.address))
    }

    /// Returns the names of its addresses, with the length of ranges.
    pub fn aliases(&self) -> impl Iterator<Item = SmolStr> {
        self.message.addresses.iter().filter_map(|address| {
            let name = address_name(&address.network, &from_octets(&address.address)?);
            Some(match address.length {
                Some(length) => SmolStr::from(format!("{name}/{length}")),
                None => name,
            })
        })
    }
}

/// Emits the names by which ztunnels request the addresses of a service. Ranges go by their first address.
pub fn address_keys(_: &ServiceKey, service: &AmbientService, emit: &mut dyn FnMut(SmolStr)) {
    for address in &service.message.addresses {
        if let Some(ip) = from_octets(&address.address) {
            emit(address_name(&address.network, &ip));
        }
    }
}

/// Returns the resource name of a service.
pub fn resource_name(key: &ServiceKey) -> SmolStr {
    SmolStr::from(format!("{}/{}", key.namespace, key.hostname))
}

/// Returns the service that represents those of all clusters: that of the config cluster, or else the first one.
pub(super) fn base<'a>(cx: &Cx, mesh: &'a MeshSnapshot, key: &ServiceKey) -> Option<&'a Shared<ClusterService>> {
    let mut rows = mesh.cluster_services_by_name.get(cx, key);
    let first = rows.next()?;
    let is_own = |(row, _): &(&ClusterServiceKey, _)| row.cluster == mesh.installation.cluster;
    let own = std::iter::once(first).chain(rows).find(is_own);
    Some(own.unwrap_or(first).1)
}

/// Derives a service over clusters.
///
/// Parity (pilot/pkg/serviceregistry/ambient/multicluster.go): a service of the config cluster that does not span
/// clusters stands alone. Of others, the addresses and names of all clusters count, and the rest is that of the config
/// cluster or else of the first one.
pub fn service(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<AmbientService> {
    let base = base(cx, mesh, key)?;
    let mut message = base.message();
    let mut subject_alt_names = base.declared.subject_alt_names.clone();
    if base.declared.is_global {
        let rows: Vec<_> = mesh.cluster_services_by_name.get(cx, key).collect();
        if rows.len() > 1 {
            let all = rows.iter().flat_map(|(_, row)| &row.declared.message.addresses);
            let by_name: BTreeMap<String, &NetworkAddress> = all
                .filter_map(|address| {
                    let ip = from_octets(&address.address)?;
                    let length = address.length.unwrap_or(if ip.is_ipv4() { 32 } else { 128 });
                    Some((format!("{}/{ip}/{length}", address.network), address))
                })
                .collect();
            message.addresses = by_name.into_values().cloned().collect();
        }
        let names = rows.iter().flat_map(|(_, row)| row.declared.subject_alt_names.iter());
        let mut names: BTreeSet<SmolStr> = names.cloned().collect();
        names.extend(remote_identities(cx, mesh, key));
        subject_alt_names = names.into_iter().collect::<Vec<_>>().into();
    }
    let waypoint = base.declared.waypoint.as_ref();
    let waypoint = waypoint.and_then(|gateway| mesh.waypoints.get(cx, gateway)?.service.clone());
    Some(AmbientService {
        message,
        subject_alt_names,
        is_global: base.declared.is_global,
        waypoint,
    })
}

/// Emits the waypoint of a service that spans clusters.
pub fn waypoint_of_global(_: &ServiceKey, service: &AmbientService, emit: &mut dyn FnMut(ServiceKey)) {
    if service.is_global {
        service.waypoint.iter().for_each(|waypoint| emit(waypoint.clone()));
    }
}

/// Derives what a gateway between networks depends on, for the services that it serves: those that span clusters, and
/// their waypoints.
///
/// Parity (pilot/pkg/serviceregistry/ambient/ambientindex.go, `AllLocalNetworkGlobalServices`).
pub fn exposed(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<ServedService> {
    let is_global = mesh.ambient_services.get(cx, key)?.is_global;
    if !is_global && mesh.global_services_by_waypoint.get(cx, key).next().is_none() {
        return None;
    }
    mesh.services.get(cx, key).map(|service| ServedService::of(service))
}

/// Returns the identities of the workloads of a service in other networks.
fn remote_identities(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Vec<SmolStr> {
    let trust_domain = &mesh.mesh_config(cx).trust_domain;
    let workloads = mesh.hidden_workloads_by_service.get(cx, key);
    let identity = |workload: Workload| {
        spiffe_id(
            trust_domain,
            &Namespace::new(&workload.namespace),
            &workload.service_account,
        )
    };
    workloads.map(|(_, workload)| identity(workload.decoded())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{features::Features, fixture, installation::Installation};

    #[test]
    fn services_of_a_host_do_not_read_all_of_its_declarations() {
        let declared = |number: usize| {
            format!(
                "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: e, namespace: n{number}}}\n\
                 spec: {{hosts: [h.com], ports: [{{number: 80, name: http, protocol: HTTP}}]}}\n"
            )
        };
        let installation = Installation {
            features: Features {
                pilot_enable_ambient: true,
                ..Features::default()
            },
            ..Installation::default()
        };
        let objects = (0..50).map(declared).collect::<Vec<String>>().concat();
        let world = fixture::folder_world(installation, &[("entries.yaml", &objects)]);
        let mesh = world.snapshot();
        let key = ClusterServiceKey {
            cluster: fixture::CLUSTER,
            service: ServiceKey {
                hostname: "h.com".into(),
                namespace: "n7".into(),
            },
        };
        let cx = Cx::recording();
        let service = in_cluster(&cx, &mesh, &key).expect("the host is declared");
        assert!(!service.is_canonical, "that of n0 is");
        let reads = cx.into_reads();
        let all = Cx::recording();
        let declared = mesh
            .declared_services_by_host
            .get(&all, &(key.cluster, key.service.hostname));
        assert_eq!(declared.count(), 50);
        assert!(all.into_reads().iter().all(|read| !reads.contains(read)));
    }
}
