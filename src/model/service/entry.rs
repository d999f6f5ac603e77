//! Services of ServiceEntries: one for each address of each entry of the namespace that declares the host.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use smol_str::SmolStr;

use super::{
    Protocol, Registry, Resolution, Service, ServiceKey, ServicePort, UNSPECIFIED_IP, entry_lists::EntryLists,
};
use crate::{
    api::{Config, Meta, kube::service::TargetPort},
    base::{Hostname, Shared, cidr, host},
    model::MeshSnapshot,
    proto::istio::networking::v1alpha3::{
        ServiceEntry,
        service_entry::{Location, Resolution as Given},
    },
    table::Cx,
};

/// Returns the ServiceEntries of the config cluster and of registries that declare the host in the namespace: those of
/// the first registry first, then oldest first.
pub(in crate::model) fn entries<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    key: &ServiceKey,
) -> Vec<&'a Shared<Config<ServiceEntry>>> {
    let rows = mesh.service_entries_by_host.get(cx, key);
    let ranked = rows.filter_map(|(object, entry)| Some((mesh.installation.entry_rank(&object.cluster)?, entry)));
    let mut entries: Vec<_> = ranked.collect();
    entries.sort_by(|(rank_a, a), (rank_b, b)| (rank_a, a.meta.age_order()).cmp(&(rank_b, b.meta.age_order())));
    entries.into_iter().map(|(_, entry)| entry).collect()
}

/// Returns those of the [`entries`] that apply to the host: their limit may cut it off.
pub(in crate::model) fn applied<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    key: &ServiceKey,
) -> Vec<&'a Shared<Config<ServiceEntry>>> {
    let mut entries = entries(cx, mesh, key);
    entries.retain(|entry| applies(cx, mesh, entry, &key.hostname));
    entries
}

/// Returns true if an entry applies to one of its hosts.
pub(in crate::model) fn applies(cx: &Cx, mesh: &MeshSnapshot, entry: &Config<ServiceEntry>, host: &Hostname) -> bool {
    let kept = mesh.kept_hosts(cx, &entry.meta.key);
    kept.is_none_or(|kept| {
        entry
            .spec
            .hosts
            .iter()
            .take(kept)
            .any(|declared| Hostname::new(declared) == *host)
    })
}

