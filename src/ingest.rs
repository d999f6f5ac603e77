//! Configuration sources: each turns external state into model `Change`s.

pub mod access;
mod backoff;
pub mod cluster;
pub mod config_sources;
pub mod context;
pub mod crd;
mod defect;
pub mod diagnostics;
pub mod discovery_filter;
pub mod file;
#[cfg(test)]
mod fixture;
mod in_flight;
pub mod jwks;
pub mod kinds;
pub mod mcp;
pub mod mesh;
pub mod metrics;
pub mod registry;
pub mod registry_metrics;
pub mod remote;
pub mod resolve;
pub mod source;
mod state_file;
pub mod tag;
