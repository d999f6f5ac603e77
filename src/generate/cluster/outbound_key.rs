//! The key of an outbound cluster.

use smol_str::SmolStr;

use crate::{
    base::{Hashed, Shared, cidr::IpMode},
    generate::{endpoint::EndpointProxyView, name::ClusterMode, patch::PatchRef, proxy_view::SocketProxyView},
    model::{ServiceKey, destination_rule::RuleRef, service::MergedPort},
};

/// One outbound cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutboundClusterKey {
    /// The service.
    pub service: ServiceKey,
    /// Service port.
    pub port: u32,
    /// Members of the service that the port comes from, if the host has several.
    pub merged: Option<MergedPort>,
    /// Subset, empty for the default cluster.
    pub subset: SmolStr,
    /// Mode.
    pub mode: ClusterMode,
    /// DestinationRule, if there is one.
    pub rule: Option<RuleRef>,
    /// Attributes of the proxy.
    pub client: Hashed<SocketProxyView>,
    /// Attributes that inline endpoints depend on, for DNS clusters only.
    pub inline: Option<InlineProxyView>,
    /// EnvoyFilter patches that apply, in order.
    pub patches: Shared<[PatchRef]>,
}

/// Further attributes of a proxy that DNS clusters depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InlineProxyView {
    /// Address families to resolve.
    pub ip_mode: IpMode,
    /// Attributes that endpoints depend on.
    pub endpoints: EndpointProxyView,
}

impl OutboundClusterKey {
    /// Returns the cluster name.
    pub fn name(&self) -> String {
        self.mode.cluster_name(self.port, &self.subset, &self.service.hostname)
    }
}
