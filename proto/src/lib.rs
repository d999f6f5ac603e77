//! The messages of Envoy, xDS and Istio, generated at build time from their .proto files, and their JSON form.
//!
//! Modules follow packages: `envoy.config.cluster.v3.Cluster` is [`envoy::config::cluster::v3::Cluster`]. Maps are
//! `BTreeMap`, so that equal messages have equal bytes; byte fields are `Bytes`; wrappers are `Option` of the plain type.
//! Rust types exist for the packages that the daemon builds itself; the descriptors of [`descriptor_pool`] also cover the
//! rest of Envoy's API, so that [`json`] reads and writes any of it.

mod any;
pub mod json;

use std::sync::OnceLock;

use prost_reflect::DescriptorPool;

pub use any::Any;
pub use generated::*;

// Generated code answers to the generator's style.
#[allow(clippy::all, clippy::pedantic, unreachable_pub, missing_docs)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/modules.rs"));
}

/// All descriptors: of every generated message, and of the Envoy extensions that have no Rust type here.
pub fn descriptor_pool() -> &'static DescriptorPool {
    static POOL: OnceLock<DescriptorPool> = OnceLock::new();
    POOL.get_or_init(|| {
        DescriptorPool::decode(include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin")).as_slice())
            .expect("because the build wrote the descriptor set")
    })
}
