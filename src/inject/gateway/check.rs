//! Checks of what tenants write, before it is rendered, and of what a template has rendered (R12).

use serde_json::Value as Json;

use super::{Deployed, GatewayError, ObjectKind, Port, invalid};
use crate::{inject::pod, proto::istio::mesh::v1alpha1::ProxyConfig};

/// Ends of the prefixes of annotations that templates print in the midst of other text.
const PRINTED: &str = "istio.io/";
/// An annotation that no template prints; it is YAML of several lines.
const NOT_PRINTED: &str = "proxy.istio.io/config";

/// Refuses control characters where templates print a value of the Gateway. A line break in such a value could add
/// fields to the objects.
///
/// Other annotations may have them: they are copied as JSON.
pub(super) fn gateway(gateway: &Json) -> Result<(), GatewayError> {
    for field in ["name", "namespace", "uid"] {
        printed(gateway, &format!("metadata.{field}"), pod::metadata(gateway, field))?;
    }
    for (place, labels) in [
        ("metadata.labels", gateway.pointer("/metadata/labels")),
        (
            "spec.infrastructure.labels",
            gateway.pointer("/spec/infrastructure/labels"),
        ),
    ] {
        for (key, value) in entries(labels) {
            let field = format!("{place}[{key:?}]");
            printed(gateway, &field, key)?;
            printed(gateway, &field, value)?;
        }
    }
    for (place, annotations) in [
        ("metadata.annotations", gateway.pointer("/metadata/annotations")),
        (
            "spec.infrastructure.annotations",
            gateway.pointer("/spec/infrastructure/annotations"),
        ),
    ] {
        for (key, value) in entries(annotations) {
            let prefix = key.rfind('/').map_or("", |slash| &key[..=slash]);
            let is_printed = prefix == PRINTED || prefix.ends_with(".istio.io/");
            let field = format!("{place}[{key:?}]");
            printed(gateway, &field, key)?;
            if is_printed && key != NOT_PRINTED {
                printed(gateway, &field, value)?;
            }
        }
    }
    let spec = gateway.get("spec").unwrap_or(&Json::Null);
    printed(gateway, "spec.gatewayClassName", pod::text(spec, "gatewayClassName"))?;
    for (index, listener) in pod::list(gateway, "listeners").iter().enumerate() {
        for key in ["name", "protocol"] {
            printed(
                gateway,
                &format!("spec.listeners[{index}].{key}"),
                pod::text(listener, key),
            )?;
        }
    }
    for (index, address) in pod::list(gateway, "addresses").iter().enumerate() {
        printed(
            gateway,
            &format!("spec.addresses[{index}].value"),
            pod::text(address, "value"),
        )?;
    }
    Ok(())
}

/// Refuses control characters in the proxy's environment variables, which ProxyConfig resources of tenants set.
pub(super) fn proxy_config(gateway: &Json, config: &ProxyConfig) -> Result<(), GatewayError> {
    for (name, value) in &config.proxy_metadata {
        if let Some(character) = [name, value].into_iter().find_map(|text| control_character(text)) {
            let message = format!("the variable {name:?} of its proxy contains the control character {character:?}");
            return Err(GatewayError {
                field: "ProxyConfig".to_owned(),
                ..invalid(gateway, "", message)
            });
        }
    }
    Ok(())
}

fn entries(object: Option<&Json>) -> impl Iterator<Item = (&str, &str)> {
    let entries = object.and_then(Json::as_object).into_iter().flatten();
    entries.map(|(key, value)| (key.as_str(), value.as_str().unwrap_or_default()))
}

fn printed(of: &Json, field: &str, text: &str) -> Result<(), GatewayError> {
    match control_character(text) {
        None => Ok(()),
        Some(character) => Err(invalid(
            of,
            field,
            format!("the value contains the control character {character:?}"),
        )),
    }
}

/// Returns the first control character or line separator. YAML breaks lines at some of them.
fn control_character(text: &str) -> Option<char> {
    text.chars()
        .find(|character| character.is_control() || matches!(character, '\u{2028}' | '\u{2029}'))
}

