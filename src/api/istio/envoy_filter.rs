//! Validation of EnvoyFilters.

use std::collections::BTreeMap;

use prost::Name;
use prost_reflect::DynamicMessage;
use prost_types::Struct;

use super::{RegexUsage, common, field_path::FieldPath};
use crate::{
    api::Meta,
    proto::{
        envoy::{
            config::{
                bootstrap::v3::Bootstrap,
                cluster::v3::Cluster,
                core::v3::TypedExtensionConfig,
                listener::v3::{Filter, FilterChain, Listener, ListenerFilter},
                route::v3::{Route, RouteConfiguration, VirtualHost},
            },
            extensions::filters::network::http_connection_manager::v3::HttpFilter,
        },
        istio::networking::v1alpha3::{
            EnvoyFilter,
            envoy_filter::{
                ApplyTo, EnvoyConfigObjectMatch, EnvoyConfigObjectPatch, ListenerMatch, PatchContext, ProxyMatch,
                envoy_config_object_match::ObjectTypes, patch::Operation,
            },
        },
        json::{JsonError, Unknown, descriptor_by_url, encode_json, struct_to_json},
        message_descriptor,
    },
};

/// Names of the connection manager, today's and an old one, whose filters are matched by `subFilter`.
const CONNECTION_MANAGERS: [&str; 2] = [
    "envoy.filters.network.http_connection_manager",
    "envoy.http_connection_manager",
];

/// Parses the value of a patch as the message that `applyTo` implies. Unknown fields are skipped: they may belong to a
/// newer Envoy.
///
/// # Errors
/// At the first value that does not fit its field, and for unknown types.
pub fn value(apply_to: ApplyTo, value: &Struct) -> Result<DynamicMessage, JsonError> {
    let name = match apply_to {
        ApplyTo::Listener => Listener::full_name(),
        ApplyTo::FilterChain => FilterChain::full_name(),
        ApplyTo::NetworkFilter => Filter::full_name(),
        ApplyTo::HttpFilter => HttpFilter::full_name(),
        ApplyTo::ListenerFilter => ListenerFilter::full_name(),
        ApplyTo::RouteConfiguration => RouteConfiguration::full_name(),
        ApplyTo::VirtualHost => VirtualHost::full_name(),
        ApplyTo::HttpRoute => Route::full_name(),
        ApplyTo::Cluster => Cluster::full_name(),
        ApplyTo::ExtensionConfig => TypedExtensionConfig::full_name(),
        ApplyTo::Bootstrap => Bootstrap::full_name(),
        ApplyTo::Invalid => return Err(JsonError::new("applyTo names nothing")),
    };
    let descriptor = message_descriptor(&name);
    let descriptor = descriptor.ok_or_else(|| JsonError::new("the type of applyTo is not known"))?;
    let json = serde_json::Value::Object(struct_to_json(value));
    let bytes = encode_json(&descriptor, &json, Unknown::Ignore)?;
    Ok(DynamicMessage::decode(descriptor, bytes).expect("because the bytes follow the descriptor"))
}

/// Checks an EnvoyFilter.
pub fn check(at: &FieldPath<'_>, filter: &EnvoyFilter, _meta: &Meta) {
    if let Some(selector) = &filter.workload_selector {
        let at = at.field("workloadSelector");
        at.require_on_admission(filter.target_refs.is_empty(), "cannot be combined with targetRefs");
        common::selector_labels(&at.field("labels"), &selector.labels);
        if selector.labels.is_empty() {
            at.warning("without labels selects all workloads of the namespace");
        }
    }
    at.each("targetRefs", &filter.target_refs, common::target_reference);
    at.each("configPatches", &filter.config_patches, patch);
    // Parity (pkg/config/validation/envoyfilter/envoyfilter.go): admission warns of every valid EnvoyFilter.
    if at.is_valid() {
        at.warning("depends on the implementation of proxies, which may change at any time; hint: prefer other kinds");
    }
}

fn patch(at: &FieldPath<'_>, patch: &EnvoyConfigObjectPatch) {
    let apply_to = ApplyTo::try_from(patch.apply_to).unwrap_or(ApplyTo::Invalid);
    at.field("applyTo").require(apply_to != ApplyTo::Invalid, "is required");
    // Parity (pkg/config/validation/envoyfilter/envoyfilter.go): patches of waypoints are not checked.
    let is_waypoint = patch.r#match.as_ref().is_some_and(is_of_waypoints);
    match &patch.patch {
        None if is_waypoint => at.field("patch").warning("is missing"),
        None => at.field("patch").error("is required"),
        Some(patch) => {
            let at = at.field("patch");
            let operation = Operation::try_from(patch.operation).unwrap_or(Operation::Invalid);
            at.field("operation")
                .require(operation != Operation::Invalid, "is required");
            let removes = operation == Operation::Remove;
            at.field("value")
                .require(removes || patch.value.is_some(), "is required");
            if removes && patch.value.is_some() {
                at.field("value").warning("has no effect with REMOVE");
            }
            if let Some(found) = &patch.value
                && let Err(error) = value(apply_to, found)
            {
                // The other patches of the object apply. Parity (golang/protobuf, jsonpb/decode.go, unmarshalMessage):
                // Istio admits ambiguous values.
                let message = format!("is left out: {error}");
                if is_waypoint || error.is_ambiguous || has_unknown_type(found) {
                    at.field("value").warning(message);
                } else {
                    at.field("value").refuse(message);
                }
            }
            if patch.filter_class != 0 && apply_to != ApplyTo::HttpFilter {
                at.field("filterClass").warning("counts for HTTP_FILTER only");
            }
        }
    }
    if let Some(matched) = &patch.r#match {
        self::matched(&at.field("match"), matched, apply_to);
    }
}

