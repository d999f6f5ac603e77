//! `MeshSnapshot`: all tables of one revision, immutable and consistent.

pub mod graph;

use std::{ops::Deref, sync::OnceLock};

pub use graph::DerivedTables;

use super::installation::Installation;
use crate::{
    api::Config,
    base::Shared,
    proto::istio::mesh::v1alpha1::MeshConfig,
    table::{Cx, PrefetchedRow},
};

/// Number of a commit in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Revision(pub u64);

/// All data of the control plane at one revision. Cloning is cheap.
///
/// Every table is read as `mesh.NAME`: a snapshot dereferences to [`DerivedTables`], and these to the input tables
/// ([`InputTables`](super::inputs::InputTables)). Readers need not know whether a table is derived, which may change.
/// The list in [`graph`] declares `mesh.services` and the other derived tables; the list in `api::kinds` declares
/// `mesh.pods` and the other input tables (`table: pods`). No name is in both: a derived table would hide the input
/// table.
#[doc(alias = "PushContext")]
#[derive(Clone)]
pub struct MeshSnapshot {
    /// The revision.
    pub revision: Revision,
    /// Installation settings.
    pub installation: Shared<Installation>,
    /// Row of the mesh config, which nearly every generator reads.
    pub(super) config: PrefetchedRow<Config<MeshConfig>>,
    /// Input and derived tables.
    pub(super) derived: DerivedTables,
}

/// See [`MeshSnapshot`]: only tables are reached by it.
impl Deref for MeshSnapshot {
    type Target = DerivedTables;
    fn deref(&self) -> &DerivedTables {
        &self.derived
    }
}

impl MeshSnapshot {
    /// Returns the mesh config of the config cluster. Before one is known, all fields are unset.
    pub fn mesh_config(&self, cx: &Cx) -> &MeshConfig {
        static UNSET: OnceLock<MeshConfig> = OnceLock::new();
        match self.config.get(cx) {
            Some(config) => &config.spec,
            None => UNSET.get_or_init(MeshConfig::default),
        }
    }
}
