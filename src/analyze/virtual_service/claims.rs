//! Routes by JWT claims.

use std::collections::{BTreeMap, BTreeSet};

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
    base::{Labels, SmolStr, select},
};

/// The maximum number of pods of a Gateway that messages about a VirtualService name.
const MAX_PODS: usize = 10;

/// Reports routes by claims at gateways without a RequestAuthentication.
///
/// Parity (pkg/config/analysis/analyzers/virtualservice/jwtclaimroute.go).
pub(in crate::analyze) fn claims(mesh: &Mesh, report: &mut Report) {
    let mut pods = GatewayPods::of(mesh);
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
            for pod in pods.without_authentication(gateway) {
                let text = format!(
                    "routes by {claim}, but no RequestAuthentication selects pod {pod} of Gateway {}",
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

/// The pods of Gateways that no RequestAuthentication selects. Many VirtualServices name one Gateway, many Gateways
/// select the same pods, and a namespace may have thousands of RequestAuthentications.
struct GatewayPods<'a> {
    mesh: &'a Mesh,
    /// The selectors of RequestAuthentications by namespace.
    selectors: BTreeMap<&'a str, Vec<Labels>>,
    /// True for the labels of pods in a namespace that one of these selects.
    authenticated: BTreeMap<SmolStr, BTreeMap<Labels, bool>>,
    /// The names of the first pods that none selects, by the selectors of Gateways.
    by_gateway: BTreeMap<Labels, Vec<SmolStr>>,
}

impl<'a> GatewayPods<'a> {
    fn of(mesh: &'a Mesh) -> Self {
        let mut selectors: BTreeMap<&str, Vec<Labels>> = BTreeMap::new();
        for authentication in mesh.of(Kind::RequestAuthentication) {
            let selector = labels(&authentication.spec("selector")["matchLabels"]);
            let of_namespace = selectors.entry(authentication.namespace.as_str());
            of_namespace.or_default().push(selector);
        }
        Self {
            mesh,
            selectors,
            authenticated: BTreeMap::new(),
            by_gateway: BTreeMap::new(),
        }
    }

    /// Returns the names of the first pods of a Gateway that no RequestAuthentication selects.
    fn without_authentication(&mut self, gateway: &Object) -> Vec<SmolStr> {
        let (mesh, selector) = (self.mesh, labels(gateway.spec("selector")));
        if let Some(known) = self.by_gateway.get(&selector) {
            return known.clone();
        }
        let pods = mesh.pods(None, &selector).filter(|pod| !self.is_authenticated(pod));
        let names: Vec<SmolStr> = pods.take(MAX_PODS).map(|pod| pod.name.clone()).collect();
        self.by_gateway.insert(selector, names.clone());
        names
    }

    fn is_authenticated(&mut self, pod: &Object) -> bool {
        let known = self.authenticated.get(&pod.namespace);
        if let Some(known) = known.and_then(|pods| pods.get(&pod.labels)) {
            return *known;
        }
        let namespaces = ["istio-system", pod.namespace.as_str()].into_iter();
        let mut selectors = namespaces
            .filter_map(|namespace| self.selectors.get(namespace))
            .flatten();
        let is_selected = selectors.any(|selector| select::subset(selector, &pod.labels));
        let of_namespace = self.authenticated.entry(pod.namespace.clone()).or_default();
        of_namespace.insert(pod.labels.clone(), is_selected);
        is_selected
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::analyze::mesh::Settings;

    #[test]
    fn r21_equal_pods_of_gateways_are_compared_once() {
        let object = |kind: Kind, name: String, labels: &Value, spec: &Value| {
            let metadata = json!({"name": name, "namespace": "n", "labels": labels});
            let manifest = json!({"metadata": metadata, "spec": spec});
            Object::of(kind.into(), manifest, "").expect("a namespace that counts")
        };
        let pods = (0..60).map(|number| {
            let labels = json!({"app": "gw", "team": format!("t{}", number % 3)});
            object(Kind::Pod, format!("p{number:02}"), &labels, &Value::Null)
        });
        let selector = json!({"selector": {"app": "gw"}});
        let gateways = ["g1", "g2"].map(|name| object(Kind::Gateway, name.to_owned(), &Value::Null, &selector));
        let authentication = json!({"selector": {"matchLabels": {"team": "t0"}}});
        let authentication = object(
            Kind::RequestAuthentication,
            "a".to_owned(),
            &Value::Null,
            &authentication,
        );
        let objects = pods.chain(gateways).chain([authentication]);
        let mesh = Mesh::new(objects.collect::<Vec<_>>(), Settings::default());
        let mut found = GatewayPods::of(&mesh);
        for gateway in mesh.of(Kind::Gateway) {
            let names = found.without_authentication(gateway);
            assert_eq!(names.len(), MAX_PODS);
            assert_eq!(names[..3], ["p01", "p02", "p04"]);
        }
        assert_eq!(found.authenticated["n"].len(), 3);
        assert_eq!(found.by_gateway.len(), 1);
    }
}
