//! Simulates proxyless gRPC clients, which subscribe in steps: listeners of their targets, the routes of these, the
//! clusters of the routes, their endpoints.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use smol_str::SmolStr;

use super::{document, references};
use crate::{
    base::Shared,
    generate::{
        RequestedResources, ResourceSnapshot, ResourceType,
        name::ClusterName,
        requested::ON_DEMAND,
        store::{ConfigStore, ConnectionId, ProxyEvents, Serial},
    },
    model::MeshSnapshot,
    table::ChangeSet,
};

/// Requested names by type.
type RequestedNames = BTreeMap<ResourceType, BTreeSet<SmolStr>>;

/// Returns the listeners that an entry of `proxies.yaml` requests.
pub(super) fn targets(entry: &Value) -> BTreeSet<SmolStr> {
    let targets = entry.get("grpcTargets").and_then(Value::as_array);
    let names = targets.into_iter().flatten().filter_map(Value::as_str);
    names.map(SmolStr::new).collect()
}

/// Subscribes until nothing new is requested; returns descriptions of generators that panicked.
pub(super) fn ask(
    store: &mut ConfigStore,
    mesh: &MeshSnapshot,
    targets: impl Iterator<Item = (ConnectionId, BTreeSet<SmolStr>)>,
) -> Vec<String> {
    let mut clients: Vec<(ConnectionId, RequestedNames)> = targets
        .filter(|(_, targets)| !targets.is_empty())
        .map(|(member, targets)| (member, [(ResourceType::Listener, targets)].into()))
        .collect();
    let mut panics = Vec::new();
    for _ in ON_DEMAND {
        let requested = clients
            .iter()
            .map(|(member, requested)| (*member, Shared::new(RequestedResources::new(requested.clone()))));
        let membership = ProxyEvents {
            requested: requested.collect(),
            ..ProxyEvents::default()
        };
        panics.extend(store.update(mesh, &ChangeSet::default(), membership, &Serial).panics);
        for (member, requested) in &mut clients {
            let snapshot = store.group_of(*member).and_then(|key| store.snapshot(key));
            if let Some(snapshot) = snapshot {
                follow(snapshot, requested);
            }
        }
    }
    panics
}

/// Adds the names in the responses.
fn follow(snapshot: &ResourceSnapshot, requested: &mut RequestedNames) {
    let mut named: BTreeMap<ResourceType, BTreeSet<String>> = BTreeMap::new();
    for resource_type in ON_DEMAND {
        for resource in snapshot.resources(resource_type).iter() {
            let (_, body) = document(resource);
            references(&body, &mut named);
            let clusters = named.entry(ResourceType::Cluster).or_default();
            clusters.extend(clusters_of(&body).map(str::to_owned));
        }
    }
    // A client asks for the endpoints of a cluster that does not exist too, and gets none.
    let clusters = named.get(&ResourceType::Cluster).into_iter().flatten();
    let clusters: Vec<String> = clusters
        .filter(|name| ClusterName::outbound(name).is_some())
        .cloned()
        .collect();
    named.entry(ResourceType::Endpoint).or_default().extend(clusters);
    for resource_type in [ResourceType::Route, ResourceType::Cluster, ResourceType::Endpoint] {
        let names = named.remove(&resource_type).unwrap_or_default();
        let requested = requested.entry(resource_type).or_default();
        requested.extend(names.into_iter().map(SmolStr::from));
    }
}

/// Returns the clusters of a route configuration.
fn clusters_of(configuration: &Value) -> impl Iterator<Item = &str> {
    let hosts = array(configuration, "virtualHosts");
    let actions = hosts
        .flat_map(|host| array(host, "routes"))
        .filter_map(|route| route.get("route"));
    actions
        .flat_map(|action| {
            let weighted = action.get("weightedClusters").into_iter();
            let weighted = weighted.flat_map(|weighted| array(weighted, "clusters"));
            let names = weighted.filter_map(|cluster| cluster.get("name"));
            action.get("cluster").into_iter().chain(names)
        })
        .filter_map(Value::as_str)
}

fn array<'v>(value: &'v Value, key: &str) -> impl Iterator<Item = &'v Value> {
    value.get(key).and_then(Value::as_array).into_iter().flatten()
}
