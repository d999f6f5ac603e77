//! Label selectors of all kinds that select workloads.

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::MeshSnapshot;
use crate::{
    api::Config,
    base::ObjectKey,
    proto::istio::{
        extensions::v1alpha1::{TrafficExtension, WasmPlugin},
        networking::v1alpha3::{DestinationRule, EnvoyFilter, Gateway, Sidecar},
        security::v1beta1::{AuthorizationPolicy, PeerAuthentication, RequestAuthentication},
        telemetry::v1alpha1::Telemetry,
    },
    table::{Cx, Index},
};

/// An object that selects workloads by labels.
pub trait Selects {
    /// Returns the labels that a workload must have; `None` for all workloads of the namespace.
    fn selector(&self) -> Option<&BTreeMap<String, String>>;
}

/// Checks that an index is of a kind.
fn by_label<T>(index: &Index<SmolStr, ObjectKey, Config<T>>) -> &Index<SmolStr, ObjectKey, Config<T>> {
    index
}

macro_rules! selects {
    ($($kind:ty, $index:ident: |$spec:ident| $selector:expr;)*) => {
        $(impl Selects for $kind {
            fn selector(&self) -> Option<&BTreeMap<String, String>> {
                let $spec = self;
                $selector
            }
        })*

        /// Returns true if an object of any of these kinds selects workloads by the per-replica label.
        pub(super) fn selected_by_any(cx: &Cx, mesh: &MeshSnapshot, label: &SmolStr) -> bool {
            false $(|| by_label::<$kind>(&mesh.$index).contains(cx, label))*
        }
    };
}

// The index of a kind is in `snapshot::graph`, and compiles only with an entry here.
selects! {
    AuthorizationPolicy, authorization_policies_by_label: |spec| Some(&spec.selector.as_ref()?.match_labels);
    RequestAuthentication, request_authentications_by_label: |spec| Some(&spec.selector.as_ref()?.match_labels);
    PeerAuthentication, peer_authentications_by_label: |spec| Some(&spec.selector.as_ref()?.match_labels);
    Telemetry, telemetries_by_label: |spec| Some(&spec.selector.as_ref()?.match_labels);
    WasmPlugin, wasm_plugins_by_label: |spec| Some(&spec.selector.as_ref()?.match_labels);
    TrafficExtension, traffic_extensions_by_label: |spec| Some(&spec.selector.as_ref()?.match_labels);
    EnvoyFilter, envoy_filters_by_label: |spec| Some(&spec.workload_selector.as_ref()?.labels);
    Sidecar, sidecars_by_label: |spec| Some(&spec.workload_selector.as_ref()?.labels);
    DestinationRule, raw_rules_by_label: |spec| Some(&spec.workload_selector.as_ref()?.match_labels);
    Gateway, gateways_by_label: |spec| Some(&spec.selector);
}
