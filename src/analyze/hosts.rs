//! Hosts of services and the namespaces that see them.
//!
//! Parity (pkg/config/analysis/analyzers/util/service_lookup.go, hosts.go).

use std::collections::BTreeMap;

use super::{
    deployment::number,
    json::{items, labels, text, texts},
    mesh::Mesh,
};
use crate::{api::Kind, base::Labels};

/// The scope of hosts that every namespace sees.
pub(super) const ALL: &str = "*";

/// A service as a destination.
#[derive(Clone)]
pub(super) struct Destination {
    /// The numbers of its ports.
    pub(super) ports: Vec<i64>,
    /// The selector of a ServiceEntry for pods.
    pub(super) selector: Labels,
}

/// The destinations of a mesh by scope (a namespace or [`ALL`]) and host.
pub(super) struct Hosts(BTreeMap<(String, String), Destination>);

impl Hosts {
    /// Indexes the hosts of ServiceEntries and Services.
    pub(super) fn of(mesh: &Mesh) -> Self {
        let mut hosts = BTreeMap::new();
        for entry in mesh.of(Kind::ServiceEntry) {
            let destination = Destination {
                ports: items(entry.spec("ports"))
                    .iter()
                    .map(|port| number(&port["number"]))
                    .collect(),
                selector: labels(&entry.spec("workloadSelector")["labels"]),
            };
            for host in texts(entry.spec("hosts")) {
                let host = qualified(&entry.namespace, host);
                for scope in scopes(texts(entry.spec("exportTo")), &entry.namespace) {
                    hosts.insert((scope, host.clone()), destination.clone());
                }
            }
        }
        for service in mesh.of(Kind::Service) {
            let destination = Destination {
                ports: items(service.spec("ports"))
                    .iter()
                    .map(|port| number(&port["port"]))
                    .collect(),
                selector: Labels::new(),
            };
            let exported = service
                .annotation("networking.istio.io/exportTo")
                .split(',')
                .map(str::trim);
            let exported = exported.filter(|scope| !scope.is_empty());
            for scope in scopes(exported, &service.namespace) {
                let host = qualified(&service.namespace, &service.name);
                hosts.insert((scope, host), destination.clone());
            }
        }
        Self(hosts)
    }

    /// Returns the destination of a host that an object of a namespace names.
    pub(super) fn find(&self, namespace: &str, exported_to: &serde_json::Value, host: &str) -> Option<&Destination> {
        let exact = qualified(namespace, host);
        let at = |scope: &str, host: &str| self.0.get(&(scope.to_owned(), host.to_owned()));
        let mut exported = texts(exported_to).map(|scope| if scope == "." { namespace } else { scope });
        let own = items(exported_to).is_empty().then(|| at(namespace, &exact)).flatten();
        at(ALL, &exact)
            .or(own)
            .or_else(|| exported.find_map(|scope| at(scope, &exact)))
            .or_else(|| {
                let name = host.strip_prefix('*').unwrap_or(host);
                // The longest wildcard first; each is one lookup.
                let ends = name.char_indices().map(|(at, _)| at).chain([name.len()]);
                ends.map(|end| format!("*{}", &name[end..]))
                    .find_map(|wildcard| at(ALL, &wildcard).or_else(|| at(namespace, &wildcard)))
            })
    }
}

/// Returns the scopes of an `exportTo`.
pub(super) fn scopes<'a>(exported: impl Iterator<Item = &'a str>, namespace: &str) -> Vec<String> {
    let mut scopes: Vec<String> = exported
        .map(|scope| if scope == "." { namespace } else { scope }.to_owned())
        .collect();
    if scopes.is_empty() {
        scopes.push(ALL.to_owned());
    }
    scopes.sort();
    scopes.dedup();
    scopes
}

/// Returns a short name with the namespace and domain; other hosts are complete.
pub(super) fn qualified(namespace: &str, host: &str) -> String {
    if host.starts_with('*') || host.contains('.') {
        host.to_owned()
    } else {
        format!("{host}.{namespace}.svc.cluster.local")
    }
}

/// Returns namespace and name of a service's host; other hosts are names in the namespace itself.
pub(super) fn service_name<'a>(namespace: &'a str, host: &'a str) -> (&'a str, &'a str) {
    let parts = host
        .strip_suffix(".svc.cluster.local")
        .and_then(|rest| rest.rsplit_once('.'));
    match parts {
        Some((name, namespace)) if !name.is_empty() && !namespace.is_empty() => (namespace, name),
        _ => (namespace, host),
    }
}

/// Splits a reference `namespace/name`, or a name in the given namespace.
pub(super) fn reference<'a>(namespace: &'a str, name: &'a str) -> (&'a str, &'a str) {
    name.split_once('/').unwrap_or((namespace, name))
}

/// Returns true if one of the gateways of a VirtualService is that of sidecars.
pub(super) fn applies_to_sidecars(gateways: &serde_json::Value) -> bool {
    let gateways = items(gateways);
    gateways.is_empty() || gateways.iter().any(|gateway| text(gateway) == "mesh")
}
