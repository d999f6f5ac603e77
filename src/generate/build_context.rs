//! Access to the mesh for generators: a snapshot, the scopes and the shared values of one update, with recorded reads.

use std::{
    any::{Any, TypeId},
    sync::Arc,
};

use crate::{
    base::Shared,
    model::{
        MeshSnapshot, ScopeKey, Service, ServiceKey, SidecarScope,
        service::{MergedPort, ScopedService, ServicePort, ServiceRef},
    },
    proto::istio::mesh::v1alpha1::MeshConfig,
    table::{Cx, Table},
};

/// A generator's only access to the mesh.
#[derive(Clone, Copy)]
#[doc(alias = "PushContext")]
pub struct BuildContext<'a> {
    /// Records the reads; passed to every table access.
    pub cx: &'a Cx,
    /// All tables of one revision.
    pub mesh: &'a MeshSnapshot,
    /// The scopes that live groups use.
    pub scopes: &'a ScopeTables,
    /// Values that resources share during one update.
    pub memo: &'a PushMemo,
}

impl<'a> BuildContext<'a> {
    /// Returns the mesh config, merged onto the defaults.
    pub fn mesh_config(&self) -> &'a MeshConfig {
        self.mesh.mesh_config(self.cx)
    }

    /// Returns a service.
    pub fn service(&self, key: &ServiceKey) -> Option<&'a Shared<Service>> {
        self.mesh.services.get(self.cx, key)
    }

    /// Returns one of the services of a host.
    pub fn member(&self, service: &ServiceRef) -> Option<&'a Shared<Service>> {
        Service::member(self.service(&service.key)?, service.member)
    }

    /// Returns a service as a scope sees it.
    pub fn scoped(&self, service: &ScopedService) -> Option<Shared<Service>> {
        service.of(self.service(&service.key)?)
    }

    /// Returns a service as a destination of routes, which depend on its ports only if it has exactly one. Of a host
    /// with several services, at most two ports are kept: there may be tens of thousands, and as many routes.
    pub fn as_destination(&self, service: ScopedService) -> ScopedService {
        let has_many = service.merged.as_ref().is_some_and(|merged| merged.ports.len() > 2);
        match has_many.then(|| self.service(&service.key)).flatten() {
            Some(row) => service.with_few_ports(row),
            None => service,
        }
    }

    /// Returns a port of a service, with the service that has its attributes.
    pub fn service_port(
        &self,
        key: &ServiceKey,
        merged: Option<MergedPort>,
        number: u32,
    ) -> Option<(&'a Shared<Service>, &'a ServicePort)> {
        Service::merged_port(self.service(key)?, merged, number)
    }

    /// Returns a scope. Selected scopes exist; an empty one replaces a Sidecar that this revision removed. A proxy is
    /// selected before its scope exists, so a selection must not read it.
    pub fn scope(&self, key: &ScopeKey) -> Shared<SidecarScope> {
        self.read_scope(&self.scopes.all, key)
    }

    /// Returns a scope with only those of its VirtualServices that have TCP or TLS routes. Its readers are not rebuilt
    /// when HTTP routes come or go: listing clusters and listeners costs most of such a change otherwise.
    pub fn tcp_scope(&self, key: &ScopeKey) -> Shared<SidecarScope> {
        self.read_scope(&self.scopes.tcp, key)
    }

    fn read_scope(&self, table: &Table<ScopeKey, SidecarScope>, key: &ScopeKey) -> Shared<SidecarScope> {
        let scope = table.get(self.cx, key).cloned();
        scope.unwrap_or_else(|| Shared::new(SidecarScope::empty(key.clone())))
    }
}

/// The scopes that live groups use.
#[derive(Clone)]
pub struct ScopeTables {
    /// Scopes with all their VirtualServices.
    pub all: Table<ScopeKey, SidecarScope>,
    /// The same scopes without the VirtualServices that only route HTTP.
    pub tcp: Table<ScopeKey, SidecarScope>,
}

/// Values of one update, one of each type. Modules above this one add and read their own types.
///
/// A slot is found by comparing a handful of type ids, without hashing.
#[derive(Clone, Default)]
pub struct PushMemo(Vec<(TypeId, Arc<dyn Any + Send + Sync>)>);

impl PushMemo {
    /// Adds a value, in place of an earlier one of its type.
    pub fn with<T: Any + Send + Sync>(mut self, value: T) -> Self {
        let id = TypeId::of::<T>();
        self.0.retain(|(held, _)| *held != id);
        self.0.push((id, Arc::new(value)));
        self
    }

    /// Returns the value of a type. The store adds every type before an update.
    pub fn get<T: Any>(&self) -> &T {
        let slot = self.0.iter().find(|(id, _)| *id == TypeId::of::<T>());
        slot.and_then(|(_, value)| value.downcast_ref())
            .expect("because the store adds every slot before it evaluates anything")
    }
}
