//! JSON forms of debug pages, as Istio's clients read them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};
use smol_str::SmolStr;

use super::redact::redacted;
use crate::{
    api::{Config, Kind, kinds::with_kinds},
    base::{Hostname, Namespace, ObjectKey},
    generate::{ProxyType, ResourceSnapshot, ResourceType},
    model::{
        MeshSnapshot, ServiceKey,
        export::ExportTo,
        service::{Registry, Resolution, Service, mcs},
    },
    proto::json,
    table::{Cx, Table},
    xds::registry::{LiveConnection, TypeStatus},
};

fn time(seconds: i64) -> Value {
    time::OffsetDateTime::from_unix_timestamp(seconds).map_or(Value::Null, moment)
}

fn moment(time: time::OffsetDateTime) -> Value {
    time.format(&time::format_description::well_known::Rfc3339)
        .map_or(Value::Null, Value::String)
}

/// Returns `model.Service` of every service.
pub(super) fn registry(mesh: &MeshSnapshot) -> Value {
    mesh.services
        .iter(&Cx::untracked())
        .flat_map(|(_, row)| row.all())
        .map(self::service)
        .collect()
}

fn service(service: &Service) -> Value {
    let export_to: Vec<&str> = match &service.export_to {
        ExportTo::Public => vec!["*"],
        ExportTo::None => vec!["~"],
        ExportTo::Namespaces(namespaces) => namespaces.iter().map(Namespace::as_str).collect(),
    };
    let resolution = match service.resolution {
        Resolution::ClientSideLb => 0,
        Resolution::DnsLb => 1,
        Resolution::Passthrough => 2,
        Resolution::DnsRoundRobinLb => 3,
        Resolution::Alias => 4,
        Resolution::DynamicDns => 5,
    };
    let ports: Vec<Value> = service
        .ports
        .iter()
        .map(|port| json!({ "name": port.name, "port": port.number, "protocol": format!("{:?}", port.protocol) }))
        .collect();
    let addresses: Map<String, Value> = service
        .cluster_vips
        .iter()
        .map(|(cluster, vips)| (cluster.to_string(), json!(vips)))
        .collect();
    json!({
        "Attributes": {
            "ServiceRegistry": registry_name(service.registry),
            "Name": service.name,
            "Namespace": service.key.namespace.as_str(),
            "Labels": service.labels,
            "ExportTo": export_to,
            "LabelSelectors": service.selector,
        },
        "ports": ports,
        "serviceAccounts": service.service_accounts,
        "creationTime": time(service.creation),
        "hostname": service.key.hostname.as_str(),
        "clusterVIPs": { "Addresses": addresses },
        "defaultAddress": service.default_address,
        "Resolution": resolution,
        "MeshExternal": service.mesh_external,
    })
}

fn registry_name(registry: Registry) -> &'static str {
    match registry {
        Registry::Kubernetes => "Kubernetes",
        Registry::External => "External",
    }
}

