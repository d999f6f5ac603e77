//! `MeshSnapshot`: all tables of one revision, immutable and in agreement.

use std::ops::Deref;

use super::{graph::DerivedTables, installation::Installation};
use crate::{
    api::Config,
    base::Shared,
    proto::istio::mesh::v1alpha1::MeshConfig,
    table::{Cx, Held},
};

/// Counts commits of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Revision(pub u64);

/// Everything the control plane knows, at one revision. Cloning is cheap.
///
/// Input tables and derived tables are fields of this type by dereference: `mesh.services`, `mesh.pods`.
#[doc(alias = "PushContext")]
#[derive(Clone)]
pub struct MeshSnapshot {
    /// The revision.
    pub revision: Revision,
    /// Who we are.
    pub installation: Shared<Installation>,
    /// The row of the mesh config, which nearly everything reads.
    pub(super) config: Held<Config<MeshConfig>>,
    /// The raw and derived tables.
    pub(super) derived: DerivedTables,
}

impl Deref for MeshSnapshot {
    type Target = DerivedTables;
    fn deref(&self) -> &DerivedTables {
        &self.derived
    }
}

impl MeshSnapshot {
    /// The mesh config of the config cluster. Before one is known: all fields unset.
    pub fn mesh_config(&self, cx: &Cx) -> &MeshConfig {
        static UNSET: std::sync::OnceLock<MeshConfig> = std::sync::OnceLock::new();
        match self.config.get(cx) {
            Some(config) => &config.spec,
            None => UNSET.get_or_init(MeshConfig::default),
        }
    }
}
