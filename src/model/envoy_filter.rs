//! Compiled EnvoyFilters: each patch with its value decoded as the message that it changes, and its matches.
//!
//! Compiling costs far more than applying, so it happens once per object, not per proxy. Note: only a patch that cannot
//! be decoded is omitted; the other patches of its object apply.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use prost::{Message, Name};
use prost_reflect::{DynamicMessage, ReflectMessage, Value as Reflected};
use regex::bytes::Regex;
use smol_str::{SmolStr, format_smolstr};

use super::MeshSnapshot;
use crate::{
    api::{Config, istio::envoy_filter, regex as user_regex},
    base::{Hostname, Labels, Namespace, ObjectKey},
    proto::{
        Any,
        istio::networking::v1alpha3::{
            EnvoyFilter,
            envoy_filter::{
                self as proto, ClusterMatch, EnvoyConfigObjectPatch, ListenerMatch, RouteConfigurationMatch,
                envoy_config_object_match::ObjectTypes,
            },
        },
        udpa::r#type::v1::TypedStruct,
    },
    table::Cx,
};

pub use proto::{ApplyTo, patch::FilterClass, patch::Operation};

/// Annotation with services whose clusters gateways keep without a route: `namespace/host` or `host`, comma-separated.
const REFERENCED_SERVICES_ANNOTATION: &str = "envoyfilter.istio.io/referenced-services";

/// Context of the configuration that a patch changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PatchContext {
    /// Inbound configuration of sidecars, and of waypoints.
    SidecarInbound,
    /// Outbound configuration of sidecars.
    SidecarOutbound,
    /// Gateways.
    Gateway,
}

/// Class of resources that a patch changes. Keys of resources contain only the patches of their class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PatchClass {
    /// Clusters.
    Cluster,
    /// Listeners, filter chains and filters.
    Listener,
    /// Route configurations, virtual hosts and routes.
    Route,
    /// Extension configurations, served by ECDS.
    Extension,
}

/// A compiled EnvoyFilter.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct CompiledFilter {
    /// Patches that could be decoded, in the order of the object.
    pub patches: Vec<Patch>,
    /// Services whose clusters gateways keep without a route.
    pub referenced_services: Vec<ReferencedService>,
}

/// A service referred to outside routes: by an EnvoyFilter's annotation, or by an extension provider.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReferencedService {
    /// Namespace; `None` for any.
    pub namespace: Option<Namespace>,
    /// The host.
    pub host: Hostname,
}

impl ReferencedService {
    /// Parses `namespace/host` or `host`.
    pub fn parse(text: &str) -> Self {
        let (namespace, host) = match text.split_once('/') {
            Some((namespace, host)) => (Some(Namespace::new(namespace)), host),
            None => (None, text),
        };
        Self {
            namespace,
            host: Hostname::new(host),
        }
    }
}

/// One patch.
#[derive(Clone, Debug, PartialEq)]
pub struct Patch {
    /// Position for notes: `namespace/name configPatches[2] HTTP_FILTER`.
    pub place: SmolStr,
    /// The kind of object that it changes.
    pub apply_to: ApplyTo,
    /// Context; `None` for all. Patches for waypoints alone are not compiled, because no context is one.
    pub context: Option<PatchContext>,
    /// Proxies that it selects.
    pub proxy: ProxyMatch,
    /// Objects that it matches; `None` for all of the kind.
    pub object: Option<ObjectTypes>,
    /// Operation. Insertions relative to something are additions for unordered kinds.
    pub operation: Operation,
    /// Requested position of an added HTTP filter. Parity (pilot/pkg/networking/core/envoyfilter/listener_patch.go):
    /// ignored.
    pub filter_class: FilterClass,
    /// Value to merge, add or replace with; `None` for removals.
    pub value: Option<PatchValue>,
}

/// Value of a patch: a message of the type that belongs to `applyTo`.
#[derive(Clone, Debug, PartialEq)]
pub struct PatchValue {
    /// The message with its fields.
    pub message: DynamicMessage,
    /// Types of the packed messages inside it, without duplicates; see [`packed_type`].
    pub packed: BTreeSet<SmolStr>,
    bytes: Bytes,
}

impl PatchValue {
    fn new(message: DynamicMessage) -> Self {
        let mut packed = BTreeSet::new();
        packed_types(&message, &mut packed);
        Self {
            bytes: message.encode_to_vec().into(),
            packed,
            message,
        }
    }

