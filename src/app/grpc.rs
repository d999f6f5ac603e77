//! gRPC services for operators' tools, on the xDS ports: health and reflection.

mod health;
mod reflection;

pub(super) use health::Health;
pub(super) use reflection::Reflection;

/// The services of the plaintext port; the secure port has the certificate service too.
const DISCOVERY: &str = "envoy.service.discovery.v3.AggregatedDiscoveryService";
