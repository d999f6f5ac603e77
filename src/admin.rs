//! Pages for operators: readiness, metrics, version, debug pages.

pub mod access;
pub mod config_objects;
pub mod controlz;
pub mod debug;
pub mod http;
pub mod metrics;
pub mod page;
pub mod profile;
pub mod registration;
pub mod renderer;
pub mod server;
