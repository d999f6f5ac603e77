//! The JSON types of node metadata, by key.
//!
//! Parity (pkg/model/proxy.go): Istio refuses a node whose metadata has a value of another type. A key that is not
//! listed may have any value.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::base::boolean;

/// The JSON type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// A string.
    Text,
    /// A string with a boolean.
    Flag,
    /// A whole number.
    Number,
    /// A list of strings.
    Texts,
    /// An object whose values are strings.
    Map,
    /// An object.
    Object,
    /// A string with a JSON list of objects.
    Ports,
}

/// The keys, by form.
const FORMS: &[(Form, &[&str])] = &[
    (
        Form::Text,
        &[
            "APP_CONTAINERS",
            "AUTO_REGISTER_GROUP",
            "BASE",
            "CLOUDRUN_ADDR",
            "CLUSTER_ID",
            "GENERATOR",
            "HTTP10",
            "HTTP_PROXY_PORT",
            "IDLE_TIMEOUT",
            "INSTANCE_IPS",
            "INTERCEPTION_MODE",
            "ISTIO_PROXY_SHA",
            "ISTIO_REVISION",
            "ISTIO_VERSION",
            "MESH_ID",
            "NAME",
            "NAMESPACE",
            "NETWORK",
            "NODE_NAME",
            "OUTLIER_LOG_PATH",
            "OWNER",
            "REQUESTED_NETWORK_VIEW",
            "SERVICE_ACCOUNT",
            "STS_PORT",
            "TLS_CLIENT_CERT_CHAIN",
            "TLS_CLIENT_KEY",
            "TLS_CLIENT_ROOT_CERT",
            "TLS_SERVER_CERT_CHAIN",
            "TLS_SERVER_KEY",
            "TLS_SERVER_ROOT_CERT",
            "UNPRIVILEGED_POD",
            "WORKLOAD_ENTRY",
            "WORKLOAD_IDENTITY_SOCKET_FILE",
            "WORKLOAD_NAME",
        ],
    ),
    (
        Form::Flag,
        &[
            "DISABLE_HBONE_SEND",
            "DNS_AUTO_ALLOCATE",
            "DNS_CAPTURE",
            "ENABLE_HBONE",
            "ENVOY_SKIP_DEPRECATED_LOGS",
            "EXIT_ON_ZERO_ACTIVE_CONNECTIONS",
            "INBOUND_LISTENER_EXACT_BALANCE",
            "METADATA_DISCOVERY",
            "OUTBOUND_LISTENER_EXACT_BALANCE",
        ],
    ),
    (Form::Number, &["ENVOY_PROMETHEUS_PORT", "ENVOY_STATUS_PORT"]),
    (Form::Texts, &["PILOT_SAN"]),
    (
        Form::Map,
        &["ANNOTATIONS", "LABELS", "PLATFORM_METADATA", "STATIC_LABELS"],
    ),
    (Form::Object, &["PROXY_CONFIG"]),
    (Form::Ports, &["POD_PORTS"]),
];

/// Returns the first key whose value has another type, with the type that it must have.
pub(super) fn mismatch(metadata: &BTreeMap<String, Value>) -> Option<(&'static str, &'static str)> {
    FORMS.iter().find_map(|(form, keys)| {
        let mut wrong = keys
            .iter()
            .filter(|key| metadata.get(**key).is_some_and(|value| !form.fits(value)));
        wrong.next().map(|key| (*key, form.name()))
    })
}

impl Form {
    fn fits(self, value: &Value) -> bool {
        let is_text = |value: &Value| value.is_string() || value.is_null();
        match self {
            Self::Text => is_text(value),
            Self::Flag => value.as_str().is_some_and(|text| boolean::parse(text).is_some()),
            Self::Number => value.is_i64() || value.is_null(),
            Self::Texts => value.is_null() || value.as_array().is_some_and(|all| all.iter().all(is_text)),
            Self::Map => value.is_null() || value.as_object().is_some_and(|all| all.values().all(is_text)),
            Self::Object => value.is_object() || value.is_null(),
            Self::Ports => value.as_str().is_some_and(|text| {
                let list: Option<Vec<Value>> = serde_json::from_str(text).ok();
                list.is_some_and(|list| list.iter().all(Value::is_object))
            }),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Text => "a string",
            Self::Flag => "a string with a boolean",
            Self::Number => "a whole number",
            Self::Texts => "a list of strings",
            Self::Map => "an object with strings",
            Self::Object => "an object",
            Self::Ports => "a string with a JSON list of ports",
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(key: &str, value: Value) -> Option<(&'static str, &'static str)> {
        mismatch(&BTreeMap::from([(key.to_owned(), value)]))
    }

    #[test]
    fn values_have_the_types_of_istio() {
        for (key, value) in [
            ("NAMESPACE", json!("app")),
            ("DNS_CAPTURE", json!("true")),
            ("DNS_CAPTURE", json!("0")),
            ("ENVOY_STATUS_PORT", json!(15021)),
            ("PILOT_SAN", json!(["istiod"])),
            ("LABELS", json!({ "app": "web" })),
            ("PROXY_CONFIG", json!({ "concurrency": 2 })),
            ("POD_PORTS", json!(r#"[{"containerPort": 80}]"#)),
            ("ANYTHING", json!([1])),
        ] {
            assert_eq!(found(key, value), None, "{key}");
        }
        for (key, value) in [
            ("NAMESPACE", json!(5)),
            ("CLUSTER_ID", json!({})),
            ("DNS_CAPTURE", json!(true)),
            ("ENABLE_HBONE", json!("yes")),
            ("ENVOY_STATUS_PORT", json!("15021")),
            ("ENVOY_STATUS_PORT", json!(1.5)),
            ("PILOT_SAN", json!("istiod")),
            ("LABELS", json!("app=web")),
            ("LABELS", json!({ "app": 1 })),
            ("PROXY_CONFIG", json!("{}")),
            ("POD_PORTS", json!([])),
        ] {
            assert_eq!(found(key, value).map(|(key, _)| key), Some(key));
        }
    }
}
