//! Namespaces that the discovery selectors of the mesh select.

use crate::{
    base::{ClusterId, ObjectKey, SmolStr},
    model::snapshot::MeshSnapshot,
    table::Cx,
};

/// Returns true if the objects of a namespace count: a selector matches its labels, or there are no selectors.
pub(super) fn is_selected(mesh: &MeshSnapshot, cluster: &ClusterId, namespace: &str) -> bool {
    let cx = Cx::untracked();
    let dependencies = mesh.external_dependencies.get(&cx, &());
    let selectors = dependencies.map(|dependencies| dependencies.discovery_selectors.as_slice());
    let selectors = selectors.unwrap_or_default();
    if selectors.is_empty() {
        return true;
    }
    let key = ObjectKey::new(cluster, "", SmolStr::new(namespace));
    let found = mesh.namespaces.get(&cx, &key);
    found.is_some_and(|found| selectors.iter().any(|selector| selector.matches(&found.meta.labels)))
}
