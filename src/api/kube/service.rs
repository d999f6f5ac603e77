//! core/v1 Service.

use smol_str::SmolStr;

use crate::{
    api::{Meta, meta::Keyed},
    base::{Labels, ObjectKey, Shared},
};

/// A Kubernetes Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Metadata.
    pub meta: Shared<Meta>,
    /// `spec.type`, `ClusterIP` when absent.
    pub service_type: SmolStr,
    /// `spec.clusterIPs`, else `spec.clusterIP`; `None` as text for headless ones.
    pub cluster_ips: Vec<SmolStr>,
    /// `spec.ports`.
    pub ports: Vec<Port>,
    /// `spec.selector`.
    pub selector: Labels,
    /// `spec.externalName`.
    pub external_name: SmolStr,
    /// `spec.externalIPs`.
    pub external_ips: Vec<SmolStr>,
    /// `status.loadBalancer.ingress`: IP, else host name.
    pub load_balancer: Vec<SmolStr>,
    /// `spec.internalTrafficPolicy` is `Local`.
    pub node_local: bool,
    /// `spec.trafficDistribution`.
    pub traffic_distribution: SmolStr,
    /// `spec.publishNotReadyAddresses`.
    pub publish_not_ready: bool,
}

/// One port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// `name`.
    pub name: SmolStr,
    /// `port`.
    pub number: u32,
    /// `protocol`: `TCP` when absent.
    pub protocol: SmolStr,
    /// `appProtocol`.
    pub app_protocol: Option<SmolStr>,
    /// `targetPort`.
    pub target: TargetPort,
    /// `nodePort`, 0 when absent.
    pub node_port: u32,
}

/// Where a Service port leads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TargetPort {
    /// A number; 0 when the object gives none.
    Number(u32),
    /// A named container port.
    Name(SmolStr),
}

impl Keyed for Service {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
