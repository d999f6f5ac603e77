//! From a snapshot to Envoy's configuration.
//!
//! Three steps, each a memo with recorded reads: [`select`] reduces a proxy to a [`ProxyGroupKey`], a list of parts;
//! a part lists resources by key; a resource key is built into bytes. A key holds everything about the client that its
//! result depends on, the rest is read through a [`View`]; so equal keys share one result, whoever asks.

pub mod cluster;
pub mod constant;
pub mod encoded;
pub mod endpoint;
pub mod extension;
pub mod gateway;
pub mod group;
pub mod labels;
pub mod listener;
pub mod name;
pub mod name_table;
pub mod patch;
pub mod proxy;
pub mod route;
pub mod security;
pub mod select;
pub mod store;
pub mod view;
pub mod vip;

pub use encoded::{EncodedResource, ResourceType};
pub use gateway::GatewayView;
pub use group::{PartKey, ProxyGroupKey, ResourceKey, ResourceSnapshot};
pub use proxy::{Proxy, ProxyType};
pub use view::View;
pub use vip::VipView;
