//! Statuses of InferencePools: an entry for each Gateway whose routes use the pool.
//!
//! Parity (pilot/pkg/config/kube/gateway/inferencepool_collection.go): an entry follows from the statuses of routes as
//! they are written, because it says that a Gateway has accepted a route.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{
    ACCEPTED, Condition, Content, Entries, Entry, List, RESOLVED_REFS, Status, StatusKey, Verdict,
    gateway::is_of_own_class, is_own, statuses::StatusInputs,
};
use crate::{
    api::{
        Kind,
        gateway_api::{InferencePool, common::GROUP},
    },
    base::{Namespace, ObjectKey, SmolStr},
    model::{
        MeshSnapshot,
        gateway_api::{Mistake, is_converted, listener, policy::TargetKey},
    },
    table::Cx,
};

/// Returns the status of an InferencePool; `None` if it is another revision's.
pub(super) fn status(inputs: StatusInputs, key: &ObjectKey) -> Option<Status> {
    let StatusInputs {
        cx,
        mesh,
        revisions,
        attached,
    } = inputs;
    let pool = mesh
        .inference_pools
        .get(cx, key)
        .filter(|pool| is_converted(mesh, key) && is_own(cx, mesh, revisions, &pool.meta))?;
    let controller = &mesh.installation.features.pilot_gateway_api_controller_name;
    let target = TargetKey {
        namespace: key.namespace.clone(),
        kind: SmolStr::new_static(Kind::InferencePool.name()),
        name: key.name.clone(),
    };
    let mut gateways: BTreeMap<ObjectKey, Condition> = BTreeMap::new();
    for route in attached.routes_of(cx, &target) {
        let status = StatusKey {
            kind: route.kind,
            object: route.object.clone(),
        };
        let Some(written) = attached.written(cx, &status) else {
            continue;
        };
        for parent in written["parents"].as_array().into_iter().flatten() {
            if parent["controllerName"] == controller.as_str()
                && let Some(gateway) = gateway_of(cx, mesh, &parent["parentRef"], &route.object)
            {
                gateways
                    .entry(gateway.clone())
                    .or_insert_with(|| accepted(parent, &route.object, &gateway));
            }
        }
    }
    let own = StatusKey {
        kind: Kind::InferencePool,
        object: key.clone(),
    };
    let written = attached.written(cx, &own);
    let listed = written.and_then(|status| status["parents"].as_array());
    let dropped = listed.into_iter().flatten().map(|parent| &parent["parentRef"]);
    let dropped = dropped.filter(|reference| is_placeholder(reference) || has_own_class(cx, mesh, reference, key));
    let entries = gateways.iter().map(|(gateway, accepted)| Entry {
        controller: SmolStr::default(),
        reference: json!({
            "group": GROUP, "kind": "Gateway", "namespace": gateway.namespace.as_str(), "name": gateway.name,
        }),
        conditions: vec![accepted.clone(), picker(cx, mesh, key, &pool.spec)],
    });
    Some(Status {
        generation: pool.meta.generation,
        content: Content::Entries(Entries {
            list: List::PoolParents,
            controller: SmolStr::default(),
            entries: entries.collect(),
            dropped: dropped.cloned().collect(),
        }),
    })
}

/// Returns the Gateway of a reference in the status of a route, which may name a ListenerSet.
fn gateway_of(cx: &Cx, mesh: &MeshSnapshot, reference: &Value, own: &ObjectKey) -> Option<ObjectKey> {
    let namespace = reference["namespace"].as_str();
    let namespace = namespace.map_or_else(|| own.namespace.clone(), Namespace::new);
    let object = ObjectKey::new(&own.cluster, namespace, reference["name"].as_str()?);
    match reference["kind"].as_str() {
        None | Some("Gateway") => Some(object),
        Some("ListenerSet") => listener::parent_of(&object, &mesh.listener_sets.get(cx, &object)?.spec),
        Some(_) => None,
    }
}

/// Returns true for the entry that the API's schema has by default.
fn is_placeholder(reference: &Value) -> bool {
    reference["kind"] == "Status" && reference["name"] == "default"
}

/// Returns true if the Gateway of an entry belongs to a controller of this control plane.
fn has_own_class(cx: &Cx, mesh: &MeshSnapshot, reference: &Value, pool: &ObjectKey) -> bool {
    let gateway = gateway_of(cx, mesh, reference, pool).and_then(|key| mesh.kube_gateways.get(cx, &key));
    gateway.is_some_and(|gateway| is_of_own_class(cx, mesh, gateway))
}

/// Returns the condition that follows from the status of a route.
fn accepted(parent: &Value, route: &ObjectKey, gateway: &ObjectKey) -> Condition {
    let conditions = parent["conditions"].as_array().into_iter().flatten();
    let mut conditions = conditions.filter(|condition| condition["type"] == ACCEPTED);
    match conditions.next() {
        Some(condition) if condition["status"] == "True" => Condition::met(
            ACCEPTED,
            ACCEPTED,
            "Referenced by an HTTPRoute accepted by the parentRef Gateway",
        ),
        Some(condition) => {
            let message = format!(
                "Referenced HTTPRoute {}/{} not accepted by Gateway {}/{}: {}",
                route.namespace,
                route.name,
                gateway.namespace,
                gateway.name,
                condition["message"].as_str().unwrap_or_default()
            );
            Condition::unmet(ACCEPTED, Mistake::new("HTTPRouteNotAccepted", message))
        }
        None => Condition {
            verdict: Verdict::Unknown,
            ..Condition::met(
                ACCEPTED,
                ACCEPTED,
                "Referenced by an HTTPRoute unknown parentRef Gateway status",
            )
        },
    }
}

/// Returns the condition of the reference to the endpoint picker.
fn picker(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey, pool: &InferencePool) -> Condition {
    let resolved = Condition::met(
        RESOLVED_REFS,
        RESOLVED_REFS,
        "Referenced ExtensionRef resolved successfully",
    );
    let picker = pool.endpoint_picker_ref.as_ref();
    let (kind, name) = picker.map_or((None, ""), |picker| (picker.kind.as_deref(), picker.name.as_str()));
    let service = || ObjectKey::new(&key.cluster, key.namespace.clone(), name);
    let message = match kind {
        Some(kind) if kind != "Service" => format!("Unsupported ExtensionRef kind {kind}"),
        _ if name.is_empty() => "ExtensionRef not defined".to_owned(),
        _ if mesh.kube_services.get(cx, &service()).is_none() => format!("Referenced ExtensionRef not found {name}"),
        _ => return resolved,
    };
    resolved.unless(Some(Mistake::new("InvalidExtensionRef", message)))
}
