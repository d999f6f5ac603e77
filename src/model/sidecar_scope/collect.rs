//! Union of the services of listeners and VirtualServices in a scope: one service per host.

use std::collections::{BTreeMap, BTreeSet};

use super::{SidecarScope, imports::VisibleService};
use crate::{
    base::{Hostname, Namespace, Shared, keyed::KeyedMap},
    model::{
        MeshSnapshot,
        service::{MergedService, Registry, ServiceKey, Visibility},
        virtual_service::VirtualServiceSummary,
    },
    table::Cx,
};

/// Services so far, in order of insertion.
#[derive(Default)]
pub(super) struct Collector<'m> {
    entries: Vec<Entry<'m>>,
    by_host: KeyedMap<&'m Hostname, usize>,
}

struct Entry<'m> {
    service: VisibleService<'m>,
    /// Visible ports; `None` for all.
    ports: Option<BTreeSet<u32>>,
    /// The member that each port comes from, if the row has several.
    merged: BTreeMap<u32, u32>,
}

impl<'m> Entry<'m> {
    fn of(service: VisibleService<'m>, ports: Option<&[u32]>) -> Self {
        let mut entry = Self {
            service,
            ports: ports.map(|ports| ports.iter().copied().collect()),
            merged: BTreeMap::new(),
        };
        entry.merge(service, ports);
        entry
    }

    fn has_members(&self) -> bool {
        !self.service.row.members.is_empty()
    }

    /// Adds ports of the same service, or of one that agrees with it.
    fn merge(&mut self, other: VisibleService, ports: Option<&[u32]>) {
        if self.has_members() {
            for port in ports.unwrap_or(&other.own().ports) {
                self.merged.entry(*port).or_insert(other.member);
            }
            return;
        }
        self.ports = match (self.ports.take(), ports) {
            (Some(mut all), Some(more)) => {
                all.extend(more);
                Some(all)
            }
            _ => None,
        };
    }
}

impl<'m> Collector<'m> {
    /// Adds a service, or some of its ports. The first service of a host decides, except that Kubernetes services
    /// replace ServiceEntries. Ports of the same service, and of those of its namespace that agree with it, are added.
    ///
    /// Parity (pilot/pkg/model/sidecar.go, `appendSidecarServices`).
    pub(super) fn add(&mut self, service: VisibleService<'m>, ports: Option<&[u32]>) {
        let host = &service.key.hostname;
        let Some(index) = self.by_host.get(host) else {
            self.by_host.insert(host, self.entries.len());
            self.entries.push(Entry::of(service, ports));
            return;
        };
        let current = &mut self.entries[*index];
        let (held, added) = (current.service.own(), service.own());
        if held.registry != added.registry {
            if added.registry == Registry::Kubernetes {
                *current = Entry::of(service, ports);
            }
        } else if current.service.key == service.key && held.merge_class == added.merge_class {
            current.merge(service, ports);
        }
    }

    /// Adds destination services of a VirtualService. A listener with a port shows that port only.
    pub(super) fn add_destinations(&mut self, destinations: &[DestinationService<'m>], listener_port: Option<u32>) {
        for DestinationService { service, ports } in destinations {
            let declared = &service.own().ports;
            let is_shown = |port: &u32| match listener_port {
                Some(wanted) => *port == wanted,
                None => ports.is_empty() || ports.contains(port),
            };
            let shown: Vec<u32> = declared.iter().copied().filter(is_shown).collect();
            if shown.len() == declared.len() {
                self.add(*service, None);
            } else if !shown.is_empty() {
                self.add(*service, Some(&shown));
            }
        }
    }

    /// Sets the services of a scope.
    pub(super) fn finish(self, scope: SidecarScope) -> SidecarScope {
        let mut port_filters = BTreeMap::new();
        let mut merged = BTreeMap::new();
        for entry in &self.entries {
            let key = entry.service.key;
            if entry.has_members() {
                let service = MergedService {
                    member: entry.service.member,
                    ports: entry.merged.clone(),
                };
                merged.insert(key.clone(), Shared::new(service));
            } else if let Some(ports) = &entry.ports {
                port_filters.insert(key.clone(), ports.iter().copied().collect());
            }
        }
        let by_host = self
            .entries
            .iter()
            .map(|entry| (entry.service.key.hostname.clone(), entry.service.key.clone()));
        SidecarScope {
            by_host: Shared::new(by_host.collect()),
            port_filters: Shared::new(port_filters),
            merged: Shared::new(merged),
            services: self
                .entries
                .iter()
                .map(|entry| entry.service.key.clone())
                .collect::<Vec<_>>()
                .into(),
            ..scope
        }
    }
}

/// A destination service of a VirtualService.
pub(super) struct DestinationService<'m> {
    service: VisibleService<'m>,
    /// The ports that routes name; empty for all.
    ports: BTreeSet<u32>,
}

/// Returns the destination services of a VirtualService for clients of a namespace: that namespace's own service
/// whatever its visibility, or else the best visible one.
pub(super) fn destinations<'m>(
    cx: &Cx,
    mesh: &'m MeshSnapshot,
    own: &Namespace,
    summary: &VirtualServiceSummary,
) -> Vec<DestinationService<'m>> {
    let mut ports_by_host: BTreeMap<&Hostname, BTreeSet<u32>> = BTreeMap::new();
    for destination in summary.destinations.iter() {
        if destination.sources.is_empty() || destination.sources.contains(own) {
            ports_by_host
                .entry(&destination.host)
                .or_default()
                .insert(destination.port);
        }
    }
    let services = ports_by_host.into_iter().filter_map(|(host, ports)| {
        Some(DestinationService {
            service: best_service(cx, mesh, own, host)?,
            ports: if ports.contains(&0) { BTreeSet::new() } else { ports },
        })
    });
    services.collect()
}

/// Returns the service of a host for clients of a namespace that has not imported any.
fn best_service<'m>(cx: &Cx, mesh: &'m MeshSnapshot, own: &Namespace, host: &Hostname) -> Option<VisibleService<'m>> {
    let representative = |(key, row): (&'m ServiceKey, &'m Shared<Visibility>)| VisibleService {
        key,
        row,
        member: row.primary(),
    };
    let rows: Vec<VisibleService> = mesh.services_by_host.get(cx, host).map(representative).collect();
    if let Some(found) = rows.iter().find(|service| service.key.namespace == *own) {
        return Some(*found);
    }
    let mut visible = rows
        .into_iter()
        .filter(|service| service.own().export_to.visible_to(own));
    if mesh.installation.features.pilot_sidecar_pick_best_service_namespace {
        visible.min_by_key(|service| {
            let attributes = service.own();
            let outranked = attributes.registry != Registry::Kubernetes;
            (outranked, attributes.creation, &service.key.namespace)
        })
    } else {
        visible.next()
    }
}
