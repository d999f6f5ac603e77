//! Matches of TCP and TLS routes, without their conditions on the connection.

use std::collections::BTreeMap;

use crate::{
    model::virtual_service::MESH_GATEWAY,
    proto::istio::networking::v1alpha3::{L4MatchAttributes, TlsMatchAttributes},
};

/// Conditions of a match on the proxy and the port.
pub(super) struct StaticMatch<'m> {
    gateways: &'m [String],
    port: u32,
    /// Namespace of the client; empty for any.
    pub(super) source_namespace: &'m str,
    /// Labels of the client; empty for any.
    pub(super) source_labels: &'m BTreeMap<String, String>,
}

impl<'m> From<&'m TlsMatchAttributes> for StaticMatch<'m> {
    fn from(by: &'m TlsMatchAttributes) -> Self {
        Self {
            gateways: &by.gateways,
            port: by.port,
            source_namespace: &by.source_namespace,
            source_labels: &by.source_labels,
        }
    }
}

impl<'m> From<&'m L4MatchAttributes> for StaticMatch<'m> {
    fn from(by: &'m L4MatchAttributes) -> Self {
        Self {
            gateways: &by.gateways,
            port: by.port,
            source_namespace: &by.source_namespace,
            source_labels: &by.source_labels,
        }
    }
}

impl StaticMatch<'_> {
    /// Returns true if the match is for the gateway `mesh` and this port.
    pub(super) fn is_for_mesh(&self, port: u32) -> bool {
        (self.gateways.is_empty() || self.gateways.iter().any(|gateway| gateway == MESH_GATEWAY))
            && (self.port == 0 || self.port == port)
    }
}
