//! Workloads as ztunnels know them: pods, WorkloadEntries, endpoints of ServiceEntries, and endpoints of EndpointSlices
//! without a pod.
//!
//! Parity (pilot/pkg/serviceregistry/ambient/workloads.go).

mod endpoints;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use bytes::Bytes;
use prost::Message;
use smol_str::SmolStr;

pub use self::endpoints::{
    EntryEndpoints, SliceTargets, SliceWorkloads, entry_candidates, entry_endpoints, slice_candidates, slice_targets,
    slice_workloads, slices_with_workloads, target_pods,
};
use super::{
    cluster_network, gateway, octets, policy,
    service::{ClusterSelectorKey, ClusterService, ClusterServiceKey, ServiceSource, hostname, is_own},
    trust_domain, waypoint,
};
use crate::{
    api::{
        Config,
        kube::{
            EndpointSlice, Pod,
            endpoint_slice::{PodReference, SliceEndpoint},
            pod::REDIRECTION,
        },
    },
    base::{ClusterId, Labels, NetworkId, ObjectKey, Shared, cidr, select},
    model::{
        MeshSnapshot, ServiceKey, canonical,
        inputs::InputWriters,
        workload::{TUNNEL_HTTP, TUNNEL_LABEL, address_name, entry_labels, entry_name, label_map},
    },
    proto::istio::{
        networking::v1alpha3::{ServiceEntry, WorkloadEntry, service_entry::Resolution},
        workload::{Locality, NetworkMode, Port, PortList, TunnelProtocol, Workload, WorkloadStatus, WorkloadType},
    },
    table::Cx,
};

/// Groups and kinds in the names of workloads, between the cluster and the object.
const POD: &str = "//Pod/";
const WORKLOAD_ENTRY: &str = "/networking.istio.io/WorkloadEntry/";
const SERVICE_ENTRY: &str = "/networking.istio.io/ServiceEntry/";
const ENDPOINT_SLICE: &str = "/discovery.k8s.io/EndpointSlice/";

/// The number of services that a pod or WorkloadEntry may serve. Each is part of the message of each workload, and so
/// are its ports.
const MAX_SERVICES: usize = 1_000;
/// The number of ports that a pod, a WorkloadEntry or an endpoint of a slice may have for all its services.
const MAX_PORTS: usize = 10_000;

/// Resource name of a workload.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorkloadUid(SmolStr);

/// Origin of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Source {
    Pod(ObjectKey),
    WorkloadEntry(ObjectKey),
    /// An endpoint of a ServiceEntry, by its address; or one of its hosts, if it has no endpoints.
    ServiceEntry(ObjectKey, SmolStr),
    /// An endpoint of an EndpointSlice, by its first address.
    EndpointSlice(ObjectKey, SmolStr),
}

impl Source {
    fn object(&self) -> &ObjectKey {
        match self {
            Self::Pod(key) | Self::WorkloadEntry(key) | Self::ServiceEntry(key, _) | Self::EndpointSlice(key, _) => key,
        }
    }
}

impl WorkloadUid {
    /// Returns a name without any check.
    pub fn new(name: impl Into<SmolStr>) -> Self {
        Self(name.into())
    }

    /// Returns the text.
    pub fn text(&self) -> &SmolStr {
        &self.0
    }

    fn of(source: &Source) -> Self {
        let name = |key: &ObjectKey, kind: &str| format!("{}{kind}{}/{}", key.cluster, key.namespace, key.name);
        Self(SmolStr::from(match source {
            Source::Pod(key) => name(key, POD),
            Source::WorkloadEntry(key) => name(key, WORKLOAD_ENTRY),
            Source::ServiceEntry(key, address) => format!("{}/{address}", name(key, SERVICE_ENTRY)),
            Source::EndpointSlice(key, address) => format!("{}/{address}", name(key, ENDPOINT_SLICE)),
        }))
    }