/// Returns shards by cluster and provider, by host and namespace.
pub(super) fn endpoint_shards(mesh: &MeshSnapshot) -> Value {
    let cx = Cx::untracked();
    let mut hosts: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    for (key, endpoints) in mesh.endpoints.iter(&cx) {
        let registry = mesh
            .services
            .get(&cx, key)
            .map_or("Kubernetes", |service| registry_name(service.registry));
        let mut shards: BTreeMap<String, Vec<Value>> = BTreeMap::new();
        for endpoint in &*endpoints.endpoints {
            shards.entry(format!("{registry}/{}", endpoint.origin.cluster)).or_default().push(json!({
                "Labels": *endpoint.origin.labels,
                "Addresses": std::iter::once(&endpoint.address).chain(&endpoint.extra_addresses).collect::<Vec<_>>(),
                "ServicePortName": endpoint.port_name,
                "EndpointPort": endpoint.port,
                "ServiceAccount": endpoint.origin.identity,
                "Network": endpoint.origin.network.as_str(),
                "Locality": { "Label": endpoint.origin.locality, "ClusterID": endpoint.origin.cluster.as_str() },
                "LbWeight": endpoint.origin.weight,
                "TLSMode": endpoint.origin.tls_mode,
                "Namespace": endpoint.origin.namespace.as_str(),
                "WorkloadName": endpoint.origin.workload_name,
                "HostName": endpoint.origin.hostname,
                "SubDomain": endpoint.origin.subdomain,
                "HealthStatus": format!("{:?}", endpoint.health),
                "NodeName": endpoint.origin.node_name,
            }));
        }
        let accounts: std::collections::BTreeSet<&SmolStr> = endpoints
            .endpoints
            .iter()
            .map(|endpoint| &endpoint.origin.identity)
            .filter(|identity| !identity.is_empty())
            .collect();
        let accounts: Map<String, Value> = accounts
            .into_iter()
            .map(|identity| (identity.to_string(), json!({})))
            .collect();
        hosts.entry(key.hostname.as_str()).or_default().insert(
            key.namespace.to_string(),
            json!({ "Shards": shards, "ServiceAccounts": accounts }),
        );
    }
    json!(hosts)
}

