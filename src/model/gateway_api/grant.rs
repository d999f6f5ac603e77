//! ReferenceGrants.

use crate::{api::gateway_api::common::GROUP, base::Namespace, model::MeshSnapshot, table::Cx};

/// A reference from one namespace to another.
#[derive(Clone, Copy, Debug)]
pub struct Reference<'a> {
    /// Kind of the referring object, of the Gateway API.
    pub from_kind: &'a str,
    /// Its namespace.
    pub from: &'a str,
    /// Group of the target.
    pub group: &'a str,
    /// Kind of the target.
    pub kind: &'a str,
    /// Namespace of the target.
    pub namespace: &'a Namespace,
    /// Name of the target.
    pub name: &'a str,
}

/// Returns true if a ReferenceGrant in the target's namespace allows the reference.
pub fn is_granted(cx: &Cx, mesh: &MeshSnapshot, reference: Reference) -> bool {
    let mut grants = mesh.reference_grants_by_namespace.get(cx, reference.namespace);
    grants.any(|(_, grant)| {
        let is_from = grant.spec.from.iter().any(|subject| {
            subject.group == GROUP && subject.kind == reference.from_kind && subject.namespace == reference.from
        });
        let is_to = grant.spec.to.iter().any(|object| {
            let is_named = object.name.as_ref().is_none_or(|name| name == reference.name);
            object.group == reference.group && object.kind == reference.kind && is_named
        });
        is_from && is_to
    })
}
