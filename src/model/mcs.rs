//! Multi-Cluster Services: what ServiceExports and ServiceImports make of services and of who may use their endpoints.
//!
//! A cluster that imports a service knows it by a further host, `<name>.<namespace>.svc.clusterset.local`, with the
//! virtual IPs of the import. With service discovery by this API, endpoints are for clients of their own cluster unless
//! their cluster exports the service.

use smol_str::SmolStr;

use super::{MeshSnapshot, Service, features::Features};
use crate::{
    base::{ClusterId, Hostname, Namespace, ObjectKey, cidr},
    table::Cx,
};

/// The domain of imported services.
pub const DOMAIN: &str = "clusterset.local";

/// True if imported services have hosts of their own.
pub fn has_hosts(features: &Features) -> bool {
    features.enable_mcs_host && features.enable_mcs_service_discovery
}

/// The host of an imported service.
pub fn hostname(name: &str, namespace: &Namespace) -> Hostname {
    Hostname::from(format!("{name}.{namespace}.svc.{DOMAIN}"))
}

/// True if the service is one that clusters import.
pub fn is_imported(service: &Service) -> bool {
    let rest = service.key.hostname.strip_suffix(DOMAIN);
    rest.is_some_and(|rest| rest.ends_with(".svc."))
}

/// The virtual IPs by which a cluster imports a service, sorted; none if it does not. The key is that of the Service.
pub fn vips(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Vec<SmolStr> {
    if !has_hosts(&mesh.installation.features) {
        return Vec::new();
    }
    let import = mesh.service_imports.get(cx, key);
    let ips = import.into_iter().flat_map(|import| &import.spec.ips);
    let mut ips: Vec<SmolStr> = ips.filter(|ip| cidr::parse_ip(ip).is_some()).cloned().collect();
    ips.sort_unstable();
    ips
}

/// True if a cluster knows the Kubernetes service itself: it has the Service, or imports it.
pub fn is_known(cx: &Cx, mesh: &MeshSnapshot, service: &Service, cluster: &ClusterId) -> bool {
    let object = ObjectKey::new(cluster, service.key.namespace.clone(), service.name.clone());
    if is_imported(service) {
        !vips(cx, mesh, &object).is_empty()
    } else {
        mesh.kube_services.get(cx, &object).is_some()
    }
}

/// True if the endpoints that a service has in a cluster are only for clients of that cluster.
pub fn is_confined(cx: &Cx, mesh: &MeshSnapshot, service: &Service, cluster: &ClusterId) -> bool {
    let features = &mesh.installation.features;
    if !features.enable_mcs_service_discovery {
        return false;
    }
    if !is_known(cx, mesh, service, cluster) {
        return true;
    }
    if !is_imported(service) && has_hosts(features) && features.enable_mcs_cluster_local {
        return true;
    }
    let object = ObjectKey::new(cluster, service.key.namespace.clone(), service.name.clone());
    mesh.service_exports.get(cx, &object).is_none()
}

#[cfg(test)]
mod tests;
