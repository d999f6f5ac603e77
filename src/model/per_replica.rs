//! Proxy attributes that differ between replicas of a workload and still affect its configuration (usually none).

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{
    MeshSnapshot,
    envoy_filter::CompiledFilter,
    policy,
    selector::{self, Selects},
};
use crate::{
    api::Config,
    base::{Namespace, ObjectKey},
    proto::istio::networking::v1alpha3::Sidecar,
    table::Cx,
};

/// Labels that differ between the replicas of a workload: those of the replica's node, and those of the StatefulSet
/// controller.
pub const REPLICA_LABELS: [&str; 3] = [
    "kubernetes.io/hostname",
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
];

/// Per-replica attributes that something in the mesh uses. A superset: an attribute is part of a proxy's keys only
/// where it matters.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PerReplicaInputs {
    /// True if the node matters.
    pub node: bool,
    /// True if the locality matters.
    pub locality: bool,
    /// Labels of [`REPLICA_LABELS`] that some selector matches.
    pub labels: BTreeSet<&'static str>,
    /// Node metadata that EnvoyFilters match.
    pub metadata: BTreeSet<SmolStr>,
    /// Namespaces with Sidecars that have listeners, which may bind to addresses of the workload.
    namespaces_with_listeners: BTreeSet<Namespace>,
    /// True if one of them applies to every namespace.
    listeners_everywhere: bool,
}

impl PerReplicaInputs {
    /// Returns true if addresses may affect a sidecar of this namespace.
    pub fn addresses(&self, namespace: &Namespace) -> bool {
        self.listeners_everywhere || self.namespaces_with_listeners.contains(namespace)
    }
}

/// Emits the index keys of an object that selects per-replica labels.
pub fn label_entries<T: Selects>(_key: &ObjectKey, row: &Config<T>, emit: &mut dyn FnMut(SmolStr)) {
    for label in row.spec.selector().into_iter().flat_map(BTreeMap::keys) {
        if REPLICA_LABELS.contains(&label.as_str()) {
            emit(SmolStr::new(label));
        }
    }
}

/// Emits the index key of a Sidecar with listeners.
pub fn sidecar_entry(_key: &ObjectKey, row: &Config<Sidecar>, emit: &mut dyn FnMut(())) {
    if !row.spec.ingress.is_empty() {
        emit(());
    }
}

/// Emits the index key of an EnvoyFilter that matches node metadata.
pub fn filter_entry(_key: &ObjectKey, row: &CompiledFilter, emit: &mut dyn FnMut(())) {
    if row.patches.iter().any(|patch| !patch.proxy.metadata.is_empty()) {
        emit(());
    }
}

/// Derives the per-replica attributes that the mesh uses.
pub fn inputs(cx: &Cx, mesh: &MeshSnapshot, _key: &()) -> Option<PerReplicaInputs> {
    let dependencies = mesh.locality_dependencies.get(cx, &());
    let root = policy::root_namespace(cx, mesh);
    let sidecars = mesh.listening_sidecars.get(cx, &());
    let namespaces: BTreeSet<Namespace> = sidecars.map(|(key, _)| key.namespace.clone()).collect();
    let filters = mesh.filters_by_metadata.get(cx, &());
    let patches = filters.flat_map(|(_, row)| &row.patches);
    let labels = REPLICA_LABELS.into_iter();
    let selected = labels.filter(|label| {
        dependencies.is_some_and(|dependencies| dependencies.labels.contains(*label))
            || mesh
                .virtual_services_by_source_label
                .contains(cx, &SmolStr::new_static(label))
            || selector::selected_by_any(cx, mesh, &SmolStr::new_static(label))
    });
    Some(PerReplicaInputs {
        labels: selected.collect(),
        node: dependencies.is_some_and(|dependencies| dependencies.node),
        locality: dependencies.is_some_and(|dependencies| dependencies.locality),
        metadata: patches
            .flat_map(|patch| patch.proxy.metadata.keys().map(SmolStr::new))
            .collect(),
        listeners_everywhere: namespaces.contains(&root),
        namespaces_with_listeners: namespaces,
    })
}
