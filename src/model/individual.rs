//! What decides of a proxy that its replicas do not have in common: as a rule nothing.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use super::{MeshSnapshot, envoy_filter::CompiledFilter, policy};
use crate::{
    api::Config,
    base::{Namespace, ObjectKey},
    proto::istio::{
        extensions::v1alpha1::{TrafficExtension, WasmPlugin},
        networking::v1alpha3::{DestinationRule, EnvoyFilter, Gateway, Sidecar},
        security::v1beta1::{AuthorizationPolicy, PeerAuthentication, RequestAuthentication},
        telemetry::v1alpha1::Telemetry,
    },
    table::Cx,
};

/// The labels that differ between the replicas of a workload: of the node that a replica runs on, and what the controller
/// of StatefulSets puts.
pub const REPLICA_LABELS: [&str; 3] = [
    "kubernetes.io/hostname",
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
];

/// What selection has to know of a single proxy, since something in the mesh asks for it. A superset of the truth: what
/// stands here goes into the keys of proxies only where it decides.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct IndividualNeeds {
    /// The node that it runs on.
    pub node: bool,
    /// Where it runs.
    pub locality: bool,
    /// Those of [`REPLICA_LABELS`] that some selector asks for.
    pub labels: BTreeSet<&'static str>,
    /// The metadata of its node that EnvoyFilters are for.
    pub metadata: BTreeSet<SmolStr>,
    /// The namespaces that have Sidecars with listeners, which may stand at addresses of the workload.
    namespaces_with_listeners: BTreeSet<Namespace>,
    /// One of them is for every namespace.
    listeners_everywhere: bool,
}

impl IndividualNeeds {
    /// True if its addresses may decide about a sidecar of this namespace.
    pub fn addresses(&self, namespace: &Namespace) -> bool {
        self.listeners_everywhere || self.namespaces_with_listeners.contains(namespace)
    }
}

/// What selects workloads by their labels.
pub trait Selects {
    /// The names of the labels that it asks for.
    fn labels(&self) -> impl Iterator<Item = &String>;
}

macro_rules! selects {
    ($($kind:ty: $selector:ident . $labels:ident;)*) => { $(
        impl Selects for $kind {
            fn labels(&self) -> impl Iterator<Item = &String> {
                self.$selector.iter().flat_map(|selector| selector.$labels.keys())
            }
        }
    )* };
}

selects! {
    AuthorizationPolicy: selector.match_labels;
    RequestAuthentication: selector.match_labels;
    PeerAuthentication: selector.match_labels;
    Telemetry: selector.match_labels;
    WasmPlugin: selector.match_labels;
    TrafficExtension: selector.match_labels;
    EnvoyFilter: workload_selector.labels;
    Sidecar: workload_selector.labels;
    DestinationRule: workload_selector.match_labels;
}

impl Selects for Gateway {
    fn labels(&self) -> impl Iterator<Item = &String> {
        self.selector.keys()
    }
}

/// What asks for labels of replicas: entries of the indexes by label.
pub fn label_entries<T: Selects>(_key: &ObjectKey, row: &Config<T>, emit: &mut dyn FnMut(SmolStr)) {
    for label in row.spec.labels() {
        if REPLICA_LABELS.contains(&label.as_str()) {
            emit(SmolStr::new(label));
        }
    }
}

/// Sidecars with listeners: entries of the index.
pub fn sidecar_entry(_key: &ObjectKey, row: &Config<Sidecar>, emit: &mut dyn FnMut(())) {
    if !row.spec.ingress.is_empty() {
        emit(());
    }
}

/// EnvoyFilters for proxies with certain metadata: entries of the index.
pub fn filter_entry(_key: &ObjectKey, row: &CompiledFilter, emit: &mut dyn FnMut(())) {
    if row.patches.iter().any(|patch| !patch.proxy.metadata.is_empty()) {
        emit(());
    }
}

/// Derives the needs of the mesh.
pub fn needs(cx: &Cx, mesh: &MeshSnapshot, _key: &()) -> Option<IndividualNeeds> {
    let place = mesh.place_needs.get(cx, &());
    let root = policy::root_namespace(cx, mesh);
    let sidecars = mesh.listening_sidecars.get(cx, &());
    let namespaces: BTreeSet<Namespace> = sidecars.map(|(key, _)| key.namespace.clone()).collect();
    let filters = mesh.filters_by_metadata.get(cx, &());
    let patches = filters.flat_map(|(_, row)| &row.patches);
    let labels = REPLICA_LABELS.into_iter();
    let asked = labels.filter(|label| {
        place.is_some_and(|place| place.labels.contains(*label))
            || is_selected_by(cx, mesh, &SmolStr::new_static(label))
    });
    Some(IndividualNeeds {
        labels: asked.collect(),
        node: place.is_some_and(|place| place.node),
        locality: place.is_some_and(|place| place.locality),
        metadata: patches
            .flat_map(|patch| patch.proxy.metadata.keys().map(SmolStr::new))
            .collect(),
        listeners_everywhere: namespaces.contains(&root),
        namespaces_with_listeners: namespaces,
    })
}

/// True if something selects workloads by the label.
fn is_selected_by(cx: &Cx, mesh: &MeshSnapshot, label: &SmolStr) -> bool {
    mesh.virtual_services_by_source_label.contains(cx, label)
        || mesh.authorization_policies_by_label.contains(cx, label)
        || mesh.request_authentications_by_label.contains(cx, label)
        || mesh.peer_authentications_by_label.contains(cx, label)
        || mesh.telemetries_by_label.contains(cx, label)
        || mesh.wasm_plugins_by_label.contains(cx, label)
        || mesh.traffic_extensions_by_label.contains(cx, label)
        || mesh.envoy_filters_by_label.contains(cx, label)
        || mesh.sidecars_by_label.contains(cx, label)
        || mesh.raw_rules_by_label.contains(cx, label)
        || mesh.gateways_by_label.contains(cx, label)
}