    /// Returns the origin. The name of a cluster may contain slashes, and the address of an endpoint any text.
    fn source(&self) -> Option<Source> {
        for kind in [SERVICE_ENTRY, ENDPOINT_SLICE, WORKLOAD_ENTRY, POD] {
            let Some((cluster, rest)) = self.0.split_once(kind) else {
                continue;
            };
            let mut rest = rest.splitn(3, '/');
            let key = ObjectKey::new(&ClusterId::new(cluster), rest.next()?, rest.next()?);
            return match (kind, rest.next().map(SmolStr::new)) {
                (SERVICE_ENTRY, Some(address)) => Some(Source::ServiceEntry(key, address)),
                (ENDPOINT_SLICE, Some(address)) => Some(Source::EndpointSlice(key, address)),
                (WORKLOAD_ENTRY, None) => Some(Source::WorkloadEntry(key)),
                (POD, None) => Some(Source::Pod(key)),
                _ => None,
            };
        }
        None
    }
}

/// A workload as ztunnels receive it.
///
/// There may be a hundred thousand of these, so the message is kept encoded, which takes a quarter of the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AmbientWorkload {
    /// The encoded [`Workload`].
    pub message: Bytes,
    /// Its network.
    pub network: NetworkId,
    /// Its IP addresses.
    pub addresses: Box<[IpAddr]>,
    /// Its node; empty if unknown.
    pub node: SmolStr,
    /// The services that it serves.
    pub services: Box<[ServiceKey]>,
    /// True if it accepts HBONE.
    pub is_tunnelled: bool,
    /// True if it belongs to another network and is sent only as part of a workload that represents that network.
    pub is_hidden: bool,
}

impl AmbientWorkload {
    /// Encodes a workload.
    pub(super) fn new(message: &Workload, addresses: Vec<IpAddr>, services: Vec<ServiceKey>) -> Self {
        Self {
            message: message.encode_to_vec().into(),
            network: NetworkId::new(&message.network),
            addresses: addresses.into(),
            node: SmolStr::new(&message.node),
            services: services.into(),
            is_tunnelled: message.tunnel_protocol() == TunnelProtocol::Hbone,
            is_hidden: false,
        }
    }

    /// Decodes the message.
    pub fn decoded(&self) -> Workload {
        Workload::decode(&*self.message).expect("because it was encoded by this type")
    }

    /// Returns the names of its addresses.
    pub fn aliases(&self) -> impl Iterator<Item = SmolStr> {
        self.addresses
            .iter()
            .map(|address| address_name(&self.network, address))
    }
}

/// Returns the workloads that may have changed.
pub fn candidates(mesh: &MeshSnapshot, inputs: &InputWriters) -> Vec<WorkloadUid> {
    let pods = inputs.pods.changes().iter().map(|(key, ..)| key);
    let pods = pods
        .filter(|key| mesh.installation.is_ambient(&key.cluster))
        .cloned()
        .map(Source::Pod);
    let entries = inputs.workload_entries.changes().iter().map(|(key, ..)| key);
    let entries = entries
        .filter(|key| is_own(mesh, key))
        .cloned()
        .map(Source::WorkloadEntry);
    let services = inputs
        .service_entries
        .changes()
        .iter()
        .filter(|(key, ..)| is_own(mesh, key));
    let endpoints = services.flat_map(|(key, old, new)| {
        let versions = [old, new].into_iter().flatten();
        let addresses: BTreeSet<&str> = versions.flat_map(|entry| endpoint_addresses(&entry.spec)).collect();
        let source = |address: &str| Source::ServiceEntry(key.clone(), address.into());
        addresses.into_iter().map(source).collect::<Vec<_>>()
    });
    let slices = inputs.endpoint_slices.changes().iter();
    let slices = slices.filter(|(key, ..)| mesh.installation.is_ambient(&key.cluster));
    let slices = slices.flat_map(|(key, old, new)| {
        let versions = [old, new].into_iter().flatten();
        let addresses =
            versions.flat_map(|slice| without_pods(slice).filter_map(|(_, endpoint)| endpoint.addresses.first()));
        let addresses: BTreeSet<&SmolStr> = addresses.collect();
        let source = |address: &SmolStr| Source::EndpointSlice(key.clone(), address.clone());
        addresses.into_iter().map(source).collect::<Vec<_>>()
    });
    let all = pods.chain(entries).chain(endpoints).chain(slices);
    all.map(|source| WorkloadUid::of(&source)).collect()
}

