//! Services and ports that a proxy's workload serves.
//!
//! Kubernetes Services are found by the WorkloadEntry at the proxy's address, or else by its pod. ServiceEntries are
//! found by address: inline endpoints and selected workloads.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{ServiceTarget, workload};
use crate::{
    api::{
        Config,
        kube::{
            self, Pod,
            service::{Port, TargetPort},
        },
    },
    base::{ClusterId, Hostname, Labels, Namespace, NetworkId, ObjectKey, Shared, select},
    generate::{BuildContext, Proxy},
    model::{
        Service, ServiceKey,
        endpoint::target_port,
        service::{InboundPorts, Protocol, Resolution, ServicePort, mcs},
        workload::{Workload, WorkloadSource, augmented, entry_locality},
    },
    proto::istio::networking::v1alpha3 as networking,
};

/// The targets of a proxy, and the labels of the first ServiceEntry endpoint at its address.
pub(crate) struct Targets {
    pub(crate) list: Vec<ServiceTarget>,
    pub(crate) entry_labels: Option<Labels>,
}

/// Returns the targets of a proxy with this pod, by age and host of the services.
pub(crate) fn targets(ctx: &BuildContext, proxy: &Proxy, pod: Option<&Shared<Pod>>) -> Targets {
    let mut found = kube_targets(ctx, proxy, pod);
    let entry_labels = entry_targets(ctx, proxy, &mut found);
    found.sort_by(|(a_age, a), (b_age, b)| (a_age, &a.service.hostname).cmp(&(b_age, &b.service.hostname)));
    Targets {
        list: found.into_iter().map(|(_, target)| target).collect(),
        entry_labels,
    }
}

/// Targets, each with the creation time of the Service in the proxy's cluster or of the ServiceEntry.
type Found = Vec<(i64, ServiceTarget)>;

fn kube_targets(ctx: &BuildContext, proxy: &Proxy, pod: Option<&Shared<Pod>>) -> Found {
    let cluster = workload::cluster(ctx, proxy);
    if let Some(entry) = workload::entry(ctx, proxy, pod) {
        return selecting(ctx, &cluster, &entry.origin.namespace, &entry.origin.labels)
            .flat_map(|service| by_entry(ctx, service, entry))
            .collect();
    }
    let Some(pod) = pod else {
        // Parity (pilot/pkg/xds/ads.go): labels and ports of the node are ignored when it connects.
        return Vec::new();
    };
    let mut services = selecting(ctx, &cluster, pod.meta.namespace(), &pod.meta.labels).peekable();
    if services.peek().is_none() {
        return by_address(ctx, proxy, &cluster);
    }
    services
        .flat_map(|service| by_ports(ctx, service, |port| port_of_pod(pod, port)))
        .collect()
}

/// Returns the Kubernetes Services of a namespace that select the labels. One without a selector selects nothing.
fn selecting<'a>(
    ctx: &BuildContext<'a>,
    cluster: &ClusterId,
    namespace: &Namespace,
    labels: &Labels,
) -> impl Iterator<Item = &'a Shared<kube::Service>> + use<'a> {
    let rows = ctx.mesh.kube_services_by_namespace.get(ctx.cx, namespace);
    let (cluster, labels) = (cluster.clone(), labels.clone());
    rows.filter(move |(key, service)| {
        key.cluster == cluster && !service.selector.is_empty() && select::subset(&service.selector, &labels)
    })
    .map(|(_, service)| service)
}

/// Returns the services of the model for a Kubernetes Service.
fn rows<'a>(ctx: &BuildContext<'a>, service: &kube::Service) -> impl Iterator<Item = &'a Shared<Service>> + use<'a> {
    let (name, namespace) = (service.meta.name(), service.meta.namespace());
    let installation = &ctx.mesh.installation;
    let own = format!("{name}.{namespace}.svc.{}", installation.domain);
    // The cluster also has its clusterset host if it imports the service.
    let is_imported = !mcs::vips(ctx.cx, ctx.mesh, &service.meta.key).is_empty();
    let imported = is_imported.then(|| mcs::hostname(name, namespace));
    let namespace = namespace.clone();
    let ctx = *ctx;
    [Some(Hostname::from(own)), imported]
        .into_iter()
        .flatten()
        .filter_map(move |hostname| {
            ctx.service(&ServiceKey {
                hostname,
                namespace: namespace.clone(),
            })
        })
}

