//! MeshConfig: its defaults, and mesh files merged over them.
//!
//! A field in the file replaces the default, with Istio's exceptions: `defaultConfig` is merged field by field
//! (`proxyMetadata` and most of `proxyHeaders` one level deeper), `defaultProviders` field by field,
//! `extensionProviders` by name, and `trustDomainAliases` are united.

mod validate;

use std::{cell::RefCell, sync::LazyLock};

use prost::{Message, Name};
use prost_reflect::{MessageDescriptor, OneofDescriptor};
use serde_json::{Map, Value, json};

use super::{
    FieldError,
    ambiguous::remove_overridden,
    istio::{ErrorPolicy, Validation, field_path::FieldPath},
    unknown::unknown_fields,
};
use crate::{
    base::{
        SmolStr,
        select::{LabelSelector, Requirement},
    },
    proto::{
        istio::{
            mesh::v1alpha1::{
                self as mesh_api, MeshConfig, ProxyConfig, mesh_config::DefaultProviders, proxy_config::ProxyHeaders,
            },
            networking::v1beta1::ProxyConfig as ProxyConfigResource,
        },
        json::{JsonError, Unknown, from_json, to_json},
        message_descriptor,
    },
};

/// Returns the name of the ConfigMap with mesh config and networks of a revision.
pub fn map_name(revision: &str) -> SmolStr {
    match revision {
        "" | "default" => SmolStr::new_static("istio"),
        revision => SmolStr::from(format!("istio-{revision}")),
    }
}

/// Returns the default mesh config.
pub fn defaults() -> MeshConfig {
    from_json(&default_values(), Unknown::Deny).expect("because a test reads the defaults")
}

/// Returns `discoverySelectors`.
pub fn discovery_selectors(config: &MeshConfig) -> Vec<LabelSelector> {
    config.discovery_selectors.iter().map(selector).collect()
}

/// Converts a selector.
pub fn selector(written: &mesh_api::LabelSelector) -> LabelSelector {
    let labels = written.match_labels.iter();
    let requirement = |written: &mesh_api::LabelSelectorRequirement| {
        let values = written.values.iter().map(SmolStr::new).collect();
        Requirement::new(SmolStr::new(&written.key), SmolStr::new(&written.operator), values)
    };
    LabelSelector {
        match_labels: labels
            .map(|(key, value)| (SmolStr::new(key), SmolStr::new(value)))
            .collect(),
        match_expressions: written.match_expressions.iter().map(requirement).collect(),
    }
}

/// Returns the default proxy config.
pub fn default_proxy_config() -> ProxyConfig {
    defaults().default_config.unwrap_or_default()
}

fn default_values() -> Value {
    json!({
        "enableTracing": true,
        "protocolDetectionTimeout": "0s",
        "ingressService": "istio-ingressgateway",
        "ingressControllerMode": "STRICT",
        "ingressClass": "istio",
        "trustDomain": "cluster.local",
        "enableAutoMtls": true,
        "outboundTrafficPolicy": {"mode": "ALLOW_ANY"},
        "inboundTrafficPolicy": {"mode": "PASSTHROUGH"},
        "localityLbSetting": {"enabled": true},
        "rootNamespace": "istio-system",
        "proxyListenPort": 15001,
        "proxyInboundListenPort": 15006,
        "connectTimeout": "10s",
        "dnsRefreshRate": "60s",
        "defaultServiceExportTo": ["*"],
        "defaultVirtualServiceExportTo": ["*"],
        "defaultDestinationRuleExportTo": ["*"],
        "enablePrometheusMerge": true,
        "defaultProviders": {},
        "extensionProviders": [
            {"name": "prometheus", "prometheus": {}},
            {"name": "stackdriver", "stackdriver": {}},
            {"name": "envoy", "envoyFileAccessLog": {"path": "/dev/stdout"}},
        ],
        "defaultConfig": {
            "configPath": "./etc/istio/proxy",
            "binaryPath": "/usr/local/bin/envoy",
            "serviceCluster": "istio-proxy",
            "drainDuration": "45s",
            "terminationDrainDuration": "5s",
            "proxyAdminPort": 15000,
            "controlPlaneAuthPolicy": "MUTUAL_TLS",
            "discoveryAddress": "istiod.istio-system.svc:15012",
            "statNameLength": 189,
            "statusPort": 15020,
        },
    })
}

/// A mesh config with warnings about its file.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedMeshConfig {
    /// The merged config.
    pub config: MeshConfig,
    /// True if `discoverySelectors` are invalid, so that the config has none.
    pub has_invalid_selectors: bool,
    /// Fields that have no effect or are likely mistakes.
    pub warnings: Vec<FieldError>,
}

