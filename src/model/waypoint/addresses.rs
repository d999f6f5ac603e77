//! Services at the addresses of Gateways. The services of a namespace are looked through once for all of its Gateways,
//! because ServiceEntries of a tenant may declare a million with an address.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{address, with_host};
use crate::{
    api::{Config, gateway_api},
    base::{ClusterId, Namespace, ObjectKey},
    model::{
        MeshSnapshot,
        service::{Registry, ServiceKey},
    },
    table::Cx,
};

/// The services of a namespace at the addresses of its Gateways, by cluster and address. Those of ServiceEntries have
/// no cluster. Of several services, the first one counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicesAtGateways(BTreeMap<(Option<ClusterId>, SmolStr), ServiceKey>);

impl ServicesAtGateways {
    /// Returns the service at an address in a cluster.
    pub(super) fn at(&self, cluster: &ClusterId, address: &SmolStr) -> Option<&ServiceKey> {
        let places = [Some(cluster.clone()), None].map(|cluster| (cluster, address.clone()));
        places.iter().filter_map(|place| self.0.get(place)).min()
    }
}

/// Emits the index key of a Gateway that has an address: its namespace.
pub fn with_address(key: &ObjectKey, gateway: &Config<gateway_api::Gateway>, emit: &mut dyn FnMut(Namespace)) {
    if address(gateway).is_some() {
        emit(key.namespace.clone());
    }
}

/// Derives the services at those addresses of a namespace's Gateways that are not the host of a service.
pub fn services(cx: &Cx, mesh: &MeshSnapshot, namespace: &Namespace) -> Option<ServicesAtGateways> {
    let gateways = mesh.gateways_with_address.get(cx, namespace);
    let addresses = gateways.filter_map(|(_, gateway)| address(gateway));
    let wanted: BTreeSet<SmolStr> = addresses
        .filter(|address| with_host(cx, mesh, namespace, address).is_none())
        .collect();
    if wanted.is_empty() {
        return None;
    }
    let mut found = BTreeMap::new();
    for (key, service) in mesh.services_by_namespace.get(cx, namespace) {
        for one in service.all() {
            let vips = one.cluster_vips.iter();
            let vips = vips.flat_map(|(cluster, vips)| vips.iter().map(move |vip| (Some(cluster), vip)));
            let own = (one.registry == Registry::External).then_some((None, &one.default_address));
            for (cluster, address) in vips.chain(own) {
                if wanted.contains(address) {
                    let place = (cluster.cloned(), address.clone());
                    found.entry(place).or_insert_with(|| key.clone());
                }
            }
        }
    }
    (!found.is_empty()).then_some(ServicesAtGateways(found))
}
