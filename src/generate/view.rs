//! What a generator may read: the snapshot and the scopes, each read recorded.

use crate::{
    base::Shared,
    model::{MeshSnapshot, ScopeKey, Service, ServiceKey, SidecarScope},
    proto::istio::mesh::v1alpha1::MeshConfig,
    table::{Cx, Table},
};

/// A generator's only access to the mesh.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Records the reads; handed to every table access.
    pub cx: &'a Cx,
    /// All tables of one revision.
    pub mesh: &'a MeshSnapshot,
    /// The scopes that live groups use.
    pub scopes: &'a Table<ScopeKey, SidecarScope>,
}

impl<'a> View<'a> {
    /// The mesh config, merged onto the defaults.
    pub fn mesh_config(&self) -> &'a MeshConfig {
        self.mesh.mesh_config(self.cx)
    }

    /// A service.
    pub fn service(&self, key: &ServiceKey) -> Option<&'a Shared<Service>> {
        self.mesh.services.get(self.cx, key)
    }

    /// A scope. Selected scopes exist; an empty one stands in for a Sidecar that was removed in this very revision.
    pub fn scope(&self, key: &ScopeKey) -> Shared<SidecarScope> {
        self.scopes
            .get(self.cx, key)
            .cloned()
            .unwrap_or_else(|| Shared::new(SidecarScope::empty(key.clone())))
    }
}
