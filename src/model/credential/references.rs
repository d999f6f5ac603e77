//! Indexes of the objects with credentials, so that they are found without reading all objects.

use smol_str::SmolStr;

use super::{super::MeshSnapshot, CONFIG_MAP};
use crate::{
    api::{Config, istio::envoy_filter},
    base::{Namespace, ObjectKey},
    proto::istio::networking::v1alpha3::{
        ClientTlsSettings, DestinationRule, TrafficPolicy, client_tls_settings::TlSmode,
    },
    table::Cx,
};

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

/// Returns the credentials anywhere in the patches of an EnvoyFilter, sorted; `None` without any.
pub fn of_filter(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<Vec<SmolStr>> {
    let filter = mesh.envoy_filters.get(cx, key)?;
    let names = envoy_filter::credentials(&filter.spec);
    (!names.is_empty()).then(|| names.into_iter().map(SmolStr::new).collect())
}
