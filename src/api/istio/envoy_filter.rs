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
        json::{JsonError, Unknown, encode_json, struct_to_json},
        message_descriptor,
    },
};

/// Parses the value of a patch as the message that `applyTo` implies. Unknown fields are skipped: they may belong to a
/// newer Envoy.
///
/// # Errors
/// At the first value that does not fit its field, and for unknown types.
pub fn value(apply_to: ApplyTo, value: &Struct) -> Result<DynamicMessage, JsonError> {
    let of_type = |message: &str| JsonError {
        path: String::new(),
        message: message.to_owned(),
    };
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
        ApplyTo::Invalid => return Err(of_type("applyTo names nothing")),
    };
    let descriptor = message_descriptor(&name);
    let descriptor = descriptor.ok_or_else(|| of_type("the type of applyTo is not known"))?;
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
    let context = patch.r#match.as_ref().map(|matched| matched.context);
    match &patch.patch {
        // Parity (pkg/config/validation/envoyfilter/envoyfilter.go): those of waypoints are not checked.
        None if context == Some(PatchContext::Waypoint as i32) => at.field("patch").warning("is missing"),
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
            if let Some(Err(error)) = patch.value.as_ref().map(|found| value(apply_to, found)) {
                // The other patches of the object apply.
                at.field("value").warning(format!("is left out: {error}"));
            }
            let filters = matches!(apply_to, ApplyTo::HttpFilter);
            let filtered = patch.filter_class != 0;
            at.field("filterClass")
                .require_on_admission(!filtered || filters, "counts for HTTP_FILTER only");
        }
    }
    if let Some(matched) = &patch.r#match {
        self::matched(&at.field("match"), matched, apply_to);
    }
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
            listener_match(&at.field("listener"), listener, apply_to);
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
    at.require_on_admission(fits, "the match is for another kind of object than applyTo");
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

fn listener_match(at: &FieldPath<'_>, listener: &ListenerMatch, apply_to: ApplyTo) {
    let Some(filter) = listener.filter_chain.as_ref().and_then(|chain| chain.filter.as_ref()) else {
        return;
    };
    let chain_at = at.field("filterChain");
    let at = chain_at.field("filter");
    let class = matches!(apply_to, ApplyTo::Listener | ApplyTo::FilterChain);
    if class {
        at.warning("a match of filters has no effect with this applyTo");
    }
    let Some(sub_filter) = &filter.sub_filter else { return };
    let sub_at = at.field("subFilter");
    sub_at.require_on_admission(apply_to == ApplyTo::HttpFilter, "counts for HTTP_FILTER only");
    at.field("name")
        .require(!filter.name.is_empty(), "is required with subFilter");
    sub_at.field("name").require(!sub_filter.name.is_empty(), "is required");
}
