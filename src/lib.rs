//! istiod: the control plane of an Istio service mesh.

pub mod admin;
pub mod api;
pub mod app;
pub mod auth;
pub mod base;
pub mod ca;
pub mod cli;
pub mod environment;
pub mod fetch;
pub mod generate;
pub mod ingest;
pub mod kube;
pub mod model;
pub mod proto;
pub mod push;
pub mod rpc;
pub mod settings;
pub mod status;
pub mod table;
pub mod task;
pub mod xds;

/// What is freed goes back to the system soon (`.cargo/config.toml`). The C library's allocator keeps what the worst moment
/// took: three times as much after waves of connections. Fuzzers have an allocator that looks for errors.
#[cfg(not(fuzzing))]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;