/// Returns the addresses of the endpoints of a ServiceEntry. One that is resolved by DNS has its hosts by default.
fn endpoint_addresses(spec: &ServiceEntry) -> Vec<&str> {
    if has_implicit_endpoints(spec) {
        spec.hosts.iter().map(String::as_str).collect()
    } else {
        spec.endpoints
            .iter()
            .map(|endpoint| endpoint.address.as_str())
            .collect()
    }
}

fn has_implicit_endpoints(spec: &ServiceEntry) -> bool {
    let is_resolved = match spec.resolution() {
        Resolution::Dns | Resolution::DynamicDns | Resolution::DnsRoundRobin => true,
        Resolution::None | Resolution::Static => false,
    };
    is_resolved && spec.endpoints.is_empty() && spec.workload_selector.is_none()
}

/// Returns the endpoints of a slice that do not belong to pods, with their positions.
fn without_pods(slice: &EndpointSlice) -> impl Iterator<Item = (usize, &SliceEndpoint)> {
    let counts = slice.address_type != "FQDN" && !slice.service_name.is_empty();
    let endpoints = if counts { slice.endpoints.as_slice() } else { &[] };
    let endpoints = endpoints.iter().enumerate();
    endpoints.filter(|(_, endpoint)| endpoint.pod.is_none())
}

/// Returns the services of hosts that a ServiceEntry declares, except those that another object declares first.
fn declared_by<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    object: &ObjectKey,
    hosts: impl IntoIterator<Item = &'a str>,
) -> Services<'a> {
    let keys = hosts.into_iter().map(|host| ClusterServiceKey {
        cluster: object.cluster.clone(),
        service: ServiceKey {
            hostname: host.into(),
            namespace: object.namespace.clone(),
        },
    });
    let keys: BTreeSet<ClusterServiceKey> = keys.collect();
    let rows = keys
        .iter()
        .filter_map(|key| mesh.cluster_services.get_key_value(cx, key));
    let own = rows.filter(|(_, service)| {
        let declared = &service.declared.key;
        declared.source == ServiceSource::ServiceEntry && declared.object == *object
    });
    own.collect()
}

/// Derives one workload.
pub fn workload(cx: &Cx, mesh: &MeshSnapshot, uid: &WorkloadUid) -> Option<AmbientWorkload> {
    let source = uid.source()?;
    let derivation = Derivation {
        cx,
        mesh,
        uid,
        object: source.object(),
    };
    let mut workload = match &source {
        Source::Pod(key) => derivation.of_pod(mesh.pods.get(cx, key)?),
        Source::WorkloadEntry(key) => Some(derivation.of_entry(mesh.workload_entries.get(cx, key)?)),
        Source::ServiceEntry(key, address) => derivation.of_service_entry(mesh.service_entries.get(cx, key)?, address),
        Source::EndpointSlice(key, address) => derivation.of_slice(mesh.endpoint_slices.get(cx, key)?, address),
    }?;
    workload.is_hidden = mesh.installation.features.ambient_enable_multi_network
        && workload.network != cluster_network(cx, mesh, &mesh.installation.cluster);
    Some(workload)
}

/// Derives the row of an address that belongs to a workload which accepts HBONE; other addresses have no row.
///
/// Endpoints read these rows and not the workloads, which change more often.
pub fn tunnelled_address(cx: &Cx, mesh: &MeshSnapshot, name: &SmolStr) -> Option<()> {
    let mut workloads = mesh.ambient_workloads_by_address.get(cx, name);
    workloads.any(|(_, workload)| workload.is_tunnelled).then_some(())
}

type Services<'a> = Vec<(&'a ClusterServiceKey, &'a Shared<ClusterService>)>;

const ALL_KINDS: &[ServiceSource] = &[ServiceSource::Service, ServiceSource::ServiceEntry];

