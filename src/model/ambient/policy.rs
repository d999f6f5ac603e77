//! Policies that workloads refer to, by name: those that select the workload, and those for mutual TLS.
//!
//! Parity (pilot/pkg/serviceregistry/ambient/authorization.go): policies of a whole namespace or mesh are not listed,
//! since ztunnels apply them to all workloads there.

use smol_str::SmolStr;

use super::{SelectorKey, selecting_keys, selector_keys};
use crate::{
    api::{Config, istio::DRY_RUN},
    base::{Labels, Namespace, ObjectKey, boolean, select},
    model::{MeshSnapshot, workload::label_map},
    proto::istio::security::v1beta1::{
        AuthorizationPolicy, PeerAuthentication,
        authorization_policy::Action,
        peer_authentication::{MutualTls, mutual_tls::Mode},
    },
    table::Cx,
};

/// Name of the policy that requires mutual TLS.
pub const STRICT: &str = "istio_converted_static_strict";
/// Prefix of the names of converted PeerAuthentications. Names of objects have no underscores.
pub const CONVERTED: &str = "converted_peer_authentication_";

/// Returns true if ztunnels enforce the policy: it refers to no target, its action is ALLOW or DENY, and it is not only
/// logged, unless that is enabled.
pub fn is_enforced(mesh: &MeshSnapshot, policy: &Config<AuthorizationPolicy>) -> bool {
    let spec = &policy.spec;
    let enables_dry_run = mesh.installation.features.ambient_enable_dry_run_authorization_policy;
    spec.target_ref.is_none()
        && spec.target_refs.is_empty()
        && matches!(spec.action(), Action::Allow | Action::Deny)
        && (enables_dry_run || !is_dry_run(policy))
}

/// Returns true for a policy that is only logged.
pub fn is_dry_run(policy: &Config<AuthorizationPolicy>) -> bool {
    let annotation = policy.meta.annotations.get(DRY_RUN);
    annotation.and_then(|text| boolean::parse(text)).unwrap_or_default()
}

/// The selector of a policy that ztunnels enforce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicySelector {
    labels: Labels,
}

/// Derives the selector of an AuthorizationPolicy; no row without labels, because that policy applies to the whole
/// namespace or mesh.
pub fn selector(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<PolicySelector> {
    let policy = mesh.authorization_policies.get(cx, key)?;
    let labels = label_map(&policy.spec.selector.as_ref()?.match_labels);
    (!labels.is_empty() && is_enforced(mesh, policy)).then_some(PolicySelector { labels })
}

/// Emits the index keys of a policy that selects workloads.
pub fn selector_entry(key: &ObjectKey, policy: &PolicySelector, emit: &mut dyn FnMut(SelectorKey)) {
    selector_keys(&key.namespace, &policy.labels).for_each(emit);
}

/// The modes of a PeerAuthentication that selects workloads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectorModes {
    labels: Labels,
    creation: i64,
    mode: Mode,
    ports: Vec<Mode>,
}

/// Derives the modes of a PeerAuthentication; no row without labels, because it applies to the whole namespace or mesh.
pub fn peer_policy(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<SelectorModes> {
    let policy = mesh.peer_authentications.get(cx, key)?;
    let labels = label_map(&policy.spec.selector.as_ref()?.match_labels);
    (!labels.is_empty()).then(|| SelectorModes {
        labels,
        creation: policy.meta.creation,
        mode: mode(&policy.spec),
        ports: policy.spec.port_level_mtls.values().map(MutualTls::mode).collect(),
    })
}

/// Emits the index keys of a PeerAuthentication that selects workloads.
pub fn peer_entry(key: &ObjectKey, policy: &SelectorModes, emit: &mut dyn FnMut(SelectorKey)) {
    selector_keys(&key.namespace, &policy.labels).for_each(emit);
}

fn mode(spec: &PeerAuthentication) -> Mode {
    spec.mtls.as_ref().map_or(Mode::Unset, MutualTls::mode)
}

/// The modes of mutual TLS that a namespace declares for all workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceModes {
    /// The mode for workloads of the namespace.
    own: Mode,
    /// The mode for workloads of other namespaces, which counts for the root namespace only.
    elsewhere: Option<Mode>,
}

/// Derives the modes of mutual TLS of a namespace: those of the oldest general PeerAuthentications.
///
/// Parity (pilot/pkg/serviceregistry/ambient/workloads.go, fetchPeerAuthentications): for workloads of other
/// namespaces, a selector without labels does not count as absent. Sidecars do not make this difference.
pub fn namespace_modes(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace) -> Option<NamespaceModes> {
    let rows = mesh.peer_authentications_by_namespace.get(cx, namespace);
    let general = rows.map(|(_, row)| row).filter(|row| {
        let selector = row.spec.selector.as_ref();
        selector.is_none_or(|selector| selector.match_labels.is_empty())
    });
    let mut general: Vec<_> = general.collect();
    general.sort_by_key(|row| row.meta.age_order());
    let without_selector = general.iter().find(|row| row.spec.selector.is_none());
    Some(NamespaceModes {
        own: mode(&general.first()?.spec),
        elsewhere: without_selector.map(|row| mode(&row.spec)),
    })
}

