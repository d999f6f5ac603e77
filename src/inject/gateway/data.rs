//! The data of templates: Istio's `derivedInput`, in which the Gateway's fields are embedded.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value as Json, json};

use super::{Deployed, GATEWAY_NAME, GatewayError, GatewayRequest, Port, STATUS_PORT, check};
use crate::{
    api::label::NETWORK,
    base::Labels,
    inject::{
        Environment,
        config::Values,
        data::{self, Fields, kube_list, kube_value},
        environment::{NativeSidecars, reflected},
        pod, render,
    },
    template::{Map, Value},
};

/// Labels or annotations.
pub(super) type Metadata = BTreeMap<String, String>;

/// Keys of Gateways' infrastructure with this prefix are ignored.
const RESERVED: &str = "gateway.networking.k8s.io/";
/// Label that says whether pods are captured for the ambient mesh.
const DATAPLANE_MODE: &str = "istio.io/dataplane-mode";

/// Returns the labels and annotations of all objects: those of the infrastructure, or copies of the Gateway's.
pub(super) fn metadata(request: &GatewayRequest<'_>) -> (Metadata, Metadata) {
    let infrastructure = request.gateway.pointer("/spec/infrastructure").unwrap_or(&Json::Null);
    let entries = |field: &str| {
        if let Some(given) = infrastructure.get(field).filter(|value| value.is_object()) {
            let mut given = texts(given);
            given.retain(|key, _| !key.starts_with(RESERVED));
            return given;
        }
        if !request.copies_metadata {
            return Metadata::new();
        }
        request
            .gateway
            .pointer(&format!("/metadata/{field}"))
            .map(texts)
            .unwrap_or_default()
    };
    (entries("labels"), entries("annotations"))
}

fn texts(object: &Json) -> Metadata {
    let entries = object.as_object().into_iter().flatten();
    entries
        .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
        .collect()
}

/// Adds labels that follow from the class.
pub(super) fn add_labels(request: &GatewayRequest<'_>, class_name: &str, network: &str, labels: &mut Metadata) {
    let is_ambient = class_name.contains("waypoint") || class_name.contains("east-west");
    let is_labelled = |label: &str| pod::label(request.gateway, label).is_some();
    if request.ambient && !is_ambient && !is_labelled(DATAPLANE_MODE) {
        labels
            .entry(DATAPLANE_MODE.to_owned())
            .or_insert_with(|| "none".to_owned());
    }
    if is_ambient && !network.is_empty() && !is_labelled(NETWORK) {
        labels.insert(NETWORK.to_owned(), network.to_owned());
    }
}

