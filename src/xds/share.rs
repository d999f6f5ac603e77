//! Data that streams share: request names, encoded lists and responses. It makes streams cheap; the protocol works the
//! same without it.

pub mod coalesced;
pub mod held;
pub mod initial_versions;
pub mod names;
pub mod response_cache;
