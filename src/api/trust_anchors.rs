//! The trusted root certificates of all meshes that this one trusts: an input that is not a manifest.

use super::{Kind, meta::Keyed};
use crate::base::{ClusterId, ObjectKey};

/// The root certificates for workloads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustAnchors {
    /// The key: config cluster, no namespace, a fixed name.
    pub key: ObjectKey,
    /// PEM blocks of one certificate each, sorted.
    pub certificates: Vec<String>,
}

impl TrustAnchors {
    /// The kind of these rows.
    pub const KIND: Kind = Kind::TrustAnchors;

    /// Returns the key of the only row.
    pub fn key(cluster: &ClusterId) -> ObjectKey {
        ObjectKey::new(cluster, "", "trust-anchors")
    }
}

impl Keyed for TrustAnchors {
    fn key(&self) -> &ObjectKey {
        &self.key
    }
}
