//! ExternalName services that are aliases of another service, over any number of hops.

use std::collections::BTreeSet;

use super::{ServiceKey, kube};
use crate::{
    base::{Hostname, Namespace},
    model::MeshSnapshot,
    table::Cx,
};

/// Returns the ExternalName services that resolve to this host, by namespace, then host. The host itself must be
/// concrete; aliases in a loop are never found, because the search starts at the concrete end.
pub(super) fn aliases(cx: &Cx, mesh: &MeshSnapshot, host: &Hostname) -> Vec<ServiceKey> {
    let mut found: BTreeSet<(Namespace, Hostname)> = BTreeSet::new();
    let mut targets = vec![host.clone()];
    while let Some(target) = targets.pop() {
        for (key, _) in mesh.aliases_by_target.get(cx, &target) {
            // The first cluster with the Service determines its target.
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