fn is_of_waypoints(matched: &EnvoyConfigObjectMatch) -> bool {
    matched.context == PatchContext::Waypoint as i32
}

/// Returns true if a value contains a type that has no descriptor here, but may have one in Istio: that of an extension
/// in Envoy's `contrib`. Types of the xDS API v2 are unknown to both.
fn has_unknown_type(value: &Struct) -> bool {
    fn is_within(value: &serde_json::Value) -> bool {
        match value {
            serde_json::Value::Object(fields) => {
                let url = fields.get("@type").and_then(serde_json::Value::as_str);
                let is_unknown = |url: &str| !url.contains(".v2.") && descriptor_by_url(url).is_none();
                url.is_some_and(is_unknown) || fields.values().any(is_within)
            }
            serde_json::Value::Array(items) => items.iter().any(is_within),
            _ => false,
        }
    }
    struct_to_json(value).values().any(is_within)
}

fn matched(at: &FieldPath<'_>, matched: &EnvoyConfigObjectMatch, apply_to: ApplyTo) {
    if let Some(proxy) = &matched.proxy {
        proxy_match(&at.field("proxy"), proxy);
    }
    let fits = match (&matched.object_types, apply_to) {
        (None, _) => true,
        (
            Some(ObjectTypes::Listener(listener)),
            ApplyTo::Listener
            | ApplyTo::FilterChain
            | ApplyTo::NetworkFilter
            | ApplyTo::HttpFilter
            | ApplyTo::ListenerFilter,
        ) => {
            let checks_names = apply_to != ApplyTo::ListenerFilter && !is_of_waypoints(matched);
            listener_match(&at.field("listener"), listener, apply_to, checks_names);
            true
        }
        (
            Some(ObjectTypes::RouteConfiguration(_)),
            ApplyTo::RouteConfiguration | ApplyTo::VirtualHost | ApplyTo::HttpRoute,
        )
        | (Some(ObjectTypes::Cluster(_)), ApplyTo::Cluster)
        | (
            Some(ObjectTypes::Waypoint(_)),
            ApplyTo::NetworkFilter
            | ApplyTo::HttpFilter
            | ApplyTo::HttpRoute
            | ApplyTo::Listener
            | ApplyTo::FilterChain
            | ApplyTo::Cluster,
        ) => true,
        (Some(_), _) => false,
    };
    // Parity (pkg/config/validation/envoyfilter/envoyfilter.go): the others have no match that admission checks.
    let is_checked = !matches!(
        apply_to,
        ApplyTo::ListenerFilter | ApplyTo::ExtensionConfig | ApplyTo::Bootstrap
    );
    let message = "the match is for another kind of object than applyTo";
    if fits {
        return;
    }
    if is_checked && !is_of_waypoints(matched) {
        at.refuse(message);
    } else {
        at.warning(message);
    }
}

fn proxy_match(at: &FieldPath<'_>, proxy: &ProxyMatch) {
    if !proxy.proxy_version.is_empty() {
        at.field("proxyVersion")
            .regex(&proxy.proxy_version, RegexUsage::ControlPlane);
    }
    metadata(&at.field("metadata"), &proxy.metadata);
}

fn metadata(at: &FieldPath<'_>, metadata: &BTreeMap<String, String>) {
    at.require(metadata.keys().all(|key| !key.is_empty()), "a key is empty");
}

/// Checks the filters of a match. Parity (pkg/config/validation/envoyfilter/envoyfilter.go): names and sub-filters are
/// not checked for waypoints and listener filters.
fn listener_match(at: &FieldPath<'_>, listener: &ListenerMatch, apply_to: ApplyTo, checks_names: bool) {
    let Some(filter) = listener.filter_chain.as_ref().and_then(|chain| chain.filter.as_ref()) else {
        return;
    };
    let chain_at = at.field("filterChain");
    let at = chain_at.field("filter");
    let class = matches!(apply_to, ApplyTo::Listener | ApplyTo::FilterChain);
    if class {
        at.warning("a match of filters has no effect with this applyTo");
    }
    let name = filter.name.as_str();
    let Some(sub_filter) = &filter.sub_filter else {
        at.field("name")
            .require_on_admission(!checks_names || !name.is_empty(), "is required");
        return;
    };
    if !checks_names {
        return;
    }
    let sub_at = at.field("subFilter");
    sub_at.require_on_admission(apply_to == ApplyTo::HttpFilter, "counts for HTTP_FILTER only");
    at.field("name").require(!name.is_empty(), "is required with subFilter");
    at.field("name").require_on_admission(
        name.is_empty() || CONNECTION_MANAGERS.contains(&name),
        "must be envoy.filters.network.http_connection_manager with subFilter",
    );
    sub_at.field("name").require(!sub_filter.name.is_empty(), "is required");
}
