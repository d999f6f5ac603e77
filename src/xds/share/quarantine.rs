//! Quarantine: resources that a proxy refused are not sent to proxies of the same build, until they change.
//!
//! One proxy must not keep changes from others, so a resource is withheld from proxies that have not refused it
//! themselves only after several have, and only while none of the build has acknowledged it. A proxy that waits for a
//! resource by its name is sent the version that others hold, or else the refused one, so that it goes on.
//!
//! A refused resource is identified by its content version, so nothing has to be invalidated. The quarantine holds it
//! weakly: it ends with the last connection that withholds it. So proxies that reconnect later try again.

use std::sync::{
    Arc, Mutex, OnceLock, PoisonError, Weak,
    atomic::{AtomicBool, AtomicU32, Ordering},
};

use prometheus::{IntGauge, IntGaugeVec};
use rustc_hash::FxHashMap;
use smol_str::SmolStr;

use crate::{
    base::Version,
    generate::{EncodedResource, ResourceType, proxy::NodeMetadata},
};

/// The number of connections that must refuse a resource before it is withheld from others.
const REFUSERS: u32 = 3;

/// A resource that a proxy refused.
#[derive(Debug)]
pub struct Refusal {
    /// The type.
    pub resource_type: ResourceType,
    /// The name.
    pub name: SmolStr,
    /// The refused content.
    pub version: Version,
    /// The reason, in the words of the proxy.
    pub reason: String,
    /// The resource that the proxy that refused it holds instead.
    pub(in crate::xds) held: Option<Arc<EncodedResource>>,
    /// Set while it is in quarantine.
    counted: OnceLock<Counted>,
    /// The number of connections that refused it.
    refusers: AtomicU32,
    /// True if a proxy of the build acknowledged it.
    is_accepted: AtomicBool,
}

impl Refusal {
    pub(in crate::xds) fn new(
        resource_type: ResourceType,
        resource: &EncodedResource,
        reason: String,
        held: Option<Arc<EncodedResource>>,
    ) -> Self {
        Self {
            resource_type,
            name: resource.name.clone(),
            version: resource.version,
            reason,
            held,
            counted: OnceLock::new(),
            refusers: AtomicU32::new(0),
            is_accepted: AtomicBool::new(false),
        }
    }

    /// Returns true if it is withheld from proxies that have not refused it themselves.
    pub(in crate::xds) fn concerns_others(&self) -> bool {
        self.refusers.load(Ordering::Relaxed) >= REFUSERS && !self.is_accepted.load(Ordering::Relaxed)
    }

    /// Returns the version of what the proxy that refused it holds instead; `None` if it holds nothing.
    pub fn held_version(&self) -> Option<Version> {
        self.held.as_ref().map(|held| held.version)
    }

    /// Returns true if the resource is withheld from the proxies that refused it.
    pub fn is_quarantined(&self) -> bool {
        self.counted.get().is_some()
    }
}

/// Counts a refusal while it exists.
#[derive(Debug)]
struct Counted(IntGauge);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// The build of a proxy: its version and its extensions. Proxies of one build refuse the same resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::xds) struct Build(u64);

impl Build {
    pub(in crate::xds) fn of(node: &NodeMetadata) -> Self {
        use std::hash::{Hash, Hasher};
        let mut hasher = rustc_hash::FxHasher::default();
        (&node.version_text, &node.extensions, node.proxy_type).hash(&mut hasher);
        Self(hasher.finish())
    }
}

/// The refusals of one build and type by the refused content.
pub(in crate::xds) type ByVersion<T> = FxHashMap<Version, T>;

/// Refusals that live as long as a connection holds them.
type WeakRefusals = ByVersion<Weak<Refusal>>;

/// All resources in quarantine.
#[derive(Debug)]
pub(in crate::xds) struct Quarantine {
    /// False without refusals, so that connections need no lock.
    any: AtomicBool,
    /// Locked for an insertion, or for a listing of one build and type.
    refusals: Mutex<FxHashMap<(Build, ResourceType), WeakRefusals>>,
    gauges: IntGaugeVec,
}

impl Quarantine {
    /// Creates an empty quarantine, whose size by type this metric shows.
    pub(in crate::xds) fn new(gauges: IntGaugeVec) -> Self {
        Self {
            any: AtomicBool::new(false),
            refusals: Mutex::default(),
            gauges,
        }
    }

