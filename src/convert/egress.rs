//! EgressRules to ServiceEntries.
//!
//! Note: the protocol `https` meant plain HTTP from the application and TLS from the sidecar on. It becomes HTTP with a
//! DestinationRule that starts TLS.

use std::net::IpAddr;

use serde_json::{Value, json};

use super::{Converter, Old};

/// The ports of a rule.
#[derive(Default)]
struct Ports {
    /// Ports of a ServiceEntry.
    all: Vec<Value>,
    /// Numbers of the ports to which the sidecar starts TLS.
    tls: Vec<i64>,
}

pub(super) fn convert(converter: &mut Converter<'_>) {
    for rule in converter.take("EgressRule") {
        convert_rule(converter, &rule);
    }
}

fn convert_rule(converter: &mut Converter<'_>, rule: &Old<'_>) {
    let Some(service) = rule.spec.get("destination").text("service") else {
        converter.note(rule, "spec.destination.service", "is required; the rule is left out");
        return;
    };
    if service == "*" {
        let message = "all hosts cannot be mapped; hint: meshConfig.outboundTrafficPolicy.mode ALLOW_ANY";
        converter.note(rule, "spec.destination.service", message);
        return;
    }
    let is_range = service.contains('/') || service.parse::<IpAddr>().is_ok();
    let host = if is_range {
        converter.fqdn(&rule.name, &rule.namespace)
    } else {
        service.to_owned()
    };
    let ports = ports(converter, rule, is_range);
    let useless = "proxies for egress are Gateways today";
    converter.lost(rule, rule.spec, "spec.", &[("useEgressProxy", useless)]);
    if ports.all.is_empty() {
        converter.note(rule, "spec.ports", "has no usable port; the rule is left out");
        return;
    }
    let is_exact = !is_range && !host.starts_with('*');
    if !is_range && host.starts_with('*') && !host.starts_with("*.") {
        converter.note(
            rule,
            "spec.destination.service",
            "a part of a label is not a wildcard of proxies",
        );
    }
    let resolution = if is_exact && !ports.tls.is_empty() {
        "DNS"
    } else {
        "NONE"
    };
    let spec = &mut converter.object("ServiceEntry", &rule.namespace, &rule.name)["spec"];
    spec["hosts"] = json!([host]);
    if is_range {
        spec["addresses"] = json!([service]);
    }
    spec["ports"] = ports.all.into();
    spec["location"] = "MESH_EXTERNAL".into();
    spec["resolution"] = resolution.into();
    if !ports.tls.is_empty() {
        let settings = ports.tls.iter();
        let settings = settings.map(|number| json!({ "port": { "number": number }, "tls": { "mode": "SIMPLE" } }));
        let settings: Vec<Value> = settings.collect();
        let spec = &mut converter.object("DestinationRule", &rule.namespace, &rule.name)["spec"];
        spec["host"] = host.into();
        spec["trafficPolicy"] = json!({ "portLevelSettings": settings });
    }
}

/// Returns the ports of a rule. Address ranges have no ports of HTTP.
fn ports(converter: &mut Converter<'_>, rule: &Old<'_>, is_range: bool) -> Ports {
    let mut ports = Ports::default();
    for (index, port) in rule.spec.items("ports").enumerate() {
        let word = port.text("protocol").unwrap_or("http").to_lowercase();
        let number = port.integer("port").unwrap_or(80);
        let protocol = match (word.as_str(), is_range) {
            ("http" | "http2" | "grpc" | "https", true) => None,
            ("https", false) => {
                ports.tls.push(number);
                Some("HTTP")
            }
            ("http", false) => Some("HTTP"),
            ("http2", false) => Some("HTTP2"),
            ("grpc", false) => Some("GRPC"),
            ("tcp", _) => Some("TCP"),
            ("mongo", _) => Some("MONGO"),
            _ => None,
        };
        match protocol {
            Some(protocol) => {
                let name = format!("{word}-{number}");
                ports
                    .all
                    .push(json!({ "number": number, "name": name, "protocol": protocol }));
            }
            None => {
                let field = format!("spec.ports[{index}].protocol");
                converter.note(rule, &field, &format!("{word:?} is not allowed for this destination"));
            }
        }
    }
    ports
}
