//! Endpoints, in the form of `model.IstioEndpoint`, and the gateways to networks.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use smol_str::SmolStr;

use super::{labels_or_null, list_or_null, service::registry_name};
use crate::{
    model::{
        Endpoint, MeshSnapshot, ServiceKey,
        endpoint::{Health, ServiceEndpoints},
        network::{GatewayIndex, NetworkGateway},
    },
    table::Cx,
};

/// Shards by cluster and provider, by host and namespace. They are written host by host: as one value, those of a large
/// mesh take six times the memory of their text.
pub(in crate::admin::debug) struct Shards<'a>(pub(in crate::admin::debug) &'a MeshSnapshot);

impl Serialize for Shards<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let cx = Cx::untracked();
        let rows = self.0.endpoints.iter(&cx);
        let mut rows = rows.filter(|(_, row)| !row.endpoints.is_empty()).peekable();
        serializer.collect_map(std::iter::from_fn(|| {
            let (first, row) = rows.next()?;
            let mut of_host = BTreeMap::from([(first.namespace.as_str(), shards(self.0, first, row))]);
            // Rows of one host are adjacent.
            while let Some((key, row)) = rows.next_if(|(key, _)| key.hostname == first.hostname) {
                of_host.insert(key.namespace.as_str(), shards(self.0, key, row));
            }
            Some((first.hostname.as_str(), of_host))
        }))
    }
}

/// Returns the shards of a service.
fn shards(mesh: &MeshSnapshot, key: &ServiceKey, row: &ServiceEndpoints) -> Value {
    let service = mesh.services.get(&Cx::untracked(), key);
    let registry = service.map_or("Kubernetes", |service| registry_name(service.registry));
    let mut shards: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for listed in &*row.endpoints {
        let shard = format!("{registry}/{}", listed.origin.cluster);
        shards.entry(shard).or_default().push(endpoint(listed));
    }
    let accounts: BTreeSet<&SmolStr> = row.endpoints.iter().map(|endpoint| &endpoint.origin.identity).collect();
    let accounts = accounts.into_iter().filter(|identity| !identity.is_empty());
    let accounts: Map<String, Value> = accounts.map(|identity| (identity.to_string(), json!({}))).collect();
    json!({ "Shards": shards, "ServiceAccounts": accounts })
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