macro_rules! istio_objects {
    ($($(#[$doc:meta])* $kind:ident: $row:ty { table: $table:ident, class: $class:ident, $($column:tt)* })*) => {
        /// Returns every Istio object, in the form of a manifest.
        pub(super) fn configs(mesh: &MeshSnapshot) -> Value {
            let mut rows = Vec::new();
            $(istio_objects!($class, mesh.$table, Kind::$kind, rows);)*
            Value::Array(rows)
        }
    };
    (Istio, $table:expr, $kind:expr, $rows:ident) => { objects(&$table, $kind, &mut $rows) };
    ($class:ident, $table:expr, $kind:expr, $rows:ident) => {};
}

with_kinds!(istio_objects);

fn objects<M: prost::Message + prost::Name>(table: &Table<ObjectKey, Config<M>>, kind: Kind, rows: &mut Vec<Value>) {
    rows.extend(table.iter(&Cx::untracked()).map(|(key, config)| {
        json!({
            "kind": kind.name(),
            "apiVersion": format!("{}/{}", kind.group(), kind.version()),
            "metadata": {
                "name": key.name,
                "namespace": key.namespace.as_str(),
                "labels": config.meta.labels,
                "annotations": config.meta.annotations,
                "resourceVersion": config.meta.resource_version,
                "creationTimestamp": time(config.meta.creation),
            },
            "spec": json::to_json(&config.spec),
        })
    }));
}

/// Returns the network gateways, by address and port.
pub(super) fn networks(mesh: &MeshSnapshot) -> Value {
    let networks = mesh.networks.get(&Cx::untracked(), &());
    let gateways = networks
        .iter()
        .flat_map(|networks| networks.by_network.values().flatten());
    let mut gateways: Vec<_> = gateways.collect();
    gateways.sort();
    let rows = gateways.into_iter().map(|gateway| {
        let (namespace, name) = gateway.service_account.split_once('/').unwrap_or_default();
        json!({
            "Network": gateway.network.as_str(),
            "Cluster": gateway.cluster.as_str(),
            "Addr": gateway.address,
            "Port": gateway.port,
            "HBONEPort": gateway.hbone_port,
            "ServiceAccount": { "Namespace": namespace, "Name": name },
        })
    });
    rows.collect()
}

/// Returns exports and imports of services by cluster.
pub(super) fn mcs(mesh: &MeshSnapshot) -> Value {
    let (cx, features) = (Cx::untracked(), &mesh.installation.features);
    let mut keys: BTreeSet<&ObjectKey> = BTreeSet::new();
    if features.enable_mcs_service_discovery {
        keys.extend(mesh.service_exports.iter(&cx).map(|(key, _)| key));
    }
    if mcs::has_hosts(features) {
        keys.extend(mesh.service_imports.iter(&cx).map(|(key, _)| key));
    }
    let mut keys: Vec<&ObjectKey> = keys.into_iter().collect();
    keys.sort_by_key(|key| (&key.cluster, &key.namespace, &key.name));
    let row = |key: &ObjectKey| {
        let own = format!("{}.{}.svc.{}", key.name, key.namespace, mesh.installation.domain);
        let hosts = [Hostname::from(own), mcs::hostname(&key.name, &key.namespace)];
        let exported = features.enable_mcs_service_discovery && mesh.service_exports.get(&cx, key).is_some();
        let policies: Map<String, Value> = hosts
            .into_iter()
            .filter_map(|hostname| {
                let namespace = key.namespace.clone();
                let service = mesh.services.get(&cx, &ServiceKey { hostname, namespace })?;
                let known = mcs::is_known(&cx, mesh, service, &key.cluster);
                let cluster_local = mcs::is_cluster_local_in(&cx, mesh, service, &key.cluster);
                let policy = if cluster_local {
                    "DiscoverableFromSameCluster"
                } else {
                    "AlwaysDiscoverable"
                };
                known.then(|| (service.key.hostname.to_string(), json!(policy)))
            })
            .collect();
        json!({
            "Cluster": key.cluster.as_str(),
            "Name": key.name,
            "Namespace": key.namespace.as_str(),
            "Exported": exported,
            "Imported": mcs::has_hosts(features) && mesh.service_imports.get(&cx, key).is_some(),
            "ClusterSetVIP": mcs::vips(&cx, mesh, key).into_iter().next().unwrap_or_default(),
            "Discoverability": if exported { Value::Object(policies) } else { Value::Null },
        })
    };
    keys.into_iter().map(row).collect()
}

/// Returns a client of `connections`.
pub(super) fn connection(connection: &LiveConnection) -> Value {
    json!({
        "connectionId": connection.id,
        "connectedAt": moment(connection.connected_at.into()),
        "address": connection.peer.map(|peer| peer.to_string()).unwrap_or_default(),
    })
}

/// Returns a client of `adsz`.
pub(super) fn client(live: &LiveConnection) -> Value {
    let mut client = connection(live);
    let watches: Map<String, Value> = live
        .types()
        .into_iter()
        .map(|status| (status.resource_type.url().to_owned(), json!(status.names)))
        .collect();
    client["labels"] = json!(live.proxy.labels());
    client["metadata"] = json!(live.proxy.metadata.values());
    client["locality"] = json!(live.proxy.node_locality);
    client["watches"] = Value::Object(watches);
    client
}

/// Returns a row of `syncz` with nonces; empty ones are omitted.
pub(super) fn sync(live: &LiveConnection) -> Value {
    let proxy = &live.proxy;
    let types = live.types();
    let proxy_type = match proxy.node.proxy_type {
        ProxyType::Sidecar => "sidecar",
        ProxyType::Router => "router",
        ProxyType::Waypoint => "waypoint",
        ProxyType::Ztunnel => "ztunnel",
        ProxyType::Agentgateway => "agentgateway",
    };
    let mut row = Map::new();
    let mut put = |key: &str, value: &str| {
        if !value.is_empty() {
            row.insert(key.to_owned(), json!(value));
        }
    };
    put("cluster_id", &proxy.node.cluster);
    put("proxy", &proxy.id);
    put("proxy_type", proxy_type);
    put("istio_version", &proxy.node.version_text);
    put("proxy_version", &proxy.node.version_text);
    let fields = [
        (ResourceType::Cluster, "cluster"),
        (ResourceType::Listener, "listener"),
        (ResourceType::Route, "route"),
        (ResourceType::Endpoint, "endpoint"),
        (ResourceType::Extension, "extensionconfig"),
    ];
    for (resource_type, field) in fields {
        if let Some(status) = types.iter().find(|status| status.resource_type == resource_type) {
            put(&format!("{field}_sent"), &status.nonce_sent);
            put(&format!("{field}_acked"), &status.nonce_acked);
        }
    }
    let resources: Map<String, Value> = types
        .iter()
        .map(|status| (status.resource_type.url().to_owned(), type_status(status)))
        .collect();
    row.insert("resources".to_owned(), Value::Object(resources));
    Value::Object(row)
}

fn type_status(status: &TypeStatus) -> Value {
    let mut entry = json!({ "sent": status.nonce_sent, "acked": status.nonce_acked });
    if let Some(sent_at) = status.sent_at {
        entry["sentTime"] = moment(sent_at.into());
    }
    if let Some(error) = &status.last_error {
        entry["lastError"] = json!(error);
    }
    entry
}

/// Returns the resources of a type as JSON with their types, without private keys.
pub(super) fn bodies(resources: &ResourceSnapshot, resource_type: ResourceType) -> Vec<Value> {
    resources
        .resources(resource_type)
        .iter()
        .map(|resource| redacted(json::any_to_json(&resource.any())))
        .collect()
}

/// Returns the resources of these types, named as in metrics (`cds`) or by URL.
pub(super) fn of_types(resources: &ResourceSnapshot, types: &[&str]) -> Vec<Value> {
    let is_selected = |resource_type: &ResourceType| {
        let short = resource_type.short_name();
        types
            .iter()
            .any(|name| name.eq_ignore_ascii_case(short) || *name == resource_type.url())
    };
    ResourceType::ALL
        .iter()
        .filter(|resource_type| is_selected(resource_type))
        .flat_map(|resource_type| bodies(resources, *resource_type))
        .collect()
}

/// Returns `configs` of Envoy's `admin.v3.ConfigDump`, as the proxy would show it.
pub(super) fn config_dump(resources: &ResourceSnapshot, include_endpoints: bool) -> Vec<Value> {
    let wrap = |resource_type, field: &str| -> Vec<Value> {
        let bodies = bodies(resources, resource_type).into_iter();
        bodies.map(|body| json!({ field: body })).collect()
    };
    let named = |resource_type, form: fn(Value, Value) -> Value| -> Vec<Value> {
        let bodies = bodies(resources, resource_type).into_iter();
        bodies
            .map(|body| form(body.get("name").cloned().unwrap_or_default(), body))
            .collect()
    };
    let section = |name: &str, field: &str, entries: Vec<Value>| {
        let mut section = json!({ "@type": format!("type.googleapis.com/envoy.admin.v3.{name}") });
        if !entries.is_empty() {
            section[field] = Value::Array(entries);
        }
        section
    };
    let clusters = wrap(ResourceType::Cluster, "cluster");
    let listeners = named(
        ResourceType::Listener,
        |name, body| json!({ "name": name, "active_state": { "listener": body } }),
    );
    let routes = wrap(ResourceType::Route, "route_config");
    let secrets = named(
        ResourceType::Secret,
        |name, body| json!({ "name": name, "secret": body }),
    );
    let filters = wrap(ResourceType::Extension, "ecds_filter");
    let mut configs = vec![
        section("BootstrapConfigDump", "", Vec::new()),
        section("ClustersConfigDump", "dynamic_active_clusters", clusters),
    ];
    if include_endpoints {
        let endpoints = wrap(ResourceType::Endpoint, "endpoint_config");
        configs.push(section("EndpointsConfigDump", "dynamic_endpoint_configs", endpoints));
    }
    configs.extend([
        section("ListenersConfigDump", "dynamic_listeners", listeners),
        section("ScopedRoutesConfigDump", "", Vec::new()),
        section("RoutesConfigDump", "dynamic_route_configs", routes),
        section("SecretsConfigDump", "dynamic_active_secrets", secrets),
        section("EcdsConfigDump", "ecds_filters", filters),
    ]);
    configs
}
