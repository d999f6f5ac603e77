//! A control plane without time and sockets.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use istiod::{
    api::Kind,
    base::{ObjectKey, Shared},
    generate::{
        Proxy, RequestedResources, ResourceType,
        store::{ConfigStore, ConnectionId, ProxyEvents, Serial},
    },
    model::{Change, Installation, MeshSnapshot, World, inputs::Row},
    table::ChangeSet,
};

/// The resources of all proxies: (proxy, type, name) → version.
pub(super) type Bytes = BTreeMap<(u64, ResourceType, String), String>;

/// The model and the generated resources of some proxies, which are numbered from 0.
pub(super) struct ControlPlane {
    world: World,
    pub(super) store: ConfigStore,
    proxies: u64,
}

impl ControlPlane {
    /// Creates a control plane with an empty mesh and these proxies. `requested` has the subscriptions of gRPC clients.
    pub(super) fn new(
        installation: Installation,
        proxies: impl IntoIterator<Item = Arc<Proxy>>,
        requested: impl IntoIterator<Item = (ConnectionId, RequestedResources)>,
    ) -> Self {
        let connected: Vec<_> = (0..).map(ConnectionId).zip(proxies).collect();
        let requested = requested.into_iter();
        let mut control_plane = Self {
            world: World::new(installation),
            store: ConfigStore::default(),
            proxies: connected.len() as u64,
        };
        let membership = ProxyEvents {
            connected,
            requested: requested.map(|(id, names)| (id, Shared::new(names))).collect(),
            ..ProxyEvents::default()
        };
        let mesh = control_plane.world.snapshot();
        control_plane
            .store
            .update(&mesh, &ChangeSet::default(), membership, &Serial);
        control_plane
    }

    /// Commits a batch. Returns the number of resources built.
    pub(super) fn commit(&mut self, batch: Vec<Change>) -> Result<usize, String> {
        let commit = self.world.commit(batch);
        let update = self
            .store
            .update(&commit.snapshot, &commit.changes, ProxyEvents::default(), &Serial);
        if update.panics.is_empty() {
            Ok(update.built)
        } else {
            Err(format!("panics: {:?}", update.panics))
        }
    }

    /// Returns the present mesh.
    pub(super) fn mesh(&self) -> Arc<MeshSnapshot> {
        self.world.snapshot()
    }

    /// Returns the versions that resources would have without an object, as the effects of the object say; `None` if
    /// there is no such object.
    pub(super) fn without(&mut self, kind: Kind, key: &ObjectKey) -> Result<Option<Bytes>, String> {
        let Some(without) = self.world.without(kind, key) else {
            return Ok(None);
        };
        if !without.panics.is_empty() {
            return Err(format!("panics: {:?}", without.panics));
        }
        let mut bytes = self.bytes();
        for effect in self.store.effects(&without.snapshot, &without.changes, &Serial) {
            for (id, resource) in effect
                .connections
                .iter()
                .flat_map(|id| effect.resources.iter().map(move |it| (id, it)))
            {
                let key = (id.0, resource.resource_type, resource.name.to_string());
                let present = bytes.get(&key).cloned();
                if present != resource.version.map(|version| version.to_string())
                    || resource.version == resource.without
                {
                    return Err(format!("{key:?} has the version {present:?}: {resource:?}"));
                }
                match resource.without {
                    Some(version) => bytes.insert(key, version.to_string()),
                    None => bytes.remove(&key),
                };
            }
        }
        Ok(Some(bytes))
    }

    /// Returns the versions of all resources.
    pub(super) fn bytes(&self) -> Bytes {
        let mut bytes = Bytes::new();
        for index in 0..self.proxies {
            let snapshot = self
                .store
                .group_of(ConnectionId(index))
                .and_then(|key| self.store.snapshot(key));
            for resource_type in ResourceType::ALL {
                for resource in snapshot
                    .iter()
                    .flat_map(|snapshot| snapshot.resources(*resource_type).iter())
                {
                    bytes.insert(
                        (index, *resource_type, resource.name.to_string()),
                        resource.version.to_string(),
                    );
                }
            }
        }
        bytes
    }
}

/// Returns changes that add these rows.
pub(super) fn upserts(rows: impl IntoIterator<Item = Row>) -> Vec<Change> {
    rows.into_iter().map(Change::Upsert).collect()
}

/// Names the first resources that differ.
pub(super) fn first_difference(a: &Bytes, b: &Bytes) -> String {
    let keys: BTreeSet<_> = a.keys().chain(b.keys()).collect();
    let differing: Vec<String> = keys
        .into_iter()
        .filter(|key| a.get(key) != b.get(key))
        .take(5)
        .map(|key| format!("{key:?}"))
        .collect();
    differing.join("; ")
}
