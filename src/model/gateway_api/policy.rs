//! BackendTLSPolicies and XBackendTrafficPolicies, converted to DestinationRules: one for each host of their targets.
//!
//! Parity (pilot/pkg/config/kube/gateway/backend_policies.go): of several policies for a setting of a host, the oldest
//! applies, and only it becomes a parent of the rule; a policy whose CA certificates are missing blocks connections.

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::{CONVERTED, PARENTS_ANNOTATION, converted_meta, is_converted, service_host};
use crate::{
    api::{
        Config, Kind, Meta,
        gateway_api::{
            BackendTlsPolicy, BackendTrafficPolicy,
            common::{ObjectReference, TargetReference},
            policy::{BackendValidation, RetryConstraint},
        },
    },
    base::{Labels, Namespace, ObjectKey, Shared},
    model::{
        MeshSnapshot,
        credential::{CONFIG_MAP, INVALID, config_map_authority},
        inputs::InputWriters,
    },
    proto::istio::networking::v1alpha3::{
        ClientTlsSettings, DestinationRule, PortSelector, TrafficPolicy,
        client_tls_settings::TlSmode,
        traffic_policy::{PortTrafficPolicy, RetryBudget},
    },
    table::Cx,
};

/// Annotation that makes istiod ignore a policy.
pub(super) const IGNORE_ANNOTATION: &str = "istio.io/ignore-policy-attachment";
/// Creation of converted rules: older than all written ones.
const OLDEST: i64 = i64::MIN;
/// Retries that are always allowed.
const MIN_RETRIES: u32 = 10;

/// Key of [`BackendPolicies`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyKey {
    /// [`Kind::BackendTlsPolicy`] or [`Kind::BackendTrafficPolicy`].
    pub kind: Kind,
    /// The object.
    pub object: ObjectKey,
}

/// The target of a policy, or a backend of a route.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TargetKey {
    /// Namespace of the object.
    pub namespace: Namespace,
    /// Kind of the object.
    pub kind: SmolStr,
    /// Name of the object.
    pub name: SmolStr,
}

/// Key of [`OldestTlsPolicies`]: a reference to a target as BackendTLSPolicies of a namespace write it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TlsTarget {
    /// Namespace of the policies.
    pub namespace: Namespace,
    /// `group` of the reference.
    pub group: SmolStr,
    /// `kind` of the reference.
    pub kind: SmolStr,
    /// `name` of the reference.
    pub name: SmolStr,
    /// Name of a port, if the policy is restricted to that.
    pub section: Option<SmolStr>,
}

impl TlsTarget {
    fn new(namespace: &Namespace, target: &TargetReference) -> Self {
        Self {
            namespace: namespace.clone(),
            group: target.group.clone(),
            kind: target.kind.clone(),
            name: target.name.clone(),
            section: target.section_name.clone(),
        }
    }
}

/// The oldest BackendTLSPolicies of a target. Each of its many policies depends on these alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OldestTlsPolicies {
    /// The oldest one.
    pub first: RankedPolicy,
    /// The oldest one with another identity, if there is one.
    pub other: Option<RankedPolicy>,
}

/// A policy as it competes with others of its namespace. The fields are in the order of their precedence.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RankedPolicy {
    /// Creation time in seconds since 1970.
    pub creation: i64,
    /// Name of the policy.
    pub name: SmolStr,
    /// Identity; empty for a policy from a file.
    pub uid: SmolStr,
}

impl RankedPolicy {
    fn of(policy: &Config<BackendTlsPolicy>) -> Self {
        Self {
            creation: policy.meta.creation,
            name: policy.meta.name().clone(),
            uid: policy.spec.uid.clone(),
        }
    }
}

/// A host of a policy's target.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Backend {
    /// [`Kind::Service`] or [`Kind::ServiceEntry`].
    pub kind: Kind,
    /// The object.
    pub object: ObjectKey,
    /// The host.
    pub host: SmolStr,
}

/// The settings of a policy.
#[derive(Clone, Debug, PartialEq)]
pub enum Settings {
    /// TLS towards the backends.
    Tls(ClientTlsSettings),
    /// A limit of retries.
    Retries(Option<RetryBudget>),
}

/// A policy with its targets.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendPolicies {
    /// Metadata.
    pub meta: Shared<Meta>,
    /// The settings.
    pub settings: Settings,
    /// The targets, each with the names of the ports that it is restricted to, in their order; `None` for all ports.
    pub targets: BTreeMap<Backend, Vec<Option<SmolStr>>>,
}

