//! The admission webhooks: HTTP requests of API servers in, verdicts about objects out.
//!
//! API servers send no credentials, so any client that reaches the port is untrusted: bodies are bounded in number,
//! size and nesting, and metrics have no labels that a request chooses. `review` and `validation` are pure; `body` and
//! `server` do the I/O.

pub mod body;
pub mod metrics;
pub mod review;
pub mod server;
pub mod validation;
