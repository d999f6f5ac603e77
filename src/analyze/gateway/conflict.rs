//! Gateways that compete for hosts or share certificates.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::missing_pods;
use crate::{
    analyze::{
        deployment::number,
        json::{items, labels, selector_text, text, texts},
        mesh::Mesh,
        message::{CONFLICTING_GATEWAYS, DUPLICATE_CERTIFICATE, Report},
        object::Object,
    },
    api::Kind,
    base::{Labels, SmolStr, select},
};

/// The maximum number of other Gateways that messages about one Gateway name. All Gateways of a mesh may share a
/// certificate.
const MAX_OTHERS: usize = 20;

/// A host of a server: its port, its name, and its address to bind.
type Host<'a> = (i64, &'a str, &'a str);

/// The selectors of all Gateways. Each has a position: texts of a thousand nested selectors are megabytes.
#[derive(Default)]
struct Selectors {
    positions: BTreeMap<String, usize>,
    /// Text and labels of each selector.
    by_position: Vec<(String, Labels)>,
}

impl Selectors {
    /// Returns the position of a selector, which is added if it is new.
    fn add(&mut self, labels: Labels) -> usize {
        let text = selector_text(&labels);
        let next = self.by_position.len();
        let position = *self.positions.entry(text.clone()).or_insert(next);
        if position == next {
            self.by_position.push((text, labels));
        }
        position
    }
}

/// The servers of all Gateways.
struct Servers<'a> {
    selectors: Selectors,
    /// The position of each Gateway's selector.
    of_gateways: Vec<usize>,
    /// The selectors of Gateways with servers.
    serving: BTreeSet<usize>,
    /// The Gateways that serve a host, by the positions of their selectors.
    by_host: BTreeMap<Host<'a>, BTreeMap<usize, BTreeSet<String>>>,
}

impl<'a> Servers<'a> {
    fn of(mesh: &'a Mesh) -> Self {
        let mut servers = Self {
            selectors: Selectors::default(),
            of_gateways: Vec::new(),
            serving: BTreeSet::new(),
            by_host: BTreeMap::new(),
        };
        for gateway in mesh.of(Kind::Gateway) {
            let selector = servers.selectors.add(labels(gateway.spec("selector")));
            servers.of_gateways.push(selector);
            // Of several servers on one port, the last one counts.
            let listed = items(gateway.spec("servers")).iter();
            let by_port: BTreeMap<i64, &Value> = listed.map(|server| (port_of(server), server)).collect();
            for server in by_port.into_values() {
                for host in hosts(server) {
                    let claims = servers.by_host.entry(host).or_default().entry(selector).or_default();
                    claims.insert(gateway.full_name());
                }
                servers.serving.insert(selector);
            }
        }
        servers
    }
}

fn port_of(server: &Value) -> i64 {
    number(&server["port"]["number"])
}

/// Returns the hosts of a server, each once.
fn hosts(server: &Value) -> BTreeSet<Host<'_>> {
    let (port, bind) = (port_of(server), text(&server["bind"]));
    texts(&server["hosts"]).map(|name| (port, name, bind)).collect()
}

/// The pairs of selectors that select a common pod. Each pair is compared once.
struct Overlaps<'a> {
    mesh: &'a Mesh,
    selectors: &'a Selectors,
    known: BTreeMap<(usize, usize), bool>,
}

impl<'a> Overlaps<'a> {
    fn new(mesh: &'a Mesh, selectors: &'a Selectors) -> Self {
        Self {
            mesh,
            selectors,
            known: BTreeMap::new(),
        }
    }

    /// Selectors overlap if they are equal, or if the text of one contains that of the other and a pod has the labels
    /// of both.
    fn contains(&mut self, a: usize, b: usize) -> bool {
        if a == b {
            return true;
        }
        let (mesh, pair) = (self.mesh, (a.min(b), a.max(b)));
        let ((a, a_labels), (b, b_labels)) = (&self.selectors.by_position[a], &self.selectors.by_position[b]);
        if !a.contains(b.as_str()) && !b.contains(a.as_str()) {
            return false;
        }
        *self.known.entry(pair).or_insert_with(|| {
            let united: Option<Labels> = union(a_labels, b_labels);
            united.is_some_and(|united| mesh.pods(None, &united).next().is_some())
        })
    }
}

/// Returns the labels of both selectors; `None` if they contradict each other.
fn union(a: &Labels, b: &Labels) -> Option<Labels> {
    let mut united = a.clone();
    for (key, value) in b {
        let before: Option<SmolStr> = united.insert(key.clone(), value.clone());
        if before.is_some_and(|before| before != *value) {
            return None;
        }
    }
    Some(united)
}

/// Reports Gateways that serve the same hosts on one port of the same pods.
///
/// Parity (pkg/config/analysis/analyzers/gateway/conflictinggateway.go).
pub(in crate::analyze) fn conflicts(mesh: &Mesh, report: &mut Report) {
    let servers = Servers::of(mesh);
    compare(&servers, &mut Overlaps::new(mesh, &servers.selectors), report);
}

