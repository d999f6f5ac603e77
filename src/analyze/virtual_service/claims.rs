//! Routes by JWT claims.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::{
    analyze::{
        hosts::reference,
        json::{items, labels, texts},
        mesh::Mesh,
        message::{CLAIMS_WITHOUT_AUTHENTICATION, Report},
        object::Object,
    },
    api::{Kind, names::claim_path},
    base::select,
};

/// The maximum number of pods of a Gateway that messages about a VirtualService name.
const MAX_PODS: usize = 10;

/// Reports routes by claims at gateways without a RequestAuthentication.
///
/// Parity (pkg/config/analysis/analyzers/virtualservice/jwtclaimroute.go).
pub(in crate::analyze) fn claims(mesh: &Mesh, report: &mut Report) {
    for service in mesh.of(Kind::VirtualService) {
        let Some(claim) = claim(service) else {
            continue;
        };
        let gateways: BTreeSet<&str> = texts(service.spec("gateways")).collect();
        for written in gateways.into_iter().filter(|name| *name != "mesh") {
            let (namespace, name) = reference(&service.namespace, written);
            let Some(gateway) = mesh.find(Kind::Gateway, namespace, name) else {
                continue;
            };
            let selector = labels(gateway.spec("selector"));
            let pods = mesh.pods(None, &selector).filter(|pod| !is_authenticated(mesh, pod));
            for pod in pods.take(MAX_PODS) {
                let text = format!(
                    "routes by {claim}, but no RequestAuthentication selects pod {} of Gateway {}",
                    pod.name,
                    gateway.full_name()
                );
                report.add(CLAIMS_WITHOUT_AUTHENTICATION, service, text);
            }
        }
    }
}

/// Returns a header of a route that is a claim.
fn claim(service: &Object) -> Option<&str> {
    let matches = items(service.spec("http"))
        .iter()
        .flat_map(|route| items(&route["match"]));
    let headers = matches.flat_map(|request| [&request["headers"], &request["withoutHeaders"]]);
    let names = headers.filter_map(Value::as_object).flat_map(|headers| headers.keys());
    names.map(String::as_str).find(|name| claim_path(name).is_some())
}

fn is_authenticated(mesh: &Mesh, pod: &Object) -> bool {
    let of_mesh = mesh.within(Kind::RequestAuthentication, "istio-system");
    let of_namespace = mesh.within(Kind::RequestAuthentication, &pod.namespace);
    of_mesh.iter().chain(of_namespace).any(|authentication| {
        let selector = labels(&authentication.spec("selector")["matchLabels"]);
        select::subset(&selector, &pod.labels)
    })
}
