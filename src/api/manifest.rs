//! Writes rows as manifests, the reverse of parsing: the parsed manifest is an equal row.
//!
//! Covers the kinds that count in remote clusters, except Secrets, whose content must not be written anywhere. Note: a
//! manifest has only what the row keeps of the object. A hidden Gateway has the manifest of the whole one, because
//! discovery selectors decide again whether it is hidden.

use serde::Serialize;
use serde_json::{Map, Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{
    Config, Kind, Meta, Row,
    kube::{EndpointSlice, Node, Pod, Service, endpoint_slice::SliceEndpoint, service},
};
use crate::proto::{istio::mesh::v1alpha1::MeshConfig, json::to_json};

/// The kinds of the objects that manifests describe.
pub const KINDS: [Kind; 10] = [
    Kind::MeshConfig,
    Kind::Namespace,
    Kind::Node,
    Kind::Pod,
    Kind::Service,
    Kind::EndpointSlice,
    Kind::WorkloadEntry,
    Kind::KubeGateway,
    Kind::ServiceExport,
    Kind::ServiceImport,
];

/// Returns the manifest of a row, whose kind is one of [`KINDS`]; `None` for rows without one.
pub fn manifest(row: &Row) -> Option<Value> {
    Some(match row {
        Row::MeshConfig(row) => object(&row.meta, metadata(&row.meta), remote_mesh(&row.spec)),
        Row::Namespace(namespace) => object(&namespace.meta, metadata(&namespace.meta), Map::new()),
        Row::Node(row) => object(&row.meta, metadata(&row.meta), node(row)),
        Row::Pod(row) => object(&row.meta, pod_metadata(row), pod(row)),
        Row::Service(row) => object(&row.meta, metadata(&row.meta), service(row)),
        Row::EndpointSlice(row) => object(&row.meta, metadata(&row.meta), endpoint_slice(row)),
        Row::WorkloadEntry(row) => config(row, to_json(&row.spec)),
        Row::KubeGateway(row) => typed(row)?,
        Row::HiddenGateway(row) => typed(&row.gateway)?,
        Row::ServiceExport(row) => typed(row)?,
        Row::ServiceImport(row) => typed(row)?,
        _ => return None,
    })
}

fn object(meta: &Meta, metadata: Map<String, Value>, mut fields: Map<String, Value>) -> Value {
    let (group, version) = (meta.kind.group(), meta.kind.version());
    let api_version = if group.is_empty() {
        version.to_owned()
    } else {
        format!("{group}/{version}")
    };
    fields.insert("apiVersion".to_owned(), api_version.into());
    fields.insert("kind".to_owned(), meta.kind.name().into());
    fields.insert("metadata".to_owned(), metadata.into());
    Value::Object(fields)
}

fn config<T>(config: &Config<T>, spec: Value) -> Value {
    let mut fields = Map::from_iter([("spec".to_owned(), spec)]);
    if let Some(status) = &config.status {
        fields.insert("status".to_owned(), Value::clone(status));
    }
    object(&config.meta, metadata(&config.meta), fields)
}

/// Returns the manifest of an object whose `spec` is a Rust type. Absent fields are null, which parsing ignores.
fn typed<T: Serialize>(row: &Config<T>) -> Option<Value> {
    Some(config(row, serde_json::to_value(&row.spec).ok()?))
}

fn metadata(meta: &Meta) -> Map<String, Value> {
    let mut fields = Map::new();
    let mut set = |name: &str, value: Value| {
        fields.insert(name.to_owned(), value);
    };
    set("name", meta.name().as_str().into());
    if !meta.namespace().is_empty() {
        set("namespace", meta.namespace().as_str().into());
    }
    if !meta.labels.is_empty() {
        set("labels", json!(*meta.labels));
    }
    if !meta.annotations.is_empty() {
        set("annotations", json!(meta.annotations));
    }
    let creation = OffsetDateTime::from_unix_timestamp(meta.creation).ok();
    if let Some(text) = creation.and_then(|creation| creation.format(&Rfc3339).ok()) {
        set("creationTimestamp", text.into());
    }
    if meta.generation != 0 {
        set("generation", meta.generation.into());
    }
    if meta.resource_version != "1" {
        set("resourceVersion", meta.resource_version.as_str().into());
    }
    fields
}

/// Returns the fields of a ConfigMap with the mesh config of a remote cluster.
fn remote_mesh(config: &MeshConfig) -> Map<String, Value> {
    let text = json!({ "trustDomain": config.trust_domain }).to_string();
    Map::from_iter([("data".to_owned(), json!({ "mesh": text }))])
}

fn node(node: &Node) -> Map<String, Value> {
    let address = |address| json!({ "type": "ExternalIP", "address": address });
    let addresses: Vec<Value> = node.external_ips.iter().map(address).collect();
    let mut status = json!({ "addresses": addresses });
    if !node.kubelet_version.is_empty() {
        status["nodeInfo"] = json!({ "kubeletVersion": node.kubelet_version });
    }
    Map::from_iter([("status".to_owned(), status)])
}

/// Name of an owner whose name does not count, because a label names the workload.
const UNNAMED_OWNER: &str = "owner";

/// Returns the metadata of a pod with an owner from which the same workload follows. The row has the owner's name
/// without the suffixes that controllers append, and such a name stays as it is when it is parsed again.
fn pod_metadata(pod: &Pod) -> Map<String, Value> {
    let mut fields = metadata(&pod.meta);
    if !pod.uid.is_empty() {
        fields.insert("uid".to_owned(), pod.uid.as_str().into());
    }
    if pod.terminating {
        fields.insert("deletionTimestamp".to_owned(), "1970-01-01T00:00:00Z".into());
    }
    let is_named = pod.meta.labels.contains_key("service.istio.io/workload-name");
    let is_itself = pod.workload_kind == "Pod" && (is_named || pod.workload_name == *pod.meta.name());
    if !is_itself {
        let name = if is_named {
            UNNAMED_OWNER
        } else {
            pod.workload_name.as_str()
        };
        let owner = json!([{ "controller": true, "kind": pod.workload_kind, "name": name }]);
        fields.insert("generateName".to_owned(), "-".into());
        fields.insert("ownerReferences".to_owned(), owner);
    }
    fields
}

fn pod(pod: &Pod) -> Map<String, Value> {
    let mut ports = Vec::new();
    for ((name, protocol), number) in &pod.named_ports {
        ports.push(json!({ "name": name, "containerPort": number, "protocol": protocol }));
    }
    let ips: Vec<Value> = pod.ips.iter().map(|ip| json!({ "ip": ip })).collect();
    let ready = if pod.ready { "True" } else { "False" };
    let mut spec = Map::new();
    for (name, text) in [
        ("nodeName", &pod.node_name),
        ("serviceAccountName", &pod.service_account),
        ("hostname", &pod.hostname),
        ("subdomain", &pod.subdomain),
    ] {
        if !text.is_empty() {
            spec.insert(name.to_owned(), text.as_str().into());
        }
    }
    if pod.host_network {
        spec.insert("hostNetwork".to_owned(), true.into());
    }
    if !ports.is_empty() {
        spec.insert("containers".to_owned(), json!([{ "ports": ports }]));
    }
    let status = json!({ "podIPs": ips, "phase": pod.phase, "conditions": [{ "type": "Ready", "status": ready }] });
    Map::from_iter([("spec".to_owned(), spec.into()), ("status".to_owned(), status)])
}

fn service(service: &Service) -> Map<String, Value> {
    let mut spec = Map::from_iter([
        ("type".to_owned(), service.service_type.as_str().into()),
        ("ports".to_owned(), service.ports.iter().map(port).collect()),
    ]);
    let mut set = |name: &str, value: Value, is_set: bool| {
        if is_set {
            spec.insert(name.to_owned(), value);
        }
    };
    set(
        "clusterIPs",
        json!(service.cluster_ips),
        !service.cluster_ips.is_empty(),
    );
    set(
        "ipFamilies",
        json!(service.ip_families),
        !service.ip_families.is_empty(),
    );
    set("selector", json!(service.selector), !service.selector.is_empty());
    set(
        "externalName",
        json!(service.external_name),
        !service.external_name.is_empty(),
    );
    set(
        "externalIPs",
        json!(service.external_ips),
        !service.external_ips.is_empty(),
    );
    set("internalTrafficPolicy", "Local".into(), service.node_local);
    let distribution = &service.traffic_distribution;
    set("trafficDistribution", json!(distribution), !distribution.is_empty());
    set("publishNotReadyAddresses", true.into(), service.publish_not_ready);
    let mut fields = Map::from_iter([("spec".to_owned(), spec.into())]);
    if !service.load_balancer.is_empty() {
        // The row does not distinguish addresses from host names.
        let ingress: Vec<Value> = service.load_balancer.iter().map(|ip| json!({ "ip": ip })).collect();
        let status = json!({ "loadBalancer": { "ingress": ingress } });
        fields.insert("status".to_owned(), status);
    }
    fields
}

fn port(port: &service::Port) -> Value {
    let mut fields = Map::from_iter([
        ("port".to_owned(), port.number.into()),
        ("protocol".to_owned(), port.protocol.as_str().into()),
    ]);
    let mut set = |name: &str, value: Value| {
        fields.insert(name.to_owned(), value);
    };
    if !port.name.is_empty() {
        set("name", port.name.as_str().into());
    }
    if let Some(protocol) = &port.app_protocol {
        set("appProtocol", protocol.as_str().into());
    }
    match &port.target {
        service::TargetPort::Number(0) => {}
        service::TargetPort::Number(number) => set("targetPort", (*number).into()),
        service::TargetPort::Name(name) => set("targetPort", name.as_str().into()),
    }
    if port.node_port != 0 {
        set("nodePort", port.node_port.into());
    }
    Value::Object(fields)
}

fn endpoint_slice(slice: &EndpointSlice) -> Map<String, Value> {
    let ports = slice.ports.iter();
    let ports: Vec<Value> = ports
        .map(|(name, number)| {
            let protocol = if slice.not_tcp.contains(name) { "UDP" } else { "TCP" };
            json!({ "name": name, "port": number, "protocol": protocol })
        })
        .collect();
    Map::from_iter([
        ("addressType".to_owned(), slice.address_type.as_str().into()),
        ("ports".to_owned(), ports.into()),
        ("endpoints".to_owned(), slice.endpoints.iter().map(endpoint).collect()),
    ])
}

fn endpoint(endpoint: &SliceEndpoint) -> Value {
    let mut fields = Map::from_iter([("addresses".to_owned(), json!(endpoint.addresses))]);
    let conditions = [
        ("ready", endpoint.ready),
        ("serving", endpoint.serving),
        ("terminating", endpoint.terminating),
    ];
    let conditions: Map<String, Value> = conditions
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value?.into())))
        .collect();
    if !conditions.is_empty() {
        fields.insert("conditions".to_owned(), conditions.into());
    }
    for (name, text) in [("hostname", &endpoint.hostname), ("nodeName", &endpoint.node_name)] {
        if !text.is_empty() {
            fields.insert(name.to_owned(), text.as_str().into());
        }
    }
    if let Some(pod) = &endpoint.pod {
        let mut target = json!({ "kind": "Pod", "namespace": pod.namespace, "name": pod.name });
        if !pod.uid.is_empty() {
            target["uid"] = pod.uid.as_str().into();
        }
        fields.insert("targetRef".to_owned(), target);
    }
    Value::Object(fields)
}

#[cfg(test)]
mod tests;