/// Compares each Gateway with those that serve one of its hosts.
fn compare(servers: &Servers<'_>, overlaps: &mut Overlaps<'_>, report: &mut Report) {
    let mesh = overlaps.mesh;
    for (gateway, own) in mesh.of(Kind::Gateway).iter().zip(&servers.of_gateways) {
        let (key, selector) = &servers.selectors.by_position[*own];
        let listed = items(gateway.spec("servers"));
        // A Gateway with servers has its own pods in common with itself.
        let mut serving = servers.serving.iter();
        if listed.is_empty() && !key.is_empty() && !serving.any(|other| overlaps.contains(*own, *other)) {
            missing_pods(gateway, selector, report);
            continue;
        }
        let name = gateway.full_name();
        for server in listed {
            let port = port_of(server);
            let mut others: BTreeSet<&String> = BTreeSet::new();
            for host in hosts(server) {
                for (other, names) in servers.by_host.get(&host).into_iter().flatten() {
                    if overlaps.contains(*own, *other) {
                        others.extend(names.iter().filter(|other| **other != name).take(MAX_OTHERS));
                    }
                }
            }
            if !others.is_empty() {
                let others: Vec<&str> = others.into_iter().map(String::as_str).take(MAX_OTHERS).collect();
                let hosts: Vec<&str> = texts(&server["hosts"]).collect();
                let text = format!(
                    "port {port} of the pods {key} has hosts ({}) that other Gateways serve too: {}",
                    hosts.join(", "),
                    others.join(", ")
                );
                report.add(CONFLICTING_GATEWAYS, gateway, text);
            }
        }
    }
}

/// Reports Gateways of the same pods that use one certificate: clients reuse connections between them.
///
/// Parity (pkg/config/analysis/analyzers/gateway/certificate.go).
pub(in crate::analyze) fn duplicate_certificates(mesh: &Mesh, report: &mut Report) {
    let mut users: BTreeMap<Certificate<'_>, Vec<(&Object, Labels)>> = BTreeMap::new();
    for gateway in mesh.of(Kind::Gateway) {
        for certificate in certificates(gateway) {
            users
                .entry(certificate)
                .or_default()
                .push((gateway, labels(gateway.spec("selector"))));
        }
    }
    for gateway in mesh.of(Kind::Gateway) {
        let selector = labels(gateway.spec("selector"));
        let name = gateway.full_name();
        let mut others: BTreeSet<String> = BTreeSet::new();
        for certificate in certificates(gateway) {
            let users = users.get(&certificate).into_iter().flatten();
            let of_same_pods = users.filter(|(other, of_other)| {
                let is_apart = mesh.settings.scopes_gateways && other.namespace != gateway.namespace;
                !is_apart && select::subset(&selector, of_other)
            });
            let of_others = of_same_pods
                .map(|(other, _)| other.full_name())
                .filter(|other| *other != name);
            others.extend(of_others.take(MAX_OTHERS));
        }
        for other in others.into_iter().take(MAX_OTHERS) {
            let text = format!("Gateway {other} uses the same certificate; clients that reuse connections may get 404");
            report.add(DUPLICATE_CERTIFICATE, gateway, text);
        }
    }
}

/// The source of a server's certificate.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Certificate<'a> {
    Credential(&'a str),
    Files(&'a str, &'a str),
}

fn certificates(gateway: &Object) -> BTreeSet<Certificate<'_>> {
    let servers = items(gateway.spec("servers")).iter();
    servers.filter_map(|server| certificate(&server["tls"])).collect()
}

fn certificate(tls: &Value) -> Option<Certificate<'_>> {
    let field = |name: &str| Some(text(&tls[name])).filter(|text| !text.is_empty());
    match field("credentialName") {
        Some(name) => Some(Certificate::Credential(name)),
        None => Some(Certificate::Files(field("serverCertificate")?, field("privateKey")?)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::analyze::mesh::Settings;

    fn gateway(name: &str, labels: &[&str], port: u16, host: &str) -> Object {
        let selector: BTreeMap<&str, &str> = labels.iter().map(|label| (*label, "x")).collect();
        let server = json!({"port": {"number": port, "name": "http", "protocol": "HTTP"}, "hosts": [host, host]});
        let manifest = json!({"metadata": {"name": name, "namespace": "n"},
            "spec": {"selector": selector, "servers": [server]}});
        Object::of(Kind::Gateway.into(), manifest, "").unwrap()
    }

    #[test]
    fn selectors_are_compared_once_and_only_for_common_hosts() {
        let nested = ["a", "b", "c", "d", "e", "f"];
        let mut gateways = Vec::new();
        for count in 1..=nested.len() {
            let own = format!("own-{count}");
            gateways.push(gateway(&own, &nested[..count], 80, &own));
        }
        for count in 1..=3 {
            for port in [80, 81] {
                let name = format!("common-{count}-{port}");
                gateways.push(gateway(&name, &nested[..count], port, "common"));
            }
        }
        let mesh = Mesh::new(gateways, Settings::default());
        let servers = Servers::of(&mesh);
        assert_eq!((servers.selectors.by_position.len(), servers.serving.len()), (6, 6));
        let mut overlaps = Overlaps::new(&mesh, &servers.selectors);
        compare(&servers, &mut overlaps, &mut Report::default());
        assert_eq!(overlaps.known.len(), 3);
    }
}