/// Returns the changed policies.
pub fn candidates(inputs: &InputWriters) -> Vec<PolicyKey> {
    let key = |kind, object: &ObjectKey| PolicyKey {
        kind,
        object: object.clone(),
    };
    let tls = inputs.backend_tls_policies.changes().iter();
    let traffic = inputs.backend_traffic_policies.changes().iter();
    let tls = tls.map(|(object, ..)| key(Kind::BackendTlsPolicy, object));
    tls.chain(traffic.map(|(object, ..)| key(Kind::BackendTrafficPolicy, object)))
        .collect()
}

/// Emits the targets of a BackendTLSPolicy.
pub fn targets(key: &ObjectKey, row: &Config<BackendTlsPolicy>, emit: &mut dyn FnMut(TlsTarget)) {
    if !is_ignored(&row.meta) {
        for target in &row.spec.target_refs {
            emit(TlsTarget::new(&key.namespace, target));
        }
    }
}

/// Derives the oldest policies of a target.
pub fn oldest(cx: &Cx, mesh: &MeshSnapshot, target: &TlsTarget) -> Option<OldestTlsPolicies> {
    let ranked = || {
        let policies = mesh.tls_policies_by_target.get(cx, target);
        policies.map(|(_, policy)| RankedPolicy::of(policy))
    };
    let first = ranked().min()?;
    let other = ranked().filter(|policy| policy.uid != first.uid).min();
    Some(OldestTlsPolicies { first, other })
}

/// Emits the hosts that a policy applies to.
pub fn backends(_: &PolicyKey, row: &BackendPolicies, emit: &mut dyn FnMut(Backend)) {
    row.targets.keys().for_each(|backend| emit(backend.clone()));
}

/// Derives a policy with its targets.
pub fn policies(cx: &Cx, mesh: &MeshSnapshot, key: &PolicyKey) -> Option<BackendPolicies> {
    if !is_converted(mesh, &key.object) {
        return None;
    }
    if key.kind == Kind::BackendTrafficPolicy {
        let is_enabled = mesh.installation.features.pilot_enable_alpha_gateway_api;
        return retries(cx, mesh, key).filter(|_| is_enabled);
    }
    let policy = mesh.backend_tls_policies.get(cx, &key.object)?;
    if is_ignored(&policy.meta) {
        return None;
    }
    let mut targets: BTreeMap<Backend, Vec<Option<SmolStr>>> = BTreeMap::new();
    for target in &policy.spec.target_refs {
        if precedence(cx, mesh, policy, target).is_some() {
            continue;
        }
        let found = target_backends(cx, mesh, &key.object, target).into_iter().flatten();
        let section = target.section_name.clone().filter(|section| !section.is_empty());
        for backend in found {
            targets.entry(backend).or_default().push(section.clone());
        }
    }
    Some(BackendPolicies {
        meta: policy.meta.clone(),
        settings: Settings::Tls(tls(cx, mesh, &key.object.namespace, &policy.spec.validation)),
        targets,
    })
}

fn retries(cx: &Cx, mesh: &MeshSnapshot, key: &PolicyKey) -> Option<BackendPolicies> {
    let policy: &Config<BackendTrafficPolicy> = mesh.backend_traffic_policies.get(cx, &key.object)?;
    if is_ignored(&policy.meta) {
        return None;
    }
    let services = policy.spec.target_refs.iter().filter(|target| target.kind == "Service");
    let targets = services.filter_map(|target| target_backends(cx, mesh, &key.object, target).ok());
    Some(BackendPolicies {
        meta: policy.meta.clone(),
        settings: Settings::Retries(policy.spec.retry_constraint.as_ref().map(retry_budget)),
        targets: targets.flatten().map(|backend| (backend, vec![None])).collect(),
    })
}

/// Returns true if a policy has the annotation that makes istiod ignore it.
pub(super) fn is_ignored(meta: &Meta) -> bool {
    let written = meta.annotations.get(IGNORE_ANNOTATION);
    written.is_some_and(|value| value.eq_ignore_ascii_case("true"))
}

/// Returns the name of the oldest policy with the same target, if it is older than this one. Policies without an
/// identity, which come from files, count as one.
pub(super) fn precedence(
    cx: &Cx,
    mesh: &MeshSnapshot,
    policy: &Config<BackendTlsPolicy>,
    target: &TargetReference,
) -> Option<SmolStr> {
    let key = TlsTarget::new(policy.meta.namespace(), target);
    let oldest = mesh.oldest_tls_policies.get(cx, &key)?;
    let rival = if oldest.first.uid == policy.spec.uid {
        oldest.other.as_ref()?
    } else {
        &oldest.first
    };
    let is_older = (rival.creation, &rival.name) < (policy.meta.creation, policy.meta.name());
    is_older.then(|| rival.name.clone())
}

