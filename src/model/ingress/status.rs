//! Statuses of Ingresses: the addresses of the ingress gateway.
//!
//! Parity (pilot/pkg/config/kube/ingress/status.go): the addresses of the service that the mesh config names, or else
//! those of the node of a running pod of the gateway.

use std::{net::IpAddr, sync::Arc};

use serde_json::{Value, json};
use smol_str::SmolStr;

use super::{ingress_namespace, selector_value};
use crate::{
    base::{Namespace, ObjectKey},
    model::MeshSnapshot,
    table::{Cx, Derived, RelationId, Transaction},
};

/// Identity of the table, which no table of the mesh has.
const ADDRESSES: RelationId = RelationId(5100);

/// The statuses of all served Ingresses, brought up to date with snapshots.
pub struct IngressStatuses {
    mesh: Option<Arc<MeshSnapshot>>,
    addresses: Derived<(), Vec<SmolStr>>,
}

impl Default for IngressStatuses {
    fn default() -> Self {
        Self {
            mesh: None,
            addresses: Derived::new(ADDRESSES),
        }
    }
}

impl IngressStatuses {
    /// Takes a snapshot. Returns the Ingresses whose status may have changed.
    pub fn update(&mut self, mesh: &Arc<MeshSnapshot>) -> Vec<ObjectKey> {
        let before = self.mesh.replace(mesh.clone());
        let mut tx = Transaction::default();
        if let Some(before) = &before {
            mesh.mark_differences(before, &mut tx);
        }
        let first = before.is_none().then_some(());
        self.addresses.update(&mut tx, &first, |cx, ()| addresses(cx, mesh));
        let all = || mesh.served_ingresses.keys(&Cx::untracked()).cloned().collect();
        match before {
            Some(before) if self.addresses.writer().changes().is_empty() => {
                let changed = mesh.served_ingresses.differences(&before.served_ingresses);
                changed.cloned().collect()
            }
            _ => all(),
        }
    }

    /// Returns the status of an Ingress; `None` if it is not served.
    pub fn get(&self, key: &ObjectKey) -> Option<Value> {
        let cx = Cx::untracked();
        self.mesh.as_ref()?.served_ingresses.get(&cx, key)?;
        let addresses = self.addresses.table().get(&cx, &())?.iter();
        let listed: Vec<Value> = addresses.map(entry).collect();
        Some(json!({"loadBalancer": {"ingress": listed}}))
    }
}

fn entry(address: &SmolStr) -> Value {
    if is_ip(address) {
        json!({ "ip": address })
    } else {
        json!({ "hostname": address })
    }
}

fn is_ip(address: &SmolStr) -> bool {
    address.parse::<IpAddr>().is_ok()
}

/// Derives the addresses of the ingress gateway: IP addresses first, as Istio sorts them. Without an Ingress, none are
/// looked for.
pub fn addresses(cx: &Cx, mesh: &MeshSnapshot) -> Option<Vec<SmolStr>> {
    mesh.served_ingresses.keys(cx).next()?;
    let namespace = Namespace::new(ingress_namespace(mesh));
    let service = &mesh.mesh_config(cx).ingress_service;
    let mut addresses = if service.is_empty() {
        of_node(cx, mesh, &namespace)
    } else {
        of_service(cx, mesh, &namespace, service)
    };
    addresses.sort_by_cached_key(|address| (!is_ip(address), address.clone()));
    addresses.dedup();
    Some(addresses)
}

fn of_service(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace, name: &str) -> Vec<SmolStr> {
    let key = ObjectKey::new(&mesh.installation.cluster, namespace.clone(), name);
    let Some(service) = mesh.kube_services.get(cx, &key) else {
        return Vec::new();
    };
    if service.is_external_name() {
        return vec![service.external_name.clone()];
    }
    let addresses = service.load_balancer.iter().chain(&service.external_ips);
    addresses.cloned().collect()
}

/// Returns the external addresses of the node with the first running pod of the gateway.
fn of_node(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace) -> Vec<SmolStr> {
    let cluster = &mesh.installation.cluster;
    let selector = selector_value(mesh.mesh_config(cx));
    let mut pods = mesh.pods.iter(cx).filter(|(key, pod)| {
        let is_selected = pod.meta.labels.get("istio").is_some_and(|value| value == selector);
        key.cluster == *cluster && key.namespace == *namespace && pod.phase == "Running" && is_selected
    });
    let Some((_, pod)) = pods.next() else {
        return Vec::new();
    };
    let node = ObjectKey::new(cluster, "", pod.node_name.clone());
    let node = mesh.nodes.get(cx, &node);
    node.map(|node| node.external_ips.clone()).unwrap_or_default()
}
