//! The Multi-Cluster Services API: exports of Services to other clusters, and imports.

use serde::{Deserialize, Serialize};
use smol_str::SmolStr;

/// Exports the Service with the same name and namespace.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
pub struct ServiceExport {}

/// The Service with the same name and namespace in the cluster set, as this cluster sees it.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct ServiceImport {
    /// `ClusterSetIP` or `Headless`.
    #[serde(rename = "type")]
    pub import_type: SmolStr,
    /// The virtual IPs.
    pub ips: Vec<SmolStr>,
}
