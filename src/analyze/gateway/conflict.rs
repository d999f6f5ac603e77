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

/// The hosts of all Gateways with one selector and one port: each host with its address to bind, and the Gateways.
type Claims<'a> = BTreeMap<(&'a str, &'a str), BTreeSet<String>>;

/// The claims by port, and then by selector.
struct Servers<'a> {
    by_port: BTreeMap<i64, BTreeMap<String, Claims<'a>>>,
    selectors: BTreeMap<String, Labels>,
}

impl<'a> Servers<'a> {
    fn of(mesh: &'a Mesh) -> Self {
        let mut servers = Self {
            by_port: BTreeMap::new(),
            selectors: BTreeMap::new(),
        };
        for gateway in mesh.of(Kind::Gateway) {
            let selector = labels(gateway.spec("selector"));
            let key = selector_text(&selector);
            // Of several servers on one port, the last one counts.
            let listed = items(gateway.spec("servers")).iter();
            let by_port: BTreeMap<i64, &Value> = listed.map(|server| (port_of(server), server)).collect();
            for (port, server) in by_port {
                let claims = servers.by_port.entry(port).or_default().entry(key.clone()).or_default();
                for host in texts(&server["hosts"]) {
                    let names = claims.entry((host, text(&server["bind"]))).or_default();
                    names.insert(gateway.full_name());
                }
                servers.selectors.insert(key.clone(), selector.clone());
            }
        }
        servers
    }
}

fn port_of(server: &Value) -> i64 {
    number(&server["port"]["number"])
}

/// The pairs of selectors that select a common pod. Each pair is compared once.
struct Overlaps<'a> {
    mesh: &'a Mesh,
    known: BTreeMap<(String, String), bool>,
}

impl Overlaps<'_> {
    /// Selectors overlap if they are equal, or if the text of one contains that of the other and a pod has the labels
    /// of both.
    fn contains(&mut self, (a, a_labels): (&str, &Labels), (b, b_labels): (&str, &Labels)) -> bool {
        if a == b {
            return true;
        }
        if !a.contains(b) && !b.contains(a) {
            return false;
        }
        let mesh = self.mesh;
        let pair = (a.min(b).to_owned(), a.max(b).to_owned());
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
    let mut overlaps = Overlaps {
        mesh,
        known: BTreeMap::new(),
    };
    for gateway in mesh.of(Kind::Gateway) {
        let selector = labels(gateway.spec("selector"));
        let key = selector_text(&selector);
        let own = (key.as_str(), &selector);
        let listed = items(gateway.spec("servers"));
        // A Gateway with servers has its own pods in common with itself.
        let has_any = || servers.selectors.iter();
        if listed.is_empty() && !key.is_empty() && !has_any().any(|(other, it)| overlaps.contains(own, (other, it))) {
            missing_pods(gateway, &selector, report);
            continue;
        }
        let name = gateway.full_name();
        for server in listed {
            let port = port_of(server);
            let mut others: BTreeSet<&String> = BTreeSet::new();
            for (other, claims) in servers.by_port.get(&port).into_iter().flatten() {
                if !overlaps.contains(own, (other, &servers.selectors[other])) {
                    continue;
                }
                for host in texts(&server["hosts"]) {
                    let names = claims.get(&(host, text(&server["bind"]))).into_iter().flatten();
                    others.extend(names.filter(|other| **other != name).take(MAX_OTHERS));
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
