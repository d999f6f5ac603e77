//! Conversion of the Gateway API to Gateways, VirtualServices and DestinationRules, from which everything else is
//! generated.
//!
//! Each listener becomes a Gateway with one server ([`listener`]). Each route becomes VirtualServices, one per parent
//! and host ([`route`]); those of HTTPRoutes and GRPCRoutes with the same parent and host are merged ([`merge`]),
//! because the API orders matches over all of them. Policies for backends become DestinationRules ([`policy`]).
//!
//! Parity (pilot/pkg/config/kube/gateway/): names and annotations are Istio's, because names of routes and metadata of
//! clusters contain them. A name contains `~`, so no object of a user has it.

mod backend;
pub mod class;
mod filter;
pub mod grant;
mod grpc;
mod http;
pub mod inference_pool;
pub mod listener;
pub mod merge;
pub mod parent;
pub mod policy;
pub mod route;
pub mod status;
pub mod used_pool;

use smol_str::SmolStr;

use super::{MeshSnapshot, gateway::CONVERTED};
use crate::{
    api::{Kind, Meta},
    base::{Labels, ObjectKey, Shared},
};

/// Annotation with the objects that a converted one is made of, the first one first.
pub const PARENTS_ANNOTATION: &str = "internal.istio.io/parents";

/// A mistake in an object of the Gateway API, as its status reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Reason of the condition.
    pub reason: &'static str,
    /// Message of the condition.
    pub message: String,
}

impl Mistake {
    fn new(reason: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { reason, message }
    }

    /// Joins two mistakes; the reason is that of the first one.
    fn joined(first: Option<Self>, second: Option<Self>) -> Option<Self> {
        match (first, second) {
            (Some(first), Some(second)) => Some(Self {
                message: [first.message.as_str(), "; ", &second.message].concat(),
                ..first
            }),
            (first, second) => first.or(second),
        }
    }
}

/// Returns true for objects of the config cluster, if the Gateway API is enabled.
fn is_converted(mesh: &MeshSnapshot, key: &ObjectKey) -> bool {
    mesh.installation.features.pilot_enable_gateway_api && key.cluster == mesh.installation.cluster
}

/// Returns the metadata of a converted object.
fn converted_meta(kind: Kind, key: ObjectKey, annotations: Labels, creation: i64) -> Shared<Meta> {
    Shared::new(Meta {
        kind,
        key,
        labels: Shared::default(),
        annotations,
        creation,
        generation: 0,
        resource_version: SmolStr::new_static("1"),
    })
}

/// Returns the host name of a Kubernetes service.
fn service_host(mesh: &MeshSnapshot, namespace: &str, name: &str) -> String {
    [name, ".", namespace, ".svc.", &mesh.installation.domain].concat()
}