/// A service of the model with its ports, of which a Service may have tens of thousands.
struct KnownPorts<'a> {
    row: &'a Service,
    ports: BTreeSet<(&'a SmolStr, u32, Protocol)>,
}

impl<'a> KnownPorts<'a> {
    fn of(row: &'a Service) -> Self {
        let ports = row.ports.iter();
        Self {
            row,
            ports: ports.map(|port| (&port.name, port.number, port.protocol)).collect(),
        }
    }

    /// Returns the target of a port of a Service.
    fn target(&self, service: &kube::Service, port: &Port, number: u32) -> (i64, ServiceTarget) {
        let declared = ServicePort::of_kube(port);
        let is_known = self
            .ports
            .contains(&(&declared.name, declared.number, declared.protocol));
        let target = ServiceTarget {
            service: self.row.key.clone(),
            port: port.number,
            target_port: number,
            own: (!is_known).then(|| Box::new(declared)),
        };
        (service.meta.creation, target)
    }
}

/// Returns the targets of a Service whose ports resolve. Two ports with the same target port and protocol are one
/// target.
fn by_ports(ctx: &BuildContext, service: &kube::Service, resolve: impl Fn(&Port) -> Option<u32>) -> Found {
    let mut found = Vec::new();
    for row in rows(ctx, service) {
        let known = KnownPorts::of(row);
        let mut seen: BTreeSet<(u32, Protocol)> = BTreeSet::new();
        for port in &service.ports {
            let Some(number) = resolve(port) else { continue };
            if seen.insert((number, Protocol::of_kube_port(port))) {
                found.push(known.target(service, port, number));
            }
        }
    }
    found
}

fn port_of_pod(pod: &Pod, port: &Port) -> Option<u32> {
    match &port.target {
        TargetPort::Number(number) => Some(*number),
        TargetPort::Name(name) => pod.named_port(name, &port.protocol),
    }
}

/// Returns the targets of a Service on a WorkloadEntry.
fn by_entry(ctx: &BuildContext, service: &kube::Service, entry: &Workload) -> Found {
    let selects = Resolution::of_kube(service) == Resolution::ClientSideLb;
    let Some(row) = rows(ctx, service).next().filter(|_| selects) else {
        return Vec::new();
    };
    let served = service.ports.iter();
    let served = served.filter(|port| Protocol::of_kube_port(port) != Protocol::Udp);
    let known = KnownPorts::of(row);
    let resolved = served.filter_map(|port| Some(known.target(service, port, target_port(port, entry)?)));
    resolved.collect()
}

/// Returns the targets of Services without a selector whose EndpointSlices contain the proxy's first address.
fn by_address(ctx: &BuildContext, proxy: &Proxy, cluster: &ClusterId) -> Found {
    let Some(address) = proxy.addresses.first() else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for (key, endpoints) in ctx.mesh.services_by_endpoint_address.get(ctx.cx, address) {
        if !workload::is_of_namespace(proxy, &key.namespace) {
            continue;
        }
        let known =
            |row: &&Shared<Service>| row.service_entry.is_none() && mcs::is_known(ctx.cx, ctx.mesh, row, cluster);
        let Some(row) = ctx.service(key).filter(known) else {
            continue;
        };
        let object = ObjectKey::new(cluster, key.namespace.clone(), row.name.clone());
        let Some(service) = ctx.mesh.kube_services.get(ctx.cx, &object) else {
            continue;
        };
        let known = KnownPorts::of(row);
        let mut by_name: BTreeMap<&SmolStr, &Port> = BTreeMap::new();
        for port in &service.ports {
            by_name.entry(&port.name).or_insert(port);
        }
        for endpoint in &*endpoints.endpoints {
            if endpoint.address != *address || endpoint.origin.cluster != *cluster {
                continue;
            }
            if let Some(port) = by_name.get(&endpoint.port_name) {
                found.push(known.target(service, port, endpoint.port));
            }
        }
    }
    found
}

/// Adds the targets of ServiceEntries at the proxy's addresses. Returns the labels of the first endpoint.
fn entry_targets(ctx: &BuildContext, proxy: &Proxy, found: &mut Found) -> Option<Labels> {
    let mut labels = None;
    for address in &proxy.addresses {
        inline_targets(ctx, proxy, address, found, &mut labels);
        selected_targets(ctx, proxy, address, found, &mut labels);
    }
    labels
}

type Entry = Config<networking::ServiceEntry>;

