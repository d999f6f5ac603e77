//! `MeshSnapshot`: all tables of one revision, immutable and in agreement.

use std::ops::Deref;

use super::{graph::DerivedTables, installation::Installation};
use crate::base::Shared;

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
    /// The raw and derived tables.
    pub(super) derived: DerivedTables,
}

impl Deref for MeshSnapshot {
    type Target = DerivedTables;
    fn deref(&self) -> &DerivedTables {
        &self.derived
    }
}
