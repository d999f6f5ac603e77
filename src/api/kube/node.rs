//! core/v1 Node.

use smol_str::SmolStr;

use crate::{
    api::{Meta, meta::Keyed},
    base::{ObjectKey, Shared},
};

/// A node: locality labels, and addresses for NodePort gateways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Metadata.
    pub meta: Shared<Meta>,
    /// `status.addresses` of type `ExternalIP`.
    pub external_ips: Vec<SmolStr>,
    /// `status.addresses` of type `InternalIP`.
    pub internal_ips: Vec<SmolStr>,
}

impl Keyed for Node {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
