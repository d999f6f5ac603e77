//! Statuses of routes, and what other statuses need to know of routes.

use std::{collections::BTreeSet, ops::Range};

use serde_json::{Map, Value};
use smol_str::SmolStr;

use super::{
    ACCEPTED, Condition, Content, Entries, Entry, List, RESOLVED_REFS, Status, is_own,
    statuses::StatusInputs,
    surplus::{Refused, Surpluses},
};
use crate::{
    api::{
        Kind, Meta,
        gateway_api::{common::ParentReference, inference, route::BackendReference},
        invalid_route::InvalidRoute,
    },
    base::{Namespace, ObjectKey, Shared},
    model::{
        MeshSnapshot,
        gateway_api::{
            Mistake, is_converted,
            listener::ListenerOwner,
            parent::{self, Child, Parent, Target, reason, sort_text},
            policy::TargetKey,
            route::{AttachedRoute, AttachedRouteKey},
        },
        output_limit, waypoint,
    },
    table::Cx,
};

/// Type of the condition that only some rules apply. The API's prefix of its message is `Dropped Rule`.
pub(super) const PARTIALLY_INVALID: &str = "PartiallyInvalid";
const RESOLVED_WAYPOINTS: &str = "ResolvedWaypoints";

/// Returns the status of a route; `None` if it is another revision's.
pub(super) fn status(inputs: StatusInputs, key: &AttachedRouteKey) -> Option<Status> {
    let StatusInputs {
        cx,
        mesh,
        revisions,
        attached,
    } = inputs;
    if let Some(invalid) = invalid_version(cx, mesh, key) {
        let is_own = is_converted(mesh, &key.object) && is_own(cx, mesh, revisions, &invalid.meta);
        return is_own.then(|| invalid_status(cx, mesh, key, invalid));
    }
    let route = mesh.attached_routes.get(cx, key)?;
    if !is_own(cx, mesh, revisions, &route.meta) {
        return None;
    }
    let refused = Refused::of(cx, mesh, attached.surpluses, key, route);
    let conditions = |positions| conditions(cx, mesh, key, route, positions, &refused);
    Some(of_parents(mesh, &route.meta, &route.parents, conditions))
}

/// Returns the present version of a route, if it has errors.
fn invalid_version<'a>(cx: &Cx, mesh: &'a MeshSnapshot, key: &AttachedRouteKey) -> Option<&'a Shared<InvalidRoute>> {
    if !InvalidRoute::may_be(key.kind) {
        return None;
    }
    mesh.invalid_routes.get(cx, &InvalidRoute::key(key.kind, &key.object))
}

/// Returns the status of a route with errors. Its references to backends are not looked up, so there is no condition
/// about them: one that exists is of the generation that it names.
fn invalid_status(cx: &Cx, mesh: &MeshSnapshot, key: &AttachedRouteKey, invalid: &InvalidRoute) -> Status {
    let child = Child {
        kind: key.kind,
        meta: &invalid.meta,
        hostnames: &invalid.hostnames,
        contributes: false,
    };
    let parents = parent::resolve(cx, mesh, &child, &invalid.parent_refs);
    let message = format!(
        "{}; the last valid version of the route applies, if there was one",
        invalid.message
    );
    let mistake = Mistake::new(reason::UNSUPPORTED, message);
    let conditions = |positions: Range<usize>| {
        let denied = denial(&parents[positions]).unwrap_or_else(|| mistake.clone());
        vec![Condition::unmet(ACCEPTED, denied)]
    };
    of_parents(mesh, &invalid.meta, &parents, conditions)
}

/// Returns a status with an entry for each reference, which has the conditions for the positions of its parents.
fn of_parents(
    mesh: &MeshSnapshot,
    meta: &Meta,
    parents: &[Parent],
    conditions: impl Fn(Range<usize>) -> Vec<Condition>,
) -> Status {
    let controller = &mesh.installation.features.pilot_gateway_api_controller_name;
    // New entries follow in descending order.
    let references = references(parents, meta.namespace()).into_iter().rev();
    let entries = references.filter_map(|positions| {
        let first = parents.get(positions.start)?;
        Some(Entry {
            controller: controller.clone(),
            reference: to_json(&first.reference),
            conditions: conditions(positions),
        })
    });
    Status {
        generation: meta.generation,
        content: Content::Entries(Entries {
            list: List::RouteParents,
            controller: controller.clone(),
            entries: entries.collect(),
            dropped: Vec::new(),
        }),
    }
}

