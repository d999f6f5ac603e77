//! Kubernetes kinds, reduced to what the mesh needs. Objects are parsed at the edge and dropped.

pub mod config_map;
pub mod endpoint_slice;
pub mod ingress;
pub mod namespace;
pub mod node;
pub mod pod;
mod remote_mesh;
pub mod secret;
pub mod service;

pub use config_map::ConfigMap;
pub use endpoint_slice::EndpointSlice;
pub use ingress::{Ingress, IngressClass};
pub use namespace::Namespace;
pub use node::Node;
pub use pod::Pod;
pub use secret::Secret;
pub use service::Service;

#[cfg(test)]
mod tests;
