//! The DNS answer for a host name: an input that is not a manifest.

use std::net::IpAddr;

use smol_str::SmolStr;

use super::{Kind, meta::Keyed};
use crate::base::{ClusterId, ObjectKey};

/// The addresses of the host name of a network gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedHost {
    /// The key: config cluster, no namespace, the host name as the name.
    pub key: ObjectKey,
    /// The addresses, sorted.
    pub addresses: Vec<IpAddr>,
}

impl ResolvedHost {
    /// The kind of these rows.
    pub const KIND: Kind = Kind::ResolvedHost;

    /// Returns the key of a host name.
    pub fn key(cluster: &ClusterId, host: &str) -> ObjectKey {
        ObjectKey::new(cluster, "", SmolStr::new(host))
    }
}

impl Keyed for ResolvedHost {
    fn key(&self) -> &ObjectKey {
        &self.key
    }
}
