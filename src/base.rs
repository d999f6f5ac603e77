//! Basics without knowledge of Istio: identifiers, shared rows, versions, matching and Go-compatible parsing.

pub mod address;
pub mod boolean;
pub mod cidr;
pub mod cipher_suite;
pub mod duration;
pub mod fingerprint;
pub(crate) mod handshake;
pub mod hashed;
pub mod host;
pub mod ident;
pub mod keyed;
pub mod message;
pub mod pem;
pub mod pool;
pub mod re2;
pub mod scratch;
pub mod select;
pub mod sensitive;
pub mod shared;
pub mod spiffe;
pub mod url;
pub mod version;

pub use hashed::Hashed;
pub use ident::{ClusterId, Hostname, Namespace, NetworkId, ObjectKey};
pub use message::MessageKey;
pub use sensitive::Sensitive;
pub use shared::Shared;
pub use smol_str::SmolStr;
pub use spiffe::SpiffeId;
pub use version::Version;

/// Labels or annotations of an object, in key order. An object has few of them, so they are a sorted vector: a
/// `BTreeMap` takes 640 bytes for its first entry.
pub type Labels = litemap::LiteMap<SmolStr, SmolStr>;