/// Returns the services of the entries, oldest first. Invalid addresses have none.
pub(super) fn services(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Vec<Service> {
    let entries = applied(cx, mesh, key);
    let lists: Vec<Shared<EntryLists>> = entries.iter().map(|entry| EntryLists::of(cx, mesh, entry)).collect();
    let classes = merge_classes(&entries, &lists);
    let mut services = Vec::new();
    for ((entry, lists), merge_class) in entries.into_iter().zip(&lists).zip(classes) {
        let mut addresses = addresses(cx, mesh, key, entry).into_iter();
        let Some(first) = addresses.next() else { continue };
        let first = first.of(Service {
            merge_class,
            ..converted(cx, mesh, key, entry, lists)
        });
        let further: Vec<Service> = addresses.map(|address| address.of(first.clone())).collect();
        services.push(first);
        services.extend(further);
    }
    services
}

/// Returns a number for each entry that is equal for those whose ports may be merged. 0 is free for a Kubernetes
/// service, which nothing is merged with.
///
/// Parity (pilot/pkg/model/sidecar.go, `canMergeServices`): `exportTo` counts as written.
fn merge_classes(entries: &[&Shared<Config<ServiceEntry>>], lists: &[Shared<EntryLists>]) -> Vec<u32> {
    if entries.len() < 2 {
        return vec![1; entries.len()];
    }
    let mut classes = BTreeMap::new();
    let attributes = entries.iter().zip(lists).map(|(entry, lists)| {
        let audience: BTreeSet<&String> = entry.spec.export_to.iter().collect();
        (resolution(&entry.spec), &lists.labels, &lists.selector, audience)
    });
    let class = |attributes| {
        let next = u32::try_from(classes.len()).unwrap_or(u32::MAX).saturating_add(1);
        *classes.entry(attributes).or_insert(next)
    };
    attributes.map(class).collect()
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

/// Returns the number of services of an entry for a host: one per address, or one without addresses.
pub(in crate::model) fn address_count(entry: &ServiceEntry) -> usize {
    if entry.addresses.is_empty() {
        return 1;
    }
    given_addresses(entry).len()
}

/// Returns the addresses that an entry declares, each once; invalid ones are omitted.
///
/// Note: in Istio, a repeated address has equal services, of which others than the first only repeat endpoints. For the
/// unspecified address, each service has the addresses of all endpoints, so an object of 1 MiB would take gigabytes.
fn given_addresses(entry: &ServiceEntry) -> Vec<SmolStr> {
    let mut known = BTreeSet::new();
    let given = entry.addresses.iter().filter_map(|text| address(text));
    given.filter(|address| known.insert(address.clone())).collect()
}

/// Returns true if an address may be allocated to the host: it has none, is not a wildcard, and is resolved.
pub(super) fn wants_address(entry: &ServiceEntry, hostname: &Hostname) -> bool {
    entry.addresses.is_empty() && entry.resolution() != Given::None && !host::is_wildcard(hostname)
}

/// Address of a service.
struct Address {
    address: SmolStr,
    auto_ipv4: SmolStr,
    auto_ipv6: SmolStr,
}

impl Address {
    /// Returns a service with the address.
    fn of(self, service: Service) -> Service {
        Service {
            default_address: self.address,
            auto_ipv4: self.auto_ipv4,
            auto_ipv6: self.auto_ipv6,
            ..service
        }
    }
}

/// Returns the addresses of the entry; invalid ones are omitted.
fn addresses(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey, entry: &Config<ServiceEntry>) -> Vec<Address> {
    if entry.spec.addresses.is_empty() {
        let (auto_ipv4, auto_ipv6) = auto_addresses(cx, mesh, key, entry);
        let address = SmolStr::new_static(UNSPECIFIED_IP);
        return vec![Address {
            address,
            auto_ipv4,
            auto_ipv6,
        }];
    }
    let given = given_addresses(&entry.spec).into_iter();
    given
        .map(|address| Address {
            address,
            auto_ipv4: SmolStr::default(),
            auto_ipv6: SmolStr::default(),
        })
        .collect()
}

fn port(port: &crate::proto::istio::networking::v1alpha3::ServicePort) -> ServicePort {
    ServicePort {
        name: SmolStr::new(&port.name),
        number: port.number,
        target: TargetPort::Number(port.target_port),
        protocol: Protocol::parse(&port.protocol),
    }
}

/// Returns an address for listeners: a range of one address is that address. The unspecified address, which listeners
/// of all services share, has one spelling.
fn address(text: &str) -> Option<SmolStr> {
    let net = cidr::parse(text)?;
    Some(if cidr::is_range(text) {
        SmolStr::new(text)
    } else if text.contains('/') || net.addr().is_unspecified() {
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

/// Returns true if clients connect to several addresses of a host at once, and use the first connection.
pub(in crate::model) fn races_connections(meta: &Meta) -> bool {
    let strategy = meta.annotations.get("istio.io/connect-strategy");
    strategy.is_some_and(|strategy| strategy.eq_ignore_ascii_case("RACE_FIRST_TCP_CONNECT"))
}

/// Returns the service of an entry, without an address.
fn converted(
    cx: &Cx,
    mesh: &MeshSnapshot,
    key: &ServiceKey,
    entry: &Config<ServiceEntry>,
    lists: &EntryLists,
) -> Service {
    let (meta, spec) = (&entry.meta, &entry.spec);
    Service {
        key: key.clone(),
        name: meta.name().clone(),
        registry: Registry::External,
        service_entry: Some(meta.key.clone()),
        creation: meta.creation,
        ports: spec.ports.iter().map(port).collect(),
        cluster_vips: Default::default(),
        default_address: SmolStr::default(),
        auto_ipv4: SmolStr::default(),
        auto_ipv6: SmolStr::default(),
        members: Vec::new(),
        merge_class: 0,
        resolution: resolution(spec),
        mesh_external: spec.location() == Location::MeshExternal,
        export_to: lists.export_to.clone(),
        service_accounts: lists.service_accounts.clone(),
        labels: lists.labels.clone(),
        selector: lists.selector.clone(),
        selects_workloads: spec.workload_selector.is_some(),
        aliases: Shared::default(),
        external_name: Hostname::default(),
        node_local: false,
        traffic_distribution: super::traffic_distribution(cx, mesh, "", meta),
        publish_not_ready: false,
        race_first_tcp_connect: races_connections(meta),
        headless: false,
        external_addresses: Default::default(),
        external_ports: Default::default(),
    }
}