/// Attributes that workloads of all kinds have in common.
struct Common<'a> {
    uid: &'a WorkloadUid,
    object: &'a ObjectKey,
    labels: &'a Labels,
    annotations: &'a Labels,
    /// Labels that refer to a waypoint; `None` for a workload without one.
    waypoint_labels: Option<&'a Labels>,
    network: NetworkId,
    workload_name: &'a str,
    services: &'a Services<'a>,
}

impl Common<'_> {
    fn workload(&self, cx: &Cx, mesh: &MeshSnapshot) -> Workload {
        let (labels, namespace) = (self.labels, &self.object.namespace);
        let cluster = &self.object.cluster;
        let of_labels = |labels| waypoint::of_workload(cx, mesh, cluster, labels, namespace);
        let waypoint = self.waypoint_labels.map(of_labels).unwrap_or_default();
        let mut policies = policy::attached(cx, mesh, namespace, labels);
        let of_services = self
            .services
            .iter()
            .filter_map(|(_, service)| service.declared.waypoint.clone());
        policies.extend(waypoint::implicit_policies(
            cx,
            mesh,
            waypoint.gateway.as_ref(),
            of_services,
        ));
        let is_native = labels.get(TUNNEL_LABEL).is_some_and(|protocols| {
            let mut protocols = protocols.split(',');
            protocols.any(|protocol| protocol == TUNNEL_HTTP)
        });
        let is_redirected = self
            .annotations
            .get(REDIRECTION)
            .is_some_and(|value| value == "enabled");
        let tunnel = if is_native || is_redirected {
            TunnelProtocol::Hbone
        } else {
            TunnelProtocol::None
        };
        let (canonical_name, canonical_revision) = canonical::service(labels, self.workload_name);
        Workload {
            uid: self.uid.text().to_string(),
            name: self.object.name.to_string(),
            namespace: namespace.to_string(),
            network: self.network.to_string(),
            tunnel_protocol: tunnel.into(),
            native_tunnel: is_native,
            trust_domain: trust_domain(cx, mesh),
            waypoint: waypoint.address,
            application_tunnel: waypoint.tunnel,
            network_gateway: gateway::address_of(cx, mesh, &self.network),
            canonical_name: canonical_name.to_string(),
            canonical_revision: canonical_revision.to_string(),
            workload_type: WorkloadType::Pod.into(),
            workload_name: self.workload_name.to_owned(),
            authorization_policies: policies,
            cluster_id: self.object.cluster.to_string(),
            ..Workload::default()
        }
    }
}

fn names(services: &Services) -> Vec<ServiceKey> {
    services.iter().map(|(key, _)| key.service.clone()).collect()
}

/// Keeps the oldest of the services that a workload may serve.
fn keep_oldest(services: &mut Services) {
    if services.len() > MAX_SERVICES {
        services.sort_by_key(|(key, service)| (service.declared.creation, *key));
        services.truncate(MAX_SERVICES);
    }
}

/// Returns the ports of each service by the name of its resource, `most` of them for all.
fn ports_of(
    services: &Services,
    most: usize,
    ports: impl Fn(&ClusterService) -> Vec<Port>,
) -> BTreeMap<String, PortList> {
    let mut left = most;
    let list = services.iter().map(|(key, service)| {
        let name = super::service::resource_name(&key.service);
        let mut ports = if left == 0 { Vec::new() } else { ports(service) };
        ports.truncate(left);
        left -= ports.len();
        (name.to_string(), PortList { ports })
    });
    list.collect()
}

/// Returns the ports of a workload for a service. `named` returns its port with a name.
///
/// The named target port of a Service must exist. A ServiceEntry has no named target ports; the workload's port with
/// the name of the service port counts instead, and for WorkloadEntries also with Services.
fn target_ports(service: &ClusterService, is_pod: bool, named: impl Fn(&str) -> Option<u32>) -> Vec<Port> {
    let declared = &service.declared;
    let target = |port: &Port| {
        let names = declared.port_names.get(&port.service_port)?;
        if !names.target.is_empty() {
            return named(&names.target);
        }
        let is_matched = !is_pod || (declared.key.source == ServiceSource::ServiceEntry && !names.name.is_empty());
        let own = is_matched.then(|| named(&names.name)).flatten();
        Some(own.unwrap_or(port.target_port))
    };
    let ports = declared.message.ports.iter().filter_map(|port| {
        Some(Port {
            service_port: port.service_port,
            target_port: target(port)?,
            ..Port::default()
        })
    });
    ports.collect()
}

