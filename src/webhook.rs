//! The admission webhooks: HTTP requests of API servers in, verdicts about objects out.
//!
//! API servers send no credentials, so any client that reaches the port is untrusted: bodies are bounded in number,
//! size and nesting, and metrics have no labels that a request chooses. `review`, `validation` and `injection` are
//! pure; `body`, `host`, `injector` and `server` do the I/O.

pub mod body;
pub mod host;
pub mod injection;
pub mod injector;
pub mod metrics;
pub mod review;
pub mod server;
pub mod validation;
