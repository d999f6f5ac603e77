//! Destinations of routes and mirrors.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::{
    analyze::{
        deployment::number,
        hosts::{Destination, Hosts, service_name},
        json::{indexed, is_set, items, text, texts},
        mesh::Mesh,
        message::{PORT_REQUIRED, REFERENCE_NOT_FOUND, Report, SUBSET_WITHOUT_EFFECT, listed},
        object::Object,
    },
    api::Kind,
};

/// A destination with its path.
struct Route<'a> {
    path: String,
    to: &'a Value,
}

/// Returns the destinations of a VirtualService: those of routes and those of mirrors.
fn routes(service: &Object) -> Vec<Route<'_>> {
    let mut routes = Vec::new();
    for protocol in ["tcp", "tls", "http"] {
        for (path, rule) in indexed(&format!("spec.{protocol}"), service.spec(protocol)) {
            routes.extend(
                indexed(&format!("{path}.route"), &rule["route"]).map(|(path, route)| Route {
                    path: format!("{path}.destination"),
                    to: &route["destination"],
                }),
            );
        }
    }
    for (path, rule) in indexed("spec.http", service.spec("http")) {
        if is_set(&rule["mirror"]) {
            let path = format!("{path}.mirror");
            routes.push(Route {
                path,
                to: &rule["mirror"],
            });
        }
        routes.extend(
            indexed(&format!("{path}.mirrors"), &rule["mirrors"]).map(|(path, mirror)| Route {
                path: format!("{path}.destination"),
                to: &mirror["destination"],
            }),
        );
    }
    routes
}

/// Reports destinations that do not exist, ports that they lack, and subsets that requests through gateways ignore.
///
/// Parity (pkg/config/analysis/analyzers/virtualservice/destinationhosts.go).
pub(in crate::analyze) fn destinations(mesh: &Mesh, report: &mut Report) {
    let hosts = Hosts::of(mesh);
    let subsets = subsets_by_host(mesh);
    for service in mesh.of(Kind::VirtualService) {
        // Many routes may lead to one host, and each look-up may read thousands of namespaces.
        let mut known: BTreeMap<&str, Option<&Destination>> = BTreeMap::new();
        for Route { path, to } in routes(service) {
            let host = text(&to["host"]);
            let find = || hosts.find(&service.namespace, service.spec("exportTo"), host);
            match *known.entry(host).or_insert_with(find) {
                Some(destination) => port(service, &path, to, destination, report),
                None => {
                    let text = format!("{path}.host: {host:?} is not a service of the mesh");
                    report.add(REFERENCE_NOT_FOUND, service, text);
                }
            }
        }
        ignored_subsets(service, &subsets, report);
    }
}

fn port(service: &Object, path: &str, to: &Value, destination: &Destination, report: &mut Report) {
    let host = text(&to["host"]);
    if !is_set(&to["port"]) {
        if destination.ports.len() > 1 {
            let text = format!(
                "{path}: a port is required, because {host} has several: {}",
                listed(destination.ports.iter())
            );
            report.add(PORT_REQUIRED, service, text);
        }
        return;
    }
    let port = number(&to["port"]["number"]);
    if !destination.has_port(port) {
        let text = format!("{path}.port: {host} has no port {port}");
        report.add(REFERENCE_NOT_FOUND, service, text);
    }
}

/// Returns the VirtualServices that route one of their own hosts to a subset of it, by the host.
fn subsets_by_host(mesh: &Mesh) -> BTreeMap<&str, BTreeSet<String>> {
    let mut subsets: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for service in mesh.of(Kind::VirtualService) {
        let own: BTreeSet<&str> = texts(service.spec("hosts")).collect();
        for to in http_destinations(service) {
            let host = text(&to["host"]);
            if !text(&to["subset"]).is_empty() && own.contains(host) {
                subsets.entry(host).or_default().insert(service.full_name());
            }
        }
    }
    subsets
}

fn http_destinations(service: &Object) -> impl Iterator<Item = &Value> {
    let rules = items(service.spec("http")).iter();
    rules
        .flat_map(|rule| items(&rule["route"]))
        .map(|route| &route["destination"])
}

fn ignored_subsets(service: &Object, subsets: &BTreeMap<&str, BTreeSet<String>>, report: &mut Report) {
    if items(service.spec("gateways")).is_empty() {
        return;
    }
    let general = http_destinations(service).filter(|to| text(&to["subset"]).is_empty());
    let hosts: BTreeSet<&str> = general.map(|to| text(&to["host"])).collect();
    let mut ignored: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (host, others) in hosts.iter().filter_map(|host| Some((*host, subsets.get(host)?))) {
        for other in others {
            ignored.entry(other).or_default().push(host);
        }
    }
    for (other, hosts) in ignored {
        let hosts = listed(hosts.iter());
        let text = format!("requests through gateways ignore the subsets of {hosts} in VirtualService {other}");
        report.add(SUBSET_WITHOUT_EFFECT, service, text);
    }
}

/// Reports subsets that no DestinationRule declares.
///
/// Parity (pkg/config/analysis/analyzers/virtualservice/destinationrules.go).
pub(in crate::analyze) fn subsets(mesh: &Mesh, report: &mut Report) {
    let mut declared: BTreeSet<(&str, &str, &str)> = BTreeSet::new();
    for rule in mesh.of(Kind::DestinationRule) {
        let (namespace, name) = service_name(&rule.namespace, text(rule.spec("host")));
        let names = items(rule.spec("subsets")).iter().map(|subset| text(&subset["name"]));
        declared.extend(names.map(|subset| (namespace, name, subset)));
    }
    for service in mesh.of(Kind::VirtualService) {
        for Route { path, to } in routes(service) {
            let (host, subset) = (text(&to["host"]), text(&to["subset"]));
            let (namespace, name) = service_name(&service.namespace, host);
            if !subset.is_empty() && !declared.contains(&(namespace, name, subset)) {
                let text = format!("{path}.subset: no DestinationRule of {host} has the subset {subset:?}");
                report.add(REFERENCE_NOT_FOUND, service, text);
            }
        }
    }
}
