//! Functions for lists in annotations: ports, interfaces and networks.

use serde_json::Value as Json;

use super::text;
use crate::template::{Function, Type, Value, print};

pub(super) fn functions() -> [Function; 6] {
    use Type::{Any, String as Text};
    [
        Function::new("excludeInboundPort", &[Any, Text], Text, |context, arguments| {
            let port = print(context, &arguments[..1])?;
            let port = String::from_utf8_lossy(&port).trim().to_owned();
            let list = text(arguments[1]);
            context.allocate(list.len() + port.len())?;
            Ok(with_port(&port, list).into())
        }),
        Function::new("includeInboundPorts", &[Any], Text, |_, arguments| {
            Ok(ports(arguments[0], |_| true).into())
        }),
        Function::new("applicationPorts", &[Any], Text, |_, arguments| {
            Ok(ports(arguments[0], |container| container != "istio-proxy").into())
        }),
        Function::new("kubevirtInterfaces", &[Text], Text, |_, arguments| {
            Ok(arguments[0].clone())
        }),
        Function::new("excludeInterfaces", &[Text], Text, |_, arguments| {
            Ok(arguments[0].clone())
        }),
        Function::new("appendMultusNetwork", &[Text, Text], Text, |context, arguments| {
            let (existing, network) = (text(arguments[0]), text(arguments[1]));
            context.allocate(existing.len() + 2 * network.len())?;
            Ok(with_network(existing, &network).into())
        }),
    ]
}

/// Adds a port to a list, unless it is unset or in the list.
///
/// Parity (pkg/kube/inject/template.go, excludeInboundPort): the list has the port only without spaces around it.
fn with_port(port: &str, list: String) -> String {
    if port.is_empty() || port == "0" || list.split(',').any(|other| other == port) {
        return list;
    }
    let listed = list.split(',').map(str::trim).filter(|other| !other.is_empty());
    listed.chain([port]).collect::<Vec<_>>().join(",")
}

/// Returns the TCP ports of containers.
fn ports(containers: &Value, is_included: impl Fn(&str) -> bool) -> String {
    let items = |value: &Value| match value {
        Value::List(list) => list.items().to_vec(),
        _ => Vec::new(),
    };
    let field = |value: &Value, name: &str| match value {
        Value::Object(object) => object.field(name).unwrap_or(Value::Nil),
        _ => Value::Nil,
    };
    let mut found = Vec::new();
    for container in items(containers) {
        if !is_included(&text(&field(&container, "Name"))) {
            continue;
        }
        for port in items(&field(&container, "Ports")) {
            if matches!(text(&field(&port, "Protocol")).as_str(), "UDP" | "SCTP") {
                continue;
            }
            if let Value::Int(_, number) = field(&port, "ContainerPort") {
                found.push(number.to_string());
            }
        }
    }
    found.join(",")
}

/// Adds a network `NAMESPACE/NAME` to the annotation of Multus, a JSON list or a list of names.
///
/// Parity (pkg/kube/inject/template.go, appendMultusNetwork): a list with other elements than objects stays as it is,
/// and a network in JSON is the same if name and namespace are.
fn with_network(existing: String, network: &str) -> String {
    if existing.is_empty() {
        return network.to_owned();
    }
    let (namespace, name) = network.split_once('/').unwrap_or(("", network));
    if let Some(end) = existing.rfind(']') {
        let Ok(Json::Array(networks)) = serde_json::from_str(&existing) else {
            return existing;
        };
        if networks.iter().any(|other| !other.is_object() && !other.is_null()) {
            return existing;
        }
        let is_same = |other: &Json| {
            let is_in_namespace = match &other["namespace"] {
                Json::Null => namespace.is_empty(),
                own => own == namespace,
            };
            is_in_namespace && other["name"] == name
        };
        if networks.iter().any(is_same) {
            return existing;
        }
        let added = if namespace.is_empty() {
            format!("{{\"name\": {name:?}}}")
        } else {
            format!("{{\"name\": {name:?}, \"namespace\": {namespace:?}}}")
        };
        let separator = if networks.is_empty() { "" } else { ", " };
        return format!("{}{separator}{added}{}", &existing[..end], &existing[end..]);
    }
    if existing.split(',').any(|other| other.trim() == network) {
        return existing;
    }
    format!("{existing}, {network}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_added_once() {
        for (port, list, expected) in [
            ("15020", "", "15020"),
            ("15020", "80, 90,", "80,90,15020"),
            ("15020", "80,15020", "80,15020"),
            ("15020", "80, 15020", "80,15020,15020"),
            ("0", "80", "80"),
            ("", "80", "80"),
        ] {
            assert_eq!(with_port(port, list.to_owned()), expected, "{port} {list}");
        }
    }

    #[test]
    fn networks_are_added_once() {
        for (existing, expected) in [
            ("", "default/istio-cni"),
            ("a", "a, default/istio-cni"),
            ("a, default/istio-cni", "a, default/istio-cni"),
            ("[not JSON]", "[not JSON]"),
            ("[\"a\"]", "[\"a\"]"),
        ] {
            assert_eq!(with_network(existing.to_owned(), "default/istio-cni"), expected);
        }
        let other = "{\"name\": \"istio-cni\", \"namespace\": \"other\"}";
        for (network, added) in [
            ("istio-cni", "{\"name\": \"istio-cni\"}"),
            (
                "default/istio-cni",
                "{\"name\": \"istio-cni\", \"namespace\": \"default\"}",
            ),
        ] {
            let expected = format!("[{other}, {added}]");
            assert_eq!(with_network(format!("[{other}]"), network), expected);
            assert_eq!(with_network(expected.clone(), network), expected);
        }
        let added = with_network("[{\"name\": \"a\"}]".to_owned(), "default/istio-cni");
        let networks: Json = serde_json::from_str(&added).expect("a JSON list");
        assert_eq!(
            networks[1],
            serde_json::json!({"name": "istio-cni", "namespace": "default"})
        );
        assert_eq!(with_network(added.clone(), "default/istio-cni"), added);
    }
}
