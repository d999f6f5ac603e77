//! Statuses of BackendTLSPolicies and XBackendTrafficPolicies: an entry for each target. A BackendTLSPolicy also has an
//! entry for each Gateway whose routes use a target.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use smol_str::SmolStr;

use super::{
    ACCEPTED, Condition, Content, Entries, Entry, List, MESH_CONTROLLER, RESOLVED_REFS, Status, is_own,
    statuses::StatusInputs,
};
use crate::{
    api::{
        Kind, Meta,
        gateway_api::{
            common::{GROUP, TargetReference},
            policy::BackendValidation,
        },
    },
    base::{Namespace, ObjectKey},
    model::{
        MeshSnapshot,
        gateway_api::{
            Mistake, is_converted,
            policy::{
                AuthorityError, IGNORE_ANNOTATION, TargetKey, check_authority, is_ignored, precedence, target_backends,
            },
        },
    },
    table::Cx,
};

const VALID: &str = "Configuration is valid";

/// Returns the status of a BackendTLSPolicy; `None` if it is another revision's.
pub(super) fn tls(inputs: StatusInputs, key: &ObjectKey) -> Option<Status> {
    let StatusInputs {
        cx,
        mesh,
        revisions,
        attached,
    } = inputs;
    let policy = mesh
        .backend_tls_policies
        .get(cx, key)
        .filter(|policy| is_converted(mesh, key) && is_own(cx, mesh, revisions, &policy.meta))?;
    let targets = &policy.spec.target_refs;
    if is_ignored(&policy.meta) {
        return Some(ignored(mesh, &policy.meta, targets));
    }
    let (accepted, resolved) = authority(cx, mesh, &key.namespace, &policy.spec.validation);
    let conditions = |target: &TargetReference| {
        let mistake = match target_backends(cx, mesh, key, target) {
            Err(error) => Some(not_found(&error)),
            Ok(_) => precedence(cx, mesh, policy, target).map(|other| {
                let other = other.as_str();
                let kind = Kind::BackendTlsPolicy.name();
                let message = format!("Conflicts with {kind} {other:?} targeting the same backend");
                Mistake::new("Conflicted", message)
            }),
        };
        vec![accepted.clone().unless(mistake), resolved.clone()]
    };
    let mut entries = entries(targets, conditions);
    let mut gateways = BTreeSet::new();
    for target in targets {
        if target_backends(cx, mesh, key, target).is_ok() {
            let target = TargetKey {
                namespace: key.namespace.clone(),
                kind: target.kind.clone(),
                name: target.name.clone(),
            };
            gateways.extend(attached.gateways_of(cx, &target));
        }
    }
    // Parity (pilot/pkg/config/kube/gateway/backend_policies.go): Gateways have the conditions of the last target.
    let last = entries.last().map(|entry| entry.conditions.clone()).unwrap_or_default();
    let names: BTreeSet<SmolStr> = gateways.into_iter().map(|gateway| gateway.name).collect();
    entries.extend(names.into_iter().map(|name| Entry {
        controller: mesh.installation.features.pilot_gateway_api_controller_name.clone(),
        reference: json!({"group": GROUP, "kind": "Gateway", "name": name}),
        conditions: last.clone(),
    }));
    Some(with_entries(mesh, &policy.meta, entries))
}

/// Returns the status of an XBackendTrafficPolicy; `None` if it is another revision's.
pub(super) fn traffic(inputs: StatusInputs, key: &ObjectKey) -> Option<Status> {
    let StatusInputs {
        cx, mesh, revisions, ..
    } = inputs;
    let policy = mesh
        .backend_traffic_policies
        .get(cx, key)
        .filter(|policy| is_converted(mesh, key) && is_own(cx, mesh, revisions, &policy.meta))?;
    if !mesh.installation.features.pilot_enable_alpha_gateway_api {
        return None;
    }
    let targets = &policy.spec.target_refs;
    if is_ignored(&policy.meta) {
        return Some(ignored(mesh, &policy.meta, targets));
    }
    let message = match &policy.spec.session_persistence {
        Some(_) => format!("{VALID}, but Istio does not support the following fields: sessionPersistence"),
        None => VALID.to_owned(),
    };
    let conditions = |target: &TargetReference| {
        let error = target_backends(cx, mesh, key, target).err().or_else(|| {
            let is_service = target.kind == Kind::Service.name();
            (!is_service).then(|| format!("unsupported reference kind: {}", target.kind))
        });
        let mistake = error.map(|error| not_found(&error));
        vec![Condition::met(ACCEPTED, ACCEPTED, message.clone()).unless(mistake)]
    };
    Some(with_entries(mesh, &policy.meta, entries(targets, conditions)))
}

