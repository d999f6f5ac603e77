//! What proxies of a small mesh are sent, through the store as when serving; for tests.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{
    Proxy, RequestedResources, ResourceSnapshot, ResourceType,
    proxy::{Extensions, NodeMetadata},
    store::{ConfigStore, ConnectionId, ProxyEvents, Serial},
};
use crate::{
    base::{Hashed, Shared},
    model::{fixture, installation::Installation},
    proto::json,
    table::ChangeSet,
};

/// Service `a` with an HTTP and a TCP port, and its pod.
pub(crate) const APP: &str = "
apiVersion: v1
kind: Service
metadata: {name: a}
spec:
  clusterIP: 10.0.0.1
  selector: {app: a}
  ports: [{name: http, port: 80, targetPort: 8080}, {name: tcp, port: 90, targetPort: 9090}]
---
apiVersion: v1
kind: Pod
metadata: {name: a-0, labels: {app: a}}
spec: {serviceAccountName: a}
status: {phase: Running, podIP: 10.1.0.1, conditions: [{type: Ready, status: 'True'}]}
";

/// A client with this node id, in cluster `Kubernetes` and the namespace of the id; `more` is laid over its metadata. It
/// has every extension.
pub(crate) fn client(node: &str, more: &Value) -> Proxy {
    let domain = node.rsplit('~').next().expect("an id has parts");
    let namespace = domain.split('.').next().expect("a domain has labels");
    let mut metadata = json!({"NAMESPACE": namespace, "CLUSTER_ID": "Kubernetes"});
    for (key, value) in more.as_object().expect("metadata is an object") {
        metadata[key] = value.clone();
    }
    let metadata = serde_json::from_value(metadata).expect("metadata is an object");
    Proxy::new(node, "", metadata, "".into(), Extensions::default()).expect("a valid node")
}

/// The same client, but for what its node says.
pub(crate) fn changed(proxy: Proxy, change: impl FnOnce(&mut NodeMetadata)) -> Proxy {
    let mut node = NodeMetadata::clone(&proxy.node);
    change(&mut node);
    Proxy {
        node: Hashed::new(node),
        ..proxy
    }
}

/// Extensions by name; `None`: all that there are.
pub(crate) fn extensions(names: Option<&[&str]>) -> Extensions {
    let names = names.map(|names| names.iter().map(|name| (*name).into()).collect());
    Extensions {
        listed: names.map(Hashed::new),
    }
}

/// A store that serves the proxies of a mesh folder. They are members 0, 1, and so on.
pub(crate) fn store(installation: Installation, files: &[(&str, &str)], proxies: Vec<Proxy>) -> ConfigStore {
    store_of_requested(installation, files, proxies, &RequestedResources::default())
}

/// The same; each of the proxies asks for these names.
pub(crate) fn store_of_requested(
    installation: Installation,
    files: &[(&str, &str)],
    proxies: Vec<Proxy>,
    names: &RequestedResources,
) -> ConfigStore {
    let names = Shared::new(names.clone());
    let requested = (0..proxies.len()).map(|index| (ConnectionId(index as u64), names.clone()));
    let requested = requested.collect();
    let world = fixture::folder_world(installation, files);
    let mut store = ConfigStore::default();
    let connected = proxies.into_iter().enumerate();
    let membership = ProxyEvents {
        connected: connected
            .map(|(index, proxy)| (ConnectionId(index as u64), Arc::new(proxy)))
            .collect(),
        requested,
        ..ProxyEvents::default()
    };
    let update = store.update(&world.snapshot(), &ChangeSet::default(), membership, &Serial);
    assert!(update.panics.is_empty(), "{:?}", update.panics);
    store
}

/// A resource of a client as JSON; null if there is none.
pub(crate) fn resource(store: &ConfigStore, client: u64, resource_type: ResourceType, name: &str) -> Value {
    let resource = snapshot(store, client).resources(resource_type).get(name);
    resource.map_or(Value::Null, |resource| json::any_to_json(&resource.any()))
}

/// The names of a client's resources, in order.
pub(crate) fn names(store: &ConfigStore, client: u64, resource_type: ResourceType) -> Vec<String> {
    let all = snapshot(store, client).resources(resource_type).iter();
    all.map(|resource| resource.name.to_string()).collect()
}

fn snapshot(store: &ConfigStore, client: u64) -> &ResourceSnapshot {
    let group = store.group_of(ConnectionId(client)).expect("the client has a group");
    store.snapshot(group).expect("the group has a snapshot")
}
