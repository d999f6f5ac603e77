//! Resource names of credentials that istiod serves.

/// Scheme of Secrets in the proxy's cluster.
pub const SECRET: &str = "kubernetes://";
/// Scheme of Secrets in the config cluster, for gateways of the Gateway API.
pub const GATEWAY_SECRET: &str = "kubernetes-gateway://";
/// Scheme of CA certificates in ConfigMaps of the config cluster.
pub const CONFIG_MAP: &str = "configmap://";

/// Returns true for resource names that Secrets and ConfigMaps provide.
pub fn is_served(name: &str) -> bool {
    [SECRET, GATEWAY_SECRET, CONFIG_MAP]
        .iter()
        .any(|scheme| name.starts_with(scheme))
}
