//! Validation of the annotations that configure the sidecar.

use std::str::FromStr;

use serde_json::Value as Json;

use super::schema::canonical_quantity;
use crate::{
    api::{mesh_config, yaml},
    base::{boolean, cidr},
};

type Check = fn(&str) -> Result<(), String>;

/// The annotations with their checks.
///
/// Parity (pkg/kube/inject/validate.go): texts begin with the short name of the setting. `includeOutboundPorts` has no
/// check, so ranges of ports are admitted.
const CHECKS: &[(&str, Check)] = &[
    ("sidecar.istio.io/interceptionMode", |value| {
        let is_known = matches!(value, "REDIRECT" | "TPROXY" | "NONE");
        ensure(is_known, || {
            format!("interceptionMode invalid: {value:?} is not REDIRECT, TPROXY or NONE")
        })
    }),
    ("status.sidecar.istio.io/port", |value| port("port", value)),
    ("readiness.status.sidecar.istio.io/initialDelaySeconds", |value| {
        unsigned("initialDelaySeconds", value)
    }),
    ("readiness.status.sidecar.istio.io/periodSeconds", |value| {
        unsigned("periodSeconds", value)
    }),
    ("readiness.status.sidecar.istio.io/failureThreshold", |value| {
        unsigned("failureThreshold", value)
    }),
    (
        "traffic.sidecar.istio.io/includeOutboundIPRanges",
        |value| match value {
            "*" => Ok(()),
            ranges => cidrs("includeIPRanges", ranges),
        },
    ),
    ("traffic.sidecar.istio.io/excludeOutboundIPRanges", |value| {
        cidrs("excludeIPRanges", value)
    }),
    ("traffic.sidecar.istio.io/includeInboundPorts", |value| match value {
        "*" => Ok(()),
        list => ports("includeInboundPorts", list),
    }),
    ("traffic.sidecar.istio.io/excludeInboundPorts", |value| {
        ports("excludeInboundPorts", value)
    }),
    ("traffic.sidecar.istio.io/excludeOutboundPorts", |value| {
        ports("excludeOutboundPorts", value)
    }),
    ("traffic.sidecar.istio.io/excludeInterfaces", |value| {
        interfaces("excludeInterfaces", value)
    }),
    ("traffic.sidecar.istio.io/kubevirtInterfaces", |value| {
        interfaces("kubevirtInterfaces", value)
    }),
    ("istio.io/reroute-virtual-interfaces", |value| {
        interfaces("reroute-virtual-interfaces", value)
    }),
    ("prometheus.istio.io/merge-metrics", |value| {
        ensure(boolean::parse(value).is_some(), || {
            format!("merge-metrics invalid: {value:?} is not a boolean")
        })
    }),
    ("sidecar.istio.io/proxyCPU", |value| quantity("proxyCPU", value)),
    ("sidecar.istio.io/proxyCPULimit", |value| {
        quantity("proxyCPULimit", value)
    }),
    ("sidecar.istio.io/proxyMemory", |value| quantity("proxyMemory", value)),
    ("sidecar.istio.io/proxyMemoryLimit", |value| {
        quantity("proxyMemoryLimit", value)
    }),
    ("sidecar.istio.io/userVolume", |value| objects("userVolume", value)),
    ("sidecar.istio.io/userVolumeMount", |value| {
        objects("userVolumeMount", value)
    }),
    (PROXY_CONFIG, proxy_config),
];

/// The annotation with the proxy config of a pod.
pub(super) const PROXY_CONFIG: &str = "proxy.istio.io/config";

/// Returns the errors of all annotations.
pub(super) fn errors(pod: &Json) -> Vec<String> {
    let Some(annotations) = pod.pointer("/metadata/annotations").and_then(Json::as_object) else {
        return Vec::new();
    };
    let present = CHECKS.iter().filter_map(|(name, check)| {
        let value = annotations.get(*name)?.as_str()?;
        Some((name, check(value).err()?))
    });
    present
        .map(|(name, reason)| format!("annotation {name}: {reason}"))
        .collect()
}

/// Returns the error of one annotation's value; `None` if it is valid or the annotation has no rule.
pub fn annotation_error(name: &str, value: &str) -> Option<String> {
    let (_, check) = CHECKS.iter().find(|(known, _)| *known == name)?;
    check(value).err()
}

