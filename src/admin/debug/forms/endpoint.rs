//! Endpoints, in the form of `model.IstioEndpoint`, and the gateways to networks.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};
use smol_str::SmolStr;

use super::{labels_or_null, list_or_null, service::registry_name};
use crate::{
    model::{
        Endpoint, MeshSnapshot,
        endpoint::Health,
        network::{GatewayIndex, NetworkGateway},
    },
    table::Cx,
};

/// Returns shards by cluster and provider, by host and namespace.
pub(in crate::admin::debug) fn shards(mesh: &MeshSnapshot) -> Value {
    let cx = Cx::untracked();
    let mut hosts: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    for (key, row) in mesh.endpoints.iter(&cx).filter(|(_, row)| !row.endpoints.is_empty()) {
        let service = mesh.services.get(&cx, key);
        let registry = service.map_or("Kubernetes", |service| registry_name(service.registry));
        let mut shards: BTreeMap<String, Vec<Value>> = BTreeMap::new();
        for of in &*row.endpoints {
            let shard = shards.entry(format!("{registry}/{}", of.origin.cluster)).or_default();
            shard.push(endpoint(of));
        }
        let accounts: BTreeSet<&SmolStr> = row.endpoints.iter().map(|endpoint| &endpoint.origin.identity).collect();
        let accounts = accounts.into_iter().filter(|identity| !identity.is_empty());
        let accounts: Map<String, Value> = accounts.map(|identity| (identity.to_string(), json!({}))).collect();
        let shards = json!({ "Shards": shards, "ServiceAccounts": accounts });
        let of_host = hosts.entry(key.hostname.as_str()).or_default();
        of_host.insert(key.namespace.to_string(), shards);
    }
    json!(hosts)
}

fn endpoint(endpoint: &Endpoint) -> Value {
    let origin = &endpoint.origin;
    let addresses = std::iter::once(&endpoint.address).chain(&endpoint.extra_addresses);
    json!({
        "Labels": labels_or_null(&origin.labels),
        "Addresses": addresses.collect::<Vec<_>>(),
        "ServicePortName": endpoint.port_name,
        "LegacyClusterPortKey": endpoint.service_port,
        "ServiceAccount": origin.identity,
        "Network": origin.network.as_str(),
        "Locality": { "Label": origin.locality, "ClusterID": origin.cluster.as_str() },
        "EndpointPort": endpoint.port,
        "LbWeight": origin.weight,
        "TLSMode": origin.tls_mode,
        "Namespace": origin.namespace.as_str(),
        "WorkloadName": origin.workload_name,
        "HostName": origin.hostname,
        "SubDomain": origin.subdomain,
        "HealthStatus": health(endpoint.health),
        // The proxy decides it for each cluster, by the outlier detection of the service's DestinationRule.
        "SendUnhealthyEndpoints": false,
        "NodeName": origin.node_name,
    })
}

fn health(health: Health) -> u8 {
    match health {
        Health::Unknown => 0,
        Health::Healthy => 1,
        Health::Unhealthy => 2,
        Health::Draining => 3,
        Health::Terminating => 4,
    }
}

/// Returns the network gateways with an IP address.
pub(in crate::admin::debug) fn networks(mesh: &MeshSnapshot) -> Value {
    let networks = mesh.networks.get(&Cx::untracked(), &());
    networks.map_or(Value::Null, |networks| gateways(&networks.resolved))
}

/// Returns the network gateways as declared.
pub(in crate::admin::debug) fn unresolved_networks(mesh: &MeshSnapshot) -> Value {
    let networks = mesh.networks.get(&Cx::untracked(), &());
    networks.map_or(Value::Null, |networks| gateways(&networks.unresolved))
}

/// Returns gateways by address and port.
fn gateways(index: &GatewayIndex) -> Value {
    let mut gateways: Vec<&NetworkGateway> = index.by_network.values().flatten().collect();
    gateways.sort();
    list_or_null(gateways.into_iter().map(|gateway| {
        let (namespace, name) = gateway.service_account.split_once('/').unwrap_or_default();
        json!({
            "Network": gateway.network.as_str(),
            "Cluster": gateway.cluster.as_str(),
            "Addr": gateway.address,
            "Port": gateway.port,
            "HBONEPort": gateway.hbone_port,
            "ServiceAccount": { "Namespace": namespace, "Name": name },
        })
    }))
}
