//! The outside world to `Change`s.

pub mod access;
mod asking;
pub mod cluster;
pub mod crd;
pub mod file;
pub mod findings;
pub mod gate;
pub mod jwks;
pub mod kinds;
pub mod mesh;
pub mod metrics;
pub mod remote;
pub mod resolve;
pub mod tag;
