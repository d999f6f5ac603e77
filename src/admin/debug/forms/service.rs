//! Services, in the form of `model.Service`.
//!
//! Parity (pilot/pkg/model/service.go).

use serde_json::{Map, Value, json};
use smol_str::SmolStr;

use super::{labels_or_null, list_or_null, map_or_null, put, time};
use crate::{
    base::ObjectKey,
    generate::proxy_class::ServiceTarget,
    model::{
        MeshSnapshot, ServiceKey,
        export::ExportTo,
        service::{Protocol, Registry, Resolution, Service, ServicePort, TrafficDistribution},
    },
    table::Cx,
};

/// Returns every service.
pub(in crate::admin::debug) fn registry(mesh: &MeshSnapshot) -> Value {
    let cx = Cx::untracked();
    let rows = mesh.services.iter(&cx);
    list_or_null(rows.flat_map(|(_, row)| row.all()).map(|member| service(mesh, member)))
}

/// Returns the service of a key; `null` if it is gone.
pub(super) fn of_key(mesh: &MeshSnapshot, key: &ServiceKey) -> Value {
    let row = mesh.services.get(&Cx::untracked(), key);
    row.map_or(Value::Null, |row| service(mesh, row))
}

/// Returns a service.
pub(super) fn service(mesh: &MeshSnapshot, service: &Service) -> Value {
    let object = object(mesh, service);
    let mut form = Map::new();
    form.insert("Attributes".to_owned(), attributes(service, &object.kind));
    if !service.ports.is_empty() {
        let ports = service.ports.iter().map(|port| Value::Object(self::port(port)));
        form.insert("ports".to_owned(), ports.collect());
    }
    if !service.service_accounts.is_empty() {
        form.insert("serviceAccounts".to_owned(), json!(*service.service_accounts));
    }
    form.insert("creationTime".to_owned(), time(service.creation));
    form.insert("hostname".to_owned(), json!(service.key.hostname.as_str()));
    let vips = service
        .cluster_vips
        .iter()
        .map(|(cluster, vips)| (cluster, json!(vips)));
    form.insert("clusterVIPs".to_owned(), json!({ "Addresses": map_or_null(vips) }));
    put(&mut form, "defaultAddress", &service.default_address);
    put(&mut form, "autoAllocatedIPv4Address", &service.auto_ipv4);
    put(&mut form, "autoAllocatedIPv6Address", &service.auto_ipv6);
    form.insert("Resolution".to_owned(), json!(resolution(service.resolution)));
    form.insert("MeshExternal".to_owned(), json!(service.mesh_external));
    form.insert("ResourceVersion".to_owned(), json!(object.resource_version));
    Value::Object(form)
}

/// Returns the service of a target, with the port that the workload serves.
pub(super) fn target(mesh: &MeshSnapshot, target: &ServiceTarget) -> Option<Value> {
    let service = mesh.services.get(&Cx::untracked(), &target.service)?;
    let mut port = target.declared(service).map(self::port)?;
    port.insert("TargetPort".to_owned(), json!(target.target_port));
    Some(json!({ "Service": self::service(mesh, service), "Port": port }))
}

/// Attributes of the Kubernetes Service of a row: the one in the config cluster, or else in the first cluster by id.
#[derive(Default)]
struct KubeObject {
    kind: SmolStr,
    resource_version: SmolStr,
}

fn object(mesh: &MeshSnapshot, service: &Service) -> KubeObject {
    if service.registry == Registry::External {
        return KubeObject::default();
    }
    let cx = Cx::untracked();
    let clusters = std::iter::once(&mesh.installation.cluster).chain(service.cluster_vips.keys());
    let mut keys = clusters.map(|cluster| ObjectKey::new(cluster, service.key.namespace.clone(), service.name.clone()));
    let row = keys.find_map(|key| mesh.kube_services.get(&cx, &key));
    row.map_or_else(KubeObject::default, |row| KubeObject {
        kind: row.service_type.clone(),
        resource_version: row.meta.resource_version.clone(),
    })
}

fn attributes(service: &Service, kind: &str) -> Value {
    let export_to = match &*service.export_to {
        ExportTo::Public => Value::Null,
        ExportTo::None => json!({ "~": {} }),
        ExportTo::Namespaces(namespaces) => map_or_null(namespaces.iter().map(|namespace| (namespace, json!({})))),
    };
    let aliases = service
        .aliases
        .iter()
        .map(|alias| json!({ "Namespace": alias.namespace.as_str(), "Hostname": alias.hostname.as_str() }));
    let addresses = service.external_addresses.iter();
    let addresses = addresses.map(|(cluster, addresses)| (cluster, json!(**addresses)));
    let ports = service.external_ports.iter();
    let ports = ports.map(|(cluster, ports)| {
        (
            cluster,
            map_or_null(ports.iter().map(|(port, node)| (port, json!(node)))),
        )
    });
    let distribution = match service.traffic_distribution {
        TrafficDistribution::Any => 0,
        TrafficDistribution::PreferSameZone => 1,
        TrafficDistribution::PreferSameNode => 2,
    };
    let is_entry = service.registry == Registry::External;
    json!({
        "ServiceRegistry": registry_name(service.registry),
        "Name": if is_entry { service.key.hostname.as_str() } else { service.name.as_str() },
        "Namespace": service.key.namespace.as_str(),
        "Labels": labels_or_null(&service.labels),
        "ExportTo": export_to,
        "LabelSelectors": labels_or_null(&service.selector),
        "Aliases": list_or_null(aliases),
        "ClusterExternalAddresses": { "Addresses": map_or_null(addresses) },
        "ClusterExternalPorts": map_or_null(ports),
        "PassthroughTargetPorts": Value::Null,
        "Type": kind,
        "ExternalName": service.external_name.as_str(),
        "NodeLocal": service.node_local,
        "TrafficDistribution": distribution,
        "ObjectName": if is_entry { service.name.as_str() } else { "" },
        "DNSConnectStrategy": u8::from(service.race_first_tcp_connect),
        "PublishNotReadyAddresses": service.publish_not_ready,
    })
}

fn port(port: &ServicePort) -> Map<String, Value> {
    let mut form = Map::new();
    put(&mut form, "name", &port.name);
    form.insert("port".to_owned(), json!(port.number));
    form.insert("protocol".to_owned(), json!(protocol(port.protocol)));
    form
}

/// Parity (pkg/config/protocol/instance.go).
pub(super) fn protocol(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Unsupported => "UnsupportedProtocol",
        Protocol::Http => "HTTP",
        Protocol::HttpProxy => "HTTP_PROXY",
        Protocol::Http2 => "HTTP2",
        Protocol::Https => "HTTPS",
        Protocol::Grpc => "GRPC",
        Protocol::GrpcWeb => "GRPC-Web",
        Protocol::Tcp => "TCP",
        Protocol::Tls => "TLS",
        Protocol::Udp => "UDP",
        Protocol::Mongo => "Mongo",
        Protocol::Redis => "Redis",
        Protocol::Mysql => "MySQL",
    }
}

fn resolution(resolution: Resolution) -> u8 {
    match resolution {
        Resolution::ClientSideLb => 0,
        Resolution::DnsLb => 1,
        Resolution::Passthrough => 2,
        Resolution::DnsRoundRobinLb => 3,
        Resolution::Alias => 4,
        Resolution::DynamicDns => 5,
    }
}

pub(super) fn registry_name(registry: Registry) -> &'static str {
    match registry {
        Registry::Kubernetes => "Kubernetes",
        Registry::External => "External",
    }
}
