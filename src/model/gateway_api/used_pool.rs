//! InferencePools that routes use, and the shadow Services that these routes need.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use super::{
    inference_pool::{self, Picker},
    is_converted,
    listener::{self, ListenerOwner},
    parent::Target,
};
use crate::{
    api::Kind,
    base::{Labels, ObjectKey},
    model::MeshSnapshot,
    table::Cx,
};

/// A pool that routes use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsedPool {
    /// Gateways whose routes use the pool.
    pub gateways: BTreeSet<ObjectKey>,
    /// The picker.
    pub picker: Picker,
    /// The Service that the routes need.
    pub service: ShadowService,
}

/// A Service that the control plane keeps for a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShadowService {
    /// Name. The namespace is that of the pool.
    pub name: SmolStr,
    /// Labels.
    pub labels: Labels,
    /// Selector of the pods.
    pub selector: Labels,
    /// Ports of the pods. The Service has a port for each.
    pub target_ports: Vec<u16>,
    /// Application protocol of all ports.
    pub app_protocol: Option<SmolStr>,
}

/// Emits the Gateways whose routes use a pool.
pub fn gateways(_: &ObjectKey, row: &UsedPool, emit: &mut dyn FnMut(ObjectKey)) {
    row.gateways.iter().for_each(|gateway| emit(gateway.clone()));
}

/// Derives a pool that routes use; none without a port of the picker, or without a route.
pub fn used(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<UsedPool> {
    let pool = &mesh
        .inference_pools
        .get(cx, key)
        .filter(|_| is_converted(mesh, key))?
        .spec;
    let reference = pool.endpoint_picker_ref.as_ref()?;
    let (mut is_used, mut gateways) = (false, BTreeSet::new());
    for (_, route) in mesh.routes_by_pool.get(cx, key) {
        for parent in &route.parents {
            is_used = true;
            if let Target::Listener { owner, .. } = &parent.target {
                gateways.extend(gateway_of(cx, mesh, owner));
            }
        }
    }
    let labels = inference_pool::labels(&key.name, reference)?;
    Some(UsedPool {
        gateways,
        picker: Picker::of(mesh, &key.namespace, &labels).filter(|_| is_used)?,
        service: ShadowService {
            name: inference_pool::service_name(&key.name),
            labels,
            selector: pool.selector.match_labels.clone(),
            target_ports: pool.target_ports.iter().map(|port| port.number).collect(),
            app_protocol: pool.app_protocol.clone(),
        },
    })
}

/// Returns the Gateway of a parent's listeners.
fn gateway_of(cx: &Cx, mesh: &MeshSnapshot, owner: &ListenerOwner) -> Option<ObjectKey> {
    if owner.kind == Kind::KubeGateway {
        return Some(owner.object.clone());
    }
    let set = mesh.listener_sets.get(cx, &owner.object)?;
    listener::parent_of(&owner.object, &set.spec)
}

#[cfg(test)]
mod tests;
