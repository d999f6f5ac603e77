//! The wire: ADS in both protocols, over connections that are state machines without IO.

pub mod connection;
mod delta;
mod order;
mod sotw;
#[cfg(test)]
mod tests;
pub mod watched;

pub use connection::{Connection, Outcome, Protocol, Reaction, Refusal, Request, Response};
