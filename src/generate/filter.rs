//! Contents of filter chains: HTTP connection managers with their filters, TCP proxies, TLS, access logs, tracing,
//! telemetry, security and extensions.
//!
//! Note: nothing here depends on the listener of a chain. A [`FilterStack`] carries the inputs of the filters.

pub mod access_log;
pub mod chain_fields;
pub mod chain_limit;
pub mod extension;
pub mod hcm;
pub mod http_filters;
mod memo;
pub mod proxy_view;
pub mod security;
mod security_filters;
pub mod stack;
pub mod stats;
pub mod tcp;
pub mod telemetry;
pub mod tls;
pub mod tracing;

pub use chain_fields::NetworkFilters;
pub use memo::FilterMemo;
pub use proxy_view::{FilterProxyView, ListenerClass, SecurityPolicies};
pub use security_filters::{PeerSource, SecurityStage};
pub use stack::FilterStack;
