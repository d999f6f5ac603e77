//! Imports of an egress listener, from its `hosts`.

#[cfg(test)]
mod tests;

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
};

use super::{AliasFilters, PortFilters};
use crate::{
    base::{Hostname, Namespace, ObjectKey, Shared, keyed::KeyedMap},
    model::{
        MeshSnapshot,
        export::ExportTo,
        service::{Registry, ServiceKey, ServiceRef, Visibility},
        virtual_service::{Semantics, VirtualServiceSummary},
    },
    table::Cx,
};

/// Any namespace, in `namespace/host`.
const ANY_NAMESPACE: &str = "*";

/// Hosts by the namespace that they are imported from.
#[derive(Default)]
pub(super) struct Imports<'a> {
    by_namespace: BTreeMap<&'a str, Hosts<'a>>,
}

/// Hosts of a listener. There may be thousands, so services and VirtualServices are looked up and not compared with
/// each.
#[derive(Default)]
struct Hosts<'a> {
    exact: BTreeSet<&'a str>,
    /// The rest of each wildcard after its `*`.
    suffixes: BTreeSet<&'a str>,
    /// The lengths of `suffixes`.
    lengths: BTreeSet<usize>,
    /// Exact hosts and suffixes, each backwards, sorted.
    backwards: OnceCell<Vec<Vec<u8>>>,
}

/// A service that a namespace sees.
#[derive(Clone, Copy)]
pub(super) struct VisibleService<'a> {
    pub(super) key: &'a ServiceKey,
    pub(super) row: &'a Visibility,
    /// Position among the services of the row.
    pub(super) member: u32,
}

impl<'a> VisibleService<'a> {
    /// Returns the attributes of the service itself.
    pub(super) fn own(&self) -> &'a Visibility {
        self.row.member(self.member)
    }

    pub(super) fn reference(&self) -> ServiceRef {
        ServiceRef {
            key: self.key.clone(),
            member: self.member,
        }
    }
}

/// An imported service.
pub(super) struct Import<'a> {
    pub(super) service: VisibleService<'a>,
    /// Visible ports; `None` for all.
    pub(super) ports: Option<Vec<u32>>,
    /// Visible aliases; `None` for all.
    aliases: Option<Shared<[ServiceKey]>>,
}

/// The visible aliases of services; `None` for all. All services of a row have the same: there may be thousands, with
/// thousands of aliases.
type VisibleAliases<'m> = KeyedMap<&'m ServiceKey, Option<Shared<[ServiceKey]>>>;

impl<'a> Imports<'a> {
    /// Parses hosts of the form `namespace/host`; others are ignored.
    pub(super) fn of(written: &'a [String], own: &'a Namespace) -> Self {
        let mut imports = Self::default();
        for entry in written {
            let Some((namespace, host)) = entry.split_once('/').filter(|(_, host)| !host.contains('/')) else {
                continue;
            };
            let namespace = if namespace == "." { own.as_str() } else { namespace };
            let hosts = imports.by_namespace.entry(namespace).or_default();
            if let Some(suffix) = host.strip_prefix('*') {
                hosts.suffixes.insert(suffix);
                hosts.lengths.insert(suffix.len());
            } else {
                hosts.exact.insert(host);
            }
        }
        imports
    }

    /// Returns the namespaces that are imported from; `None` for any.
    pub(super) fn namespaces(&self) -> Option<Vec<Namespace>> {
        let all = self.by_namespace.contains_key(ANY_NAMESPACE);
        (!all).then(|| self.by_namespace.keys().map(Namespace::new).collect())
    }

