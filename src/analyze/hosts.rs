//! Hosts of services and the namespaces that see them.
//!
//! Parity (pkg/config/analysis/analyzers/util/service_lookup.go, hosts.go).

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{
    deployment::number,
    json::{items, labels, text, texts},
    mesh::Mesh,
};
use crate::{
    api::{Kind, istio::common::MAX_EXPORTS},
    base::{Labels, Shared},
};

/// The scope of hosts that every namespace sees.
pub(super) const ALL: &str = "*";

/// A service as a destination.
pub(super) struct Destination {
    /// The numbers of its ports.
    pub(super) ports: Vec<i64>,
    /// The same numbers, to look them up.
    known: BTreeSet<i64>,
    /// The selector of a ServiceEntry for pods.
    pub(super) selector: Labels,
}

impl Destination {
    /// Returns a destination, given its ports and the field with their numbers.
    fn new(ports: &Value, field: &str, selector: Labels) -> Self {
        let ports: Vec<i64> = items(ports).iter().map(|port| number(&port[field])).collect();
        Self {
            known: ports.iter().copied().collect(),
            ports,
            selector,
        }
    }

    /// Returns true if it has a port with this number.
    pub(super) fn has_port(&self, number: i64) -> bool {
        self.known.contains(&number)
    }
}

/// A host as an object declares it. All hosts of the object share this: an object may have hundreds of hosts, and a
/// hundred thousand scopes.
#[derive(Clone)]
struct Declared {
    /// The namespaces that see it, or [`ALL`].
    scopes: Shared<BTreeSet<String>>,
    destination: Shared<Destination>,
}

impl Declared {
    fn new(scopes: Vec<String>, destination: Destination) -> Self {
        Self {
            scopes: Shared::new(scopes.into_iter().collect()),
            destination: destination.into(),
        }
    }
}

/// The destinations of a mesh by host. Of several for one scope, the last one counts.
#[derive(Default)]
pub(super) struct Hosts(BTreeMap<String, Vec<Declared>>);

impl Hosts {
    /// Indexes the hosts of ServiceEntries and Services.
    pub(super) fn of(mesh: &Mesh) -> Self {
        let mut hosts = Self::default();
        for entry in mesh.of(Kind::ServiceEntry) {
            let selector = labels(&entry.spec("workloadSelector")["labels"]);
            let declared = Declared::new(
                scopes(texts(entry.spec("exportTo")), &entry.namespace),
                Destination::new(entry.spec("ports"), "number", selector),
            );
            for host in texts(entry.spec("hosts")) {
                hosts.add(qualified(&entry.namespace, host), &declared);
            }
        }
        for service in mesh.of(Kind::Service) {
            let exported = service
                .annotation("networking.istio.io/exportTo")
                .split(',')
                .map(str::trim);
            let exported = exported.filter(|scope| !scope.is_empty());
            let declared = Declared::new(
                scopes(exported, &service.namespace),
                Destination::new(service.spec("ports"), "port", Labels::new()),
            );
            hosts.add(qualified(&service.namespace, &service.name), &declared);
        }
        hosts
    }

    fn add(&mut self, host: String, declared: &Declared) {
        self.0.entry(host).or_default().push(declared.clone());
    }

    /// Returns the destination of a host in a scope.
    fn at(&self, scope: &str, host: &str) -> Option<&Destination> {
        seen_in(scope, self.0.get(host)?)
    }

    /// Returns the destination of a host that an object of a namespace names.
    pub(super) fn find(&self, namespace: &str, exported_to: &Value, host: &str) -> Option<&Destination> {
        self.of_name(namespace, exported_to, &qualified(namespace, host))
            .or_else(|| {
                let name = host.strip_prefix('*').unwrap_or(host);
                // The longest wildcard first; each is one lookup.
                let ends = name.char_indices().map(|(at, _)| at).chain([name.len()]);
                ends.map(|end| format!("*{}", &name[end..]))
                    .find_map(|wildcard| self.at(ALL, &wildcard).or_else(|| self.at(namespace, &wildcard)))
            })
    }