/// Returns the positions of the parents of each reference. Equal references are neighbours.
fn references(parents: &[Parent], own: &Namespace) -> Vec<Range<usize>> {
    let is_equal = |a: &Parent, b: &Parent| sort_text(&a.reference, own) == sort_text(&b.reference, own);
    let mut start = 0;
    let chunks = parents.chunk_by(is_equal);
    let positions = chunks.map(|parents| {
        let end = start + parents.len();
        std::mem::replace(&mut start, end)..end
    });
    positions.collect()
}

/// Returns the conditions for one reference, which may have several parents.
fn conditions(
    cx: &Cx,
    mesh: &MeshSnapshot,
    key: &AttachedRouteKey,
    route: &AttachedRoute,
    positions: Range<usize>,
    refused: &Refused,
) -> Vec<Condition> {
    let parents = &route.parents[positions.clone()];
    let bound = parents.iter().filter(|parent| parent.denied.is_none()).count();
    let message = match bound {
        0 | 1 => "Route was valid".to_owned(),
        bound => format!("Route was valid, bound to {bound} parents"),
    };
    let is_mesh = parents
        .iter()
        .any(|parent| matches!(parent.target, Target::Service { .. }));
    let mistake = if is_mesh {
        &route.mesh_mistake
    } else {
        &route.gateway_mistake
    };
    let denied = denial(parents).or_else(|| refused.all(positions.clone()));
    let dropped = refused.some(positions).filter(|_| denied.is_none());
    let mut conditions = vec![
        Condition::met(ACCEPTED, ACCEPTED, message).unless(denied),
        Condition::met(RESOLVED_REFS, RESOLVED_REFS, "All references resolved").unless(mistake.clone()),
    ];
    if let Some(dropped) = dropped {
        conditions.push(Condition::met(PARTIALLY_INVALID, output_limit::CODE, dropped));
    }
    if mesh.installation.features.pilot_enable_ambient {
        let mistake = parents.first().filter(|_| is_mesh);
        let mistake = mistake.and_then(|parent| waypoint_mistake(cx, mesh, &key.object, &parent.reference));
        let message = mistake.unwrap_or("All waypoints resolved");
        conditions.push(Condition::met(RESOLVED_WAYPOINTS, RESOLVED_WAYPOINTS, message));
    }
    conditions
}

/// Returns the mistake to report for parents of one reference: none if one of them is bound, else the most telling
/// reason, with the messages of all that have it.
fn denial(parents: &[Parent]) -> Option<Mistake> {
    if parents.iter().any(|parent| parent.denied.is_none()) {
        return None;
    }
    let ranks = [reason::NOT_ALLOWED, reason::NO_HOST, reason::NO_PARENT];
    ranks.into_iter().find_map(|rank| {
        let denied = parents.iter().filter_map(|parent| parent.denied.as_ref());
        let denied = denied.filter(|mistake| mistake.reason == rank).cloned();
        denied.fold(None, |joined, mistake| Mistake::joined(joined, Some(mistake)))
    })
}

/// Returns why routes of a parent have no effect for clients without sidecars.
fn waypoint_mistake(
    cx: &Cx,
    mesh: &MeshSnapshot,
    route: &ObjectKey,
    reference: &ParentReference,
) -> Option<&'static str> {
    let namespace = reference.namespace.as_ref();
    let namespace = namespace.map_or_else(|| route.namespace.clone(), Namespace::new);
    let key = ObjectKey::new(&route.cluster, namespace.clone(), reference.name.clone());
    let labels = if reference.kind.as_deref() == Some(Kind::ServiceEntry.name()) {
        mesh.service_entries.get(cx, &key).map(|row| &row.meta.labels)
    } else {
        mesh.kube_services.get(cx, &key).map(|row| &row.meta.labels)
    };
    match labels {
        None => Some("parent not found"),
        Some(labels) if !waypoint::is_named(cx, mesh, labels, &namespace) => Some(
            "istio.io/use-waypoint label missing from parent and parent namespace; in ambient mode, route will not be \
             respected",
        ),
        Some(_) => None,
    }
}

fn to_json(reference: &ParentReference) -> Value {
    let mut fields = Map::new();
    let texts = [
        ("group", reference.group.as_ref()),
        ("kind", reference.kind.as_ref()),
        ("namespace", reference.namespace.as_ref()),
        ("name", Some(&reference.name)),
        ("sectionName", reference.section_name.as_ref()),
    ];
    for (name, text) in texts {
        if let Some(text) = text {
            fields.insert(name.to_owned(), text.as_str().into());
        }
    }
    if let Some(port) = reference.port {
        fields.insert("port".to_owned(), port.into());
    }
    Value::Object(fields)
}

