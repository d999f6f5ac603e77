//! The wire: ADS in both protocols, over connections that are state machines without IO.

pub mod admission;
pub mod answers;
pub mod body;
pub mod claims;
pub mod connection;
pub mod debug;
mod delta;
pub mod events;
pub mod laid;
pub mod metrics;
pub mod names;
mod order;
pub mod registry;
mod request;
pub mod server;
mod sotw;
mod stream;
#[cfg(test)]
mod tests;
pub mod watched;

pub use connection::{Connection, Outcome, Protocol, Reaction, Refusal, Request, Response};
pub use server::{Security, Server, ServerOptions};
