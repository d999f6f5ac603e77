//! The key of an outbound cluster.

use smol_str::SmolStr;

use crate::{
    base::{Hashed, Shared, cidr::IpMode},
    generate::{endpoint::EndpointProxyView, name::ClusterMode, patch::PatchRef, proxy_view::SocketProxyView},
    model::{ServiceKey, destination_rule::RuleRef},
};

/// One outbound cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutboundKey {
    /// The service.
    pub service: ServiceKey,
    /// The service port.
    pub port: u32,
    /// The subset, empty for the default cluster.
    pub subset: SmolStr,
    /// What it is for.
    pub mode: ClusterMode,
    /// The rule, if there is one.
    pub rule: Option<RuleRef>,
    /// The client.
    pub client: Hashed<SocketProxyView>,
    /// What endpoints that stand inline depend on of the client: for DNS clusters only.
    pub inline: Option<InlineProxyView>,
    /// EnvoyFilter patches that concern it, in order.
    pub patches: Shared<[PatchRef]>,
}

/// What DNS clusters depend on of a client besides the rest.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InlineProxyView {
    /// The address families, which are asked for.
    pub ip_mode: IpMode,
    /// As for endpoints of EDS.
    pub endpoints: EndpointProxyView,
}

impl OutboundKey {
    /// The cluster's name.
    pub fn name(&self) -> String {
        self.mode.cluster_name(self.port, &self.subset, &self.service.hostname)
    }
}