    /// Returns the hosts imported from a namespace: those that name it, then those for any namespace.
    fn for_namespace(&self, namespace: &str) -> impl Iterator<Item = &Hosts<'a>> {
        let named = self.by_namespace.get(namespace);
        named.into_iter().chain(self.by_namespace.get(ANY_NAMESPACE))
    }

    /// Returns the imported ones of the services that `own` sees in [`Self::namespaces`], from one namespace per host.
    /// With a port, only services with that port, restricted to it.
    pub(super) fn services<'m>(
        &self,
        mesh: &MeshSnapshot,
        own: &Namespace,
        visible: &[VisibleService<'m>],
        port: Option<u32>,
    ) -> Vec<Import<'m>> {
        let mut aliases = VisibleAliases::default();
        let imports = visible
            .iter()
            .filter_map(|service| self.import(*service, port, &mut aliases));
        let mut imports: Vec<Import> = imports.collect();
        let unified = mesh.installation.features.pilot_unified_sidecar_scope;
        let mut chosen: KeyedMap<&Hostname, (&Namespace, Registry)> = KeyedMap::default();
        chosen.reserve(imports.len());
        for Import { service, .. } in &imports {
            let key = service.key;
            let candidate = (&key.namespace, service.own().registry);
            match chosen.get_mut(&key.hostname) {
                None => {
                    chosen.insert(&key.hostname, candidate);
                }
                Some(current) if is_preferred(candidate, *current, own, unified) => *current = candidate,
                Some(_) => {}
            }
        }
        imports.retain(|import| {
            let key = import.service.key;
            let chosen = chosen.get(&key.hostname);
            chosen.is_some_and(|(namespace, _)| **namespace == key.namespace)
        });
        imports
    }

    fn import<'m>(
        &self,
        service: VisibleService<'m>,
        port: Option<u32>,
        aliases: &mut VisibleAliases<'m>,
    ) -> Option<Import<'m>> {
        let (key, visibility) = (service.key, service.own());
        let hosts = self
            .for_namespace(&key.namespace)
            .find(|hosts| hosts.cover(&key.hostname))?;
        let ports = match port {
            None => None,
            Some(port) if visibility.ports.binary_search(&port).is_err() => return None,
            Some(_) if visibility.ports.len() == 1 && service.row.members.is_empty() => None,
            Some(port) => Some(vec![port]),
        };
        let aliases = if visibility.aliases.is_empty() {
            None
        } else {
            let covered = || hosts.covered_aliases(&visibility.aliases);
            aliases.entry(key).or_insert_with(covered).clone()
        };
        Some(Import {
            service,
            ports,
            aliases,
        })
    }

    /// Returns those of some VirtualServices of gateway `mesh` that have an imported host.
    pub(super) fn virtual_services<'m>(
        &self,
        visible: &[(&'m ObjectKey, &'m Shared<VirtualServiceSummary>)],
    ) -> Vec<(&'m ObjectKey, &'m Shared<VirtualServiceSummary>)> {
        let imported = visible.iter().filter(|(key, summary)| {
            let mut hosts = self.for_namespace(&key.namespace);
            hosts.any(|hosts| summary.hosts.iter().any(|host| hosts.meet(host, summary.semantics)))
        });
        imported.copied().collect()
    }
}

impl Hosts<'_> {
    /// Returns the imported ones of the aliases of a service; `None` if all are.
    ///
    /// Parity (pilot/pkg/model/sidecar.go, `matchingAliasService`): the imports from the service's namespace count,
    /// whatever the namespace of the alias.
    fn covered_aliases(&self, aliases: &[ServiceKey]) -> Option<Shared<[ServiceKey]>> {
        let covered = |alias: &&ServiceKey| self.cover(&alias.hostname);
        let found: Vec<ServiceKey> = aliases.iter().filter(covered).cloned().collect();
        (found.len() != aliases.len()).then(|| found.into())
    }

    /// Returns true if every name of the host is imported.
    fn cover(&self, host: &str) -> bool {
        self.exact.contains(host) || self.has_wildcard_for(host.strip_prefix('*').unwrap_or(host))
    }

    /// Returns true if a host of a VirtualService is imported, possibly in part; for the Gateway API as a whole.
    fn meet(&self, host: &str, semantics: Semantics) -> bool {
        if semantics == Semantics::Gateway {
            return self.cover(host);
        }
        self.cover(host) || host.strip_prefix('*').is_some_and(|suffix| self.has_host_below(suffix))
    }

    /// Returns true if a wildcard covers a name, or what follows the `*` of another wildcard.
    fn has_wildcard_for(&self, name: &str) -> bool {
        let mut lengths = self.lengths.range(..=name.len());
        lengths.any(|length| {
            let suffix = name.get(name.len() - length..);
            suffix.is_some_and(|suffix| self.suffixes.contains(suffix))
        })
    }

    /// Returns true if an exact host or a wildcard ends with a suffix.
    fn has_host_below(&self, suffix: &str) -> bool {
        let backwards = self.backwards.get_or_init(|| {
            let hosts = self.exact.iter().chain(&self.suffixes);
            let mut backwards: Vec<Vec<u8>> = hosts.map(|host| host.bytes().rev().collect()).collect();
            backwards.sort_unstable();
            backwards
        });
        let begin: Vec<u8> = suffix.bytes().rev().collect();
        let first = backwards.partition_point(|host| *host < begin);
        backwards.get(first).is_some_and(|host| host.starts_with(&begin))
    }
}

