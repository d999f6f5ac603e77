//! Union of the services of listeners and VirtualServices in a scope: one service per host.

use std::collections::{BTreeMap, BTreeSet};

use super::{PortFilter, SidecarScope};
use crate::{
    base::{Hostname, Namespace, Shared},
    model::{
        MeshSnapshot,
        service::{Registry, ServiceKey, Visibility},
        virtual_service::VirtualServiceSummary,
    },
    table::Cx,
};

/// Services so far, in order of insertion.
#[derive(Default)]
pub(super) struct Collector<'m> {
    entries: Vec<Entry<'m>>,
    by_host: BTreeMap<&'m Hostname, usize>,
}

struct Entry<'m> {
    key: &'m ServiceKey,
    registry: Registry,
    /// Visible ports; `None` for all.
    ports: Option<BTreeSet<u32>>,
}

impl<'m> Collector<'m> {
    /// Adds a service, or some of its ports. The first service of a host stays, except that Kubernetes services replace
    /// ServiceEntries; adding the same service again adds its ports.
    pub(super) fn add(&mut self, key: &'m ServiceKey, visibility: &'m Visibility, ports: Option<&[u32]>) {
        let entry = Entry {
            key,
            registry: visibility.registry,
            ports: ports.map(|ports| ports.iter().copied().collect()),
        };
        let Some(index) = self.by_host.get(&key.hostname) else {
            self.by_host.insert(&key.hostname, self.entries.len());
            self.entries.push(entry);
            return;
        };
        let current = &mut self.entries[*index];
        if current.key == key {
            current.ports = match (current.ports.take(), entry.ports) {
                (Some(mut all), Some(more)) => {
                    all.extend(more);
                    Some(all)
                }
                _ => None,
            };
        } else if current.registry != Registry::Kubernetes && entry.registry == Registry::Kubernetes {
            *current = entry;
        }
    }

    /// Adds the destination services of a VirtualService for clients of a namespace: that namespace's own service
    /// whatever its visibility, or else the best visible one.
    pub(super) fn add_destinations(
        &mut self,
        cx: &Cx,
        mesh: &'m MeshSnapshot,
        own: &Namespace,
        summary: &VirtualServiceSummary,
        listener_port: Option<u32>,
    ) {
        let mut ports_by_host: BTreeMap<&Hostname, BTreeSet<u32>> = BTreeMap::new();
        for destination in &summary.destinations {
            if destination.sources.is_empty() || destination.sources.contains(own) {
                ports_by_host
                    .entry(&destination.host)
                    .or_default()
                    .insert(destination.port);
            }
        }
        for (host, ports) in ports_by_host {
            let Some((key, visibility)) = best_service(cx, mesh, own, host) else {
                continue;
            };
            let selected_ports = match listener_port {
                Some(port) => BTreeSet::from([port]),
                None if ports.contains(&0) => BTreeSet::new(),
                None => ports,
            };
            if selected_ports.is_empty() {
                self.add(key, visibility, None);
                continue;
            }
            let found: Vec<u32> = visibility
                .ports
                .iter()
                .copied()
                .filter(|port| selected_ports.contains(port))
                .collect();
            if found.len() == visibility.ports.len() {
                self.add(key, visibility, None);
            } else if !found.is_empty() {
                self.add(key, visibility, Some(&found));
            }
        }
    }

    /// Sets the services of a scope.
    pub(super) fn finish(self, scope: SidecarScope) -> SidecarScope {
        let mut port_filters = BTreeMap::new();
        for entry in &self.entries {
            if let Some(ports) = &entry.ports {
                let trim = PortFilter {
                    ports: Some(ports.iter().copied().collect()),
                    aliases: None,
                };
                port_filters.insert(entry.key.clone(), trim);
            }
        }
        let by_host = self
            .entries
            .iter()
            .map(|entry| (entry.key.hostname.clone(), entry.key.clone()));
        SidecarScope {
            by_host: Shared::new(by_host.collect()),
            port_filters: Shared::new(port_filters),
            services: self
                .entries
                .iter()
                .map(|entry| entry.key.clone())
                .collect::<Vec<_>>()
                .into(),
            ..scope
        }
    }
}

/// Returns the service of a host for clients of a namespace that has not imported any.
fn best_service<'m>(
    cx: &Cx,
    mesh: &'m MeshSnapshot,
    own: &Namespace,
    host: &Hostname,
) -> Option<(&'m ServiceKey, &'m Visibility)> {
    let rows: Vec<_> = mesh
        .services_by_host
        .get(cx, host)
        .map(|(key, row)| (key, &**row))
        .collect();
    if let Some(found) = rows.iter().find(|(key, _)| key.namespace == *own) {
        return Some(*found);
    }
    let mut visible = rows.into_iter().filter(|(_, row)| row.export_to.visible_to(own));
    if mesh.installation.features.pilot_sidecar_pick_best_service_namespace {
        visible.min_by_key(|(key, row)| (row.registry != Registry::Kubernetes, row.creation, &key.namespace))
    } else {
        visible.next()
    }
}
