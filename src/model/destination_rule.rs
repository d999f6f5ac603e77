//! DestinationRules merged by host, and the order in which a client looks them up.

use super::{MeshSnapshot, inputs::Inputs, installation::Installation, service::Service};
use crate::{
    api::Meta,
    base::{Hostname, Namespace, ObjectKey, Shared},
    model::service::ExportTo,
    proto::istio::networking::v1alpha3 as networking,
    table::Cx,
};

/// Names the rules of one namespace for one host (fully qualified, may be a wildcard).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleKey {
    /// The namespace of the rules.
    pub namespace: Namespace,
    /// The host as resolved.
    pub host: Hostname,
}

/// The rules of one (namespace, host) after merging: several remain when exportTo or workloadSelector differ.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct HostRules {
    /// In order of precedence: with workloadSelector first, then older ones.
    pub rules: Vec<Shared<DestinationRule>>,
}

/// One DestinationRule after merging.
#[derive(Clone, Debug, PartialEq)]
pub struct DestinationRule {
    /// Metadata of the first rule that was merged; shows in config metadata.
    pub meta: Shared<Meta>,
    /// All rules merged into this one.
    pub from: Vec<ObjectKey>,
    /// The host, fully qualified.
    pub host: Hostname,
    /// Who may see it.
    pub export_to: ExportTo,
    /// The merged specification.
    pub spec: networking::DestinationRule,
}

/// The (namespace, host) pairs that a change of DestinationRules concerns.
pub fn candidates(installation: &Installation, inputs: &Inputs) -> Vec<RuleKey> {
    let rules = inputs.raw_destination_rules.changes().iter();
    rules
        .flat_map(|(key, old, new)| {
            [old, new].into_iter().flatten().map(|rule| RuleKey {
                namespace: key.namespace.clone(),
                host: resolve_host(installation, &rule.spec.host, &key.namespace),
            })
        })
        .collect()
}

/// A host as written in a namespace, fully qualified: names without a dot are services of that namespace.
pub fn resolve_host(installation: &Installation, host: &str, namespace: &Namespace) -> Hostname {
    if host.contains('.') || host.starts_with('*') {
        Hostname::new(host)
    } else {
        Hostname::from(format!("{host}.{namespace}.svc.{}", installation.domain))
    }
}

/// Derives the merged rules of one (namespace, host).
pub fn host_rules(_cx: &Cx, _mesh: &MeshSnapshot, _key: &RuleKey) -> Option<HostRules> {
    None
}

/// The rule that a client in a namespace uses for a service; `labels` are the client's, for rules with a selector.
pub fn lookup(
    _cx: &Cx,
    _mesh: &MeshSnapshot,
    _client: &Namespace,
    _labels: &crate::base::Labels,
    _service: &Service,
) -> Option<Shared<DestinationRule>> {
    None
}
