//! Indexes of the objects with credentials, so that they are found without reading all objects.

use prost_types::{Struct, Value, value::Kind};
use smol_str::SmolStr;

use super::{super::MeshSnapshot, CONFIG_MAP, is_served};
use crate::{
    api::Config,
    base::{Namespace, ObjectKey},
    proto::istio::networking::v1alpha3::{
        ClientTlsSettings, DestinationRule, TrafficPolicy, client_tls_settings::TlSmode,
    },
    table::Cx,
};

/// Most credentials of an EnvoyFilter. Each identity that it applies to has a resource for every one of them.
const MAX_OF_FILTER: usize = 1_000;
/// Longest name of a credential in an EnvoyFilter; those of objects are much shorter.
const MAX_NAME: usize = 1_024;

/// Proxies for which a DestinationRule may refer to a credential.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CredentialUsers {
    /// Gateways, by every rule.
    Gateways,
    /// Sidecars of the rule's namespace, by rules that select them.
    Selected(Namespace),
    /// All sidecars, by rules with CA certificates in ConfigMaps.
    Everyone,
}

/// Emits the index keys of a DestinationRule with credentials.
pub fn clients(key: &ObjectKey, rule: &Config<DestinationRule>, emit: &mut dyn FnMut(CredentialUsers)) {
    if client_credentials(&rule.spec).next().is_none() {
        return;
    }
    emit(CredentialUsers::Gateways);
    if rule.spec.workload_selector.is_some() {
        emit(CredentialUsers::Selected(key.namespace.clone()));
    }
    if client_credentials(&rule.spec).any(|tls| tls.credential_name.starts_with(CONFIG_MAP)) {
        emit(CredentialUsers::Everyone);
    }
}

/// Returns the TLS settings of a rule that use a credential.
pub fn client_credentials(rule: &DestinationRule) -> impl Iterator<Item = &ClientTlsSettings> {
    let of_subsets = rule
        .subsets
        .iter()
        .filter_map(|subset| subset.traffic_policy.as_deref());
    let policies = rule.traffic_policy.as_deref().into_iter().chain(of_subsets);
    policies
        .flat_map(tls_settings)
        .filter(|tls| !tls.credential_name.is_empty() && matches!(tls.mode(), TlSmode::Simple | TlSmode::Mutual))
}

fn tls_settings(policy: &TrafficPolicy) -> impl Iterator<Item = &ClientTlsSettings> {
    let of_ports = policy.port_level_settings.iter().filter_map(|port| port.tls.as_deref());
    policy.tls.as_deref().into_iter().chain(of_ports)
}

/// Returns the credentials anywhere in the patches of an EnvoyFilter, sorted; `None` without any. Of too many, the
/// first ones count.
pub fn of_filter(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<Vec<SmolStr>> {
    let filter = mesh.envoy_filters.get(cx, key)?;
    let mut names = Vec::new();
    for patch in &filter.spec.config_patches {
        let value = patch.patch.as_ref().and_then(|patch| patch.value.as_ref());
        if let Some(value) = value {
            in_struct(value, &mut names);
        }
    }
    names.sort_unstable();
    names.dedup();
    names.truncate(MAX_OF_FILTER);
    names.shrink_to_fit();
    (!names.is_empty()).then_some(names)
}

fn in_struct(fields: &Struct, names: &mut Vec<SmolStr>) {
    fields.fields.values().for_each(|value| in_value(value, names));
}

fn in_value(value: &Value, names: &mut Vec<SmolStr>) {
    match &value.kind {
        Some(Kind::StringValue(text)) if is_served(text) && text.len() <= MAX_NAME => names.push(SmolStr::new(text)),
        Some(Kind::StructValue(fields)) => in_struct(fields, names),
        Some(Kind::ListValue(list)) => list.values.iter().for_each(|value| in_value(value, names)),
        _ => {}
    }
}