/// Returns true for a name of an object: a DNS subdomain (RFC 1123).
pub(super) fn is_name(name: &str) -> bool {
    let is_end = |character: char| character.is_ascii_lowercase() || character.is_ascii_digit();
    let is_label = |label: &str| {
        label.starts_with(is_end)
            && label.ends_with(is_end)
            && label.chars().all(|character| is_end(character) || character == '-')
    };
    name.len() <= 253 && name.split('.').all(is_label)
}

/// Returns true for a port of a ListenerSet that templates can print. Others are omitted, not refused: a tenant of
/// another namespace must not prevent the deployment of the Gateway.
pub(super) fn is_port(port: &Port) -> bool {
    let is_allowed = |character: char| character.is_ascii_alphanumeric() || matches!(character, '-' | '.' | '/');
    is_name(&port.name)
        && port
            .protocol
            .starts_with(|character: char| character.is_ascii_alphabetic())
        && port.protocol.chars().all(is_allowed)
}

/// Describes an object whose kind is not allowed.
pub(super) fn unexpected_kind(object: &Json) -> String {
    let kinds: Vec<&str> = ObjectKind::ALL.into_iter().map(ObjectKind::name).collect();
    let (version, kind) = (pod::text(object, "apiVersion"), pod::text(object, "kind"));
    format!(
        "unexpected object kind {kind:?} of version {version:?}, only {} are allowed",
        kinds.join(", ")
    )
}

/// Returns the kind of a patched object, or the reason why it may not be applied.
pub(super) fn object(deployed: &Deployed<'_>, object: &Json) -> Result<ObjectKind, String> {
    let kind = ObjectKind::of(object).ok_or_else(|| unexpected_kind(object))?;
    let (namespace, name) = (pod::metadata(object, "namespace"), pod::metadata(object, "name"));
    let own = deployed.namespace;
    if namespace != own {
        return Err(format!(
            "object namespace {namespace:?} does not match gateway namespace {own:?}"
        ));
    }
    let is_expected =
        name == deployed.name || name == deployed.service_account || name.starts_with(deployed.gateway_name);
    if !is_expected || !is_name(name) {
        return Err(format!(
            "object name {name:?} does not match expected pattern (expected {:?}, {:?} or prefix of {:?})",
            deployed.name, deployed.service_account, deployed.gateway_name
        ));
    }
    Ok(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_subdomains() {
        for name in ["a", "a-b.c", "1a"] {
            assert!(is_name(name), "{name}");
        }
        for name in ["", "-a", "a-", "a..b", "A", "a b", "a\nb", "a: b", "ä"] {
            assert!(!is_name(name), "{name}");
        }
        assert!(is_name(&"a".repeat(253)) && !is_name(&"a".repeat(254)));
    }

    #[test]
    fn ports_of_listener_sets_are_plain() {
        let port = |name: &str, protocol: &str| Port {
            name: name.to_owned(),
            number: 80,
            protocol: protocol.to_owned(),
        };
        for (name, protocol) in [("a.b", "HTTP"), ("a", "example.com/own")] {
            assert!(is_port(&port(name, protocol)), "{name} {protocol}");
        }
        for (name, protocol) in [
            ("a", "HTTP\n  externalIPs: [192.0.2.1]"),
            ("a", "b: c"),
            ("a", "{b}"),
            ("a", ""),
            ("a\nb", "HTTP"),
            ("a: b", "HTTP"),
        ] {
            assert!(!is_port(&port(name, protocol)), "{name} {protocol}");
        }
    }

    #[test]
    fn line_breaks_of_yaml_are_control_characters() {
        for text in ["a\nb", "a\rb", "\u{85}", "\u{2028}", "\u{0}", "\u{7f}"] {
            assert!(control_character(text).is_some(), "{text:?}");
        }
        assert_eq!(control_character("äöü \u{1f600}"), None);
    }
}