/// A workload that is derived from an object.
struct Derivation<'a> {
    cx: &'a Cx,
    mesh: &'a MeshSnapshot,
    uid: &'a WorkloadUid,
    object: &'a ObjectKey,
}

impl<'a> Derivation<'a> {
    /// Returns the services of the object's cluster whose selectors match labels, in the order of the first labels of
    /// these; of too many the oldest.
    fn selecting(&self, labels: &Labels, kinds: &[ServiceSource]) -> Services<'a> {
        let (cx, mesh) = (self.cx, self.mesh);
        let ObjectKey { cluster, namespace, .. } = self.object;
        let keys = super::selecting_keys(namespace, labels).map(|selector| ClusterSelectorKey {
            cluster: cluster.clone(),
            selector,
        });
        let rows = keys.flat_map(|key| mesh.services_by_selector.get(cx, &key));
        let matching = rows.filter(|(_, service)| {
            kinds.contains(&service.declared.key.source) && select::subset(&service.declared.selector, labels)
        });
        let mut found: Services = matching.collect();
        keep_oldest(&mut found);
        found.sort_by(|(_, one), (_, other)| {
            let (one, other) = (&one.declared.selector, &other.declared.selector);
            one.iter().next().cmp(&other.iter().next())
        });
        found
    }

    fn of_pod(&self, pod: &Pod) -> Option<AmbientWorkload> {
        if pod.is_finished() || pod.ips.is_empty() {
            return None;
        }
        let addresses: Vec<IpAddr> = pod.ips.iter().map(|ip| cidr::parse_ip(ip)).collect::<Option<_>>()?;
        let labels = &pod.meta.labels;
        let selects_pods = self.mesh.installation.features.pilot_enable_serviceentry_select_pods;
        let kinds = if selects_pods {
            ALL_KINDS
        } else {
            &[ServiceSource::Service]
        };
        let mut services = self.selecting(labels, kinds);
        let mut known: BTreeSet<&ClusterServiceKey> = services.iter().map(|(key, _)| *key).collect();
        // The name of a pod does not identify it: those of a StatefulSet have the names of earlier ones, and another
        // tenant may write any name into a slice.
        let own = PodReference {
            namespace: self.object.namespace.text().clone(),
            name: self.object.name.clone(),
            uid: pod.uid.clone(),
        };
        for (slice, targets) in self.mesh.slices_by_pod.get(self.cx, self.object) {
            if targets.pods.contains(&own) {
                let service = service_of_slice(self.cx, self.mesh, slice, &targets.service);
                services.extend(service.filter(|(key, _)| known.insert(*key)));
            }
        }
        // Those that select the pod come first.
        services.truncate(MAX_SERVICES);
        let common = Common {
            uid: self.uid,
            object: self.object,
            labels,
            annotations: &pod.meta.annotations,
            waypoint_labels: Some(labels),
            network: cluster_network(self.cx, self.mesh, &self.object.cluster),
            workload_name: &pod.workload_name,
            services: &services,
        };
        let named = |name: &str| pod.named_port(name, "TCP");
        let is_healthy = pod.ready && !pod.terminating;
        let message = Workload {
            addresses: addresses.iter().map(|address| octets(*address).into()).collect(),
            service_account: pod.service_account.to_string(),
            node: pod.node_name.to_string(),
            services: ports_of(&services, MAX_PORTS, |service| target_ports(service, true, named)),
            status: status(is_healthy).into(),
            locality: node_locality(self.cx, self.mesh, pod),
            network_mode: if pod.host_network {
                NetworkMode::HostNetwork
            } else {
                NetworkMode::Standard
            }
            .into(),
            ..common.workload(self.cx, self.mesh)
        };
        Some(AmbientWorkload::new(&message, addresses, names(&services)))
    }

    fn of_entry(&self, entry: &Config<WorkloadEntry>) -> AmbientWorkload {
        let labels = entry_labels(entry);
        let selects = self.mesh.installation.features.pilot_enable_k8s_select_workload_entries;
        let kinds = if selects {
            ALL_KINDS
        } else {
            &[ServiceSource::ServiceEntry]
        };
        let services = self.selecting(&labels, kinds);
        let network = match entry.spec.network.as_str() {
            "" => cluster_network(self.cx, self.mesh, &self.object.cluster),
            given => NetworkId::new(given),
        };
        let common = Common {
            uid: self.uid,
            object: self.object,
            labels: &labels,
            annotations: &entry.meta.annotations,
            waypoint_labels: Some(&labels),
            network,
            workload_name: &entry_name(&entry.meta.annotations, &labels, entry.meta.name()),
            services: &services,
        };
        of_spec(&entry.spec, &services, MAX_PORTS, common.workload(self.cx, self.mesh))
    }

    /// Derives the workload of an endpoint of a ServiceEntry, or of one of its hosts.
    fn of_service_entry(&self, entry: &Config<ServiceEntry>, address: &SmolStr) -> Option<AmbientWorkload> {
        let endpoints = self.mesh.entry_endpoints.get(self.cx, self.object)?;
        let found = endpoints.by_address.get(address)?;
        let (endpoint, services) = match found.position {
            Some(position) => {
                let services: Services = endpoints.services.iter().map(|own| (&own.0, &own.1)).collect();
                (Cow::Borrowed(entry.spec.endpoints.get(position)?), services)
            }
            None => {
                let endpoint = WorkloadEntry {
                    address: address.to_string(),
                    ..WorkloadEntry::default()
                };
                (
                    Cow::Owned(endpoint),
                    declared_by(self.cx, self.mesh, self.object, [address.as_str()]),
                )
            }
        };
        // None of its hosts counts.
        if services.is_empty() {
            return None;
        }
        let waypoint_labels = label_map(&endpoint.labels);
        let common = Common {
            uid: self.uid,
            object: self.object,
            labels: &entry.meta.labels,
            annotations: &entry.meta.annotations,
            waypoint_labels: found.position.map(|_| &waypoint_labels),
            network: found.network.clone(),
            workload_name: entry.meta.name(),
            services: &services,
        };
        // Those of a ServiceEntry have a limit of their own (`model::endpoint::demand`).
        let common = common.workload(self.cx, self.mesh);
        Some(of_spec(&endpoint, &services, usize::MAX, common))
    }

    /// Derives the workload of an endpoint without a pod.
    fn of_slice(&self, slice: &EndpointSlice, address: &SmolStr) -> Option<AmbientWorkload> {
        let own = self.mesh.slice_workloads.get(self.cx, self.object)?;
        let endpoint = slice.endpoints.get(*own.by_address.get(address)?)?;
        let parsed = endpoint.addresses.iter().map(|address| cidr::parse_ip(address));
        let addresses: Vec<IpAddr> = parsed.collect::<Option<_>>()?;
        let services = vec![service_of_slice(self.cx, self.mesh, self.object, &slice.service_name)?];
        let message = Workload {
            uid: self.uid.text().to_string(),
            name: self.object.name.to_string(),
            namespace: self.object.namespace.to_string(),
            addresses: addresses.iter().map(|address| octets(*address).into()).collect(),
            network: cluster_network(self.cx, self.mesh, &self.object.cluster).to_string(),
            trust_domain: trust_domain(self.cx, self.mesh),
            services: ports_of(&services, MAX_PORTS, |_| own.ports.to_vec()),
            status: status(endpoint.ready.unwrap_or(true)).into(),
            cluster_id: self.object.cluster.to_string(),
            // Its address may be that of another workload.
            network_mode: NetworkMode::HostNetwork.into(),
            ..Workload::default()
        };
        Some(AmbientWorkload::new(&message, addresses, names(&services)))
    }
}

