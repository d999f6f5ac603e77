//! What a mesh config must fulfil; after an error the last good one stays.

use crate::{api::istio::Findings, proto::istio::mesh::v1alpha1::MeshConfig};

/// Checks a merged mesh config.
pub(super) fn mesh_config(_config: &MeshConfig, _findings: &mut Findings) {}