fn inline_targets(
    ctx: &BuildContext,
    proxy: &Proxy,
    address: &SmolStr,
    found: &mut Found,
    labels: &mut Option<Labels>,
) {
    for (key, entry) in ctx.mesh.service_entries_by_endpoint_address.get(ctx.cx, address) {
        // A workload selector replaces the endpoints.
        if entry.spec.workload_selector.is_some() || !workload::is_of_namespace(proxy, &key.namespace) {
            continue;
        }
        for endpoint in entry
            .spec
            .endpoints
            .iter()
            .filter(|endpoint| endpoint.address == *address)
        {
            if add_entry(ctx, entry, address, |name| endpoint.ports.get(name).copied(), found) {
                labels.get_or_insert_with(|| {
                    let own = endpoint.labels.iter().map(|(k, v)| (SmolStr::new(k), SmolStr::new(v)));
                    let own: Labels = own.collect();
                    let locality = entry_locality(endpoint, &own);
                    let network = NetworkId::new(&endpoint.network);
                    augmented(&own, &key.cluster, &locality, "", &network)
                });
            }
        }
    }
}

fn selected_targets(
    ctx: &BuildContext,
    proxy: &Proxy,
    address: &SmolStr,
    found: &mut Found,
    labels: &mut Option<Labels>,
) {
    let select_pods = ctx.mesh.installation.features.pilot_enable_serviceentry_select_pods;
    for (key, row) in ctx.mesh.workloads_by_address.get(ctx.cx, address) {
        let counts = select_pods || key.source == WorkloadSource::WorkloadEntry;
        if !counts || !row.ready || !workload::is_of_namespace(proxy, &row.key.object.namespace) {
            continue;
        }
        for (_, entry) in ctx
            .mesh
            .selecting_entries_by_namespace
            .get(ctx.cx, &row.key.object.namespace)
        {
            let Some(selector) = &entry.spec.workload_selector else {
                continue;
            };
            let pairs = selector.labels.iter().map(|(k, v)| (k.as_str(), v.as_str()));
            if !select::matches(pairs, &row.origin.labels) {
                continue;
            }
            if add_entry(ctx, entry, address, |name| row.named_ports.get(name).copied(), found) {
                labels.get_or_insert_with(|| Labels::clone(&row.origin.labels));
            }
        }
    }
}

/// Adds every port of every host of a ServiceEntry that the workload at this address serves, with the workload's port
/// of that name, or else the target port, or else the number itself. Returns true if there is one.
fn add_entry(
    ctx: &BuildContext,
    entry: &Entry,
    address: &SmolStr,
    own: impl Fn(&str) -> Option<u32>,
    found: &mut Found,
) -> bool {
    let known = found.len();
    for host in &entry.spec.hosts {
        let key = ServiceKey {
            hostname: Hostname::new(host),
            namespace: entry.meta.namespace().clone(),
        };
        let Some(row) = ctx.service(&key) else { continue };
        let declared = InboundPorts::of(row);
        let served = served_ports(ctx, entry, &key, address);
        for port in &entry.spec.ports {
            let is_served = served.as_ref().is_none_or(|served| served.contains(&port.number));
            if !declared.contains(port.number) || !is_served {
                continue;
            }
            let default = if port.target_port > 0 {
                port.target_port
            } else {
                port.number
            };
            let number = own(&port.name).filter(|number| *number > 0).unwrap_or(default);
            let target = ServiceTarget {
                service: key.clone(),
                port: port.number,
                target_port: number,
                own: None,
            };
            found.push((entry.meta.creation, target));
        }
    }
    found.len() > known
}

/// Returns the ports of a service that the workload at this address serves, for a ServiceEntry that names or selects
/// it. `None` if it serves all of them.
///
/// Parity (pilot/pkg/serviceregistry/serviceentry/conversion.go, `mergeServicesInstancesByNamespaceHost`): with DNS
/// round robin, a port has one endpoint, and other workloads do not serve it.
fn served_ports(ctx: &BuildContext, entry: &Entry, service: &ServiceKey, address: &SmolStr) -> Option<BTreeSet<u32>> {
    if entry.spec.resolution() != networking::service_entry::Resolution::DnsRoundRobin {
        return None;
    }
    let endpoints = ctx.mesh.endpoints.get(ctx.cx, service);
    let endpoints = endpoints.into_iter().flat_map(|row| row.endpoints.iter());
    let own = endpoints.filter(|endpoint| endpoint.address == *address);
    Some(own.map(|endpoint| endpoint.service_port).collect())
}