fn status(is_healthy: bool) -> WorkloadStatus {
    if is_healthy {
        WorkloadStatus::Healthy
    } else {
        WorkloadStatus::Unhealthy
    }
}

/// Returns the Service of a slice.
fn service_of_slice<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    slice: &ObjectKey,
    name: &SmolStr,
) -> Option<(&'a ClusterServiceKey, &'a Shared<ClusterService>)> {
    let key = ClusterServiceKey {
        cluster: slice.cluster.clone(),
        service: ServiceKey {
            hostname: hostname(mesh, &slice.namespace, name),
            namespace: slice.namespace.clone(),
        },
    };
    let found = mesh.cluster_services.get_key_value(cx, &key);
    found.filter(|(_, service)| service.declared.key.source == ServiceSource::Service)
}

/// Returns the locality of a pod's node.
fn node_locality(cx: &Cx, mesh: &MeshSnapshot, pod: &Pod) -> Option<Locality> {
    if pod.node_name.is_empty() {
        return None;
    }
    let node = ObjectKey::new(pod.meta.cluster(), "", pod.node_name.clone());
    let node = mesh.nodes.get(cx, &node)?;
    let label = |name: &str| node.meta.labels.get(name).map(ToString::to_string).unwrap_or_default();
    locality(
        label("topology.kubernetes.io/region"),
        label("topology.kubernetes.io/zone"),
        label("topology.istio.io/subzone"),
    )
}

