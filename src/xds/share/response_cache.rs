//! A cache of first responses, which are long and alike: a thousand proxies that request the same names of the same
//! views receive the same list. It is built once, and coalesced once for all streams that receive it at about the same
//! time. Otherwise the configuration of 2,000 sidecars costs 10 % more CPU time (bench `scale delta`). The changes for
//! clients that reconnect with equal versions are cached as well.

use std::{
    hash::{BuildHasher, Hash},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use rustc_hash::{FxBuildHasher, FxHashMap};
use smol_str::SmolStr;

use super::{
    coalesced::{ChunkCache, CoalescedResources, lock},
    held::{Charge, HeldBytes, size_of_private},
    initial_versions::{InitialVersions, Versions},
    names::Names,
    recent::Recent,
};
use crate::{
    base::Version,
    generate::{
        EncodedResource, ResourceSnapshot, ResourceType,
        resource::{TypeResources, UnknownRoutes},
    },
};

/// The size of the cached responses: that of the references to their resources. It suffices for a hundred namespaces of
/// a mesh with a thousand services, whose proxies connect in any order. With 32 responses in place of this, hardly any
/// was found again when 5,000 sidecars of 50 namespaces reconnected, and that took a fifth more CPU time (bench `scale
/// reconnect`).
const CACHE_BYTES: usize = 4 << 20;
/// The size of the cached changes.
const UPDATE_BYTES: usize = 1 << 20;
/// The size of the sets of versions that are kept. A client is mostly answered before the next one with an equal set
/// has sent it, so sets that live only as long as they are needed are seldom shared. Without this, 5,000 sidecars that
/// reconnect cost 80 % more CPU time (bench `scale reconnect`).
const VERSIONS_BYTES: usize = 8 << 20;
/// Responses with more placeholders are not cached: no honest client has many, and the cache would keep them.
const MAX_PRIVATE_BYTES: usize = 256 << 10;
/// Responses with fewer resources are not cached: building them is as fast as a lookup.
const MIN_CACHED_RESOURCES: usize = 16;

/// The complete response to a subscription.
#[derive(Clone, Debug)]
pub(in crate::xds) struct CachedResponse {
    /// The resources: sorted by name, or in the order of the view for a wildcard subscription.
    pub(in crate::xds) resources: Arc<[Arc<EncodedResource>]>,
    /// Requested names without a resource.
    pub(in crate::xds) missing: Arc<[SmolStr]>,
    /// The resources in their encoded form.
    pub(in crate::xds) coalesced: Arc<CoalescedResources>,
    /// The memory of resources that only this response has, if there are any.
    pub(in crate::xds) held: Option<Arc<Charge>>,
}

/// The changes that a client lacks when it reconnects.
#[derive(Clone, Debug)]
pub(in crate::xds) struct CachedUpdate {
    /// The resources that it does not hold in this version.
    pub(in crate::xds) resources: Arc<[Arc<EncodedResource>]>,
    /// The names that it holds and that no longer exist.
    pub(in crate::xds) removed: Arc<[SmolStr]>,
    /// The names that it holds unconfirmed.
    pub(in crate::xds) unconfirmed: Arc<[SmolStr]>,
}

/// A cache of the responses of the newest revision.
#[derive(Debug, Default)]
pub struct ResponseCache {
    newest: AtomicU64,
    /// Locked for a lookup or an insertion, never while a response is built.
    entries: Mutex<Recent<CacheEntry, CACHE_BYTES>>,
    /// As `entries`.
    updates: Mutex<Recent<UpdateEntry, UPDATE_BYTES>>,
    /// Sets of the last clients that reconnected, which the next ones share. Locked for a lookup or an insertion.
    initial_versions: Mutex<Recent<InitialVersions, VERSIONS_BYTES>>,
    /// Unconfirmed resources that are being sent. Locked for a lookup or an insertion.
    unconfirmed: Mutex<FxHashMap<Version, Weak<EncodedResource>>>,
    held: Arc<HeldBytes>,
    chunks: Arc<ChunkCache>,
}

#[derive(Debug)]
struct CacheEntry {
    resource_type: ResourceType,
    view: TypeResources,
    unknown_routes: UnknownRoutes,
    /// `None` for a wildcard subscription.
    names: Option<Weak<Names>>,
    response: CachedResponse,
}

#[derive(Debug)]
struct UpdateEntry {
    /// The resources of the complete response, compared by identity.
    all: Weak<[Arc<EncodedResource>]>,
    initial_versions: Weak<Bytes>,
    update: CachedUpdate,
}

impl ResponseCache {
    /// Creates a cache that charges its responses here.
    pub(in crate::xds) fn new(held: Arc<HeldBytes>) -> Self {
        Self {
            held,
            ..Self::default()
        }
    }

    /// Returns the memory that subscriptions hold.
    pub(in crate::xds) fn held(&self) -> &Arc<HeldBytes> {
        &self.held
    }

    /// Drops responses to subscriptions that have ended.
    pub(in crate::xds) fn drop_unused(&self) {
        lock(&self.entries).retain(CacheEntry::is_used);
        lock(&self.initial_versions).clear();
        lock(&self.updates).retain(UpdateEntry::is_used);
    }

    /// Drops responses of revisions before that of this snapshot.
    pub(in crate::xds) fn advance(&self, latest: &ResourceSnapshot) {
        let revision = latest.revision.0;
        if self.newest.fetch_max(revision, Ordering::AcqRel) < revision {
            self.clear();
        }
    }

    /// Drops everything.
    pub(in crate::xds) fn clear(&self) {
        lock(&self.entries).clear();
        lock(&self.updates).clear();
        lock(&self.initial_versions).clear();
        lock(&self.unconfirmed).retain(|_, resource| resource.strong_count() > 0);
        self.chunks.clear();
    }

    /// Returns the unconfirmed form of a resource, the same for all streams that are sent it at about the same time.
    pub(in crate::xds) fn unconfirmed(&self, resource: &EncodedResource) -> Arc<EncodedResource> {
        let mut all = lock(&self.unconfirmed);
        if let Some(known) = all.get(&resource.version).and_then(Weak::upgrade) {
            return known;
        }
        let unconfirmed = Arc::new(resource.unconfirmed());
        all.insert(resource.version, Arc::downgrade(&unconfirmed));
        unconfirmed
    }

    /// Returns all resources of a type, or those with these names.
    pub(in crate::xds) fn all(
        &self,
        resource_type: ResourceType,
        latest: &ResourceSnapshot,
        names: Option<&Arc<Names>>,
    ) -> CachedResponse {
        let view = latest.resources(resource_type);
        let is_same = |entry: &CacheEntry| {
            entry.resource_type == resource_type
                && entry.unknown_routes == latest.unknown_routes
                && entry.names.as_ref().map(Weak::as_ptr) == names.map(Arc::as_ptr)
                && entry.view.ptr_eq(view)
        };
        let parts: Vec<_> = view.parts.iter().map(Arc::as_ptr).collect();
        let hash = hash((resource_type, names.map(Arc::as_ptr), parts));
        if let Some(found) = lock(&self.entries).find(hash, is_same) {
            return found.response.clone();
        }
        let (resources, missing) = match names {
            None => (view.iter().cloned().collect(), Arc::default()),
            Some(names) => named(resource_type, latest, names),
        };
        let private = size_of_private(&resources);
        let response = CachedResponse {
            resources,
            missing,
            held: (private > 0).then(|| self.held.charge(private)),
            coalesced: Arc::new(CoalescedResources::with_cache(self.chunks.clone())),
        };
        let len = response.resources.len() + response.missing.len();
        if len < MIN_CACHED_RESOURCES || private > MAX_PRIVATE_BYTES {
            return response;
        }
        let entry = CacheEntry {
            resource_type,
            view: view.clone(),
            unknown_routes: latest.unknown_routes.clone(),
            names: names.map(Arc::downgrade),
            response: response.clone(),
        };
        let bytes = size_of_val(&*response.resources) + size_of_val(&*response.missing) + private;
        lock(&self.entries).insert(hash, entry, bytes);
        response
    }

    /// Returns the difference between what a client holds and a complete response of this cache.
    pub(in crate::xds) fn update(
        &self,
        all: &CachedResponse,
        initial_versions: &InitialVersions,
        compute: impl FnOnce(&Versions<'_>) -> CachedUpdate,
    ) -> CachedUpdate {
        // As with complete responses, the cache keeps no placeholders.
        if !initial_versions.is_shared() || all.held.is_some() {
            return compute(&initial_versions.versions());
        }
        self.keep(initial_versions);
        let reference = initial_versions.downgrade();
        let resources = Arc::downgrade(&all.resources);
        let is_same = |entry: &UpdateEntry| entry.all.ptr_eq(&resources) && entry.initial_versions.ptr_eq(&reference);
        let hash = hash((reference.as_ptr(), resources.as_ptr()));
        if let Some(found) = lock(&self.updates).find(hash, is_same) {
            return found.update.clone();
        }
        let update = compute(&initial_versions.versions());
        let names = size_of_val(&*update.removed) + size_of_val(&*update.unconfirmed);
        let bytes = size_of_val(&*update.resources) + names;
        let entry = UpdateEntry {
            all: resources,
            initial_versions: reference,
            update: update.clone(),
        };
        lock(&self.updates).insert(hash, entry, bytes);
        update
    }

    /// Keeps a set for the next client that has an equal one.
    fn keep(&self, initial_versions: &InitialVersions) {
        let hash = hash(initial_versions.downgrade().as_ptr());
        let mut kept = lock(&self.initial_versions);
        if kept.find(hash, |kept| kept.is_same(initial_versions)).is_none() {
            kept.insert(hash, initial_versions.clone(), initial_versions.size_bytes());
        }
    }
}

fn hash(identity: impl Hash) -> u64 {
    FxBuildHasher.hash_one(identity)
}

impl UpdateEntry {
    fn is_used(&self) -> bool {
        self.initial_versions.strong_count() > 0 && self.all.strong_count() > 0
    }
}

impl CacheEntry {
    fn is_used(&self) -> bool {
        self.names.as_ref().is_none_or(|names| names.strong_count() > 0)
    }
}

/// Returns the resource of a name: that of the snapshot, or the placeholder for a missing one.
pub(in crate::xds) fn resource(
    latest: &ResourceSnapshot,
    resource_type: ResourceType,
    name: &SmolStr,
) -> Option<Arc<EncodedResource>> {
    let placeholder = || latest.absent(resource_type, name).map(Arc::new);
    latest.resources(resource_type).get(name).cloned().or_else(placeholder)
}

/// Returns the resources with these names, and the names without a resource.
fn named(
    resource_type: ResourceType,
    latest: &ResourceSnapshot,
    names: &Names,
) -> (Arc<[Arc<EncodedResource>]>, Arc<[SmolStr]>) {
    let (mut resources, mut missing) = (Vec::with_capacity(names.set().len()), Vec::new());
    for name in names.set() {
        match resource(latest, resource_type, name) {
            Some(resource) => resources.push(resource),
            None => missing.push(name.clone()),
        }
    }
    (resources.into(), missing.into())
}

#[cfg(test)]
pub(in crate::xds) mod tests {
    use prost::Message;

    use super::*;
    use crate::{
        generate::resource::PartResources,
        model::Revision,
        proto::envoy::{config::cluster::v3::Cluster, service::discovery::v3::DeltaDiscoveryRequest},
        xds::share::initial_versions::InitialVersionsInterner,
    };

    /// Returns a snapshot whose response is cached.
    pub(in crate::xds) fn long_snapshot() -> ResourceSnapshot {
        snapshot(1, MIN_CACHED_RESOURCES)
    }

    /// Returns a snapshot with this many clusters.
    fn snapshot(revision: u64, clusters: usize) -> ResourceSnapshot {
        let cluster = |number: usize| {
            let name = SmolStr::from(format!("c{number}"));
            let message = Cluster::default();
            (name.clone(), Arc::new(EncodedResource::new(name, &message)))
        };
        let part = PartResources {
            resources: (0..clusters).map(cluster).collect(),
            digest: 0,
        };
        let view = |resource_type: &ResourceType| match resource_type {
            ResourceType::Cluster => TypeResources {
                parts: [Arc::new(part.clone())].into(),
                ..TypeResources::default()
            },
            _ => TypeResources::default(),
        };
        ResourceSnapshot::new(
            Revision(revision),
            ResourceType::ALL.iter().map(view).collect(),
            UnknownRoutes::Omitted,
        )
    }

    fn answer(cache: &ResponseCache, snapshot: &ResourceSnapshot) -> Arc<[Arc<EncodedResource>]> {
        cache.all(ResourceType::Cluster, snapshot, None).resources
    }

    #[test]
    fn responses_to_many_kinds_of_clients_are_kept() {
        let cache = ResponseCache::default();
        let groups: Vec<_> = (0..500).map(|_| snapshot(1, MIN_CACHED_RESOURCES)).collect();
        let first: Vec<_> = groups.iter().map(|group| answer(&cache, group)).collect();
        for (group, first) in groups.iter().zip(&first) {
            assert!(Arc::ptr_eq(&answer(&cache, group), first));
        }
    }

    #[test]
    fn short_responses_are_not_cached() {
        let cache = ResponseCache::default();
        let long = snapshot(1, MIN_CACHED_RESOURCES);
        let first = answer(&cache, &long);
        let short = snapshot(1, MIN_CACHED_RESOURCES - 1);
        assert!(!Arc::ptr_eq(&answer(&cache, &short), &answer(&cache, &short)));
        assert!(Arc::ptr_eq(&answer(&cache, &long), &first));
    }

    #[test]
    fn equal_versions_of_clients_that_were_answered_are_shared() {
        let (cache, interner) = (ResponseCache::default(), InitialVersionsInterner::default());
        let all = cache.all(ResourceType::Cluster, &long_snapshot(), None);
        let held = (0..100).map(|number| (format!("outbound|80||web-{number}.default.svc"), "1".into()));
        let fields = DeltaDiscoveryRequest {
            initial_resource_versions: held.collect(),
            ..Default::default()
        }
        .encode_to_vec();
        let read = || interner.read(&fields).expect("valid entries");
        let no_update = || CachedUpdate {
            resources: Arc::default(),
            removed: Arc::default(),
            unconfirmed: Arc::default(),
        };
        let first = read();
        cache.update(&all, &first, |_| no_update());
        let kept = first.downgrade();
        drop(first);
        assert!(read().downgrade().ptr_eq(&kept));
        cache.update(&all, &read(), |_| panic!("it is known"));
        cache.drop_unused();
        assert!(kept.upgrade().is_none());
    }

    #[test]
    fn a_newer_revision_clears_the_cache() {
        let cache = ResponseCache::default();
        let old = snapshot(1, MIN_CACHED_RESOURCES);
        cache.advance(&old);
        let first = Arc::downgrade(&answer(&cache, &old));
        cache.advance(&old);
        assert!(first.upgrade().is_some());
        cache.advance(&snapshot(2, MIN_CACHED_RESOURCES));
        assert!(first.upgrade().is_none());
    }
}