impl ParsedMeshConfig {
    /// Returns this mesh config with the `discoverySelectors` of the last one, if its own are invalid.
    ///
    /// Parity (pkg/kube/namespace/filter.go, `selectorsChanged`).
    pub fn after(mut self, last: Option<&MeshConfig>) -> Self {
        if let Some(last) = last.filter(|_| self.has_invalid_selectors) {
            self.config.discovery_selectors.clone_from(&last.discovery_selectors);
        }
        self
    }
}

/// Merges a mesh file over the defaults and validates the result. After an error the caller keeps its last valid
/// config.
pub fn parse(file: &Value) -> Result<ParsedMeshConfig, Vec<FieldError>> {
    parse_layers(&[file])
}

/// Does the same for several files, each merged over the one before.
pub fn parse_layers(layers: &[&Value]) -> Result<ParsedMeshConfig, Vec<FieldError>> {
    let validation = RefCell::<Validation>::default();
    let mut config = defaults();
    for layer in layers {
        for path in unknown_fields(&descriptor::<MeshConfig>(), layer) {
            let message = "is not a field of the mesh config and has no effect";
            validation.borrow_mut().warning(path, message);
        }
        let mut layer = Value::clone(layer);
        for path in remove_overridden(&descriptor::<MeshConfig>(), &mut layer) {
            let message = "has no effect, because another field that excludes it is set";
            validation.borrow_mut().warning(path, message);
        }
        for (ignored, name) in [
            ("default_config", "defaultConfig"),
            ("default_providers", "defaultProviders"),
        ] {
            if layer.get(ignored).is_some() {
                let message = format!("has no effect in this spelling, want {name}");
                validation.borrow_mut().warning(ignored, message);
            }
        }
        config = lay_over(&config, &layer).map_err(|error| vec![field_error(error)])?;
    }
    validate::mesh_config(&FieldPath::root("", ErrorPolicy::Reject, &validation), &config);
    let validation = validation.into_inner();
    if validation.errors.is_empty() {
        let has_invalid_selectors = validate::has_invalid_selectors(&config);
        validate::normalize(&mut config);
        Ok(ParsedMeshConfig {
            config,
            has_invalid_selectors,
            warnings: validation.into_warnings(),
        })
    } else {
        Err(validation.errors)
    }
}

/// Merges a mesh file over a mesh config.
pub fn lay_over(base: &MeshConfig, file: &Value) -> Result<MeshConfig, JsonError> {
    let overlay = object(file)?;
    let mut merged = values(base);
    let before = merged.clone();
    set_fields(&descriptor::<MeshConfig>(), &mut merged, overlay);
    // Parity (pkg/config/mesh/mesh.go): both are read in this spelling only.
    let mut proxy_config = inner(&before, "defaultConfig");
    if let Some(overlay) = overlay.get("defaultConfig") {
        let overlay = object(overlay).map_err(|error| within("defaultConfig", error))?;
        set_proxy_config(&mut proxy_config, overlay);
    }
    merged.insert("defaultConfig".to_owned(), Value::Object(proxy_config));
    let mut providers = inner(&before, "defaultProviders");
    if let Some(overlay) = overlay.get("defaultProviders") {
        let overlay = object(overlay).map_err(|error| within("defaultProviders", error))?;
        set_fields(&descriptor::<DefaultProviders>(), &mut providers, overlay);
    }
    merged.insert("defaultProviders".to_owned(), Value::Object(providers));
    let mut config: MeshConfig = from_json(&Value::Object(merged), Unknown::Ignore)?;
    merge_lists(base, &mut config);
    Ok(config)
}

/// Merges a proxy config (an annotation, a `PROXY_CONFIG` text) over another.
pub fn lay_over_proxy_config(base: &ProxyConfig, overlay: &Value) -> Result<ProxyConfig, JsonError> {
    let mut merged = values(base);
    let mut overlay = overlay.clone();
    remove_overridden(&descriptor::<ProxyConfig>(), &mut overlay);
    set_proxy_config(&mut merged, object(&overlay)?);
    from_json(&Value::Object(merged), Unknown::Ignore)
}

/// Parses `PROXY_CONFIG` of node metadata. It replaces `defaultConfig`; nothing is merged.
pub fn node_proxy_config(metadata: &Value) -> Result<ProxyConfig, JsonError> {
    from_json(metadata, Unknown::Ignore)
}