/// Returns the conditions that follow from the references to CA certificates.
fn authority(
    cx: &Cx,
    mesh: &MeshSnapshot,
    namespace: &Namespace,
    validation: &BackendValidation,
) -> (Condition, Condition) {
    let mut accepted = Condition::met(ACCEPTED, ACCEPTED, VALID);
    let resolved = Condition::met(RESOLVED_REFS, RESOLVED_REFS, VALID);
    match validation.well_known_ca_certificates.as_deref() {
        None | Some("" | "System") => {}
        Some(unknown) => {
            let mistake = Mistake::new("Invalid", format!("Unknown wellKnownCACertificates: {unknown}"));
            return (accepted.unless(Some(mistake)), resolved);
        }
    }
    if validation.well_known_ca_certificates.is_some() {
        return (accepted, resolved);
    }
    let Some(reference) = validation.ca_certificate_refs.first() else {
        return (accepted, resolved);
    };
    let Err(error) = check_authority(cx, mesh, namespace, reference) else {
        if validation.ca_certificate_refs.len() > 1 {
            accepted.message += "; warning: only the first caCertificateRefs will be used";
        }
        return (accepted, resolved);
    };
    let (reason, what, text) = match error {
        AuthorityError::Kind(text) => ("InvalidKind", "Certificate reference not supported", text),
        AuthorityError::Secret => {
            let text = "unsupported reference kind: Secret".to_owned();
            ("InvalidKind", "Certificate reference invalid", text)
        }
        AuthorityError::NotFound(text) => ("InvalidCACertificateRef", "Certificate reference not found", text),
        AuthorityError::Malformed(text) => ("InvalidCACertificateRef", "Certificate invalid", text),
    };
    let refused = Mistake::new("NoValidCACertificate", format!("Certificate reference invalid: {text}"));
    let unresolved = Mistake::new(reason, format!("{what}: {text}"));
    (accepted.unless(Some(refused)), resolved.unless(Some(unresolved)))
}

fn not_found(error: &str) -> Mistake {
    Mistake::new("TargetNotFound", format!("targetRefs invalid: {error}"))
}

fn ignored(mesh: &MeshSnapshot, meta: &Meta, targets: &[TargetReference]) -> Status {
    let message = format!("Ignored by Istio due to annotation {IGNORE_ANNOTATION}=true");
    let condition = Condition::unmet(ACCEPTED, Mistake::new("IgnoredByIstio", message));
    with_entries(mesh, meta, entries(targets, |_| vec![condition.clone()]))
}

/// Returns the entries of targets.
fn entries(targets: &[TargetReference], conditions: impl Fn(&TargetReference) -> Vec<Condition>) -> Vec<Entry> {
    let entry = |target: &TargetReference| Entry {
        controller: SmolStr::new_static(MESH_CONTROLLER),
        reference: to_json(target),
        conditions: conditions(target),
    };
    targets.iter().map(entry).collect()
}

fn with_entries(mesh: &MeshSnapshot, meta: &Meta, entries: Vec<Entry>) -> Status {
    Status {
        generation: meta.generation,
        content: Content::Entries(Entries {
            list: List::Ancestors,
            controller: mesh.installation.features.pilot_gateway_api_controller_name.clone(),
            entries,
            dropped: Vec::new(),
        }),
    }
}

fn to_json(target: &TargetReference) -> Value {
    let mut reference = json!({"group": target.group, "kind": target.kind, "name": target.name});
    if let Some(section) = target.section_name.as_ref().filter(|section| !section.is_empty()) {
        reference["sectionName"] = section.as_str().into();
    }
    reference
}