fn ensure(holds: bool, error: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(error()) }
}

/// Returns true for a number without a sign.
fn is_number<T: FromStr>(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<T>().is_ok()
}

fn port(name: &str, value: &str) -> Result<(), String> {
    ensure(is_number::<u16>(value.trim()), || {
        format!("{name} invalid: {value:?} is not a port")
    })
}

fn unsigned(name: &str, value: &str) -> Result<(), String> {
    ensure(is_number::<u32>(value), || {
        format!("{name} invalid: {value:?} is not a number of 32 bits")
    })
}

fn ports(name: &str, list: &str) -> Result<(), String> {
    match list.trim() {
        "" => Ok(()),
        list => list.split(',').try_for_each(|value| port(name, value)),
    }
}

fn cidrs(name: &str, list: &str) -> Result<(), String> {
    if list.is_empty() {
        return Ok(());
    }
    list.split(',').try_for_each(|text| {
        let is_range = text.contains('/') && cidr::parse(text).is_some();
        ensure(is_range, || format!("{name} invalid: {text:?} is not a CIDR range"))
    })
}

/// The maximum length of the name of an interface.
const MAX_INTERFACE: usize = 15;

fn interfaces(name: &str, list: &str) -> Result<(), String> {
    if list.is_empty() {
        return Ok(());
    }
    let is_member = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    list.split(',').map(str::trim).try_for_each(|text| {
        let is_name = text.len() <= MAX_INTERFACE
            && text.starts_with(|first: char| first.is_ascii_alphabetic())
            && text.bytes().all(is_member);
        ensure(is_name, || {
            format!("{name} invalid: {text:?} is not the name of an interface")
        })
    })
}

fn quantity(name: &str, value: &str) -> Result<(), String> {
    // Spaces around a quantity are valid in JSON only.
    let is_valid = !value.contains(|character: char| character.is_control() || character.is_whitespace())
        && canonical_quantity(value).is_some();
    ensure(is_valid, || {
        format!("{name} invalid: {value:?} is not a quantity such as 100m or 1Gi")
    })
}

/// Checks a JSON object whose members are objects with fields. With anything else, the output of templates is not YAML,
/// and the error does not name the annotation.
fn objects(name: &str, value: &str) -> Result<(), String> {
    let value: Json = serde_json::from_str(value).map_err(|error| format!("{name} invalid: not JSON: {error}"))?;
    let has_fields = |member: &Json| member.as_object().is_some_and(|fields| !fields.is_empty());
    let is_valid = match &value {
        Json::Object(members) => members.values().all(has_fields),
        // Parity (pkg/kube/inject/template.go, fromJSON): templates list the items of other JSON, too.
        Json::Array(items) => items.iter().all(has_fields),
        _ => value.is_null(),
    };
    ensure(is_valid, || {
        format!("{name} invalid: must be a JSON object whose members are objects")
    })
}

/// Returns the proxy config in an annotation as JSON.
pub(super) fn proxy_config_value(text: &str) -> Result<Json, String> {
    match yaml::documents(text).first().map(yaml::Document::parse) {
        None => Ok(serde_json::json!({})),
        Some(Ok(Json::Null)) => Ok(serde_json::json!({})),
        Some(Ok(value @ Json::Object(_))) => Ok(value),
        Some(Ok(_)) => Err("must be a mapping".to_owned()),
        Some(Err(error)) => Err(error.to_string()),
    }
}