    /// Returns the value as a message with a Rust type; `None` if it has another type.
    pub fn read<M: Message + Name + Default>(&self) -> Option<M> {
        (self.message.descriptor().full_name() == M::full_name())
            .then(|| M::decode(self.bytes.clone()).ok())
            .flatten()
    }
}

/// Returns the type of a packed message, or of the typed struct in it.
pub fn packed_type(any: &Any) -> SmolStr {
    let name = |url: &str| SmolStr::new(url.rsplit_once('/').map_or(url, |(_, name)| name));
    match any.type_name() {
        // Both have the same fields.
        "udpa.type.v1.TypedStruct" | "xds.type.v3.TypedStruct" => TypedStruct::decode(any.value.clone())
            .map(|typed| name(&typed.type_url))
            .unwrap_or_default(),
        other => SmolStr::new(other),
    }
}

/// Collects the types of packed messages anywhere in a message, but not inside packed messages.
fn packed_types(message: &DynamicMessage, found: &mut BTreeSet<SmolStr>) {
    if message.descriptor().full_name() == Any::full_name() {
        found.extend(message.transcode_to::<Any>().ok().as_ref().map(packed_type));
        return;
    }
    for (_, value) in message.fields() {
        match value {
            Reflected::Message(inner) => packed_types(inner, found),
            Reflected::List(list) => {
                let messages = list.iter().filter_map(Reflected::as_message);
                messages.for_each(|inner| packed_types(inner, found));
            }
            Reflected::Map(map) => {
                let messages = map.values().filter_map(Reflected::as_message);
                messages.for_each(|inner| packed_types(inner, found));
            }
            _ => {}
        }
    }
}

/// Proxies that a patch selects.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct ProxyMatch {
    /// Release; `None` for any.
    pub version: Option<VersionMatch>,
    /// Required metadata of the node, as text.
    pub metadata: BTreeMap<String, String>,
}

/// Releases that a patch selects.
#[derive(Clone, Debug)]
pub struct VersionMatch {
    pattern: String,
    /// `None` if the pattern is refused, so that nothing matches.
    regex: Option<Regex>,
}

impl PartialEq for VersionMatch {
    fn eq(&self, other: &Self) -> bool {
        self.pattern == other.pattern
    }
}

impl VersionMatch {
    fn new(pattern: &str) -> Self {
        Self {
            pattern: pattern.to_owned(),
            regex: user_regex::compile(pattern).ok(),
        }
    }

    /// Returns true if the pattern occurs in a release. A proxy without a release matches no pattern.
    pub fn matches(&self, version: &str) -> bool {
        let found = |regex: &Regex| regex.is_match(version.as_bytes());
        !version.is_empty() && self.regex.as_ref().is_some_and(found)
    }
}

impl ProxyMatch {
    /// Returns true for a proxy with this `ISTIO_VERSION` and text metadata; other metadata never matches.
    pub fn matches(&self, version: &str, metadata: &Labels) -> bool {
        let same = |(key, value): (&String, &String)| metadata.get(key.as_str()).is_some_and(|text| text == value);
        self.version.as_ref().is_none_or(|pattern| pattern.matches(version)) && self.metadata.iter().all(same)
    }
}

impl Patch {
    /// Returns the class of resources; `None` for patches of the bootstrap configuration.
    pub fn class(&self) -> Option<PatchClass> {
        match self.apply_to {
            ApplyTo::Cluster => Some(PatchClass::Cluster),
            ApplyTo::Listener
            | ApplyTo::ListenerFilter
            | ApplyTo::FilterChain
            | ApplyTo::NetworkFilter
            | ApplyTo::HttpFilter => Some(PatchClass::Listener),
            ApplyTo::RouteConfiguration | ApplyTo::VirtualHost | ApplyTo::HttpRoute => Some(PatchClass::Route),
            ApplyTo::ExtensionConfig => Some(PatchClass::Extension),
            ApplyTo::Bootstrap | ApplyTo::Invalid => None,
        }
    }

    /// Returns true if it applies in a context.
    pub fn is_for(&self, context: PatchContext) -> bool {
        self.context.is_none_or(|own| own == context)
    }

    /// Returns true if an added cluster or listener belongs to a context. Without a context of its own it is added
    /// once, outbound.
    pub fn adds_in(&self, context: PatchContext) -> bool {
        self.operation == Operation::Add
            && match self.context {
                Some(own) => own == context,
                None => context != PatchContext::SidecarInbound,
            }
    }

    /// Returns the match of listeners, if it has one.
    pub fn listener(&self) -> Option<&ListenerMatch> {
        match &self.object {
            Some(ObjectTypes::Listener(found)) => Some(found),
            _ => None,
        }
    }

