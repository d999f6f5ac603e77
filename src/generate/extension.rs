//! Filters of users: WasmPlugins and TrafficExtensions. Where they stand in a filter stack is decided by its builder.

use super::listener::FilterStack;
use crate::proto::envoy::{
    config::listener::v3::Filter, extensions::filters::network::http_connection_manager::v3::HttpFilter,
};

/// The places of extensions in a stack, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExtensionPhase {
    /// Before Istio's authentication.
    Authentication,
    /// Before Istio's authorization.
    Authorization,
    /// Before statistics.
    Stats,
    /// No phase given: after the others.
    Unspecified,
}

impl ExtensionPhase {
    /// Every phase in order.
    pub const ALL: [Self; 4] = [
        Self::Authentication,
        Self::Authorization,
        Self::Stats,
        Self::Unspecified,
    ];
}

/// The HTTP filters of a phase on a listener with this port.
pub fn http_filters(_stack: &FilterStack, _phase: ExtensionPhase, _port: u32) -> Vec<HttpFilter> {
    Vec::new()
}

/// The network filters of a phase on a listener with this port.
pub fn network_filters(_stack: &FilterStack, _phase: ExtensionPhase, _port: u32) -> Vec<Filter> {
    Vec::new()
}
