//! The push: when changes become a revision, and how a revision reaches the connections.

pub mod debounce;
pub mod delivery;
pub mod groups;
mod lanes;
mod precedence;
pub mod push_loop;
pub mod testing;
mod turns;

pub use groups::{Groups, Publication, Subscription};
pub use push_loop::PushHandle;
