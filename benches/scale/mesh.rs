//! The benched mesh: namespaces, and services with their endpoints, a VirtualService and a DestinationRule each.

use serde_json::{Value, json};

/// The size of the mesh.
#[derive(Clone, Copy)]
pub(crate) struct Mesh {
    pub(crate) services: usize,
    /// Endpoints of each service.
    pub(crate) endpoints: usize,
    pub(crate) namespaces: usize,
}

impl Mesh {
    /// The namespaces, which must be created first.
    pub(crate) fn namespaces(self) -> Vec<Value> {
        let named =
            |index| json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": format!("ns-{index}") } });
        (0..self.namespaces).map(named).collect()
    }

    /// All namespaced objects.
    pub(crate) fn objects(self) -> Vec<Value> {
        (0..self.services).flat_map(|index| self.service_of(index)).collect()
    }

    /// All objects of one service, which may be outside [`Self::objects`].
    pub(crate) fn service_of(self, index: usize) -> Vec<Value> {
        vec![
            self.service(index),
            self.slice(index, 0),
            self.virtual_service(index, 0),
            self.destination_rule(index),
        ]
    }

    fn object(self, index: usize, api_version: &str, kind: &str, suffix: &str, spec: Value) -> Value {
        let mut object = json!({ "apiVersion": api_version, "kind": kind, "metadata": {
            "name": format!("svc-{index}{suffix}"), "namespace": format!("ns-{}", index % self.namespaces),
            "labels": { "app": format!("svc-{index}") } } });
        if !spec.is_null() {
            object["spec"] = spec;
        }
        object
    }

    /// A Service without the other objects of it, which may be outside [`Self::objects`].
    pub(crate) fn service(self, index: usize) -> Value {
        let spec = json!({ "selector": { "app": format!("svc-{index}") }, "ports": [
            { "name": "http", "port": 80, "targetPort": 8080 }, { "name": "tcp", "port": 9090, "targetPort": 9090 }] });
        self.object(index, "v1", "Service", "", spec)
    }

    /// The endpoints of a service. Except in round 0, the first one has a different address in each `round`, see
    /// [`moved`].
    pub(crate) fn slice(self, index: usize, round: usize) -> Value {
        let endpoint = |number: usize| {
            let address = if round > 0 && number == 0 {
                moved(index, round)
            } else {
                self.address(index, number)
            };
            json!({ "addresses": [address], "conditions": { "ready": true, "serving": true, "terminating": false } })
        };
        let mut slice = self.object(index, "discovery.k8s.io/v1", "EndpointSlice", "-0", Value::Null);
        slice["metadata"]["labels"]["kubernetes.io/service-name"] = json!(format!("svc-{index}"));
        slice["addressType"] = json!("IPv4");
        slice["endpoints"] = (0..self.endpoints).map(endpoint).collect();
        slice["ports"] = json!([{ "name": "http", "port": 8080, "protocol": "TCP" },
            { "name": "tcp", "port": 9090, "protocol": "TCP" }]);
        slice
    }

    /// The routing of a service. One path is different in each `round`, see [`path`].
    pub(crate) fn virtual_service(self, index: usize, round: usize) -> Value {
        let name = format!("svc-{index}");
        let to =
            |subset: &str, weight: u32| json!({ "destination": { "host": name, "subset": subset }, "weight": weight });
        let spec = json!({ "hosts": [name], "http": [
            { "match": [{ "uri": { "prefix": path(round) } }], "timeout": "5s", "route": [to("v1", 100)] },
            { "route": [to("v1", 80), to("v2", 20)], "retries": { "attempts": 3, "perTryTimeout": "1s" } }] });
        self.object(index, "networking.istio.io/v1", "VirtualService", "", spec)
    }

    fn destination_rule(self, index: usize) -> Value {
        let subset = |version: &str| json!({ "name": version, "labels": { "version": version } });
        let spec = json!({ "host": format!("svc-{index}"), "subsets": [subset("v1"), subset("v2")],
            "trafficPolicy": { "connectionPool": { "http": { "http1MaxPendingRequests": 1000 } },
                "outlierDetection": { "consecutive5xxErrors": 5 } } });
        self.object(index, "networking.istio.io/v1", "DestinationRule", "", spec)
    }

    fn address(self, index: usize, endpoint: usize) -> String {
        let number = index * self.endpoints + endpoint;
        format!(
            "10.{}.{}.{}",
            64 + (number >> 16) % 63,
            (number >> 8) & 255,
            number & 255
        )
    }
}

/// The address of a service's first endpoint in a round, which nothing else ever has.
pub(crate) fn moved(index: usize, round: usize) -> String {
    format!("10.127.{}.{}", round % 250, 1 + index % 250)
}

/// A pattern for [`moved`]: the round, and the number of the service plus one.
pub(crate) const MOVED: &str = r"10\.127\.([0-9]+)\.([0-9]+)";
/// A pattern for [`path`]: the round.
pub(crate) const PATH: &str = "/round-([0-9]+)/";

/// The path that a VirtualService matches in a round.
pub(crate) fn path(round: usize) -> String {
    if round == 0 {
        "/v1/".to_owned()
    } else {
        format!("/round-{round}/")
    }
}
