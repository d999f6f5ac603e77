//! The messages of Envoy, xDS and Istio, generated at build time from their .proto files, and their JSON form.
//!
//! Modules follow packages: `envoy.config.cluster.v3.Cluster` is [`envoy::config::cluster::v3::Cluster`]. Maps are
//! `BTreeMap`, so that equal messages have equal bytes; byte fields are `Bytes`; wrappers are `Option` of the plain
//! type. The crate has Rust types for the packages that the daemon builds itself. [`descriptor_pool`] also covers the
//! rest of Envoy's API, so that [`json`] reads and writes all of it.

mod any;
pub mod field;
pub mod json;

use std::sync::OnceLock;

use prost_reflect::DescriptorPool;

pub use any::Any;
pub use generated::*;

// Generated code has the generator's style.
#[allow(clippy::all, clippy::pedantic, unreachable_pub, missing_docs)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/modules.rs"));
}

/// Returns the descriptors of all generated messages, and of the Envoy extensions without Rust types.
pub fn descriptor_pool() -> &'static DescriptorPool {
    static POOL: OnceLock<DescriptorPool> = OnceLock::new();
    POOL.get_or_init(|| {
        DescriptorPool::decode(include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin")).as_slice())
            .expect("because the build wrote the descriptor set")
    })
}
