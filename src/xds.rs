//! xDS: ADS in both variants, over connections that are state machines without I/O.

pub mod admission;
mod attribution;
pub mod config_objects;
pub mod connection;
pub mod debug;
mod delta;
pub mod events;
pub mod message;
pub mod metrics;
mod order;
pub mod protocol;
pub mod registry;
mod request;
pub mod server;
pub mod share;
mod sotw;
mod stream;
#[cfg(test)]
mod tests;
pub mod watched;

pub use connection::{Connection, Outcome, Reaction, Request, Response, SubscriptionError};
pub use protocol::Protocol;
pub use server::{Security, Server, ServerOptions};
