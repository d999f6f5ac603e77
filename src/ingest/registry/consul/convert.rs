//! Conversion of instances to a service.

use std::collections::{BTreeMap, BTreeSet};

use super::api::HealthEntry;
use crate::ingest::registry::{Instance, Port, Service, port_name, protocol};

/// End of all host names.
const SUFFIX: &str = "service.consul";
/// The key of metadata with the protocol.
const PROTOCOL: &str = "protocol";
/// The key of metadata that makes a service external.
const EXTERNAL: &str = "external";

/// Returns the service of a name with these instances; `None` without any.
pub(super) fn service<'a>(
    name: &str,
    entries: impl Iterator<Item = &'a HealthEntry>,
    has_networks: bool,
) -> Option<Service> {
    // Proxies and gateways of Consul's own mesh are no services.
    let entries: Vec<&HealthEntry> = entries.filter(|entry| entry.service.kind.is_empty()).collect();
    if entries.is_empty() {
        return None;
    }
    let mut words: BTreeMap<u32, BTreeSet<String>> = BTreeMap::new();
    for entry in entries.iter().filter(|entry| entry.service.port > 0) {
        let word = metadata(entry, PROTOCOL).to_lowercase();
        words.entry(entry.service.port).or_default().insert(word);
    }
    let ports = words.into_iter().map(|(number, words)| {
        if words.len() > 1 {
            tracing::warn!(
                service = name,
                port = number,
                ?words,
                "several protocols of a port, the first one counts"
            );
        }
        let word = words.into_iter().next().unwrap_or_default();
        let protocol = protocol(&word).unwrap_or_else(|| {
            tracing::warn!(service = name, port = number, word, "unknown protocol, using TCP");
            "TCP"
        });
        let port = Port {
            name: port_name(&word),
            protocol,
        };
        (number, port)
    });
    let healthy = entries
        .iter()
        .filter(|entry| entry.is_healthy() && entry.service.port > 0);
    Some(Service {
        hostname: format!("{name}.{SUFFIX}"),
        addresses: Vec::new(),
        ports: ports.collect(),
        is_external: entries.iter().any(|entry| !metadata(entry, EXTERNAL).is_empty()),
        instances: healthy.map(|entry| instance(entry, has_networks)).collect(),
    })
}

/// Returns metadata of the instance, or else of its node.
fn metadata<'a>(entry: &'a HealthEntry, key: &str) -> &'a str {
    let own = entry.service.meta.get(key).or_else(|| entry.node.meta.get(key));
    own.map_or("", String::as_str)
}

fn instance(entry: &HealthEntry, has_networks: bool) -> Instance {
    let address = match entry.service.address.as_str() {
        "" => &entry.node.address,
        address => address,
    };
    let datacenter = entry.node.datacenter.clone();
    Instance {
        address: address.to_owned(),
        port: entry.service.port,
        target_port: entry.service.port,
        labels: entry.service.tags.iter().filter_map(|tag| label(tag)).collect(),
        network: if has_networks {
            datacenter.clone()
        } else {
            String::new()
        },
        locality: datacenter,
        weight: match entry.service.weights.passing {
            0 | 1 => 0,
            weight => weight,
        },
    }
}

/// Returns the label of a tag `key|value`; other tags are no labels.
fn label(tag: &str) -> Option<(String, String)> {
    let mut parts = tag.split('|');
    let (key, value) = (parts.next()?, parts.next()?);
    Some((key.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entries(list: serde_json::Value) -> Vec<HealthEntry> {
        serde_json::from_value(list).expect("a list of Consul's API")
    }

    fn converted(list: serde_json::Value) -> Option<Service> {
        service("shop", entries(list).iter(), true)
    }

    #[test]
    fn healthy_instances_make_a_service() {
        let found = converted(json!([
            {
                "Node": { "Address": "10.0.0.1", "Datacenter": "dc1", "Meta": { "protocol": "tcp" } },
                "Service": { "Port": 80, "Tags": ["version|v1", "plain"], "Meta": { "protocol": "HTTP" },
                    "Weights": { "Passing": 5, "Warning": 1 } },
                "Checks": [{ "Status": "passing" }, { "Status": "passing" }],
            },
            {
                "Node": { "Address": "10.0.0.2", "Datacenter": "dc2", "Meta": null },
                "Service": { "Address": "10.1.0.2", "Port": 81, "Tags": null },
                "Checks": [{ "Status": "warning" }],
            },
            { "Node": {}, "Service": { "Kind": "connect-proxy", "Port": 20000 } },
        ]));
        let found = found.expect("a service");
        assert_eq!(found.hostname, "shop.service.consul");
        let ports: Vec<(u32, &str, &str)> = found
            .ports
            .iter()
            .map(|(number, port)| (*number, port.name.as_str(), port.protocol))
            .collect();
        assert_eq!(
            ports,
            [(80, "http", "HTTP"), (81, "tcp", "TCP")],
            "an unhealthy instance keeps its port"
        );
        let instance = Instance {
            address: "10.0.0.1".to_owned(),
            port: 80,
            target_port: 80,
            labels: [("version".to_owned(), "v1".to_owned())].into(),
            locality: "dc1".to_owned(),
            network: "dc1".to_owned(),
            weight: 5,
        };
        assert_eq!(found.instances, [instance].into());
        assert!(!found.is_external);
    }

    #[test]
    fn external_metadata_of_one_instance_counts_for_the_service() {
        let found = converted(json!([
            { "Node": { "Address": "10.0.0.1" }, "Service": { "Port": 80, "Meta": { "external": "x.com" } } },
            { "Node": { "Address": "10.0.0.2" }, "Service": { "Port": 80 } },
        ]));
        assert!(found.expect("a service").is_external);
        assert_eq!(converted(json!([])), None);
    }
}