/// Returns the hosts of a target, or the reason why there are none, in the words of Istio's statuses.
pub(super) fn target_backends(
    cx: &Cx,
    mesh: &MeshSnapshot,
    own: &ObjectKey,
    target: &TargetReference,
) -> Result<Vec<Backend>, String> {
    let object = ObjectKey::new(&own.cluster, own.namespace.clone(), target.name.clone());
    let section = target.section_name.as_ref().filter(|section| !section.is_empty());
    let (namespace, name, written) = (&object.namespace, &object.name, &target.kind);
    let not_found = || format!("reference {namespace}/{name} (of kind {written}) not found");
    let (kind, has_section, hosts) = match (target.group.as_str(), target.kind.as_str()) {
        ("", "Service") => {
            let service = mesh.kube_services.get(cx, &object).ok_or_else(not_found)?;
            let has_section = section.is_none_or(|section| service.ports.iter().any(|port| port.name == *section));
            let host = service_host(mesh, &object.namespace, &object.name);
            (Kind::Service, has_section, vec![SmolStr::from(host)])
        }
        ("networking.istio.io", "ServiceEntry") => {
            let spec = &mesh.service_entries.get(cx, &object).ok_or_else(not_found)?.spec;
            let has_section = section.is_none_or(|section| spec.ports.iter().any(|port| port.name == **section));
            let hosts = spec.hosts.iter().map(SmolStr::new).collect();
            (Kind::ServiceEntry, has_section, hosts)
        }
        _ => return Err(format!("unsupported kind {written}")),
    };
    if let Some(section) = section.filter(|_| !has_section) {
        let section = section.as_str();
        return Err(format!(
            "sectionName {section:?} does not exist in {written} {namespace}/{name}"
        ));
    }
    let backends = hosts.into_iter().map(|host| Backend {
        kind,
        object: object.clone(),
        host,
    });
    Ok(backends.collect())
}

fn tls(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace, validation: &BackendValidation) -> ClientTlsSettings {
    let names = validation.subject_alt_names.iter();
    let names = names.filter_map(|name| match name.name_type.as_str() {
        "Hostname" => Some(name.hostname.as_deref().unwrap_or_default().to_owned()),
        "URI" => Some(name.uri.as_deref().unwrap_or_default().to_owned()),
        _ => None,
    });
    ClientTlsSettings {
        mode: TlSmode::Simple as i32,
        sni: validation.hostname.to_string(),
        subject_alt_names: names.collect(),
        credential_name: authority(cx, mesh, namespace, validation),
        ..Default::default()
    }
}

/// Returns the name of the CA certificates; empty for those of the proxy's system.
fn authority(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace, validation: &BackendValidation) -> String {
    if validation.well_known_ca_certificates.is_some() {
        return String::new();
    }
    // Only the first reference counts.
    let Some(reference) = validation.ca_certificate_refs.first() else {
        return String::new();
    };
    match check_authority(cx, mesh, namespace, reference) {
        Ok(()) => format!("{CONFIG_MAP}{namespace}/{}", reference.name),
        Err(_) => INVALID.to_owned(),
    }
}

/// Reason why a reference to CA certificates is invalid, in the words of Istio's statuses.
#[derive(Debug)]
pub(super) enum AuthorityError {
    /// The kind is unknown.
    Kind(String),
    /// It is a Secret, which is known and not supported.
    Secret,
    /// The object does not exist.
    NotFound(String),
    /// The object has no certificates.
    Malformed(String),
}

/// Checks a reference to CA certificates.
pub(super) fn check_authority(
    cx: &Cx,
    mesh: &MeshSnapshot,
    namespace: &Namespace,
    reference: &ObjectReference,
) -> Result<(), AuthorityError> {
    let name = &reference.name;
    let kind = reference.kind.as_deref().unwrap_or_default();
    let is_core = reference.group.as_ref().is_none_or(SmolStr::is_empty);
    match kind {
        "ConfigMap" if is_core => {}
        "Secret" if is_core => return Err(AuthorityError::Secret),
        _ => return Err(AuthorityError::Kind(format!("unsupported kind {kind}"))),
    }
    let key = ObjectKey::new(&mesh.installation.cluster, namespace.clone(), name.clone());
    if mesh.config_maps.get(cx, &key).is_none() {
        let text = format!("reference {namespace}/{name} (of kind {kind}) not found");
        return Err(AuthorityError::NotFound(text));
    }
    config_map_authority(cx, mesh, namespace, name)
        .map(|_| ())
        .map_err(AuthorityError::Malformed)
}

fn retry_budget(constraint: &RetryConstraint) -> RetryBudget {
    let rate = constraint.min_retry_rate.as_ref().and_then(|rate| rate.count);
    RetryBudget {
        percent: constraint
            .budget
            .as_ref()
            .and_then(|budget| budget.percent)
            .map(f64::from),
        min_retry_concurrency: rate.unwrap_or(MIN_RETRIES),
    }
}

