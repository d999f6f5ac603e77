//! What a generator may read: the snapshot and the scopes, each read recorded.

use super::{
    listener::Pieces,
    route::fragment::{FragmentKey, Routes},
};
use crate::{
    base::Shared,
    model::{MeshSnapshot, ScopeKey, Service, ServiceKey, SidecarScope},
    proto::istio::mesh::v1alpha1::MeshConfig,
    table::{Cx, Table},
};

/// A generator's only access to the mesh.
#[derive(Clone, Copy)]
pub struct BuildContext<'a> {
    /// Records the reads; handed to every table access.
    pub cx: &'a Cx,
    /// All tables of one revision.
    pub mesh: &'a MeshSnapshot,
    /// The scopes that live groups use.
    pub scopes: &'a Table<ScopeKey, SidecarScope>,
    /// What live resources are put together from.
    pub fragments: &'a Table<FragmentKey, Routes>,
    /// What listeners have in common.
    pub pieces: &'a Pieces,
}

impl<'a> BuildContext<'a> {
    /// The mesh config, merged onto the defaults.
    pub fn mesh_config(&self) -> &'a MeshConfig {
        self.mesh.mesh_config(self.cx)
    }

    /// A service.
    pub fn service(&self, key: &ServiceKey) -> Option<&'a Shared<Service>> {
        self.mesh.services.get(self.cx, key)
    }

    /// The routes of a fragment that a resource lists.
    pub fn routes(&self, key: &FragmentKey) -> &'a Shared<Routes> {
        let routes = self.fragments.get(self.cx, key);
        routes.expect("because the fragments of a resource are made before it")
    }

    /// The same key, in the allocation that is in use already if there is one. Nothing depends on which it is.
    pub fn known_fragment(&self, key: FragmentKey) -> FragmentKey {
        let known = self.fragments.get_key_value(&Cx::untracked(), &key);
        known.map_or(key, |(known, _)| known.clone())
    }

    /// A scope. Selected scopes exist; an empty one stands in for a Sidecar that was removed in this very revision.
    pub fn scope(&self, key: &ScopeKey) -> Shared<SidecarScope> {
        self.scopes
            .get(self.cx, key)
            .cloned()
            .unwrap_or_else(|| Shared::new(SidecarScope::empty(key.clone())))
    }
}
