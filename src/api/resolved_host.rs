//! The answer of DNS for a host name: no object that anybody writes, but an input like others.

use std::net::IpAddr;

use smol_str::SmolStr;

use super::{Kind, meta::Keyed};
use crate::base::{ClusterId, ObjectKey};

/// The addresses of the host name of a network gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedHost {
    /// The config cluster, no namespace, the host name.
    pub key: ObjectKey,
    /// The addresses, sorted.
    pub addresses: Vec<IpAddr>,
}

impl ResolvedHost {
    /// The kind of such rows.
    pub const KIND: Kind = Kind::ResolvedHost;

    /// The key of a host name.
    pub fn key(cluster: &ClusterId, host: &str) -> ObjectKey {
        ObjectKey::new(cluster, "", SmolStr::new(host))
    }
}

impl Keyed for ResolvedHost {
    fn key(&self) -> &ObjectKey {
        &self.key
    }
}
