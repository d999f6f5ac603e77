//! The Multi-Cluster Services API: which Services are exported to other clusters, and which are imported.

use serde::Deserialize;
use smol_str::SmolStr;

/// Exports the Service of its name and namespace.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct ServiceExport {}

/// The Service of its name and namespace in the set of clusters, as this cluster sees it.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct ServiceImport {
    /// `ClusterSetIP` or `Headless`.
    #[serde(rename = "type")]
    pub import_type: SmolStr,
    /// The virtual IPs.
    pub ips: Vec<SmolStr>,
}
