//! The kinds of the Kubernetes Gateway API, with the fields that the mesh reads. Defaults are those of the API's
//! schemas, which files have not been through.

pub mod class;
pub mod common;
pub mod expression;
pub mod gateway;
pub mod inference;
pub mod policy;
pub mod route;

pub use class::GatewayClass;
pub use gateway::{Gateway, ListenerSet};
pub use inference::InferencePool;
pub use policy::{BackendTlsPolicy, BackendTrafficPolicy, ReferenceGrant};
pub use route::{GrpcRoute, HttpRoute, TcpRoute, TlsRoute, UdpRoute};

#[cfg(test)]
mod tests;
