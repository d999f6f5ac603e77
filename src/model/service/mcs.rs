//! Multi-Cluster Services: effects of ServiceExports and ServiceImports on services and the use of their endpoints.
//!
//! A cluster that imports a service has a second host for it, `<name>.<namespace>.svc.clusterset.local`, with the
//! virtual IPs of the import. With service discovery by this API, endpoints are cluster-local unless their cluster
//! exports the service.

use smol_str::SmolStr;

use super::Service;
use crate::{
    base::{ClusterId, Hostname, Namespace, ObjectKey, cidr},
    model::{MeshSnapshot, features::Features},
    table::Cx,
};

/// The domain of imported services.
pub const DOMAIN: &str = "clusterset.local";

/// Returns true if imported services have hosts of their own.
pub fn has_hosts(features: &Features) -> bool {
    features.enable_mcs_host && features.enable_mcs_service_discovery
}

/// Returns the host of an imported service.
pub fn hostname(name: &str, namespace: &Namespace) -> Hostname {
    Hostname::from(format!("{name}.{namespace}.svc.{DOMAIN}"))
}

/// Returns true for a service that clusters import.
pub fn is_imported(service: &Service) -> bool {
    let rest = service.key.hostname.strip_suffix(DOMAIN);
    rest.is_some_and(|rest| rest.ends_with(".svc."))
}

/// Returns the virtual IPs of a cluster's import, sorted; none without an import. The key is that of the Service.
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

/// Returns true if a cluster has the Kubernetes Service itself, or imports it.
pub fn is_known(cx: &Cx, mesh: &MeshSnapshot, service: &Service, cluster: &ClusterId) -> bool {
    let object = ObjectKey::new(cluster, service.key.namespace.clone(), service.name.clone());
    if is_imported(service) {
        !vips(cx, mesh, &object).is_empty()
    } else {
        mesh.kube_services.get(cx, &object).is_some()
    }
}

/// Returns true if the endpoints of a service in a cluster are cluster-local.
pub fn is_cluster_local_in(cx: &Cx, mesh: &MeshSnapshot, service: &Service, cluster: &ClusterId) -> bool {
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