/// A route, as far as other statuses depend on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Attachment {
    /// Listeners that it is attached to. If the route has errors, or if no rule applies because of a limit, they are
    /// left out: listeners count accepted routes.
    listeners: BTreeSet<(ListenerOwner, SmolStr)>,
    /// Gateways that it refers to.
    pub(super) gateways: BTreeSet<ObjectKey>,
    /// Objects that its rules refer to, as far as policies or pools depend on them.
    backends: BTreeSet<TargetKey>,
}

impl Attachment {
    /// Returns the names of the listeners of an object.
    pub(super) fn sections<'a>(&'a self, owner: &'a ListenerOwner) -> impl Iterator<Item = &'a SmolStr> {
        let listeners = self.listeners.iter().filter(move |(of, _)| of == owner);
        listeners.map(|(_, section)| section)
    }
}

/// Derives what other statuses need to know of a route.
pub(super) fn attachment(
    cx: &Cx,
    mesh: &MeshSnapshot,
    surpluses: &Surpluses,
    key: &AttachedRouteKey,
) -> Option<Attachment> {
    let route = mesh.attached_routes.get(cx, key)?;
    let (mut listeners, mut gateways) = (BTreeSet::new(), BTreeSet::new());
    let is_valid = invalid_version(cx, mesh, key).is_none();
    let refused = Refused::of(cx, mesh, surpluses, key, route);
    for positions in references(&route.parents, &key.object.namespace) {
        let is_accepted = is_valid && refused.all(positions.clone()).is_none();
        for parent in &route.parents[positions] {
            let Target::Listener { owner, section, .. } = &parent.target else {
                continue;
            };
            if owner.kind == Kind::KubeGateway {
                gateways.insert(owner.object.clone());
            }
            if is_accepted && parent.denied.is_none() {
                listeners.insert((owner.clone(), section.clone()));
            }
        }
    }
    Some(Attachment {
        listeners,
        gateways,
        backends: backends(cx, mesh, key),
    })
}

fn backends(cx: &Cx, mesh: &MeshSnapshot, key: &AttachedRouteKey) -> BTreeSet<TargetKey> {
    let own = &key.object.namespace;
    let target = |backend: &BackendReference| {
        let kind = match (backend.group.as_deref(), backend.kind.as_deref()) {
            (None | Some(""), None | Some("Service")) => "Service",
            (Some(inference::GROUP), Some("InferencePool")) => "InferencePool",
            _ => return None,
        };
        let namespace = backend.namespace.as_ref().map_or_else(|| own.clone(), Namespace::new);
        Some(TargetKey {
            namespace,
            kind: SmolStr::new_static(kind),
            name: backend.name.clone(),
        })
    };
    let references: Vec<&BackendReference> = match key.kind {
        Kind::HttpRoute => {
            let route = mesh.http_routes.get(cx, &key.object);
            let rules = route.into_iter().flat_map(|route| &route.spec.rules);
            rules.flat_map(|rule| &rule.backend_refs).collect()
        }
        Kind::GrpcRoute => {
            let route = mesh.grpc_routes.get(cx, &key.object);
            let rules = route.into_iter().flat_map(|route| &route.spec.rules);
            rules.flat_map(|rule| &rule.backend_refs).collect()
        }
        Kind::TlsRoute => {
            let route = mesh.tls_routes.get(cx, &key.object);
            let rules = route.into_iter().flat_map(|route| &route.spec.rules);
            rules.flat_map(|rule| &rule.backend_refs).collect()
        }
        _ => {
            let route = mesh.tcp_routes.get(cx, &key.object);
            let rules = route.into_iter().flat_map(|route| &route.spec.rules);
            rules.flat_map(|rule| &rule.backend_refs).collect()
        }
    };
    references.into_iter().filter_map(target).collect()
}

/// Emits the objects with listeners that a route is attached to.
pub(super) fn owners(_: &AttachedRouteKey, row: &Attachment, emit: &mut dyn FnMut(ListenerOwner)) {
    let owners: BTreeSet<&ListenerOwner> = row.listeners.iter().map(|(owner, _)| owner).collect();
    for owner in owners {
        emit(owner.clone());
    }
}

/// Emits the objects that a route's rules refer to.
pub(super) fn targets(_: &AttachedRouteKey, row: &Attachment, emit: &mut dyn FnMut(TargetKey)) {
    row.backends.iter().for_each(|target| emit(target.clone()));
}