/// Returns the data of the template.
pub(super) fn of_template(
    deployed: &Deployed<'_>,
    values: &Values,
    environment: &Environment,
) -> Result<Value, GatewayError> {
    let request = deployed.request;
    let gateway = request.gateway;
    let labels: Labels = [(GATEWAY_NAME.into(), deployed.gateway_name.into())]
        .into_iter()
        .collect();
    let own_config = environment.resource_proxy_config(deployed.namespace, &labels);
    let proxy_config = own_config.as_ref().unwrap_or(&environment.mesh.default_config);
    check::proxy_config(gateway, proxy_config)?;
    let of_annotation = |name: &str| pod::annotation(gateway, name);
    let of_config = proxy_config.image.as_ref().map(|image| image.image_type.as_str());
    let image_type = of_annotation("sidecar.istio.io/proxyImageType").or(of_config);
    let agentgateway_type = of_annotation("gateway.istio.io/agentgatewayImage").or(of_config);
    let (uid, gid) = render::assigned_ids(&environment.namespace);
    let null = Json::Null;
    let meta = kube_value("ObjectMeta", gateway.get("metadata").unwrap_or(&null));
    let text = |field: &str| Value::string(pod::text(gateway, field));
    let fields = vec![
        ("Gateway", kube_value("Gateway", gateway)),
        ("Kind", text("kind")),
        ("APIVersion", text("apiVersion")),
        ("ObjectMeta", meta.clone()),
        ("Spec", kube_value("GatewaySpec", gateway.get("spec").unwrap_or(&null))),
        ("GatewayClass", deployed.class_name.into()),
        ("DeploymentName", deployed.name.as_str().into()),
        ("ServiceAccount", deployed.service_account.as_str().into()),
        ("Ports", kube_list("ServicePort", &ports(gateway, request.more_ports))),
        ("ServiceType", deployed.service_type.as_str().into()),
        ("ClusterID", request.cluster.into()),
        ("KubeVersion", Value::int(request.kubernetes_version)),
        ("Revision", environment.revision.as_str().into()),
        (
            "NativeSidecars",
            (environment.native_sidecars != NativeSidecars::Disabled).into(),
        ),
        ("ProxyUID", Value::int64(uid)),
        ("ProxyGID", Value::int64(gid)),
        ("CompliancePolicy", environment.compliance_policy.as_str().into()),
        ("InfrastructureLabels", map(&deployed.labels)),
        ("InfrastructureAnnotations", map(&deployed.annotations)),
        ("GatewayNameLabel", GATEWAY_NAME.into()),
        ("IsEastWestGateway", request.class.is_east_west.into()),
        ("ControllerLabel", request.class.label.into()),
        ("ProxyImage", values.proxy_image(image_type).into()),
        (
            "AgentgatewayImage",
            values.image("agentgateway", agentgateway_type).into(),
        ),
        (
            "ProxyConfig",
            match &own_config {
                Some(config) => data::message(&reflected(config)),
                None => environment.mesh.proxy_template.clone(),
            },
        ),
        ("MeshConfig", environment.mesh.template.clone()),
        ("Values", values.for_template()),
    ];
    Ok(Fields::embedding(meta, "gatewaycommon.derivedInput", fields))
}

fn map(metadata: &Metadata) -> Value {
    Map::of_strings(metadata.iter().map(|(key, value)| (key.clone(), value.clone()))).into()
}

/// Returns the ports of the Service: that of load balancers' probes, then one for each number. API servers refuse a
/// Service with two ports of one number or name, and a ListenerSet of another namespace must not cause that.
fn ports(gateway: &Json, more: &[Port]) -> Vec<Json> {
    let listeners = gateway.pointer("/spec/listeners").and_then(Json::as_array);
    let own = listeners.into_iter().flatten().map(|listener| Port {
        name: pod::text(listener, "name").to_owned(),
        number: listener["port"]
            .as_u64()
            .and_then(|port| u16::try_from(port).ok())
            .unwrap_or_default(),
        protocol: pod::text(listener, "protocol").to_owned(),
    });
    let mut ports = vec![json!({"name": STATUS_PORT_NAME, "port": STATUS_PORT, "appProtocol": "tcp"})];
    let mut known = BTreeSet::from([STATUS_PORT]);
    let mut names = BTreeSet::from([STATUS_PORT_NAME.to_owned()]);
    let more = more.iter().filter(|port| check::is_port(port));
    for (index, port) in own.chain(more.cloned()).enumerate() {
        if !known.insert(port.number) {
            continue;
        }
        let protocol = port.protocol.to_lowercase();
        let mut name = port.name.replace('.', "-");
        name.truncate(name.floor_char_boundary(MAX_PORT_NAME));
        if name.is_empty() {
            name = format!("{protocol}-{index}");
        }
        let name = unique(&name, port.number, &mut names);
        ports.push(json!({"name": name, "port": port.number, "appProtocol": protocol}));
    }
    ports
}

/// Returns a name that no other port has: the number follows if a port before has it, as in Istio 1.31.
fn unique(name: &str, number: u16, names: &mut BTreeSet<String>) -> String {
    let mut found = name.to_owned();
    let mut attempts = 0_u32;
    while !names.insert(found.clone()) {
        let suffix = match attempts {
            0 => format!("-{number}"),
            attempts => format!("-{number}-{attempts}"),
        };
        let end = name.floor_char_boundary(MAX_PORT_NAME - suffix.len());
        found = [&name[..end], &suffix].concat();
        attempts += 1;
    }
    found
}

/// The name of the port of load balancers' probes.
const STATUS_PORT_NAME: &str = "status-port";
/// The longest name of a Service's port.
const MAX_PORT_NAME: usize = 63;