fn locality(region: String, zone: String, subzone: String) -> Option<Locality> {
    let is_known = !(region.is_empty() && zone.is_empty() && subzone.is_empty());
    is_known.then_some(Locality { region, zone, subzone })
}

/// Returns the workload of a WorkloadEntry or of an endpoint of a ServiceEntry, with `most_ports` ports of services.
fn of_spec(spec: &WorkloadEntry, services: &Services, most_ports: usize, common: Workload) -> AmbientWorkload {
    let address = cidr::parse_ip(&spec.address);
    let mut parts = spec.locality.split('/').map(str::to_owned);
    let mut part = || parts.next().unwrap_or_default();
    let named = |name: &str| spec.ports.get(name).copied();
    let message = Workload {
        addresses: address.map(|address| octets(address).into()).into_iter().collect(),
        hostname: if address.is_some() {
            String::new()
        } else {
            spec.address.clone()
        },
        service_account: spec.service_account.clone(),
        services: ports_of(services, most_ports, |service| target_ports(service, false, named)),
        locality: locality(part(), part(), part()),
        capacity: (spec.weight > 0).then_some(spec.weight),
        ..common
    };
    AmbientWorkload::new(&message, address.into_iter().collect(), names(services))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{features::Features, fixture, installation::Installation};

    /// Returns a workload of a ServiceEntry with this number of hosts, and the number of reads that it takes.
    fn derived(hosts: usize) -> (Workload, usize) {
        let hosts: Vec<String> = (0..hosts).map(|number| format!("h{number}.com")).collect();
        let object = format!(
            "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: e, namespace: a}}\n\
             spec: {{hosts: [{}], resolution: STATIC, ports: [{{number: 80, name: http, protocol: HTTP}}], \
             endpoints: [{{address: 192.0.2.1, network: n1}}, {{address: 192.0.2.2, weight: 2}}]}}\n",
            hosts.join(", ")
        );
        let installation = Installation {
            features: Features {
                pilot_enable_ambient: true,
                ..Features::default()
            },
            ..Installation::default()
        };
        let world = fixture::folder_world(installation, &[("entry.yaml", &object)]);
        let uid = WorkloadUid::new("Kubernetes/networking.istio.io/ServiceEntry/a/e/192.0.2.2");
        let cx = Cx::recording();
        let workload = workload(&cx, &world.snapshot(), &uid).expect("the endpoint exists");
        (workload.decoded(), cx.into_reads().len())
    }

    /// Returns a workload of a pod with this number of labels beside its own, and the number of reads that it takes.
    fn of_labels(others: usize) -> (AmbientWorkload, usize) {
        let labels: Vec<String> = (0..others).map(|number| format!("n{number}: x, ")).collect();
        let labels = labels.concat();
        let service = |name: &str, label: &str| {
            format!(
                "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: a}}\n\
                 spec: {{selector: {{{label}}}, ports: [{{name: web, port: 80}}]}}\n---\n"
            )
        };
        let policy = |kind: &str, spec: &str| {
            format!(
                "apiVersion: security.istio.io/v1\nkind: {kind}\nmetadata: {{name: p, namespace: a}}\n\
                 spec: {{selector: {{matchLabels: {{zone: z}}}}, {spec}}}\n---\n"
            )
        };
        let objects = [
            service("first", "zone: z"),
            service("second", "app: y, zone: z"),
            service("other", "app: other"),
            policy("AuthorizationPolicy", "rules: [{}]"),
            policy("PeerAuthentication", "mtls: {mode: STRICT}"),
            format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: p, namespace: a, labels: {{{labels}app: y, zone: z}}}}\n\
                 status: {{phase: Running, podIP: 192.0.2.1}}\n"
            ),
        ];
        let installation = Installation {
            features: Features {
                pilot_enable_ambient: true,
                ..Features::default()
            },
            ..Installation::default()
        };
        let world = fixture::folder_world(installation, &[("objects.yaml", &objects.concat())]);
        let uid = WorkloadUid::new("Kubernetes//Pod/a/p");
        let cx = Cx::recording();
        let workload = workload(&cx, &world.snapshot(), &uid).expect("the pod exists");
        (workload, cx.into_reads().len())
    }

    #[test]
    fn r21_selectors_are_not_looked_up_by_each_of_very_many_labels() {
        let (few, _) = of_labels(3);
        let (many, reads) = of_labels(1_000);
        let services = few.services.iter().map(|service| service.hostname.as_str());
        let expected = ["second.a.svc.cluster.local", "first.a.svc.cluster.local"];
        assert_eq!(services.collect::<Vec<_>>(), expected);
        assert_eq!(few.decoded().authorization_policies.len(), 2);
        assert_eq!(many, few);
        assert!(reads < 100, "{reads}");
    }

    /// Returns the number of services of a pod that Services with some ports select, and that of all their ports.
    fn served(services: usize, ports: usize) -> (usize, usize) {
        let ports: Vec<String> = (1..=ports)
            .map(|port| format!("{{name: p{port}, port: {port}}}"))
            .collect();
        let ports = ports.join(", ");
        let service = |number: usize| {
            format!(
                "apiVersion: v1\nkind: Service\nmetadata: {{name: s{number}, namespace: a}}\n\
                 spec: {{selector: {{app: x}}, ports: [{ports}]}}\n---\n"
            )
        };
        let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: p, namespace: a, labels: {app: x}}\n\
                   status: {phase: Running, podIP: 192.0.2.1}\n";
        let objects: String = (0..services).map(service).chain([pod.to_owned()]).collect();
        let installation = Installation {
            features: Features {
                pilot_enable_ambient: true,
                ..Features::default()
            },
            ..Installation::default()
        };
        let world = fixture::folder_world(installation, &[("objects.yaml", &objects)]);
        let uid = WorkloadUid::new("Kubernetes//Pod/a/p");
        let workload = workload(&Cx::untracked(), &world.snapshot(), &uid).expect("the pod exists");
        let message = workload.decoded();
        assert_eq!(message.services.len(), workload.services.len());
        let ports = message.services.values().map(|list| list.ports.len());
        (message.services.len(), ports.sum())
    }

    #[test]
    fn r21_services_and_ports_of_a_workload_are_limited() {
        assert_eq!(served(3, 2), (3, 6));
        assert_eq!(served(1_003, 1), (1_000, 1_000));
        assert_eq!(served(12, 1_000), (12, 10_000));
    }

    #[test]
    fn endpoints_of_an_entry_do_not_read_each_of_its_hosts() {
        let (one, reads) = derived(1);
        let (many, reads_of_many) = derived(100);
        assert_eq!(reads, reads_of_many);
        assert_eq!((one.services.len(), many.services.len()), (1, 100));
        for workload in [one, many] {
            assert_eq!((workload.network.as_str(), workload.capacity), ("n1", Some(2)));
        }
    }
}
