//! Services of ServiceEntries: one per host, from all entries of the namespace that declare it.

use std::{collections::BTreeSet, net::IpAddr};

use smol_str::SmolStr;

use super::{Protocol, Registry, Resolution, Service, ServiceKey, ServicePort, UNSPECIFIED_IP, Variant};
use crate::{
    api::{Config, kube::service::TargetPort},
    base::{Hostname, Labels, Shared, cidr, host},
    model::{MeshSnapshot, canonical},
    proto::istio::networking::v1alpha3::{
        ServiceEntry,
        service_entry::{Location, Resolution as Given},
    },
    table::Cx,
};

/// Returns the ServiceEntries of the config cluster that declare the host in the namespace, oldest first.
pub(in crate::model) fn entries<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    key: &ServiceKey,
) -> Vec<&'a Shared<Config<ServiceEntry>>> {
    let rows = mesh.service_entries_by_host.get(cx, key);
    let own = rows.filter(|(object, _)| object.cluster == mesh.installation.cluster);
    let mut entries: Vec<_> = own.map(|(_, entry)| entry).collect();
    entries.sort_by(|a, b| a.meta.age_order().cmp(&b.meta.age_order()));
    entries
}

/// Merges the entries into a service: the oldest decides, the others add addresses, and ports if they agree with it.
pub(super) fn service(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<Service> {
    let entries = entries(cx, mesh, key);
    let mut served: Vec<&Shared<Config<ServiceEntry>>> = Vec::new();
    let mut variants = Vec::new();
    let mut ports: Vec<ServicePort> = Vec::new();
    for entry in entries {
        let own = variants_of(cx, mesh, key, entry);
        let Some(variant) = own.first() else { continue };
        if served.first().is_none_or(|first| merges(mesh, first, entry)) {
            ports.extend(variant.ports.iter().cloned());
        }
        served.push(entry);
        variants.extend(own);
    }
    let mut service = converted(cx, mesh, key, served.first()?, variants.first()?);
    let mut known: BTreeSet<u32> = service.ports.iter().map(|port| port.number).collect();
    for port in ports {
        if known.insert(port.number) {
            service.ports.push(port);
        }
    }
    if variants.len() > 1 {
        service.variants = variants;
    }
    Some(service)
}

/// Returns true if the ports of a further entry get clusters too: it agrees with the first one about everything that a
/// service has only once.
fn merges(mesh: &MeshSnapshot, first: &Config<ServiceEntry>, other: &Config<ServiceEntry>) -> bool {
    let selector = |entry: &Config<ServiceEntry>| {
        let selector = entry.spec.workload_selector.as_ref();
        selector.map(|selector| selector.labels.clone()).unwrap_or_default()
    };
    let audience = |entry: &Config<ServiceEntry>| entry.spec.export_to.iter().cloned().collect::<BTreeSet<_>>();
    resolution(&first.spec) == resolution(&other.spec)
        && labels(mesh, first) == labels(mesh, other)
        && selector(first) == selector(other)
        && audience(first) == audience(other)
}

/// Returns the resolution of an entry.
pub(in crate::model) fn resolution(entry: &ServiceEntry) -> Resolution {
    match entry.resolution() {
        Given::None => Resolution::Passthrough,
        Given::Static => Resolution::ClientSideLb,
        Given::Dns => Resolution::DnsLb,
        Given::DnsRoundRobin => Resolution::DnsRoundRobinLb,
        Given::DynamicDns => Resolution::DynamicDns,
    }
}

/// Returns the number of variants of an entry: one per address, or one without addresses.
pub(in crate::model) fn address_count(entry: &ServiceEntry) -> usize {
    match entry.addresses.as_slice() {
        [] => 1,
        given => given.iter().filter(|text| address(text).is_some()).count(),
    }
}

/// Returns true if an address may be allocated to the host: it has none, is not a wildcard, and is resolved.
pub(super) fn wants_address(entry: &ServiceEntry, hostname: &Hostname) -> bool {
    entry.addresses.is_empty() && entry.resolution() != Given::None && !host::is_wildcard(hostname)
}

/// Returns one variant per address of the entry; invalid addresses are omitted.
fn variants_of(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey, entry: &Config<ServiceEntry>) -> Vec<Variant> {
    let spec = &entry.spec;
    let variant = |address: SmolStr, (auto_ipv4, auto_ipv6): (SmolStr, SmolStr)| Variant {
        address,
        auto_ipv4,
        auto_ipv6,
        ports: spec.ports.iter().map(port).collect(),
        resolution: resolution(spec),
    };
    if spec.addresses.is_empty() {
        let auto = auto_addresses(cx, mesh, key, entry);
        return vec![variant(SmolStr::new_static(UNSPECIFIED_IP), auto)];
    }
    let addresses = spec.addresses.iter().filter_map(|text| address(text));
    addresses.map(|address| variant(address, Default::default())).collect()
}

fn port(port: &crate::proto::istio::networking::v1alpha3::ServicePort) -> ServicePort {
    ServicePort {
        name: SmolStr::new(&port.name),
        number: port.number,
        target: TargetPort::Number(port.target_port),
        protocol: Protocol::parse(&port.protocol),
    }
}

/// Returns an address for listeners: a range of one address is that address.
fn address(text: &str) -> Option<SmolStr> {
    let net = cidr::parse(text)?;
    Some(if cidr::is_range(text) {
        SmolStr::new(text)
    } else if text.contains('/') {
        SmolStr::from(net.addr().to_string())
    } else {
        SmolStr::new(text)
    })
}

/// Returns the addresses allocated to the host: those in the status, or computed ones if that is disabled.
fn auto_addresses(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey, entry: &Config<ServiceEntry>) -> (SmolStr, SmolStr) {
    if !mesh.installation.features.pilot_enable_ip_autoallocate {
        let computed = mesh
            .auto_addresses
            .get(cx, key)
            .filter(|_| wants_address(&entry.spec, &key.hostname));
        return computed
            .map(|row| (row.ipv4.clone(), row.ipv6.clone()))
            .unwrap_or_default();
    }
    let label = entry.meta.labels.get("networking.istio.io/enable-autoallocate-ip");
    let refused = label.is_some_and(|value| value.eq_ignore_ascii_case("false"));
    let mut found = (SmolStr::default(), SmolStr::default());
    if refused || entry.spec.resolution() == Given::None {
        return found;
    }
    let status = entry
        .status
        .as_ref()
        .and_then(|status| status.get("addresses")?.as_array());
    for address in status.into_iter().flatten() {
        let text = |name: &str| address.get(name).and_then(serde_json::Value::as_str);
        if text("host") != Some(key.hostname.as_str()) {
            continue;
        }
        match text("value").and_then(cidr::parse_ip) {
            Some(ip @ IpAddr::V4(_)) => found.0 = SmolStr::from(ip.to_string()),
            Some(ip @ IpAddr::V6(_)) => found.1 = SmolStr::from(ip.to_string()),
            None => {}
        }
    }
    found
}

/// Returns the labels of the service; with the feature enabled, mesh-external ones get a canonical name.
fn labels(mesh: &MeshSnapshot, entry: &Config<ServiceEntry>) -> Labels {
    let mut labels = entry.meta.labels.clone();
    let features = &mesh.installation.features;
    if features.label_canonical_services_for_mesh_external_service_entries
        && entry.spec.location() == Location::MeshExternal
    {
        let (name, revision) = canonical::service(&entry.meta.labels, entry.meta.name());
        labels.insert(SmolStr::new_static(canonical::NAME_LABEL), name);
        labels.insert(SmolStr::new_static(canonical::REVISION_LABEL), revision);
    }
    labels
}

fn converted(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey, entry: &Config<ServiceEntry>, first: &Variant) -> Service {
    let (meta, spec) = (&entry.meta, &entry.spec);
    let selector = spec.workload_selector.as_ref().map(|selector| &selector.labels);
    let mut service_accounts: Vec<SmolStr> = spec.subject_alt_names.iter().map(SmolStr::new).collect();
    service_accounts.sort_unstable();
    service_accounts.dedup();
    let connect = meta.annotations.get("istio.io/connect-strategy");
    Service {
        key: key.clone(),
        name: meta.name().clone(),
        registry: Registry::External,
        service_entry: Some(meta.key.clone()),
        creation: meta.creation,
        ports: first.ports.clone(),
        cluster_vips: Default::default(),
        default_address: first.address.clone(),
        auto_ipv4: first.auto_ipv4.clone(),
        auto_ipv6: first.auto_ipv6.clone(),
        variants: Vec::new(),
        resolution: first.resolution,
        mesh_external: spec.location() == Location::MeshExternal,
        export_to: super::export_to(cx, mesh, &spec.export_to, meta.namespace()),
        service_accounts,
        labels: labels(mesh, entry),
        selector: selector
            .into_iter()
            .flatten()
            .map(|(name, value)| (SmolStr::new(name), SmolStr::new(value)))
            .collect(),
        aliases: Vec::new(),
        external_name: Hostname::default(),
        node_local: false,
        traffic_distribution: super::traffic_distribution(cx, mesh, "", meta),
        publish_not_ready: false,
        race_first_tcp_connect: connect.is_some_and(|value| value.eq_ignore_ascii_case("RACE_FIRST_TCP_CONNECT")),
        headless: false,
        external_addresses: Default::default(),
        external_ports: Default::default(),
    }
}