/// Returns true if another namespace's service of the same host replaces the current one: the own namespace's does, and
/// a Kubernetes service replaces a ServiceEntry; otherwise the older one stays.
fn is_preferred(
    (namespace, registry): (&Namespace, Registry),
    (current_namespace, current_registry): (&Namespace, Registry),
    own: &Namespace,
    unified: bool,
) -> bool {
    let outranks = current_registry != Registry::Kubernetes && registry == Registry::Kubernetes;
    namespace == own || (unified && outranks && current_namespace != own)
}

/// Returns the services that a namespace sees, of all namespaces or of some: those exported to it alone, then public
/// ones, by age, name and namespace.
pub(super) fn visible_services<'m>(
    cx: &Cx,
    mesh: &'m MeshSnapshot,
    own: &Namespace,
    declared_in: Option<Vec<Namespace>>,
) -> Vec<VisibleService<'m>> {
    let from: Vec<Option<Namespace>> = match declared_in {
        None => vec![None],
        Some(namespaces) => namespaces.into_iter().map(Some).collect(),
    };
    let mut rows: Vec<VisibleService> = Vec::new();
    for audience in [Some(own.clone()), None] {
        for namespace in &from {
            let index = &mesh.services_by_export;
            let found = index.get(cx, &(audience.clone(), namespace.clone()));
            for (key, row) in found {
                let exported = |member: &u32| is_exported(&row.member(*member).export_to, audience.as_ref());
                let members = row
                    .positions()
                    .filter(|member| row.members.is_empty() || exported(member));
                rows.extend(members.map(|member| VisibleService { key, row, member }));
            }
        }
    }
    // The rows lie apart in memory, so each is read once.
    rows.sort_by_cached_key(|service| {
        let (key, own) = (service.key, service.own());
        let public = matches!(*own.export_to, ExportTo::Public);
        (
            public,
            own.creation,
            &own.name,
            &key.namespace,
            &key.hostname,
            service.member,
        )
    });
    rows
}

/// Returns true if the services that an audience sees (`None` for all namespaces) include one with this visibility.
fn is_exported(export_to: &ExportTo, audience: Option<&Namespace>) -> bool {
    match (export_to, audience) {
        (ExportTo::Public, None) => true,
        (ExportTo::Namespaces(namespaces), Some(audience)) => namespaces.contains(audience),
        _ => false,
    }
}

/// Returns the visible ports of imports that do not show all of theirs.
pub(super) fn port_filters(imports: &[Import]) -> PortFilters {
    let filters = imports
        .iter()
        .filter_map(|import| Some((import.service.key.clone(), import.ports.clone()?)));
    Shared::new(filters.collect())
}

/// Returns the visible aliases of imports that do not show all of theirs.
pub(super) fn alias_filters(imports: &[Import]) -> AliasFilters {
    let filters = imports
        .iter()
        .filter_map(|import| Some((import.service.key.clone(), import.aliases.clone()?)));
    Shared::new(filters.collect())
}
