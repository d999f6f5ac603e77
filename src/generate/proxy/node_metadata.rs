//! `NodeMetadata`: the node metadata that replicas of one workload have in common.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use super::{
    Extensions, InterceptionMode, IstioVersion, ProxyType, is_on,
    metadata_key::{MetadataKey, MetadataValues},
};
use crate::{
    base::{ClusterId, MessageKey, Namespace, NetworkId, Shared, cidr::IpMode},
    proto::istio::mesh::v1alpha1::ProxyConfig,
};

/// The node attributes that generation always reads. They do not identify a replica. Attributes that are read only if
/// the mesh refers to them are in [`ProxyClass`](crate::generate::proxy_class::ProxyClass).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NodeMetadata {
    /// The type.
    pub proxy_type: ProxyType,
    /// `node.cluster`.
    pub node_cluster: SmolStr,
    /// The fourth part of the node id.
    pub dns_domain: SmolStr,
    /// The config namespace.
    pub namespace: Namespace,
    /// `CLUSTER_ID`.
    pub cluster: ClusterId,
    /// `NETWORK`.
    pub network: NetworkId,
    /// The address families.
    pub ip_mode: IpMode,
    /// `MESH_ID`.
    pub mesh_id: SmolStr,
    /// `WORKLOAD_NAME`.
    pub workload_name: SmolStr,
    /// True with the annotation by which a waypoint tells the services behind it who the client is.
    pub forwards_client_identity: bool,
    /// The annotation with the service name in traces; empty if absent.
    pub otel_service_name: SmolStr,
    /// `GENERATOR`; empty for Envoys.
    pub generator: SmolStr,
    /// `ISTIO_VERSION` as text, for `proxyVersion` of EnvoyFilters.
    pub version_text: SmolStr,
    /// `ISTIO_VERSION`, parsed.
    pub version: IstioVersion,
    /// `INTERCEPTION_MODE`.
    pub interception_mode: InterceptionMode,
    /// `REQUESTED_NETWORK_VIEW`; empty means all networks.
    pub network_view: Shared<BTreeSet<NetworkId>>,
    /// `PROXY_CONFIG`, which replaces `mesh.defaultConfig`; `None` if it is absent.
    pub proxy_config: Option<MessageKey<ProxyConfig>>,
    /// The extensions of the proxy.
    pub extensions: Extensions,
    /// The other metadata that generation reads.
    pub(super) values: MetadataValues,
}

impl NodeMetadata {
    /// Returns a metadata value as text; empty if absent.
    pub fn metadata_value(&self, key: MetadataKey) -> SmolStr {
        self.values.get(key)
    }

    /// Returns a metadata value as a boolean: `"true"`, `"1"` and the JSON `true` are true.
    pub fn has(&self, key: MetadataKey) -> bool {
        is_on(&self.metadata_value(key))
    }

    /// Returns true for proxyless gRPC clients and servers, which request resources by name.
    pub fn is_proxyless(&self) -> bool {
        self.generator == "grpc"
    }
}
