//! ReferenceGrants.

use smol_str::SmolStr;

use crate::{
    api::{
        Config,
        gateway_api::{ReferenceGrant, common::GROUP},
    },
    base::{Namespace, ObjectKey, Shared},
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

/// References that a grant permits: those of one of its referrers to one of its targets. The API server accepts 16 of
/// each, so that a grant has at most 256 such keys, which share both.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Permitted {
    from: Shared<Referrers>,
    to: Shared<Targets>,
}

/// The objects of a kind and namespace that refer to others.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Referrers {
    kind: SmolStr,
    namespace: SmolStr,
}

/// The objects that they may refer to.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Targets {
    namespace: Namespace,
    group: SmolStr,
    kind: SmolStr,
    /// The name; `None` for all objects of the kind.
    name: Option<SmolStr>,
}

/// Emits the references that a grant permits. A route may have thousands of references, and a namespace many grants, so
/// these are not compared with each other.
pub fn permitted(key: &ObjectKey, grant: &Config<ReferenceGrant>, emit: &mut dyn FnMut(Permitted)) {
    let subjects = grant.spec.from.iter().filter(|subject| subject.group == GROUP);
    let referrers = subjects.map(|subject| Referrers {
        kind: subject.kind.clone(),
        namespace: subject.namespace.clone(),
    });
    let referrers: Vec<Shared<Referrers>> = referrers.map(Shared::new).collect();
    for object in &grant.spec.to {
        let to = Shared::new(Targets {
            namespace: key.namespace.clone(),
            group: object.group.clone(),
            kind: object.kind.clone(),
            name: object.name.clone(),
        });
        for from in &referrers {
            emit(Permitted {
                from: from.clone(),
                to: to.clone(),
            });
        }
    }
}

/// Returns true if a ReferenceGrant in the target's namespace allows the reference.
pub fn is_granted(cx: &Cx, mesh: &MeshSnapshot, reference: Reference) -> bool {
    let from = Shared::new(Referrers {
        kind: SmolStr::new(reference.from_kind),
        namespace: SmolStr::new(reference.from),
    });
    let is_permitted = |name: Option<SmolStr>| {
        let to = Shared::new(Targets {
            namespace: reference.namespace.clone(),
            group: SmolStr::new(reference.group),
            kind: SmolStr::new(reference.kind),
            name,
        });
        let from = from.clone();
        mesh.grants_by_reference.contains(cx, &Permitted { from, to })
    };
    is_permitted(None) || is_permitted(Some(SmolStr::new(reference.name)))
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
            assert!(cx.into_reads().len() <= 2);
            is_granted
        };
        assert!(is_granted("HTTPRoute", "a", "Service", "any"));
        assert!(is_granted("Gateway", "a", "Secret", "s") && is_granted("Gateway", "a", "Secret", "other"));
        assert!(!is_granted("Gateway", "a", "Secret", "third") && !is_granted("Gateway", "b", "Secret", "s"));
        assert!(!is_granted("Gateway", "a", "Service", "any") && !is_granted("HTTPRoute", "a", "Secret", "s"));
        assert!(!is_granted("Job", "a", "Service", "any"), "another group");
    }
}