    /// Adds a refused resource. Returns the refusal that exists already, if another connection was first.
    pub(in crate::xds) fn add(&self, build: Build, refusal: Arc<Refusal>) -> Arc<Refusal> {
        let key = (build, refusal.resource_type);
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        let of_type = refusals.get(&key);
        let held = of_type.and_then(|of_type| of_type.get(&refusal.version)?.upgrade());
        if let Some(held) = held {
            held.refusers.fetch_add(1, Ordering::Relaxed);
            return held;
        }
        refusal.refusers.store(1, Ordering::Relaxed);
        refusals.retain(|_, of_type| {
            of_type.retain(|_, refusal| refusal.strong_count() > 0);
            !of_type.is_empty()
        });
        let gauge = self.gauges.with_label_values(&[refusal.resource_type.short_name()]);
        gauge.inc();
        // A new refusal is not counted yet.
        let _ = refusal.counted.set(Counted(gauge));
        let of_type = refusals.entry(key).or_default();
        of_type.insert(refusal.version, Arc::downgrade(&refusal));
        self.any.store(true, Ordering::Release);
        refusal
    }

    /// Returns true without refusals.
    pub(in crate::xds) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// Returns the refusals of resources that are withheld from proxies that have not refused them themselves. A
    /// response looks up its resources there, so that it takes the lock once.
    pub(in crate::xds) fn withheld(&self, build: Build, resource_type: ResourceType) -> ByVersion<Arc<Refusal>> {
        self.matching(build, resource_type, Refusal::concerns_others)
    }

    /// Records that a proxy of the build acknowledged resources.
    pub(in crate::xds) fn accept(&self, build: Build, resource_type: ResourceType, resources: &[Arc<EncodedResource>]) {
        let is_open = |refusal: &Refusal| !refusal.is_accepted.load(Ordering::Relaxed);
        let open = self.matching(build, resource_type, is_open);
        if open.is_empty() {
            return;
        }
        for resource in resources {
            if let Some(refusal) = open.get(&resource.version) {
                refusal.is_accepted.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Returns the matching refusals of a build and type. Forgets those that no connection holds.
    fn matching(
        &self,
        build: Build,
        resource_type: ResourceType,
        matches: impl Fn(&Refusal) -> bool,
    ) -> ByVersion<Arc<Refusal>> {
        if self.is_empty() {
            return ByVersion::default();
        }
        let key = (build, resource_type);
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(of_type) = refusals.get_mut(&key) else {
            return ByVersion::default();
        };
        of_type.retain(|_, refusal| refusal.strong_count() > 0);
        let live = of_type.iter();
        let live = live.filter_map(|(version, refusal)| Some((*version, refusal.upgrade()?)));
        let matching = live.filter(|(_, refusal)| matches(refusal)).collect();
        if of_type.is_empty() {
            refusals.remove(&key);
            self.any.store(!refusals.is_empty(), Ordering::Release);
        }
        matching
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Opts;

    use super::*;
    use crate::proto::envoy::config::cluster::v3::Cluster;

    #[test]
    fn one_proxy_keeps_nothing_from_others() {
        let gauges = IntGaugeVec::new(Opts::new("quarantined", "help"), &["type"]).expect("a valid metric");
        let quarantine = Quarantine::new(gauges.clone());
        let resource = Arc::new(EncodedResource::new("a", &Cluster::default()));
        let build = Build(1);
        let refuse = || {
            let refusal = Refusal::new(ResourceType::Cluster, &resource, "bad".to_owned(), None);
            quarantine.add(build, Arc::new(refusal))
        };
        let get = |build| {
            let withheld = quarantine.withheld(build, ResourceType::Cluster);
            withheld.get(&resource.version).cloned()
        };
        let first = refuse();
        assert!(get(build).is_none(), "one refusal");
        let others = [refuse(), refuse()];
        assert!(others.iter().all(|other| Arc::ptr_eq(other, &first)));
        assert!(get(build).is_some() && get(Build(2)).is_none());
        assert_eq!(gauges.with_label_values(&["cds"]).get(), 1);
        quarantine.accept(build, ResourceType::Cluster, std::slice::from_ref(&resource));
        assert!(get(build).is_none(), "an acknowledgement is a proof");
        drop((first, others));
        assert_eq!(gauges.with_label_values(&["cds"]).get(), 0);
        assert!(get(build).is_none() && quarantine.is_empty());
    }
}
