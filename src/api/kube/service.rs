//! core/v1 Service.

use serde_json::Value;
use smol_str::SmolStr;

use crate::{
    api::{
        FieldError, Meta,
        field::{FieldErrors, Fields},
        meta::Keyed,
    },
    base::{Labels, ObjectKey, Shared},
};

/// A Kubernetes Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Metadata.
    pub meta: Shared<Meta>,
    /// `spec.type`; `ClusterIP` if absent.
    pub service_type: SmolStr,
    /// `spec.clusterIPs`, else `spec.clusterIP`; the text `None` for headless Services.
    pub cluster_ips: Vec<SmolStr>,
    /// `spec.ipFamilies`: `IPv4`, `IPv6`, or both.
    pub ip_families: Vec<SmolStr>,
    /// `spec.ports`.
    pub ports: Vec<Port>,
    /// `spec.selector`.
    pub selector: Labels,
    /// `spec.externalName`.
    pub external_name: SmolStr,
    /// `spec.externalIPs`.
    pub external_ips: Vec<SmolStr>,
    /// `status.loadBalancer.ingress`: IP addresses, else host names.
    pub load_balancer: Vec<SmolStr>,
    /// True if `spec.internalTrafficPolicy` is `Local`.
    pub node_local: bool,
    /// `spec.trafficDistribution`.
    pub traffic_distribution: SmolStr,
    /// `spec.publishNotReadyAddresses`.
    pub publish_not_ready: bool,
}

impl Service {
    /// Parses a manifest. Each invalid field is an error with its path.
    pub fn parse(meta: Shared<Meta>, object: &Value) -> Result<Self, Vec<FieldError>> {
        let errors = FieldErrors::default();
        let root = Fields::root(object, &errors);
        let spec = root.object("spec");
        // `clusterIP` decides, unless the list has more entries.
        let mut cluster_ips = spec.texts("clusterIPs");
        let first = spec.optional_text("clusterIP").filter(|ip| !ip.is_empty());
        if let Some(first) = first.filter(|first| cluster_ips.len() < 2 || first == "None") {
            cluster_ips = vec![first];
        }
        let ingress = root.object("status").object("loadBalancer").objects("ingress");
        let load_balancer = ingress
            .iter()
            .map(|ingress| match ingress.text("ip") {
                ip if ip.is_empty() => ingress.text("hostname"),
                ip => ip,
            })
            .filter(|address| !address.is_empty())
            .collect();
        let service_type = spec.text("type");
        let service = Self {
            meta,
            service_type: if service_type.is_empty() {
                SmolStr::new_static("ClusterIP")
            } else {
                service_type
            },
            cluster_ips,
            ip_families: spec.texts("ipFamilies"),
            ports: spec.objects("ports").iter().map(Port::parse).collect(),
            selector: spec.labels("selector"),
            external_name: spec.text("externalName"),
            external_ips: spec.texts("externalIPs"),
            load_balancer,
            node_local: spec.text("internalTrafficPolicy") == "Local",
            traffic_distribution: spec.text("trafficDistribution"),
            publish_not_ready: spec.flag("publishNotReadyAddresses").unwrap_or_default(),
        };
        errors.finish(service)
    }

    /// Returns true for `clusterIP: None`.
    pub fn is_headless(&self) -> bool {
        self.cluster_ips.first().is_some_and(|ip| ip == "None")
    }

    /// Returns true for `type: ExternalName`.
    pub fn is_external_name(&self) -> bool {
        self.service_type == "ExternalName"
    }
}

impl Port {
    fn parse(fields: &Fields<'_>) -> Self {
        let protocol = fields.text("protocol");
        let target = match fields.raw("targetPort") {
            Some(Value::String(name)) => TargetPort::Name(SmolStr::new(name)),
            _ => TargetPort::Number(fields.port("targetPort")),
        };
        let number = fields.port("port");
        if number == 0 && !fields.has("port") {
            fields.error("port", "is required");
        }
        Self {
            name: fields.text("name"),
            number,
            protocol: if protocol.is_empty() {
                SmolStr::new_static("TCP")
            } else {
                protocol
            },
            app_protocol: fields.optional_text("appProtocol"),
            target,
            node_port: fields.port("nodePort"),
        }
    }
}

/// A port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// `name`.
    pub name: SmolStr,
    /// `port`.
    pub number: u32,
    /// `protocol`; `TCP` if absent.
    pub protocol: SmolStr,
    /// `appProtocol`.
    pub app_protocol: Option<SmolStr>,
    /// `targetPort`.
    pub target: TargetPort,
    /// `nodePort`; 0 if absent.
    pub node_port: u32,
}

/// The target of a Service port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TargetPort {
    /// A number; 0 if absent.
    Number(u32),
    /// A named container port.
    Name(SmolStr),
}

impl Keyed for Service {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
