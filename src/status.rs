//! Writes into Kubernetes: leader locks, root certificates, addresses, WorkloadEntries, statuses. Decisions are pure
//! functions next to each writer. Results come back as watch events and in no other way.

pub mod analysis;
pub mod auto_allocation;
pub mod auto_registration;
pub mod cluster_trust_bundle;
pub mod conditions;
mod discovery;
pub mod distribution_status;
#[cfg(test)]
mod fake_api;
pub mod gateway_class;
pub mod gateway_deployment;
pub mod gateway_status;
pub mod ingress_status;
pub mod leader;
pub mod mcs_export;
mod object_status;
mod owned_object;
pub mod refusal_events;
mod revisions;
pub mod root_cert;
pub mod shadow_service;
pub mod store;
pub mod untaint;
pub mod watching;
pub mod webhook_configuration;

use crate::{base::SmolStr, kube::Object};
pub use leader::{Election, Lock};

/// Namespace and name of an object in one cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespacedName {
    /// The namespace.
    pub namespace: SmolStr,
    /// The name.
    pub name: SmolStr,
}

impl NamespacedName {
    fn new(namespace: impl Into<SmolStr>, name: impl Into<SmolStr>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    /// Returns those of an object.
    fn of(object: &Object) -> Self {
        Self::new(object.namespace(), object.name())
    }
}
