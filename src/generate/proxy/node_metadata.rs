//! `NodeMetadata`: what replicas of one workload say of themselves alike.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use super::{
    Extensions, InterceptionMode, IstioVersion, ProxyType, is_on,
    metadata_key::{MetadataKey, Settings},
};
use crate::{
    base::{ClusterId, MessageKey, Namespace, NetworkId, Shared, cidr::IpMode},
    proto::istio::mesh::v1alpha1::ProxyConfig,
};

/// What generation may read of a node as it stands: nothing that names one replica. What it may read besides is in
/// [`ProxyClass`](crate::generate::proxy_class::ProxyClass), where it depends on the mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NodeMetadata {
    /// What it is.
    pub proxy_type: ProxyType,
    /// `node.cluster`.
    pub node_cluster: SmolStr,
    /// Fourth part of the node id.
    pub dns_domain: SmolStr,
    /// Config namespace.
    pub namespace: Namespace,
    /// Its cluster.
    pub cluster: ClusterId,
    /// `NETWORK`.
    pub network: NetworkId,
    /// The families of its addresses.
    pub ip_mode: IpMode,
    /// `MESH_ID`.
    pub mesh_id: SmolStr,
    /// `WORKLOAD_NAME`.
    pub workload_name: SmolStr,
    /// The annotation that names the service in traces; empty if there is none.
    pub otel_service_name: SmolStr,
    /// `GENERATOR`, empty for Envoys.
    pub generator: SmolStr,
    /// `ISTIO_VERSION` as sent (EnvoyFilter `proxyVersion` looks at the text).
    pub version_text: SmolStr,
    /// `ISTIO_VERSION` parsed.
    pub version: IstioVersion,
    /// `INTERCEPTION_MODE`.
    pub interception_mode: InterceptionMode,
    /// `REQUESTED_NETWORK_VIEW`; empty: all networks are visible.
    pub network_view: Shared<BTreeSet<NetworkId>>,
    /// `PROXY_CONFIG`, replaces `mesh.defaultConfig`; none if it cannot be read.
    pub proxy_config: Option<MessageKey<ProxyConfig>>,
    /// What the client can run.
    pub extensions: Extensions,
    /// The other metadata that generation knows.
    pub(super) settings: Settings,
}

impl NodeMetadata {
    /// A metadata value as text; empty if absent.
    pub fn setting(&self, setting: MetadataKey) -> SmolStr {
        self.settings.get(setting)
    }

    /// A metadata value as a boolean: `"true"`, `"1"` and the JSON `true` hold.
    pub fn has(&self, setting: MetadataKey) -> bool {
        is_on(&self.setting(setting))
    }

    /// True for gRPC clients and servers that do without a proxy: they ask for listeners and clusters by name.
    pub fn is_proxyless(&self) -> bool {
        self.generator == "grpc"
    }
}
