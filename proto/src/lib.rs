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

use prost_reflect::{DescriptorPool, MessageDescriptor};

pub use any::Any;
pub use generated::*;

// Generated code has the generator's style.
#[allow(clippy::all, clippy::pedantic, unreachable_pub, missing_docs)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/modules.rs"));
}

/// Returns the descriptors of all generated messages, and of the Envoy extensions without Rust types. They take 12 MB
/// of memory (heap profile of an idle daemon); to look up one message, use [`message_descriptor`].
pub fn descriptor_pool() -> &'static DescriptorPool {
    static POOL: OnceLock<DescriptorPool> = OnceLock::new();
    POOL.get_or_init(|| decode(include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"))))
}

/// Returns the descriptor of the message with this full name. Istio's messages come from a pool of their own, so that
/// Envoy's are loaded only when JSON of an Envoy message is read or written.
pub fn message_descriptor(name: &str) -> Option<MessageDescriptor> {
    static ISTIO: OnceLock<DescriptorPool> = OnceLock::new();
    let pool = if name.starts_with("istio.") {
        ISTIO.get_or_init(|| decode(include_bytes!(concat!(env!("OUT_DIR"), "/istio.bin"))))
    } else {
        descriptor_pool()
    };
    pool.get_message_by_name(name)
}

fn decode(descriptors: &[u8]) -> DescriptorPool {
    DescriptorPool::decode(descriptors).expect("because the build wrote the descriptor set")
}
