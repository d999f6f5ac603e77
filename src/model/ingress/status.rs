//! Statuses of Ingresses: the addresses of the ingress gateway.
//!
//! Parity (pilot/pkg/config/kube/ingress/status.go): the addresses of the service that the mesh config names, or else
//! those of the node of a running pod of the gateway. A control plane writes the statuses of its own revision.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use serde_json::{Value, json};
use smol_str::SmolStr;

use super::{ingress_namespace, selector_value};
use crate::{
    api::kube::Pod,
    base::{ClusterId, Namespace, ObjectKey},
    model::{
        MeshSnapshot,
        gateway_api::status::{Revisions, is_own},
    },
    table::{Cx, Derived, RelationId, Transaction},
};

/// Identity of the table, which no table of the mesh has.
const ADDRESSES: RelationId = RelationId(5100);

/// The statuses of the own revision's served Ingresses, brought up to date with snapshots.
pub struct IngressStatuses {
    revisions: Revisions,
    mesh: Option<Arc<MeshSnapshot>>,
    addresses: Derived<(), Vec<SmolStr>>,
}

impl IngressStatuses {
    /// Returns the statuses before the first snapshot.
    pub fn new(revisions: Revisions) -> Self {
        Self {
            revisions,
            mesh: None,
            addresses: Derived::new(ADDRESSES),
        }
    }

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
            Some(before) if self.addresses.writer().changes().is_empty() => changed(mesh, &before),
            _ => all(),
        }
    }

    /// Returns the status of an Ingress; `None` if it is not served, or belongs to another revision.
    pub fn get(&self, key: &ObjectKey) -> Option<Value> {
        let (cx, mesh) = (Cx::untracked(), self.mesh.as_ref()?);
        let row = mesh.served_ingresses.get(&cx, key)?;
        if !is_own(&cx, mesh, &self.revisions, &row.ingress.meta) {
            return None;
        }
        let addresses = self.addresses.table().get(&cx, &())?.iter();
        let listed: Vec<Value> = addresses.map(entry).collect();
        Some(json!({"loadBalancer": {"ingress": listed}}))
    }
}

/// Returns the served Ingresses that have changed, and those of changed namespaces, whose labels may name the revision.
fn changed(mesh: &MeshSnapshot, before: &MeshSnapshot) -> Vec<ObjectKey> {
    let cx = Cx::untracked();
    let rows = mesh.served_ingresses.differences(&before.served_ingresses);
    let mut changed: BTreeSet<&ObjectKey> = rows.collect();
    let namespaces: BTreeSet<&ObjectKey> = mesh.namespaces.differences(&before.namespaces).collect();
    if !namespaces.is_empty() {
        let is_within = |key: &&ObjectKey| {
            let namespace = ObjectKey::new(&key.cluster, "", SmolStr::new(key.namespace.as_str()));
            namespaces.contains(&namespace)
        };
        changed.extend(mesh.served_ingresses.keys(&cx).filter(is_within));
    }
    changed.into_iter().cloned().collect()
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
    Some(addresses)
}

/// Returns the addresses of a service. One that is both that of a load balancer and an external IP is there twice.
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

/// Emits the index key of a running pod that may belong to the ingress gateway.
pub fn gateway_pod(key: &ObjectKey, pod: &Pod, emit: &mut dyn FnMut((ClusterId, Namespace, SmolStr))) {
    let label = pod.meta.labels.get("istio").filter(|_| pod.phase == "Running");
    if let Some(label) = label {
        emit((key.cluster.clone(), key.namespace.clone(), label.clone()));
    }
}

/// Returns the external addresses of the first node with a running pod of the gateway, each once. Pods of a removed
/// node are listed as running for minutes.
fn of_node(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace) -> Vec<SmolStr> {
    let cluster = &mesh.installation.cluster;
    let selector = SmolStr::new(selector_value(mesh.mesh_config(cx)));
    let gateway = (cluster.clone(), namespace.clone(), selector);
    let mut pods = mesh.ingress_gateway_pods.get(cx, &gateway);
    let node = pods.find_map(|(_, pod)| {
        let node = ObjectKey::new(cluster, "", pod.node_name.clone());
        mesh.nodes.get(cx, &node)
    });
    let mut addresses = node.map(|node| node.external_ips.clone()).unwrap_or_default();
    addresses.sort_unstable();
    addresses.dedup();
    addresses
}
