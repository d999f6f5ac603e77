//! The replicas of this control plane: which exist, and the secure connection between them.
//!
//! They are the endpoints of istiod's Service, from a watch of its EndpointSlices. The model does not decide: discovery
//! selectors may leave the namespace of the control plane out.

mod client;
mod service;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde_json::Value;
use smol_str::SmolStr;
use tokio::sync::{mpsc, watch};

pub(super) use self::{
    client::{ClientInputs, PeerClient},
    service::ReplicaService,
};
use crate::{
    distribution::replicas::{Replica, Replicas},
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    model::Installation,
    status::{store::resource, watching::Watches},
    task::{self, Tasks},
};

/// The path of the gRPC method by which replicas ask each other.
const METHOD: &str = "/istiod.v1.Replicas/Status";
/// The name of the secure port in istiod's Service.
const PORT_NAME: &str = "https-dns";
/// The secure port of a slice that does not name it.
const PORT: u16 = 15012;

/// Returns the name of the Service of this control plane.
fn service_name(revision: &str) -> String {
    match revision {
        "" | "default" => "istiod".to_owned(),
        revision => format!("istiod-{revision}"),
    }
}

/// Returns the names of which the serving certificate of a replica has one.
fn server_names(installation: &Installation) -> Vec<String> {
    let namespace = &installation.namespace;
    let names = BTreeSet::from([service_name(&installation.revision), "istiod".to_owned()]);
    let names = names.into_iter().rev();
    names.map(|name| format!("{name}.{namespace}.svc")).collect()
}

/// A part of the endpoints.
struct Slice {
    name: SmolStr,
    replicas: Vec<Replica>,
}

impl Slice {
    fn of(object: Object) -> Self {
        let items = |field: &str| object.value[field].as_array().cloned().unwrap_or_default();
        let ports = items("ports");
        let port = ports.iter().find(|port| port["name"] == PORT_NAME);
        let port = port.and_then(|port| u16::try_from(port["port"].as_u64()?).ok());
        let replicas = items("endpoints")
            .iter()
            .filter_map(|endpoint| replica(endpoint, port))
            .collect();
        Self {
            name: object.name().into(),
            replicas,
        }
    }
}

/// Returns the replica of an endpoint. Unknown conditions count as Kubernetes defines.
fn replica(endpoint: &Value, port: Option<u16>) -> Option<Replica> {
    let conditions = &endpoint["conditions"];
    let is_ready = conditions["ready"].as_bool().unwrap_or(true);
    let pod = &endpoint["targetRef"]["name"];
    Some(Replica {
        name: pod.as_str().unwrap_or_default().into(),
        host: endpoint["addresses"][0].as_str()?.into(),
        port: port.unwrap_or(PORT),
        is_ready,
        serves: is_ready || conditions["serving"].as_bool().unwrap_or(false),
    })
}

/// Follows the replicas.
pub(super) fn follow(tasks: &Tasks, watches: &Watches, installation: &Installation) -> watch::Receiver<Replicas> {
    let service = service_name(&installation.revision);
    let target = WatchTarget {
        namespace: Some(installation.namespace.to_string()),
        labels: Some(format!("kubernetes.io/service-name={service}")),
        ..WatchTarget::all(resource("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices"))
    };
    let (watching, events) = watches.open(target, Slice::of);
    let (sender, replicas) = watch::channel(None);
    tasks.spawn_until_shutdown("replicas", async move {
        tokio::join!(watching, publish(events, sender));
    });
    replicas
}

async fn publish(mut events: mpsc::Receiver<WatchEvent<Slice>>, out: watch::Sender<Replicas>) {
    let mut slices = BTreeMap::new();
    while let Some(event) = events.recv().await {
        match event {
            WatchEvent::Restarted(all) => slices = all.into_iter().map(|slice| (slice.name, slice.replicas)).collect(),
            WatchEvent::Applied(slice) => drop(slices.insert(slice.name, slice.replicas)),
            WatchEvent::Deleted(slice) => drop(slices.remove(&slice.name)),
        }
        task::publish(&out, Some(Arc::new(all(&slices))));
    }
}

/// Returns the replicas of all slices, one for each pod: those of two address families have a slice for each.
fn all(slices: &BTreeMap<SmolStr, Vec<Replica>>) -> BTreeSet<Replica> {
    let mut all: Vec<&Replica> = slices.values().flatten().collect();
    all.sort_by_key(|replica| (&replica.name, replica.host.contains(':'), *replica));
    all.dedup_by(|later, first| !later.name.is_empty() && later.name == first.name);
    all.into_iter().cloned().collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_service_is_that_of_the_revision() {
        let names = |revision: &str| {
            server_names(&Installation {
                revision: revision.into(),
                namespace: "istio-system".into(),
                ..Installation::default()
            })
        };
        assert_eq!(service_name(""), "istiod");
        assert_eq!(names("default"), ["istiod.istio-system.svc"]);
        assert_eq!(
            names("canary"),
            ["istiod-canary.istio-system.svc", "istiod.istio-system.svc"]
        );
    }

    fn slice(name: &str, endpoints: &Value) -> (SmolStr, Vec<Replica>) {
        let value = json!({ "metadata": { "name": name }, "endpoints": endpoints,
            "ports": [{ "name": "grpc-xds", "port": 15010 }, { "name": "https-dns", "port": 15112 }] });
        let slice = Slice::of(Object::from_value(value).expect("an object"));
        (slice.name, slice.replicas)
    }

    #[test]
    fn replicas_are_the_endpoints_by_pod() {
        let pod = |name: &str, address: &str, conditions: Value| json!({ "addresses": [address], "conditions": conditions, "targetRef": { "kind": "Pod", "name": name } });
        let ready = || json!({ "ready": true });
        let slices = BTreeMap::from([
            slice(
                "a",
                &json!([pod("istiod-1", "fd00::1", ready()), pod("istiod-2", "fd00::2", ready())]),
            ),
            slice(
                "b",
                &json!([
                    pod("istiod-1", "10.1.0.1", ready()),
                    pod("istiod-3", "10.1.0.3", json!({ "ready": false, "serving": true, "terminating": true })),
                    pod("istiod-4", "10.1.0.4", json!({ "ready": false })),
                    { "addresses": ["10.1.0.5"] },
                ]),
            ),
        ]);
        let found: Vec<_> = all(&slices)
            .into_iter()
            .map(|replica| (replica.address().to_string(), replica.is_ready, replica.serves))
            .collect();
        let expected = [
            ("10.1.0.5:15112", true, true),
            ("10.1.0.1:15112", true, true),
            ("[fd00::2]:15112", true, true),
            ("10.1.0.3:15112", false, true),
            ("10.1.0.4:15112", false, false),
        ];
        let expected = expected.map(|(address, is_ready, serves)| (address.to_owned(), is_ready, serves));
        assert_eq!(found, expected);
    }
}
