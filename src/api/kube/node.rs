//! core/v1 Node.

use serde_json::Value;
use smol_str::SmolStr;

use crate::{
    api::{
        FieldError, Meta,
        field::{FieldErrors, Fields},
        meta::{Keyed, with_annotations},
    },
    base::{ObjectKey, Shared},
};

/// A node: its locality labels, and addresses for NodePort gateways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Metadata without annotations.
    pub meta: Shared<Meta>,
    /// `status.addresses` of type `ExternalIP`.
    pub external_ips: Vec<SmolStr>,
    /// `status.nodeInfo.kubeletVersion`; empty if unknown.
    pub kubelet_version: SmolStr,
}

impl Node {
    /// Parses a manifest. Each invalid field is an error with its path.
    pub fn parse(meta: Shared<Meta>, object: &Value) -> Result<Self, Vec<FieldError>> {
        let errors = FieldErrors::default();
        let root = Fields::root(object, &errors);
        let status = root.object("status");
        let addresses = status.objects("addresses");
        let external = addresses.iter().filter(|address| address.text("type") == "ExternalIP");
        let external_ips = external.map(|address| address.text("address"));
        let external_ips = external_ips.filter(|address| !address.is_empty()).collect();
        let kubelet_version = status.object("nodeInfo").text("kubeletVersion");
        errors.finish(Self {
            meta: with_annotations(meta, &[]),
            external_ips,
            kubelet_version,
        })
    }
}

impl Keyed for Node {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
