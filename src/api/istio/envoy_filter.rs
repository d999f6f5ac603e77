//! What an EnvoyFilter must fulfil.

use std::collections::BTreeMap;

use super::{check::At, common};
use crate::{
    api::Meta,
    proto::istio::networking::v1alpha3::{
        EnvoyFilter,
        envoy_filter::{
            ApplyTo, EnvoyConfigObjectMatch, EnvoyConfigObjectPatch, ListenerMatch, ProxyMatch,
            envoy_config_object_match::ObjectTypes, patch::Operation,
        },
    },
};

/// Checks an EnvoyFilter.
pub fn check(at: &At<'_>, filter: &EnvoyFilter, _meta: &Meta) {
    if let Some(selector) = &filter.workload_selector {
        let at = at.field("workloadSelector");
        at.expect(filter.target_refs.is_empty(), "goes not together with targetRefs");
        common::selector_labels(&at.field("labels"), &selector.labels);
        if selector.labels.is_empty() {
            at.warning("without labels selects all workloads of the namespace");
        }
    }
    at.each("targetRefs", &filter.target_refs, common::target_reference);
    at.each("configPatches", &filter.config_patches, patch);
}

fn patch(at: &At<'_>, patch: &EnvoyConfigObjectPatch) {
    let apply_to = ApplyTo::try_from(patch.apply_to).unwrap_or(ApplyTo::Invalid);
    at.field("applyTo").require(apply_to != ApplyTo::Invalid, "is required");
    match &patch.patch {
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
            let filters = matches!(apply_to, ApplyTo::HttpFilter);
            let filtered = patch.filter_class != 0;
            at.field("filterClass")
                .expect(!filtered || filters, "counts for HTTP_FILTER only");
        }
    }
    if let Some(matched) = &patch.r#match {
        self::matched(&at.field("match"), matched, apply_to);
    }
}

fn matched(at: &At<'_>, matched: &EnvoyConfigObjectMatch, apply_to: ApplyTo) {
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
    at.expect(fits, "the match is for another kind of object than applyTo");
}

fn proxy_match(at: &At<'_>, proxy: &ProxyMatch) {
    if !proxy.proxy_version.is_empty() {
        common::regex(&at.field("proxyVersion"), &proxy.proxy_version);
    }
    metadata(&at.field("metadata"), &proxy.metadata);
}

fn metadata(at: &At<'_>, metadata: &BTreeMap<String, String>) {
    at.require(metadata.keys().all(|key| !key.is_empty()), "a key is empty");
}

fn listener_match(at: &At<'_>, listener: &ListenerMatch, apply_to: ApplyTo) {
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
    sub_at.expect(apply_to == ApplyTo::HttpFilter, "counts for HTTP_FILTER only");
    at.field("name")
        .require(!filter.name.is_empty(), "is required with subFilter");
    sub_at.field("name").require(!sub_filter.name.is_empty(), "is required");
}
