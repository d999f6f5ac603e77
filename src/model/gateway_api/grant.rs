//! ReferenceGrants.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use crate::{
    api::{
        Config,
        gateway_api::{ReferenceGrant, common::GROUP},
    },
    base::{Namespace, ObjectKey},
    model::MeshSnapshot,
    table::Cx,
};

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

/// The objects of a namespace that refer to those of another namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Referrers {
    /// Their kind, of the Gateway API.
    kind: SmolStr,
    /// Their namespace.
    from: SmolStr,
    /// Namespace of the targets.
    to: Namespace,
}

/// The targets that the grants of a namespace allow. A route may have thousands of references, and a namespace many
/// grants, so these are not compared with each reference.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Granted {
    /// Groups and kinds of which all objects are allowed.
    kinds: BTreeSet<(SmolStr, SmolStr)>,
    /// Other objects, by group, kind and name.
    objects: BTreeSet<(SmolStr, SmolStr, SmolStr)>,
}

/// Emits the referrers of a grant.
pub fn referrers(key: &ObjectKey, grant: &Config<ReferenceGrant>, emit: &mut dyn FnMut(Referrers)) {
    for subject in grant.spec.from.iter().filter(|subject| subject.group == GROUP) {
        emit(Referrers {
            kind: subject.kind.clone(),
            from: subject.namespace.clone(),
            to: key.namespace.clone(),
        });
    }
}

/// Derives what the grants of a namespace allow.
pub fn granted(cx: &Cx, mesh: &MeshSnapshot, referrers: &Referrers) -> Option<Granted> {
    let mut granted = Granted::default();
    for (_, grant) in mesh.grants_by_referrers.get(cx, referrers) {
        for object in &grant.spec.to {
            let (group, kind) = (object.group.clone(), object.kind.clone());
            match &object.name {
                None => drop(granted.kinds.insert((group, kind))),
                Some(name) => drop(granted.objects.insert((group, kind, name.clone()))),
            }
        }
    }
    (granted != Granted::default()).then_some(granted)
}

/// Returns true if a ReferenceGrant in the target's namespace allows the reference.
pub fn is_granted(cx: &Cx, mesh: &MeshSnapshot, reference: Reference) -> bool {
    let referrers = Referrers {
        kind: SmolStr::new(reference.from_kind),
        from: SmolStr::new(reference.from),
        to: reference.namespace.clone(),
    };
    mesh.granted.get(cx, &referrers).is_some_and(|granted| {
        let (group, kind) = (SmolStr::new(reference.group), SmolStr::new(reference.kind));
        granted.kinds.contains(&(group.clone(), kind.clone()))
            || granted.objects.contains(&(group, kind, SmolStr::new(reference.name)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{fixture, installation::Installation};

    #[test]
    fn r21_grants_are_not_compared_with_each_reference() {
        let grant = |name: &str, from: &str, to: &str| {
            format!(
                "apiVersion: gateway.networking.k8s.io/v1\nkind: ReferenceGrant\n\
                 metadata: {{name: {name}, namespace: to}}\nspec: {{from: [{from}], to: [{to}]}}\n---\n"
            )
        };
        let from = |group: &str, kind: &str| format!("{{group: {group}, kind: {kind}, namespace: a}}");
        let (service, secret) = ("{group: '', kind: Service}", "{group: '', kind: Secret, name: s}");
        let other = "{group: '', kind: Secret, name: other}";
        let routes = [from(GROUP, "HTTPRoute"), from("x.test", "Job")].join(", ");
        let objects = [
            grant("routes", &routes, service),
            grant("one", &from(GROUP, "Gateway"), secret),
            grant("two", &from(GROUP, "Gateway"), other),
        ];
        let objects = objects.concat();
        let world = fixture::folder_world(Installation::default(), &[("objects.yaml", &objects)]);
        let (mesh, namespace) = (world.snapshot(), Namespace::new("to"));
        let is_granted = |from_kind: &str, from: &str, kind: &str, name: &str| {
            let reference = Reference {
                from_kind,
                from,
                group: "",
                kind,
                namespace: &namespace,
                name,
            };
            let cx = Cx::recording();
            let is_granted = is_granted(&cx, &mesh, reference);
            assert_eq!(cx.into_reads().len(), 1);
            is_granted
        };
        assert!(is_granted("HTTPRoute", "a", "Service", "any"));
        assert!(is_granted("Gateway", "a", "Secret", "s") && is_granted("Gateway", "a", "Secret", "other"));
        assert!(!is_granted("Gateway", "a", "Secret", "third") && !is_granted("Gateway", "b", "Secret", "s"));
        assert!(!is_granted("Gateway", "a", "Service", "any") && !is_granted("HTTPRoute", "a", "Secret", "s"));
        assert!(!is_granted("Job", "a", "Service", "any"), "another group");
    }
}
