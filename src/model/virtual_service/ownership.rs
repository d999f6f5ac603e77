//! Owners of hosts, for `PILOT_STRICT_HOST_OWNERSHIP`.
//!
//! Note: declaring a name does not make its owner. A ServiceEntry may declare any name, also that of a Kubernetes
//! service and wildcards that cover services of other namespaces.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    base::{Hostname, Namespace, host},
    model::{MeshSnapshot, policy, service::Registry},
    table::Cx,
};

/// The namespaces that own wildcard hosts.
#[derive(Debug, PartialEq, Eq)]
pub struct WildcardOwners(BTreeMap<Hostname, Namespace>);

/// Returns true if a namespace may decide about requests of other namespaces' clients to a host: it owns the host, or
/// is the root namespace.
pub(super) fn owns(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace, host: &Hostname) -> bool {
    if policy::root_namespace(cx, mesh) == *namespace {
        return true;
    }
    // Routes apply to the service that has this name in lower case.
    let host = Hostname::from(host.to_ascii_lowercase());
    let owner = if host::is_wildcard(&host) {
        let owners = mesh.wildcard_owners.get(cx, &());
        owners.and_then(|owners| owners.0.get(&host))
    } else {
        first_with(cx, mesh, &host)
    };
    owner == Some(namespace)
}

/// Returns the namespace whose service has exactly this name and precedes those of others.
fn first_with<'a>(cx: &Cx, mesh: &'a MeshSnapshot, host: &Hostname) -> Option<&'a Namespace> {
    let services = mesh.services_by_host.get(cx, host);
    let first = services.min_by_key(|(key, row)| (row.registry != Registry::Kubernetes, row.creation, &key.namespace));
    first.map(|(key, _)| &key.namespace)
}

/// Derives the owners of wildcard hosts: a namespace must have the first service of exactly that name, and no other
/// namespace may have a service below it, of whatever age and visibility. No row without strict ownership.
pub fn wildcard_owners(cx: &Cx, mesh: &MeshSnapshot, _key: &()) -> Option<WildcardOwners> {
    if !mesh.installation.features.pilot_strict_host_ownership {
        return None;
    }
    let declared = mesh.visibility.keys(cx).map(|key| &key.hostname);
    let wildcards: BTreeSet<&Hostname> = declared.filter(|hostname| host::is_wildcard(hostname)).collect();
    // By what follows the `*`.
    let mut owners: BTreeMap<&str, &Namespace> = wildcards
        .into_iter()
        .filter_map(|hostname| Some((hostname.strip_prefix('*')?, first_with(cx, mesh, hostname)?)))
        .collect();
    // Each service looks up only suffixes that a wildcard may have, so that the time is linear.
    let lengths: BTreeSet<usize> = owners.keys().map(|suffix| suffix.len()).collect();
    for key in mesh.visibility.keys(cx) {
        let hostname = key.hostname.to_ascii_lowercase();
        let (name, is_wildcard) = match hostname.strip_prefix('*') {
            Some(suffix) => (suffix, true),
            None => (hostname.as_str(), false),
        };
        // A wildcard is not below itself.
        let is_above = |length: usize| length < name.len() || length == name.len() && !is_wildcard;
        for length in lengths.iter().take_while(|length| is_above(**length)) {
            let suffix = name.get(name.len() - length..);
            let others = suffix.filter(|suffix| owners.get(*suffix).is_some_and(|owner| **owner != key.namespace));
            if let Some(suffix) = others {
                owners.remove(suffix);
            }
        }
    }
    let owners = owners.into_iter();
    let owners = owners.map(|(suffix, owner)| (Hostname::from(format!("*{suffix}")), owner.clone()));
    Some(WildcardOwners(owners.collect()))
}
