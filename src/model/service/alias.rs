//! ExternalName services that are aliases of another service, over any number of hops.
//!
//! All services of a host have the same list, in any namespace, and a namespace may add many to it. So the list exists
//! once, in a row for the host: a service that is derived again has the same one.

use std::collections::BTreeSet;

use super::{ServiceKey, kube};
use crate::{
    base::{Hostname, Namespace, Shared},
    model::MeshSnapshot,
    table::Cx,
};

/// The ExternalName services that resolve to one host, by namespace, then host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAliases(Shared<[ServiceKey]>);

/// Derives the aliases of a host. The host of an ExternalName service has no row: its aliases are those of its target,
/// and rows for each hop of a long chain would be as large as its square.
pub fn host_aliases(cx: &Cx, mesh: &MeshSnapshot, host: &Hostname) -> Option<HostAliases> {
    if kube::is_external_name(cx, mesh, host) {
        return None;
    }
    let aliases = find(cx, mesh, host);
    (!aliases.is_empty()).then(|| HostAliases(aliases.into()))
}

/// Returns the aliases of a host with a concrete service. It may also be the host of an ExternalName service, if a
/// ServiceEntry declares it.
pub(super) fn of_host(cx: &Cx, mesh: &MeshSnapshot, host: &Hostname) -> Shared<[ServiceKey]> {
    match mesh.host_aliases.get(cx, host) {
        Some(row) => row.0.clone(),
        None if kube::is_external_name(cx, mesh, host) => find(cx, mesh, host).into(),
        None => Shared::default(),
    }
}

/// Finds the ExternalName services that resolve to this host. Aliases in a loop are never found for a concrete host,
/// because the search starts at the concrete end.
fn find(cx: &Cx, mesh: &MeshSnapshot, host: &Hostname) -> Vec<ServiceKey> {
    let mut found: BTreeSet<(Namespace, Hostname)> = BTreeSet::new();
    let mut targets = vec![host.clone()];
    while let Some(target) = targets.pop() {
        for (key, _) in mesh.aliases_by_target.get(cx, &target) {
            // The first cluster with the Service determines its target.
            let decisive = kube::objects(cx, mesh, &key.namespace, &key.name);
            let leads_here = decisive
                .first()
                .is_some_and(|object| object.is_external_name() && object.external_name == target.as_str());
            let hostname = Hostname::from(format!(
                "{}.{}.svc.{}",
                key.name, key.namespace, mesh.installation.domain
            ));
            if leads_here && found.insert((key.namespace.clone(), hostname.clone())) {
                targets.push(hostname);
            }
        }
    }
    let keys = found.into_iter();
    keys.map(|(namespace, hostname)| ServiceKey { hostname, namespace })
        .collect()
}
