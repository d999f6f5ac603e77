//! ExternalName services that stand for another service, over any number of hops.

use std::collections::BTreeSet;

use super::{ServiceKey, kube};
use crate::{
    base::{Hostname, Namespace},
    model::MeshSnapshot,
    table::Cx,
};

/// The ExternalName services whose names lead to this host, by namespace, then host. The host itself must be concrete;
/// aliases that only lead to each other never come up, since the search begins at the concrete end.
pub(super) fn aliases(cx: &Cx, mesh: &MeshSnapshot, host: &Hostname) -> Vec<ServiceKey> {
    let mut found: BTreeSet<(Namespace, Hostname)> = BTreeSet::new();
    let mut targets = vec![host.clone()];
    while let Some(target) = targets.pop() {
        for (key, _) in mesh.aliases_by_target.get(cx, &target) {
            // The first cluster that has the Service decides where its name leads.
            let decisive = kube::objects(cx, mesh, &key.namespace, &key.name);
            let leads_here = decisive
                .first()
                .is_some_and(|object| object.is_external_name() && object.external_name == target.as_str());
            let hostname = Hostname::from(format!(
                "{}.{}.svc.{}",
                key.name, key.namespace, mesh.installation.domain
            ));
            if leads_here && found.insert((key.namespace.clone(), hostname.clone())) {
                targets.push(hostname);
            }
        }
    }
    let keys = found.into_iter();
    keys.map(|(namespace, hostname)| ServiceKey { hostname, namespace })
        .collect()
}
