//! Validation of EnvoyFilters.

use std::collections::BTreeSet;

use prost::Name;
use prost_reflect::{DynamicMessage, MessageDescriptor, ReflectMessage, Value as Reflected};
use prost_types::{Struct, Value, value::Kind};

use super::{RegexUsage, common, field_path::FieldPath};
use crate::{
    api::{Meta, credential},
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

/// Most credentials of an EnvoyFilter. Each identity that it applies to has a resource for every one of them.
const MAX_CREDENTIALS: usize = 1_000;
/// Longest name of a credential in an EnvoyFilter; those of objects are much shorter.
const MAX_CREDENTIAL_NAME: usize = 1_024;

/// Names of the connection manager, today's and an old one, whose filters are matched by `subFilter`.
const CONNECTION_MANAGERS: [&str; 2] = [
    "envoy.filters.network.http_connection_manager",
    "envoy.http_connection_manager",
];

/// Former names of filters, with those of today. No filter that istiod generates has a former name.
const FORMER_NAMES: [(&str, &str); 27] = [
    ("envoy.buffer", "envoy.filters.http.buffer"),
    ("envoy.client_ssl_auth", "envoy.filters.network.client_ssl_auth"),
    ("envoy.cors", "envoy.filters.http.cors"),
    ("envoy.csrf", "envoy.filters.http.csrf"),
    ("envoy.ext_authz", "envoy.filters.http.ext_authz"),
    ("envoy.fault", "envoy.filters.http.fault"),
    ("envoy.grpc_http1_bridge", "envoy.filters.http.grpc_http1_bridge"),
    ("envoy.grpc_json_transcoder", "envoy.filters.http.grpc_json_transcoder"),
    ("envoy.grpc_web", "envoy.filters.http.grpc_web"),
    ("envoy.gzip", "envoy.filters.http.gzip"),
    ("envoy.health_check", "envoy.filters.http.health_check"),
    (
        "envoy.http_connection_manager",
        "envoy.filters.network.http_connection_manager",
    ),
    ("envoy.http_dynamo_filter", "envoy.filters.http.dynamo"),
    ("envoy.ip_tagging", "envoy.filters.http.ip_tagging"),
    ("envoy.listener.http_inspector", "envoy.filters.listener.http_inspector"),
    ("envoy.listener.original_dst", "envoy.filters.listener.original_dst"),
    ("envoy.listener.original_src", "envoy.filters.listener.original_src"),
    ("envoy.listener.proxy_protocol", "envoy.filters.listener.proxy_protocol"),
    ("envoy.listener.tls_inspector", "envoy.filters.listener.tls_inspector"),
    ("envoy.lua", "envoy.filters.http.lua"),
    ("envoy.mongo_proxy", "envoy.filters.network.mongo_proxy"),
    ("envoy.rate_limit", "envoy.filters.http.ratelimit"),
    ("envoy.ratelimit", "envoy.filters.network.ratelimit"),
    ("envoy.redis_proxy", "envoy.filters.network.redis_proxy"),
    ("envoy.router", "envoy.filters.http.router"),
    ("envoy.squash", "envoy.filters.http.squash"),
    ("envoy.tcp_proxy", "envoy.filters.network.tcp_proxy"),
];

/// Parses the value of a patch as the message that `applyTo` implies. Unknown fields are skipped: they may belong to a
/// newer Envoy.
///
/// # Errors
/// At the first value that does not fit its field, if values are nested too deeply, and for unknown types.
pub fn value(apply_to: ApplyTo, value: &Struct) -> Result<DynamicMessage, JsonError> {
    let descriptor = descriptor_of(apply_to)?;
    let bytes = encode_json(&descriptor, &json_of(value), Unknown::Ignore)?;
    // The bytes follow the descriptor, so nothing else can be wrong.
    DynamicMessage::decode(descriptor, bytes).map_err(|_| JsonError::new("the value is nested too deeply"))
}

fn json_of(value: &Struct) -> serde_json::Value {
    serde_json::Value::Object(struct_to_json(value))
}

/// Returns the type of values of a patch.
fn descriptor_of(apply_to: ApplyTo) -> Result<MessageDescriptor, JsonError> {
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
    message_descriptor(&name).ok_or_else(|| JsonError::new("the type of applyTo is not known"))
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
    at.each("targetRefs", &filter.target_refs, common::filter_target_reference);
    at.each("configPatches", &filter.config_patches, patch);
    let credentials = credentials(filter);
    at.require(
        credentials.len() <= MAX_CREDENTIALS,
        "refers to more than 1,000 different credentials",
    );
    at.require(
        credentials.iter().all(|name| name.len() <= MAX_CREDENTIAL_NAME),
        "refers to a credential with a name of more than 1,024 bytes",
    );
    // Parity (pkg/config/validation/envoyfilter/envoyfilter.go): admission warns of every valid EnvoyFilter.
    if at.is_valid() {
        at.warning("depends on the implementation of proxies, which may change at any time; hint: prefer other kinds");
    }
}

/// Returns the names of credentials that istiod serves, anywhere in the patches.
pub fn credentials(filter: &EnvoyFilter) -> BTreeSet<&str> {
    let mut names = BTreeSet::new();
    let patches = filter.config_patches.iter().filter_map(|patch| patch.patch.as_ref());
    for fields in patches.filter_map(|patch| patch.value.as_ref()) {
        credentials_within(fields, &mut names);
    }
    names
}

fn credentials_within<'a>(fields: &'a Struct, names: &mut BTreeSet<&'a str>) {
    fields
        .fields
        .values()
        .for_each(|value| credentials_of_value(value, names));
}