/// Returns the config of a workload: the mesh's `defaultConfig`, then ProxyConfig resources from the widest to the
/// narrowest.
pub fn effective_proxy_config(default: &ProxyConfig, resources: &[&ProxyConfigResource]) -> ProxyConfig {
    let mut config = default.clone();
    for resource in resources {
        if resource.concurrency.is_some() {
            config.concurrency = resource.concurrency;
        }
        if resource.image.is_some() {
            config.image.clone_from(&resource.image);
        }
        let variables = resource.environment_variables.iter();
        config
            .proxy_metadata
            .extend(variables.map(|(name, value)| (name.clone(), value.clone())));
    }
    config
}

/// Merges providers by name: a provider replaces the one of the same name in place. Unites and sorts aliases.
fn merge_lists(base: &MeshConfig, config: &mut MeshConfig) {
    let named = std::mem::replace(&mut config.extension_providers, base.extension_providers.clone());
    // If the file has no list, it is the base's own list and the loop changes nothing.
    for provider in named {
        match config
            .extension_providers
            .iter_mut()
            .find(|known| known.name == provider.name)
        {
            Some(known) => *known = provider,
            None => config.extension_providers.push(provider),
        }
    }
    config
        .trust_domain_aliases
        .extend(base.trust_domain_aliases.iter().cloned());
    config.trust_domain_aliases.sort();
    config.trust_domain_aliases.dedup();
}

/// The fields of `proxyHeaders` that stay unless they are overridden one by one; an overlay resets all others. Parity
/// (pkg/config/mesh/mesh.go).
const KEPT_HEADERS: [&str; 5] = [
    "forwardedClientCert",
    "requestId",
    "attemptCount",
    "server",
    "envoyDebugHeaders",
];

fn set_proxy_config(base: &mut Map<String, Value>, overlay: &Map<String, Value>) {
    let before = base.clone();
    set_fields(&descriptor::<ProxyConfig>(), base, overlay);
    if let Some(Value::Object(metadata)) = base.get("proxyMetadata") {
        let mut values = inner(&before, "proxyMetadata");
        set_named(&mut values, metadata);
        base.insert("proxyMetadata".to_owned(), Value::Object(values));
    }
    if let Some(Value::Object(headers)) = base.get("proxyHeaders") {
        let mut values = inner(&before, "proxyHeaders");
        values.retain(|name, _| KEPT_HEADERS.contains(&name.as_str()));
        set_fields(&descriptor::<ProxyHeaders>(), &mut values, headers);
        base.insert("proxyHeaders".to_owned(), Value::Object(values));
    }
}

/// Sets every field in the overlay, in either spelling, and clears other members of its oneof.
fn set_fields(descriptor: &MessageDescriptor, base: &mut Map<String, Value>, overlay: &Map<String, Value>) {
    for (name, value) in overlay.iter().filter(|(_, value)| !value.is_null()) {
        let field = descriptor
            .get_field_by_json_name(name)
            .or_else(|| descriptor.get_field_by_name(name));
        let Some(field) = field else { continue };
        for other in field.containing_oneof().iter().flat_map(OneofDescriptor::fields) {
            base.remove(other.json_name());
        }
        base.insert(field.json_name().to_owned(), value.clone());
    }
}

fn set_named(base: &mut Map<String, Value>, overlay: &Map<String, Value>) {
    let named = overlay.iter().filter(|(_, value)| !value.is_null());
    base.extend(named.map(|(name, value)| (name.clone(), value.clone())));
}

fn descriptor<M: Name>() -> MessageDescriptor {
    message_descriptor(&M::full_name()).expect("because the pool has every message of the API")
}

fn values<M: Message + Name>(message: &M) -> Map<String, Value> {
    match to_json(message) {
        Value::Object(values) => values,
        _ => Map::new(),
    }
}

fn inner(values: &Map<String, Value>, name: &str) -> Map<String, Value> {
    values.get(name).and_then(Value::as_object).cloned().unwrap_or_default()
}

fn object(value: &Value) -> Result<&Map<String, Value>, JsonError> {
    static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);
    match value {
        Value::Object(object) => Ok(object),
        Value::Null => Ok(&EMPTY),
        _ => Err(JsonError::new("is not an object")),
    }
}

fn within(path: &str, error: JsonError) -> JsonError {
    JsonError {
        path: path.to_owned(),
        ..error
    }
}

pub(super) fn field_error(error: JsonError) -> FieldError {
    FieldError {
        field: error.path,
        message: error.message,
    }
}

#[cfg(test)]
mod tests;
