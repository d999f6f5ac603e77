//! The outside world to `Change`s.

pub mod file;
pub mod remote;
pub mod resolve;