fn proxy_config(text: &str) -> Result<(), String> {
    let value = proxy_config_value(text)?;
    let mesh = serde_json::json!({ "defaultConfig": value });
    match mesh_config::parse(&mesh) {
        Ok(_) => Ok(()),
        Err(errors) => Err(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn error(name: &str, value: &str) -> String {
        errors(&json!({"metadata": {"annotations": {name: value}}})).join("; ")
    }

    #[test]
    fn invalid_annotations_are_named() {
        for (name, value, expected) in [
            ("sidecar.istio.io/interceptionMode", "redirect", "is not REDIRECT"),
            ("status.sidecar.istio.io/port", "65536", "is not a port"),
            (
                "readiness.status.sidecar.istio.io/periodSeconds",
                "-1",
                "is not a number",
            ),
            (
                "traffic.sidecar.istio.io/includeOutboundIPRanges",
                "10.0.0.0/8,*",
                "includeIPRanges invalid: \"*\"",
            ),
            (
                "traffic.sidecar.istio.io/excludeOutboundIPRanges",
                "10.0.0.0/33",
                "is not a CIDR range",
            ),
            (
                "traffic.sidecar.istio.io/includeInboundPorts",
                "80,x",
                "includeInboundPorts invalid: \"x\"",
            ),
            ("status.sidecar.istio.io/port", "+80", "is not a port"),
            (
                "readiness.status.sidecar.istio.io/periodSeconds",
                "+1",
                "is not a number",
            ),
            (
                "traffic.sidecar.istio.io/excludeOutboundIPRanges",
                "10.0.0.0/8, 192.168.0.0/16",
                "excludeIPRanges invalid: \" 192.168.0.0/16\"",
            ),
            (
                "traffic.sidecar.istio.io/includeOutboundIPRanges",
                "10.0.0.0/08",
                "is not a CIDR range",
            ),
            (
                "traffic.sidecar.istio.io/excludeInboundPorts",
                "80,",
                "excludeInboundPorts invalid: \"\"",
            ),
            (
                "traffic.sidecar.istio.io/excludeInterfaces",
                "eth0;reboot",
                "is not the name of an interface",
            ),
            (
                "traffic.sidecar.istio.io/excludeInterfaces",
                "eth0,",
                "is not the name of an interface",
            ),
            (
                "traffic.sidecar.istio.io/kubevirtInterfaces",
                "0eth",
                "is not the name of an interface",
            ),
            (
                "istio.io/reroute-virtual-interfaces",
                "name-of-16-bytes",
                "is not the name of an interface",
            ),
            ("sidecar.istio.io/proxyCPU", " 100m", "is not a quantity"),
            ("prometheus.istio.io/merge-metrics", "maybe", "is not a boolean"),
            ("sidecar.istio.io/proxyCPU", "100m\n", "is not a quantity"),
            ("sidecar.istio.io/userVolume", "{", "userVolume invalid: not JSON: "),
            ("sidecar.istio.io/userVolume", "", "userVolume invalid: not JSON: "),
            ("sidecar.istio.io/userVolume", "{\"a\": \"/a\"}", "members are objects"),
            ("sidecar.istio.io/userVolumeMount", "{\"a\": {}}", "members are objects"),
            ("proxy.istio.io/config", "[a]", "must be a mapping"),
            ("proxy.istio.io/config", "{concurrency: many}", "concurrency"),
        ] {
            let error = error(name, value);
            assert!(error.starts_with(&format!("annotation {name}: ")), "{error}");
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn valid_annotations_pass() {
        for (name, value) in [
            ("sidecar.istio.io/interceptionMode", "TPROXY"),
            ("status.sidecar.istio.io/port", "0"),
            ("traffic.sidecar.istio.io/includeOutboundIPRanges", ""),
            (
                "traffic.sidecar.istio.io/includeOutboundIPRanges",
                "127.0.0.1/24,fd00::/8",
            ),
            ("traffic.sidecar.istio.io/includeInboundPorts", "*"),
            ("traffic.sidecar.istio.io/excludeInboundPorts", "4,5, 6"),
            ("traffic.sidecar.istio.io/excludeOutboundPorts", " "),
            ("traffic.sidecar.istio.io/excludeInterfaces", ""),
            ("traffic.sidecar.istio.io/excludeInterfaces", "eth0, net1.5_a-b"),
            ("traffic.sidecar.istio.io/includeOutboundPorts", "*"),
            ("traffic.sidecar.istio.io/includeOutboundPorts", "8000:8100"),
            ("sidecar.istio.io/proxyMemory", "1Gi"),
            ("sidecar.istio.io/userVolume", "{\"a\": {\"emptyDir\": {}}}"),
            ("sidecar.istio.io/userVolumeMount", "{}"),
            ("sidecar.istio.io/userVolumeMount", "null"),
            ("proxy.istio.io/config", "concurrency: 2"),
            ("other", "anything"),
        ] {
            assert_eq!(error(name, value), "", "{name}={value}");
        }
    }
}
