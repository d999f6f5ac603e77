//! Nothing is there twice where Envoy refuses that.

use std::collections::BTreeMap;

use serde_json::Value;

use super::check::{Received, Violations};

/// Checks the resources of one proxy.
pub(super) fn check(received: &Received, violations: &mut Violations) {
    for kind in ["cds", "lds", "rds", "eds", "sds", "ecds"] {
        for name in repeated(received.all(kind).map(|(name, _)| name.to_owned())) {
            violations.add("repeated-resource", format!("{kind} {name} is there twice"));
        }
        for (name, resource) in received.all(kind) {
            let inner = resource["name"].as_str().or(resource["clusterName"].as_str());
            if inner != Some(name) {
                violations.add("other-name", format!("{kind} {name} contains the name {inner:?}"));
            }
        }
    }
    for kind in ["lds", "rds"] {
        received
            .all(kind)
            .for_each(|(name, resource)| domains(name, resource, violations));
    }
    for (name, listener) in received.all("lds") {
        filter_chains(name, listener, violations);
    }
    if !received.is_proxyless {
        let sockets = received.all("lds").flat_map(|(_, listener)| sockets(listener));
        for socket in repeated(sockets) {
            violations.add("repeated-address", format!("two listeners have the address {socket}"));
        }
    }
}

/// Returns what is there more than once, in order.
fn repeated<T: Ord>(items: impl Iterator<Item = T>) -> impl Iterator<Item = T> {
    let mut counts = BTreeMap::new();
    for item in items {
        *counts.entry(item).or_insert(0) += 1;
    }
    counts.into_iter().filter(|(_, count)| *count > 1).map(|(item, _)| item)
}

/// Domains and names of virtual hosts are unique in each route configuration, which may be inside a listener. Envoy
/// compares domains without case.
fn domains(place: &str, value: &Value, violations: &mut Violations) {
    match value {
        Value::Object(map) => {
            if let Some(hosts) = map.get("virtualHosts").and_then(Value::as_array) {
                let domains = hosts.iter().filter_map(|host| host["domains"].as_array()).flatten();
                let domains = domains.filter_map(Value::as_str).map(str::to_lowercase);
                for domain in repeated(domains) {
                    violations.add(
                        "repeated-domain",
                        format!("{place}: two virtual hosts have the domain {domain}"),
                    );
                }
                for name in repeated(hosts.iter().filter_map(|host| host["name"].as_str())) {
                    violations.add(
                        "repeated-virtual-host",
                        format!("{place}: two virtual hosts have the name {name}"),
                    );
                }
            }
            map.values().for_each(|value| domains(place, value, violations));
        }
        Value::Array(values) => values.iter().for_each(|value| domains(place, value, violations)),
        _ => {}
    }
}

/// No two filter chains of a listener match the same connection by the same criteria.
fn filter_chains(name: &str, listener: &Value, violations: &mut Violations) {
    if listener.get("filterChainMatcher").is_some() {
        return;
    }
    let chains = listener["filterChains"].as_array().into_iter().flatten();
    let criteria = chains.flat_map(|chain| criteria(&chain["filterChainMatch"]));
    for criteria in repeated(criteria) {
        let shown: Vec<_> = criteria.iter().filter(|part| !part.is_empty()).cloned().collect();
        let shown = shown.join(", ");
        violations.add(
            "repeated-match",
            format!("listener {name}: two filter chains match [{shown}]"),
        );
    }
}

/// Returns the combinations of single criteria that a match consists of.
fn criteria(by: &Value) -> Vec<Vec<String>> {
    let fields = [
        "destinationPort",
        "prefixRanges",
        "serverNames",
        "transportProtocol",
        "applicationProtocols",
        "directSourcePrefixRanges",
        "sourceType",
        "sourcePrefixRanges",
        "sourcePorts",
    ];
    let mut combinations = vec![Vec::new()];
    for field in fields {
        let alternatives: Vec<String> = match &by[field] {
            Value::Null => vec![String::new()],
            Value::Array(values) if values.is_empty() => vec![String::new()],
            Value::Array(values) => values.iter().map(|value| format!("{field} {value}")).collect(),
            value => vec![format!("{field} {value}")],
        };
        combinations = combinations
            .iter()
            .flat_map(|begun: &Vec<String>| {
                alternatives
                    .iter()
                    .map(|next| begun.iter().chain([next]).cloned().collect::<Vec<_>>())
            })
            .collect();
    }
    combinations
}

fn sockets(listener: &Value) -> Vec<String> {
    let more = listener["additionalAddresses"].as_array().into_iter().flatten();
    let addresses = std::iter::once(&listener["address"]).chain(more.map(|additional| &additional["address"]));
    let sockets = addresses
        .map(|address| &address["socketAddress"])
        .filter(|socket| !socket.is_null());
    sockets
        .map(|socket| {
            format!(
                "{} {}:{}",
                socket["protocol"].as_str().unwrap_or("TCP"),
                socket["address"],
                socket["portValue"]
            )
        })
        .collect()
}
