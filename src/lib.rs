//! istiod: the control plane of an Istio service mesh.

pub mod admin;
pub mod analyze;
pub mod api;
pub mod app;
pub mod auth;
pub mod base;
pub mod ca;
pub mod cli;
pub mod convert;
pub mod distribution;
pub mod environment;
pub mod fetch;
pub mod generate;
pub mod ingest;
pub mod inject;
pub mod kube;
pub mod log;
pub mod metrics;
pub mod model;
pub mod otlp;
pub mod proto;
pub mod push;
pub mod rpc;
pub mod settings;
pub mod status;
pub mod table;
pub mod task;
pub mod template;
pub mod webhook;
pub mod xds;

/// The global allocator. It returns freed memory to the system soon (options in `.cargo/config.toml`). The allocator of
/// the C library keeps its peak: three times as much after bursts of connections. Fuzzers use an allocator that detects
/// errors.
#[cfg(all(feature = "jemalloc", not(fuzzing)))]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;