    /// Returns the match of route configurations, if it has one.
    pub fn route_configuration(&self) -> Option<&RouteConfigurationMatch> {
        match &self.object {
            Some(ObjectTypes::RouteConfiguration(found)) => Some(found),
            _ => None,
        }
    }

    /// Returns the match of clusters, if it has one.
    pub fn cluster(&self) -> Option<&ClusterMatch> {
        match &self.object {
            Some(ObjectTypes::Cluster(found)) => Some(found),
            _ => None,
        }
    }

    /// Returns the value as a message with a Rust type.
    pub fn read<M: Message + Name + Default>(&self) -> Option<M> {
        self.value.as_ref()?.read()
    }
}

/// Compiles one EnvoyFilter.
pub fn compiled(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<CompiledFilter> {
    let row = mesh.envoy_filters.get(cx, key)?;
    Some(CompiledFilter {
        patches: patches(key, row),
        referenced_services: referenced_services(row),
    })
}

fn patches(key: &ObjectKey, row: &Config<EnvoyFilter>) -> Vec<Patch> {
    let all = row.spec.config_patches.iter().enumerate();
    let place = |position: usize, written: &EnvoyConfigObjectPatch| {
        format_smolstr!("{key} configPatches[{position}] {}", written.apply_to().as_str_name())
    };
    let mut versions = BTreeMap::new();
    all.filter_map(|(position, written)| patch(place(position, written), written, &mut versions))
        .collect()
}

/// Compiled patterns of releases; an object often has many equal ones.
type Versions<'a> = BTreeMap<&'a str, VersionMatch>;

/// Compiles one patch; `None` if it can never have an effect.
fn patch<'a>(place: SmolStr, written: &'a EnvoyConfigObjectPatch, versions: &mut Versions<'a>) -> Option<Patch> {
    let body = written.patch.as_ref()?;
    let apply_to = ApplyTo::try_from(written.apply_to).ok()?;
    let operation = Operation::try_from(body.operation).ok()?;
    let value = match &body.value {
        Some(value) => Some(envoy_filter::value(apply_to, value).ok()?),
        None => None,
    };
    let operation = effective(operation, apply_to);
    // A removal may be written with a value, which has no effect.
    let value = value.filter(|_| operation != Operation::Remove).map(PatchValue::new);
    if value.is_none() && operation != Operation::Remove {
        return None;
    }
    let matched = written.r#match.as_ref();
    Some(Patch {
        place,
        apply_to,
        context: match matched.map_or(proto::PatchContext::Any, proto::EnvoyConfigObjectMatch::context) {
            proto::PatchContext::Any => None,
            proto::PatchContext::SidecarInbound => Some(PatchContext::SidecarInbound),
            proto::PatchContext::SidecarOutbound => Some(PatchContext::SidecarOutbound),
            proto::PatchContext::Gateway => Some(PatchContext::Gateway),
            proto::PatchContext::Waypoint => return None,
        },
        proxy: matched
            .and_then(|matched| matched.proxy.as_ref())
            .map(|written| proxy_match(written, versions))
            .unwrap_or_default(),
        object: matched.and_then(|matched| matched.object_types.clone()),
        operation,
        filter_class: body.filter_class(),
        value,
    })
}

/// Returns the effective operation: insertions are additions for unordered kinds.
fn effective(operation: Operation, apply_to: ApplyTo) -> Operation {
    let ordered = matches!(
        apply_to,
        ApplyTo::HttpFilter | ApplyTo::NetworkFilter | ApplyTo::HttpRoute | ApplyTo::ListenerFilter
    );
    match operation {
        Operation::InsertBefore | Operation::InsertAfter | Operation::InsertFirst if !ordered => Operation::Add,
        other => other,
    }
}

fn proxy_match<'a>(written: &'a proto::ProxyMatch, versions: &mut Versions<'a>) -> ProxyMatch {
    let pattern = written.proxy_version.as_str();
    let version = || {
        versions
            .entry(pattern)
            .or_insert_with(|| VersionMatch::new(pattern))
            .clone()
    };
    ProxyMatch {
        version: (!pattern.is_empty()).then(version),
        metadata: written.metadata.clone(),
    }
}

fn referenced_services(row: &Config<EnvoyFilter>) -> Vec<ReferencedService> {
    let Some(list) = row.meta.annotations.get(REFERENCED_SERVICES_ANNOTATION) else {
        return Vec::new();
    };
    let entries = list.split(',').filter(|entry| !entry.is_empty());
    entries.map(ReferencedService::parse).collect()
}
