//! The mesh at one revision: derived and consistent.

pub mod ambient;
pub mod ambient_status;
pub mod authentication;
pub mod canonical;
pub mod change;
pub mod cluster_local;
pub mod credential;
pub mod destination_rule;
pub mod endpoint;
pub mod envoy_filter;
pub mod export;
pub mod extension;
pub mod external_dependencies;
pub mod features;
#[cfg(test)]
pub(crate) mod fixture;
pub mod gateway;
pub mod gateway_api;
pub mod identity;
pub mod ingress;
pub mod inputs;
pub mod installation;
pub mod locality_dependencies;
pub mod network;
pub mod output_limit;
pub mod per_replica;
pub mod policy;
pub mod reference;
pub mod selector;
pub mod service;
pub mod sidecar_scope;
pub mod snapshot;
#[cfg(test)]
mod tests;
pub mod virtual_service;
pub mod waypoint;
pub mod workload;
pub mod world;

pub use change::{Batch, Change, SourceId};
pub use endpoint::{Endpoint, EndpointTraits, ServiceEndpoints};
pub use installation::Installation;
pub use service::{Service, ServiceKey};
pub use sidecar_scope::{ScopeKey, SidecarScope};
pub use snapshot::{MeshSnapshot, Revision};
pub use workload::Origin;
pub use world::{Commit, World};
