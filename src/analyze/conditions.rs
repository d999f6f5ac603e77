//! Conditions in statuses that report failures.
//!
//! Parity (pkg/config/analysis/analyzers/conditions/conditions.go).

use serde_json::Value;

use super::{
    json::{items, text},
    mesh::Mesh,
    message::{NEGATIVE_CONDITION, Report},
    object::Object,
};
use crate::api::Kind;

const OF_SERVICE: &[&str] = &["istio.io/WaypointBound"];
const OF_POLICY: &[&str] = &["ZtunnelAccepted", "WaypointAccepted"];
const OF_GATEWAY_API: &[&str] = &["Accepted", "Programmed", "ResolvedRefs"];

/// The conditions of each kind.
const CONDITIONS: [(Kind, &[&str]); 7] = [
    (Kind::Service, OF_SERVICE),
    (Kind::ServiceEntry, OF_SERVICE),
    (Kind::WorkloadEntry, OF_SERVICE),
    (Kind::AuthorizationPolicy, OF_POLICY),
    (Kind::KubeGateway, OF_GATEWAY_API),
    (Kind::HttpRoute, OF_GATEWAY_API),
    (Kind::GrpcRoute, OF_GATEWAY_API),
];

/// Reports conditions whose status is `False`, and policies that apply in part.
pub(super) fn conditions(mesh: &Mesh, report: &mut Report) {
    for (kind, types) in CONDITIONS {
        for object in mesh.of(kind) {
            for condition in of_object(object) {
                let (name, reason) = (text(&condition["type"]), text(&condition["reason"]));
                let is_negative = types.contains(&name) && condition["status"] == "False";
                let is_partial =
                    kind == Kind::AuthorizationPolicy && name == "WaypointAccepted" && reason == "PartiallyInvalid";
                if is_negative || is_partial {
                    let message = text(&condition["message"]);
                    let status = text(&condition["status"]);
                    let text = format!("condition {name} is {status}: {reason}: {message}");
                    report.add(NEGATIVE_CONDITION, object, text);
                }
            }
        }
    }
}

fn of_object(object: &Object) -> impl Iterator<Item = &Value> {
    let status = &object.manifest["status"];
    let parents = match object.kind.name() {
        "HTTPRoute" | "GRPCRoute" => items(&status["parents"]),
        _ => std::slice::from_ref(status),
    };
    parents.iter().flat_map(|parent| items(&parent["conditions"]))
}