    /// Returns the destination of exactly this host. An object may have thousands of destinations and be exported to
    /// thousands of namespaces, so the host is not looked up again for each of these.
    fn of_name(&self, namespace: &str, exported_to: &Value, host: &str) -> Option<&Destination> {
        let declared = self.0.get(host)?;
        let own = items(exported_to).is_empty().then(|| seen_in(namespace, declared));
        // An object with more is an error.
        let exported = texts(exported_to).take(MAX_EXPORTS);
        let mut exported = exported.map(|scope| if scope == "." { namespace } else { scope });
        seen_in(ALL, declared)
            .or(own.flatten())
            .or_else(|| exported.find_map(|scope| seen_in(scope, declared)))
    }
}

/// Returns the destination in a scope, given what objects declare for a host.
fn seen_in<'a>(scope: &str, declared: &'a [Declared]) -> Option<&'a Destination> {
    let seen = declared.iter().rev().find(|declared| declared.scopes.contains(scope));
    seen.map(|declared| &*declared.destination)
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::analyze::{mesh::Settings, object::Object};

    #[test]
    fn r21_hosts_of_an_object_share_its_scopes() {
        let entry = |name: &str, port: u16, scopes: &Value| {
            let manifest = json!({"metadata": {"name": name, "namespace": "n"},
                "spec": {"hosts": ["a.test", "b.test"], "ports": [{"number": port}], "exportTo": scopes}});
            Object::of(Kind::ServiceEntry.into(), manifest, "").unwrap()
        };
        let service = json!({"metadata": {"name": "web", "namespace": "n",
            "annotations": {"networking.istio.io/exportTo": "., far"}}, "spec": {"ports": [{"port": 80}]}});
        let service = Object::of(Kind::Service.into(), service, "").unwrap();
        let objects = [
            entry("first", 1, &json!([".", "other", "far"])),
            entry("second", 2, &json!(["far"])),
            entry("wide", 3, &Value::Null),
            service,
        ];
        let hosts = Hosts::of(&Mesh::new(objects, Settings::default()));
        let [of_a, of_b] = ["a.test", "b.test"].map(|host| &hosts.0[host]);
        assert_eq!(of_a.len(), 3);
        assert!(of_a.iter().zip(of_b).all(|(a, b)| a.scopes.ptr_eq(&b.scopes)));
        let ports = |scope: &str, host: &str| hosts.at(scope, host).map(|found| found.ports.clone());
        assert_eq!(ports("n", "a.test"), Some(vec![1]), "`.` is the own namespace");
        assert_eq!(ports("far", "b.test"), Some(vec![2]), "the last one");
        assert_eq!(ports(ALL, "b.test"), Some(vec![3]));
        assert_eq!(ports("none", "b.test"), None);
        let exported = json!(["other"]);
        let found = hosts.find("x", &exported, "web.n.svc.cluster.local");
        assert!(found.is_none(), "the Service is not exported there");
        let found = hosts.find("far", &Value::Null, "web.n.svc.cluster.local");
        assert!(found.is_some_and(|found| found.has_port(80) && !found.has_port(81)));
    }

    #[test]
    fn r21_hosts_are_looked_up_in_a_limited_number_of_namespaces() {
        let entry = json!({"metadata": {"name": "entry", "namespace": "n"},
            "spec": {"hosts": ["a.test"], "ports": [], "exportTo": ["other"]}});
        let entry = Object::of(Kind::ServiceEntry.into(), entry, "").unwrap();
        let hosts = Hosts::of(&Mesh::new([entry], Settings::default()));
        let finds = |others: usize| {
            let mut exported: Vec<String> = (0..others).map(|number| format!("s{number}")).collect();
            exported.push("other".to_owned());
            hosts.find("x", &json!(exported), "a.test").is_some()
        };
        assert!(finds(3) && finds(MAX_EXPORTS - 1) && !finds(MAX_EXPORTS));
    }
}
