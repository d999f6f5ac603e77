//! Endpoints of ServiceEntries: inline, selected by labels, or the host itself.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use super::{Endpoint, Health, Origin};
use crate::{
    api::{Config, Kind},
    base::{ObjectKey, Shared, cidr, select},
    model::{
        MeshSnapshot,
        output_limit::{Demand, Limits, SMALL},
        service::{Resolution, ServiceKey, entry},
        workload::{self, Workload, WorkloadKey, WorkloadSource},
    },
    proto::istio::networking::v1alpha3::{ServiceEntry, ServicePort, WorkloadEntry},
    table::Cx,
};

/// Prefix of a Unix socket address.
const UNIX: &str = "unix://";
/// The multiple of the limit of an object up to which its first host applies. An entry must not vanish because one more
/// workload becomes ready.
pub(super) const FIRST_HOST_MULTIPLE: u64 = 10;

/// Returns the endpoints of all entries that declare the host, oldest entry first.
pub(super) fn endpoints(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Vec<Endpoint> {
    let mut endpoints = Vec::new();
    let mut ports_served: BTreeSet<u32> = BTreeSet::new();
    for config in entry::applied(cx, mesh, key) {
        let single = entry::resolution(&config.spec) == Resolution::DnsRoundRobinLb;
        let own = of_entry(cx, mesh, key, config);
        // Parity (pilot/pkg/serviceregistry/serviceentry/conversion.go): an entry counts once for each of its
        // addresses, so its endpoints repeat. Envoy drops duplicates.
        for _ in 0..entry::address_count(&config.spec) {
            for (number, endpoint) in &own {
                // DNS round robin has one endpoint per port.
                let first = ports_served.insert(*number);
                if first || !single {
                    endpoints.push(Endpoint {
                        service_port: *number,
                        ..endpoint.clone()
                    });
                }
            }
        }
    }
    endpoints
}

/// Returns true if an entry without endpoints has its hosts as endpoints.
fn is_dns(spec: &ServiceEntry) -> bool {
    entry::resolution(spec).is_dns()
}

/// Returns the number of workloads of an entry without a selector: its endpoints, or the host itself.
fn own_workloads(spec: &ServiceEntry) -> usize {
    if spec.endpoints.is_empty() && is_dns(spec) {
        1
    } else {
        spec.endpoints.len()
    }
}

/// Returns what an entry produces for one host, given the number of workloads: each port of each address, each workload
/// at each of these, and the names in certificates and namespaces that each host has.
fn output_of_host(spec: &ServiceEntry, workloads: usize) -> u64 {
    let ports = (entry::address_count(spec) as u64).saturating_mul(spec.ports.len() as u64);
    let names = spec.subject_alt_names.len() + spec.export_to.len();
    ports.saturating_mul(workloads as u64 + 1).saturating_add(names as u64)
}

/// Returns true if the output may be above that of a small object, as far as the object alone shows.
pub fn may_be_large(spec: &ServiceEntry) -> bool {
    let own = output_of_host(spec, own_workloads(spec)).saturating_mul(spec.hosts.len() as u64);
    spec.workload_selector.is_some() || own > SMALL
}

/// Derives the output of one entry that is not small. Those of registries, which no tenant writes, have no limit.
pub fn demand(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<Demand> {
    let config = mesh.service_entries.get(cx, key)?;
    let spec = &config.spec;
    if key.cluster != mesh.installation.cluster || !may_be_large(spec) {
        return None;
    }
    let workloads = match &spec.workload_selector {
        Some(_) => mesh
            .selected_workloads
            .get(cx, key)
            .map_or(0, |selected| selected.0.len()),
        None => own_workloads(spec),
    };
    let (of_host, hosts) = (output_of_host(spec, workloads), spec.hosts.len() as u64);
    let declared = of_host.saturating_mul(hosts);
    if declared <= SMALL {
        return None;
    }
    let limit = Limits::of(mesh, Kind::ServiceEntry).object;
    let first = u64::from(of_host <= limit.saturating_mul(FIRST_HOST_MULTIPLE));
    let kept = hosts.min((limit / of_host).max(first));
    Some(Demand {
        meta: config.meta.clone(),
        declared,
        applied: of_host.saturating_mul(kept),
        parts: spec.hosts.len(),
        kept: kept as usize,
        shares: Default::default(),
    })
}

/// Returns the endpoints of one entry with the number of the port that each serves.
fn of_entry(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey, config: &Config<ServiceEntry>) -> Vec<(u32, Endpoint)> {
    let spec = &config.spec;
    if spec.workload_selector.is_some() {
        let selected = mesh.selected_workloads.get(cx, &config.meta.key);
        let workloads = selected.into_iter().flat_map(|selected| selected.0.iter());
        return workloads
            .flat_map(|workload| serve(mesh, workload, &spec.ports))
            .collect();
    }
    if spec.endpoints.is_empty() && is_dns(spec) {
        let ports = spec.ports.iter();
        return ports
            .map(|port| (port.number, host_itself(key, config, port)))
            .collect();
    }
    let inline = spec.endpoints.iter().enumerate();
    let inline = inline.map(|(index, endpoint)| inline_workload(cx, mesh, config, index, endpoint));
    inline
        .flat_map(|workload| serve(mesh, &workload, &spec.ports))
        .collect()
}

fn inline_workload(
    cx: &Cx,
    mesh: &MeshSnapshot,
    config: &Config<ServiceEntry>,
    index: usize,
    endpoint: &WorkloadEntry,
) -> Workload {
    let name = SmolStr::from(format!("{}-{index}", config.meta.name()));
    let object = ObjectKey::new(config.meta.cluster(), config.meta.namespace().clone(), name.clone());
    let key = WorkloadKey {
        source: WorkloadSource::WorkloadEntry,
        object,
    };
    workload::of_entry(cx, mesh, &key, endpoint, workload::label_map(&endpoint.labels), name)
}

/// The workloads that a ServiceEntry selects. All of its hosts read this row, so that the workloads of the namespace
/// are not matched again for each host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectedWorkloads(Box<[Shared<Workload>]>);

/// Derives the ready pods and WorkloadEntries in an entry's namespace that its selector matches, pods first, then by
/// name. An entry without a selector has no row.
pub fn selected_workloads(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<SelectedWorkloads> {
    let config = mesh.service_entries.get(cx, key)?;
    let selector = workload::label_map(&config.spec.workload_selector.as_ref()?.labels);
    let is_dns = is_dns(&config.spec);
    let pods = mesh.installation.features.pilot_enable_serviceentry_select_pods;
    let index = if pods {
        &mesh.workloads_by_namespace
    } else {
        &mesh.entry_workloads_by_namespace
    };
    let rows = index.get(cx, config.meta.namespace()).map(|(_, workload)| workload);
    let selected = rows.filter(|workload| {
        workload.ready && select::subset(&selector, &workload.origin.labels) && (is_dns || !needs_dns(workload))
    });
    Some(SelectedWorkloads(selected.cloned().collect()))
}

/// Returns true if the workload is reached by a host name or a Unix socket, which only DNS ServiceEntries support.
pub(super) fn needs_dns(workload: &Workload) -> bool {
    let address = workload.addresses.first().map_or("", SmolStr::as_str);
    !address.is_empty() && cidr::parse_ip(address).is_none()
}

/// Returns the endpoints of a workload at the entry's ports: the workload's own port of that name, or else the entry's
/// target port, or else the port itself.
fn serve(mesh: &MeshSnapshot, workload: &Workload, ports: &[ServicePort]) -> Vec<(u32, Endpoint)> {
    let is_pod = workload.key.source == WorkloadSource::Pod;
    let unix = workload
        .addresses
        .first()
        .is_some_and(|address| address.starts_with(UNIX));
    let health = if is_pod { Health::Healthy } else { Health::Unknown };
    let served = ports.iter().map(|port| {
        let named = workload
            .named_ports
            .get(port.name.as_str())
            .copied()
            .unwrap_or_default();
        let number = match (named, port.target_port) {
            _ if unix => 0,
            (0, 0) => port.number,
            (0, target) => target,
            (named, _) => named,
        };
        let endpoint = Endpoint::of_workload(workload, &SmolStr::new(&port.name), number, health);
        let endpoint = if is_pod && mesh.installation.features.istio_dual_stack {
            endpoint.with_addresses(&workload.addresses)
        } else {
            endpoint
        };
        (port.number, endpoint)
    });
    served.collect()
}

/// Returns the host of a DNS ServiceEntry without endpoints: the proxy resolves it.
fn host_itself(key: &ServiceKey, config: &Config<ServiceEntry>, port: &ServicePort) -> Endpoint {
    Endpoint {
        address: SmolStr::new(key.hostname.as_str()),
        extra_addresses: Box::default(),
        port_name: SmolStr::new(&port.name),
        service_port: port.number,
        port: if port.target_port > 0 {
            port.target_port
        } else {
            port.number
        },
        health: Health::Unknown,
        cluster_local: false,
        at_tunnelled_address: false,
        origin: Shared::new(Origin {
            cluster: config.meta.cluster().clone(),
            tls_mode: SmolStr::new_static(workload::PLAINTEXT),
            workload_name: config.meta.name().clone(),
            namespace: config.meta.namespace().clone(),
            ..Origin::default()
        }),
    }
}