/// Returns the resource names of the policies of a workload with these labels: those that select it, sorted, then those
/// for mutual TLS.
pub(super) fn attached(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace, labels: &Labels) -> Vec<String> {
    let settings = mesh.ambient_mesh.get(cx, &());
    let root = settings
        .map(|settings| settings.root_namespace.clone())
        .unwrap_or_default();
    let namespaces = if *namespace == root {
        vec![&root]
    } else {
        vec![&root, namespace]
    };
    let mut names = Vec::new();
    for namespace in namespaces {
        for selector in selecting_keys(namespace, labels) {
            let policies = mesh.policies_by_selector.get(cx, &selector);
            let matching = policies.filter(|(_, policy)| select::subset(&policy.labels, labels));
            names.extend(matching.map(|(key, _)| format!("{}/{}", key.namespace, key.name)));
        }
    }
    names.sort_unstable();
    names.extend(mutual_tls(cx, mesh, namespace, labels, &root));
    names
}

/// Returns the resource names of the policies for mutual TLS.
fn mutual_tls(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace, labels: &Labels, root: &Namespace) -> Vec<String> {
    let modes_of = |namespace: &Namespace| mesh.mutual_tls_modes.get(cx, namespace).map(|modes| **modes);
    let own_mode = modes_of(namespace).map(|modes| modes.own);
    let mut is_strict = own_mode == Some(Mode::Strict);
    let mut own = None;
    if namespace != root {
        if matches!(own_mode, None | Some(Mode::Unset)) {
            is_strict = modes_of(root).and_then(|modes| modes.elsewhere) == Some(Mode::Strict);
        }
        own = oldest_peer_policy(cx, mesh, namespace, labels);
    }
    let mut needs_own = false;
    if let Some((_, policy)) = &own {
        let has = |modes: &[Mode]| policy.ports.iter().any(|mode| modes.contains(mode));
        // The converted policy has the strict mode besides the exceptions, so it replaces the static one.
        (is_strict, needs_own) = match policy.mode {
            Mode::Strict if has(&[Mode::Permissive, Mode::Disable]) => (false, true),
            Mode::Strict => (true, false),
            Mode::Permissive | Mode::Disable => (false, has(&[Mode::Strict])),
            Mode::Unset if is_strict && has(&[Mode::Permissive]) => (false, true),
            Mode::Unset if is_strict => (true, false),
            Mode::Unset => (false, has(&[Mode::Strict])),
        };
    }
    let mut names = Vec::new();
    names.extend(is_strict.then(|| format!("{root}/{STRICT}")));
    let converted = own.filter(|_| needs_own);
    names.extend(converted.map(|(name, _)| format!("{namespace}/{CONVERTED}{name}")));
    names.sort_unstable();
    names
}

/// Returns the oldest PeerAuthentication that selects a workload, with its name.
fn oldest_peer_policy<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    namespace: &Namespace,
    labels: &Labels,
) -> Option<(&'a SmolStr, &'a SelectorModes)> {
    let rows = selecting_keys(namespace, labels).flat_map(|selector| mesh.peer_policies_by_selector.get(cx, &selector));
    let matching = rows.filter(|(_, policy)| select::subset(&policy.labels, labels));
    let oldest = matching.min_by_key(|(key, policy)| (policy.creation, key.name.clone()));
    oldest.map(|(key, policy)| (&key.name, &**policy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{features::Features, fixture, installation::Installation};

    /// Returns the policies of a workload without labels, with these PeerAuthentications of the root namespace.
    fn policies(namespace: &str, peer_authentications: &[(u32, &str)]) -> Vec<String> {
        let object = |(year, spec): &(u32, &str)| {
            format!(
                "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\n\
                 metadata: {{name: pa{year}, namespace: istio-system, creationTimestamp: '{year}-01-01T00:00:00Z'}}\n\
                 spec: {{{spec}}}\n"
            )
        };
        let objects: String = peer_authentications.iter().map(object).collect();
        let installation = Installation {
            features: Features {
                pilot_enable_ambient: true,
                ..Features::default()
            },
            ..Installation::default()
        };
        let world = fixture::folder_world(installation, &[("objects.yaml", &objects)]);
        attached(
            &Cx::untracked(),
            &world.snapshot(),
            &Namespace::new(namespace),
            &Labels::new(),
        )
    }

    #[test]
    fn peer_authentications_of_the_mesh_have_no_selector() {
        let strict = ["istio-system/istio_converted_static_strict"];
        let of_namespace = [(2020, "selector: {}, mtls: {mode: STRICT}")];
        assert_eq!(policies("istio-system", &of_namespace), strict);
        assert_eq!(policies("a", &of_namespace), [""; 0]);
        let of_mesh = [
            (2020, "selector: {matchLabels: {}}, mtls: {mode: PERMISSIVE}"),
            (2021, "mtls: {mode: STRICT}"),
        ];
        assert_eq!(policies("istio-system", &of_mesh), [""; 0]);
        assert_eq!(policies("a", &of_mesh), strict);
    }
}