fn credentials_of_value<'a>(value: &'a Value, names: &mut BTreeSet<&'a str>) {
    match &value.kind {
        Some(Kind::StringValue(text)) if credential::is_served(text) => {
            names.insert(text);
        }
        Some(Kind::StructValue(fields)) => credentials_within(fields, names),
        Some(Kind::ListValue(list)) => list.values.iter().for_each(|value| credentials_of_value(value, names)),
        _ => {}
    }
}

fn patch(at: &FieldPath<'_>, patch: &EnvoyConfigObjectPatch) {
    // Parity (pkg/config/validation/envoyfilter/envoyfilter.go): patches of waypoints are not checked.
    let is_waypoint = patch.r#match.as_ref().is_some_and(is_of_waypoints);
    let require = |at: &FieldPath<'_>, is_set: bool| match is_set {
        true => {}
        false if is_waypoint => at.warning("is missing"),
        false => at.error("is required"),
    };
    let apply_to = ApplyTo::try_from(patch.apply_to).unwrap_or(ApplyTo::Invalid);
    require(&at.field("applyTo"), apply_to != ApplyTo::Invalid);
    match &patch.patch {
        None => require(&at.field("patch"), false),
        Some(patch) => {
            let at = at.field("patch");
            let operation = Operation::try_from(patch.operation).unwrap_or(Operation::Invalid);
            require(&at.field("operation"), operation != Operation::Invalid);
            let removes = operation == Operation::Remove;
            require(&at.field("value"), removes || patch.value.is_some());
            if removes && patch.value.is_some() {
                at.field("value").warning("has no effect with REMOVE");
            }
            if let Some(found) = &patch.value {
                let at = at.field("value");
                match value(apply_to, found) {
                    Ok(message) if !is_waypoint && !removes => likely_mistakes(&at, found, &message, operation),
                    Ok(_) => {}
                    // The other patches of the object apply. Parity (golang/protobuf, jsonpb/decode.go,
                    // unmarshalMessage): Istio admits ambiguous values.
                    Err(error) if is_waypoint || error.is_ambiguous || has_unknown_type(found) => {
                        at.warning(format!("is left out: {error}"));
                    }
                    Err(error) => at.refuse(format!("is left out: {error}")),
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

/// Warns of a field in the value of a patch that is not known, and of extensions without a type.
///
/// Parity (pkg/config/validation/envoyfilter/envoyfilter.go): unlike there, a value that is merged may leave the type
/// as it is.
fn likely_mistakes(at: &FieldPath<'_>, written: &Struct, message: &DynamicMessage, operation: Operation) {
    if let Err(error) = encode_json(&message.descriptor(), &json_of(written), Unknown::Deny) {
        at.warning(format!("{error}, which has no effect"));
    }
    if operation != Operation::Merge {
        let mut untyped = Vec::new();
        untyped_extensions(message, &mut untyped);
        for name in untyped {
            at.warning(format!(
                "extension {name:?} has no typed_config, so proxies may refuse it"
            ));
        }
    }
}

/// Collects the names of extensions without a type, except those in lists.
fn untyped_extensions(message: &DynamicMessage, found: &mut Vec<String>) {
    let descriptor = message.descriptor();
    let field = |name: &str| descriptor.get_field_by_name(name);
    let is_set = |name: &str| field(name).is_some_and(|field| message.has_field(&field));
    if field("typed_config").is_some() && !is_set("typed_config") && !is_set("config_discovery") {
        let name = message.get_field_by_name("name");
        let name = name.as_deref().and_then(Reflected::as_str);
        found.push(name.unwrap_or_default().to_owned());
    }
    for (_, value) in message.fields() {
        if let Reflected::Message(inner) = value {
            untyped_extensions(inner, found);
        }
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
        proxy_match(&at.field("proxy"), proxy, is_of_waypoints(matched));
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
        | (Some(ObjectTypes::Cluster(_)), ApplyTo::Cluster) => true,
        (
            Some(ObjectTypes::Waypoint(_)),
            ApplyTo::NetworkFilter
            | ApplyTo::HttpFilter
            | ApplyTo::HttpRoute
            | ApplyTo::Listener
            | ApplyTo::FilterChain
            | ApplyTo::Cluster,
        ) => is_of_waypoints(matched),
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

/// Checks a match of proxies. That of a waypoint is never compiled.
fn proxy_match(at: &FieldPath<'_>, proxy: &ProxyMatch, is_waypoint: bool) {
    if !proxy.proxy_version.is_empty() && !is_waypoint {
        at.field("proxyVersion")
            .regex(&proxy.proxy_version, RegexUsage::ControlPlane);
    }
    // Istio admits such an object, and serves its other patches.
    if proxy.metadata.contains_key("") {
        at.field("metadata").warning("a key is empty, so no proxy fits");
    }
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
    if checks_names {
        former_name(&at.field("name"), name);
    }
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
    former_name(&sub_at.field("name"), &sub_filter.name);
}

/// Warns of a name that filters had in former releases of Envoy.
fn former_name(at: &FieldPath<'_>, name: &str) {
    if let Some((_, today)) = FORMER_NAMES.iter().find(|(former, _)| *former == name) {
        at.warning(format!(
            "{name:?} is a former name, which no filter has; hint: write {today:?}"
        ));
    }
}
