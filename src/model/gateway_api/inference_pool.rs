//! InferencePools: pods that serve models, and a service that picks one of them for each request.
//!
//! Routes to a pool use its shadow Service, a headless Service of the pods that the control plane keeps. The labels of
//! that Service name the picker, so all configuration follows from the Service.
//!
//! Parity (pilot/pkg/config/kube/gateway/inferencepool_collection.go): names and labels are Istio's, so that both
//! control planes find each other's Services.

use std::{collections::BTreeSet, fmt::Write};

use aws_lc_rs::digest::{SHA256, digest};
use smol_str::{SmolStr, format_smolstr};

use super::service_host;
use crate::{
    api::{
        Kind,
        gateway_api::{
            HttpRoute,
            inference::{self, EndpointPicker},
            route::BackendReference,
        },
    },
    base::{Hostname, Labels, Namespace, ObjectKey},
    model::MeshSnapshot,
};

/// Label of shadow Services with the name of the pool.
pub const POOL_LABEL: &str = "istio.io/inferencepool-name";
/// Label with the name of the picker's Service, in the namespace of the pool.
const PICKER_LABEL: &str = "istio.io/inferencepool-extension-service";
/// Label with the port of the picker's Service.
const PORT_LABEL: &str = "istio.io/inferencepool-extension-port";
/// Label with the failure mode: `FailOpen` or `FailClose`.
const FAILURE_MODE_LABEL: &str = "istio.io/inferencepool-extension-failure-mode";
/// Label of Services that are used in another way than others.
const SEMANTICS_LABEL: &str = "internal.istio.io/service-semantics";
const SEMANTICS: &str = "inferencepool";
/// Failure mode in which requests proceed without a picker.
const FAIL_OPEN: &str = "FailOpen";
/// Failure mode by default.
const FAIL_CLOSE: &str = "FailClose";

/// Longest name of a Service.
const MAX_NAME: usize = 63;
/// Between the name of the pool and the hash.
const SEPARATOR: &str = "-ip-";
/// Bytes of the hash.
const HASH_BYTES: usize = 4;

/// A service that picks endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picker {
    /// Host.
    pub host: Hostname,
    /// Port.
    pub port: u32,
    /// True if requests proceed to any endpoint when the picker fails.
    pub fails_open: bool,
}

impl Picker {
    /// Returns the picker that the labels of a Service name.
    pub fn of(mesh: &MeshSnapshot, namespace: &Namespace, labels: &Labels) -> Option<Self> {
        let label = |name: &str| labels.get(name).filter(|value| !value.is_empty());
        let (service, port, mode) = (label(PICKER_LABEL)?, label(PORT_LABEL)?, label(FAILURE_MODE_LABEL)?);
        Some(Self {
            host: service_host(mesh, namespace, service).into(),
            // Parity (pilot/pkg/networking/core/route/route.go): no error is reported for other texts.
            port: port.parse().unwrap_or_default(),
            fails_open: mode == FAIL_OPEN,
        })
    }
}

/// Returns the labels of a pool's shadow Service; none without a port of the picker.
pub(super) fn labels(pool: &SmolStr, picker: &EndpointPicker) -> Option<Labels> {
    let port = picker.port.as_ref()?.number;
    let mode = picker.failure_mode.clone().filter(|mode| !mode.is_empty());
    let labels = [
        (POOL_LABEL, pool.clone()),
        (PICKER_LABEL, picker.name.clone()),
        (PORT_LABEL, format_smolstr!("{port}")),
        (FAILURE_MODE_LABEL, mode.unwrap_or(SmolStr::new_static(FAIL_CLOSE))),
        (SEMANTICS_LABEL, SmolStr::new_static(SEMANTICS)),
    ];
    let labels = labels
        .into_iter()
        .map(|(name, value)| (SmolStr::new_static(name), value));
    Some(labels.collect())
}

/// Returns true for the labels of Services whose endpoints a picker selects.
pub fn is_shadow(labels: &Labels) -> bool {
    labels.get(SEMANTICS_LABEL).is_some_and(|value| value == SEMANTICS)
}

/// Returns true for references to pools.
pub(super) fn is_reference(group: &str, kind: &str) -> bool {
    group == inference::GROUP && kind == Kind::InferencePool.name()
}

/// Returns the pools that the rules of a route refer to, sorted.
pub(super) fn of_route(mesh: &MeshSnapshot, key: &ObjectKey, route: &HttpRoute) -> Vec<ObjectKey> {
    if !mesh.installation.features.enable_gateway_api_inference_extension {
        return Vec::new();
    }
    let pool = |backend: &BackendReference| {
        let is_pool = is_reference(backend.group.as_deref()?, backend.kind.as_deref()?);
        let namespace = backend.namespace.as_ref();
        let namespace = namespace.map_or_else(|| key.namespace.clone(), Namespace::new);
        is_pool.then(|| ObjectKey::new(&key.cluster, namespace, backend.name.clone()))
    };
    let references = route.rules.iter().flat_map(|rule| &rule.backend_refs);
    let pools: BTreeSet<ObjectKey> = references.filter_map(pool).collect();
    pools.into_iter().collect()
}

/// Returns the name of a pool's Service: the pool's name, if necessary cut, and a hash of it.
pub fn service_name(pool: &str) -> SmolStr {
    let mut hash = String::new();
    for byte in &digest(&SHA256, pool.as_bytes()).as_ref()[..HASH_BYTES] {
        // Writing to a string cannot fail.
        let _ = write!(hash, "{byte:02x}");
    }
    let longest = MAX_NAME - SEPARATOR.len() - hash.len();
    let end = pool.floor_char_boundary(longest.min(pool.len()));
    [&pool[..end], SEPARATOR, &hash].concat().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_end_with_a_hash() {
        assert_eq!(service_name("my-ip"), "my-ip-ip-03f70481");
        assert_eq!(service_name(&"a".repeat(70)).len(), MAX_NAME);
        // From the cases of Istio.
        let long = "very-long-inference-pool-name-that-should-be-truncated-properly";
        assert_eq!(
            service_name(long),
            "very-long-inference-pool-name-that-should-be-trunca-ip-6d24df6a"
        );
    }
}