/// Derives the DestinationRule of a host from its policies.
pub fn destination_rule(cx: &Cx, mesh: &MeshSnapshot, backend: &Backend) -> Option<Config<DestinationRule>> {
    let mut policies: Vec<(&PolicyKey, &Shared<BackendPolicies>)> = mesh.policies_by_backend.get(cx, backend).collect();
    policies.sort_by_key(|(key, row)| (row.meta.creation, &key.object.namespace, &key.object.name));
    let mut traffic = TrafficPolicy::default();
    let mut parents: Vec<String> = Vec::new();
    for (key, row) in policies {
        let mut is_parent = false;
        for section in row.targets.get(backend).into_iter().flatten() {
            is_parent |= apply(cx, mesh, backend, &row.settings, section.as_ref(), &mut traffic);
        }
        if is_parent {
            let (namespace, name) = (&key.object.namespace, &key.object.name);
            parents.push(format!("{}/{namespace}.{name}", key.kind.name()));
        }
    }
    if parents.is_empty() {
        return None;
    }
    let name = match backend.kind {
        Kind::ServiceEntry => entry_rule_name(cx, mesh, backend),
        _ => [&backend.object.name, "~", CONVERTED].concat(),
    };
    let object = &backend.object;
    let key = ObjectKey::new(&object.cluster, object.namespace.clone(), name);
    // A written one of its name precedes it.
    if mesh.written_destination_rules.get(cx, &key).is_some() {
        return None;
    }
    let annotations: Labels = [(SmolStr::new_static(PARENTS_ANNOTATION), parents.join(",").into())]
        .into_iter()
        .collect();
    Some(Config {
        meta: converted_meta(Kind::DestinationRule, key, annotations, OLDEST),
        spec: DestinationRule {
            host: backend.host.to_string(),
            traffic_policy: Some(traffic.into()),
            ..Default::default()
        },
        status: None,
    })
}

/// Returns the name of the rule of a ServiceEntry's host. In Istio it contains the host with dashes, which `a.b` and
/// `a-b` have in common. The first of such hosts has that name, and those of the others contain the host itself: each
/// has a dot where an earlier one has a dash, so no host with dashes is equal to it.
fn entry_rule_name(cx: &Cx, mesh: &MeshSnapshot, backend: &Backend) -> String {
    let dashed = |host: &str| host.replace('.', "-");
    let usual = dashed(&backend.host);
    let entry = mesh.service_entries.get(cx, &backend.object);
    let mut hosts = entry.into_iter().flat_map(|entry| &entry.spec.hosts);
    let is_taken = hosts.any(|host| host.as_str() < backend.host.as_str() && dashed(host) == usual);
    let host = if is_taken {
        backend.host.as_str()
    } else {
        usual.as_str()
    };
    format!("{}~{host}~{CONVERTED}", backend.object.name)
}

/// Applies the settings of a policy, unless an older one has set them. Returns false if an older one has set those of
/// the whole backend.
fn apply(
    cx: &Cx,
    mesh: &MeshSnapshot,
    backend: &Backend,
    settings: &Settings,
    section: Option<&SmolStr>,
    traffic: &mut TrafficPolicy,
) -> bool {
    match (settings, section) {
        (Settings::Tls(_), None) if traffic.tls.is_some() => return false,
        (Settings::Tls(tls), None) => traffic.tls = Some(Box::new(tls.clone())),
        (Settings::Tls(tls), Some(section)) => {
            let Some(number) = port(cx, mesh, backend, section) else {
                return true;
            };
            let levels = &mut traffic.port_level_settings;
            if !levels
                .iter()
                .any(|level| level.port.is_some_and(|port| port.number == number))
            {
                levels.push(PortTrafficPolicy {
                    port: Some(PortSelector { number }),
                    tls: Some(Box::new(tls.clone())),
                    ..Default::default()
                });
            }
        }
        (Settings::Retries(_), _) if traffic.load_balancer.is_some() => return false,
        (Settings::Retries(budget), _) => {
            traffic.load_balancer = Some(Box::default());
            traffic.retry_budget = *budget;
        }
    }
    true
}

/// Returns the number of a target's port.
fn port(cx: &Cx, mesh: &MeshSnapshot, backend: &Backend, name: &SmolStr) -> Option<u32> {
    if backend.kind == Kind::Service {
        let service = mesh.kube_services.get(cx, &backend.object)?;
        let mut ports = service.ports.iter();
        return ports.find(|port| port.name == *name).map(|port| port.number);
    }
    let entry = mesh.service_entries.get(cx, &backend.object)?;
    let mut ports = entry.spec.ports.iter();
    ports.find(|port| port.name == **name).map(|port| port.number)
}

#[cfg(test)]
mod tests;
