//! Time: when changes become a revision, and how a revision reaches the connections.

pub mod debounce;
pub mod groups;
pub mod pump;

pub use groups::{Groups, Member, Publication};
pub use pump::{Pump, PushOptions};
