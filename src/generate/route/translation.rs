//! Context of a translation of HTTP routes.

use super::{
    RouteProxyView,
    destination::{PortInference, TargetMap},
};
use crate::{generate::BuildContext, model::features::Features};

/// Context of a translation.
pub(crate) struct Translation<'a> {
    /// The mesh.
    pub(crate) ctx: &'a BuildContext<'a>,
    /// Attributes of the proxy.
    pub(crate) client: &'a RouteProxyView,
    /// True if the labels of the requests' clients are unknown, so that no match of labels applies.
    pub(super) clients_are_unknown: bool,
    /// [`MESH_GATEWAY`](crate::model::virtual_service::MESH_GATEWAY), or `namespace/name` of the Gateway.
    pub(crate) gateway: &'a str,
    /// Port of the listener, or of the server on gateways; 0 for route configurations of all ports.
    pub(crate) port: u32,
    /// True if the server terminates TLS.
    pub(crate) tls: bool,
    /// True if responses advertise HTTP/3.
    pub(super) advertise_http3: bool,
    /// Port of destinations that have none.
    pub(crate) inference: PortInference,
    /// Rows of the destinations.
    pub(crate) targets: &'a TargetMap,
}

impl<'a> Translation<'a> {
    /// Returns the feature variables.
    pub(crate) fn features(&self) -> &'a Features {
        &self.ctx.mesh.installation.features
    }
}
