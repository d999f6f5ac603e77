//! Quarantine: resources that a proxy refused are not sent to proxies of the same source and build, until they change.
//!
//! One proxy must not keep changes from others. So a resource is withheld from a proxy that has not refused it only
//! after several others have, and only while no proxy of the build has acknowledged it. A proxy that waits for a
//! resource by its name is sent the version that others hold, or else the refused one, so that it goes on. All of this
//! is among clients of one identity, because a client may claim any build and refuse anything.
//!
//! A refused resource is identified by its content version, so nothing has to be invalidated. The quarantine holds it
//! weakly: it ends with the last connection that withholds it. So proxies that reconnect later try again.

use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher,
    sync::{
        Arc, LazyLock, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
};

use prometheus::{IntGauge, IntGaugeVec};
use rustc_hash::FxHashMap;
use smol_str::SmolStr;

use super::set_hash::FEW;
use crate::{
    base::Version,
    generate::{EncodedResource, ResourceType, proxy::NodeMetadata},
    xds::admission::Source,
};

/// The number of connections that must refuse a resource before it is withheld from others.
const REFUSERS: u32 = 3;

/// Texts with which a reason, or a part of it after a colon, begins if the machine of a proxy is the cause and not the
/// content: another process still holds a port, or a file is missing. Such a cause may pass, and does not concern other
/// proxies.
///
/// Texts of Envoy: source/common/network/listen_socket_impl.cc, source/common/filesystem/posix/filesystem_impl.cc.
const LOCAL_REASONS: [&str; 3] = ["cannot bind ", "unable to read file: ", "Invalid path: "];
/// The text before the name of a cluster that the proxy does not know. It may know it later, as others may do now.
///
/// Texts of Envoy: source/common/config/utility.cc, source/extensions/filters/http/oauth2/filter.cc.
const UNKNOWN_CLUSTER: &str = "unknown cluster '";

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
    /// True once it was compared with what proxies of the build hold.
    is_compared: AtomicBool,
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
            is_compared: AtomicBool::new(false),
        }
    }

    /// Returns true if the reason may pass without a change of the resource.
    pub(in crate::xds) fn may_pass(&self) -> bool {
        let is_local = LOCAL_REASONS.iter().any(|begin| self.part_after(begin).is_some());
        is_local || self.unknown_cluster().is_some()
    }

    /// Returns the name of a cluster that the proxy does not know, if that is the reason.
    pub(in crate::xds) fn unknown_cluster(&self) -> Option<&str> {
        self.part_after(UNKNOWN_CLUSTER)?.split('\'').next()
    }

    /// Returns what follows this text in the reason, if the reason, or a part of it after a colon, begins with it.
    fn part_after(&self, begin: &str) -> Option<&str> {
        let reason = self.reason.as_str();
        let mut found = reason.match_indices(begin);
        // The reason is the whole error if the name of the resource is not found there, such as `::_80`.
        let (at, _) = found.find(|(at, _)| *at == 0 || reason[..*at].ends_with(": "))?;
        Some(&reason[at + begin.len()..])
    }

    /// Returns true if it is withheld from proxies that have not refused it themselves.
    pub(in crate::xds) fn concerns_others(&self) -> bool {
        self.refusers.load(Ordering::Relaxed) >= REFUSERS && !self.is_accepted.load(Ordering::Relaxed)
    }

    /// Returns true once, if it is in quarantine: for the caller that compares it with what proxies of the build hold.
    pub(in crate::xds) fn must_be_compared(&self) -> bool {
        self.is_quarantined() && !self.is_compared.swap(true, Ordering::Relaxed)
    }

    /// Records that a proxy of the build acknowledged it.
    pub(in crate::xds) fn accept(&self) {
        self.is_accepted.store(true, Ordering::Relaxed);
    }

    /// Returns the version of what the proxy that refused it holds instead; `None` if it holds nothing.
    pub fn held_version(&self) -> Option<Version> {
        self.held.as_ref().map(|held| held.version)
    }

    /// Returns true if the resource is withheld from the proxies that refused it until it changes.
    pub fn is_quarantined(&self) -> bool {
        self.counted.get().is_some()
    }
}

/// Counts a refusal while it exists.
#[derive(Debug)]
struct Counted {
    gauge: IntGauge,
    all: Arc<AtomicUsize>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.gauge.dec();
        self.all.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The build of the proxies of one source: their version and their extensions. Proxies of one build refuse the same
/// resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::xds) struct Build(u64);

impl Build {
    pub(in crate::xds) fn of(node: &NodeMetadata, source: &Source) -> Self {
        // Randomly keyed, so that a client cannot choose metadata with the hash of another source.
        static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        Self(KEYS.hash_one((source, &node.version_text, &node.extensions, node.proxy_type)))
    }
}

/// The refusals of one build and type by the refused content.
pub(in crate::xds) type ByVersion<T> = FxHashMap<Version, T>;

/// Refusals that live as long as a connection holds them.
type WeakRefusals = ByVersion<Weak<Refusal>>;

/// The refusals of all builds.
#[derive(Debug, Default)]
struct Refusals {
    by_build: FxHashMap<(Build, ResourceType), WeakRefusals>,
    /// The number of refusals that may be added before unused ones are removed: a client may refuse thousands.
    until_removal: usize,
}

impl Refusals {
    fn insert(&mut self, key: (Build, ResourceType), refusal: &Arc<Refusal>) {
        if self.until_removal == 0 {
            self.remove_unused();
        }
        self.until_removal -= 1;
        let of_type = self.by_build.entry(key).or_default();
        of_type.insert(refusal.version, Arc::downgrade(refusal));
    }

    fn remove_unused(&mut self) {
        let mut used = 0;
        self.by_build.retain(|_, of_type| {
            of_type.retain(|_, refusal| refusal.strong_count() > 0);
            used += of_type.len();
            !of_type.is_empty()
        });
        self.until_removal = used + FEW;
    }
}

/// All resources in quarantine.
#[derive(Debug)]
pub(in crate::xds) struct Quarantine {
    /// The number of refusals. Without any, connections need no lock.
    all: Arc<AtomicUsize>,
    /// Locked for an insertion, or for a listing of one build and type.
    refusals: Mutex<Refusals>,
    gauges: IntGaugeVec,
}

impl Quarantine {
    /// Creates an empty quarantine, whose size by type this metric shows.
    pub(in crate::xds) fn new(gauges: IntGaugeVec) -> Self {
        Self {
            all: Arc::default(),
            refusals: Mutex::default(),
            gauges,
        }
    }

    /// Adds a refused resource. Returns the refusal that exists already, if another connection was first. One that may
    /// pass is not added.
    pub(in crate::xds) fn add(&self, build: Build, refusal: Arc<Refusal>) -> Arc<Refusal> {
        if refusal.may_pass() {
            return refusal;
        }
        let key = (build, refusal.resource_type);
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        let of_type = refusals.by_build.get(&key);
        let held = of_type.and_then(|of_type| of_type.get(&refusal.version)?.upgrade());
        if let Some(held) = held {
            held.refusers.fetch_add(1, Ordering::Relaxed);
            return held;
        }
        refusal.refusers.store(1, Ordering::Relaxed);
        let gauge = self.gauges.with_label_values(&[refusal.resource_type.short_name()]);
        gauge.inc();
        self.all.fetch_add(1, Ordering::AcqRel);
        let all = self.all.clone();
        // A new refusal is not counted yet.
        let _ = refusal.counted.set(Counted { gauge, all });
        refusals.insert(key, &refusal);
        refusal
    }

    /// Returns true without refusals.
    pub(in crate::xds) fn is_empty(&self) -> bool {
        self.all.load(Ordering::Acquire) == 0
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
                refusal.accept();
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
        let Some(of_type) = refusals.by_build.get_mut(&key) else {
            return ByVersion::default();
        };
        of_type.retain(|_, refusal| refusal.strong_count() > 0);
        let live = of_type.iter();
        let live = live.filter_map(|(version, refusal)| Some((*version, refusal.upgrade()?)));
        let matching = live.filter(|(_, refusal)| matches(refusal)).collect();
        if of_type.is_empty() {
            refusals.by_build.remove(&key);
        }
        matching
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Opts;
    use serde_json::json;

    use super::*;
    use crate::{generate::fixture, proto::envoy::config::cluster::v3::Cluster};

    fn gauges() -> IntGaugeVec {
        IntGaugeVec::new(Opts::new("quarantined", "help"), &["type"]).expect("a valid metric")
    }

    #[test]
    fn reasons_that_may_pass_say_nothing_of_others() {
        let quarantine = Quarantine::new(gauges());
        let resource = EncodedResource::new("a", &Cluster::default());
        let refuse = |reason: &str, times: u32| -> Vec<Arc<Refusal>> {
            let refuse = |_| {
                let refusal = Refusal::new(ResourceType::Listener, &resource, reason.to_owned(), None);
                quarantine.add(Build(1), Arc::new(refusal))
            };
            (0..times).map(refuse).collect()
        };
        let withheld = || quarantine.withheld(Build(1), ResourceType::Listener).len();
        let passing = [
            "cannot bind '0.0.0.0:80': Address already in use",
            "Error adding/updating listener(s) ::_80: cannot bind '[::]:80': Address already in use",
            "envoy.tracers.zipkin: unknown cluster 'zipkin'",
        ]
        .map(|reason| refuse(reason, REFUSERS))
        .concat();
        assert!(passing.iter().all(|refusal| !refusal.is_quarantined()));
        let _first = refuse("bad", REFUSERS - 1);
        assert_eq!(withheld(), 0, "they do not count with others");
        let _last = refuse("bad", 1);
        assert_eq!(withheld(), 1, "nor do they keep others from counting");
    }

    #[test]
    fn r20_clients_keep_nothing_from_other_sources() {
        let node = fixture::client("sidecar~10.0.0.1~a.shop~shop.svc.cluster.local", &json!({})).node;
        let (own, same, other, unknown) = (
            Source::Identity("spiffe://cluster.local/ns/shop/sa/a".into()),
            Source::Identity("spiffe://cluster.local/ns/shop/sa/a".into()),
            Source::Identity("spiffe://cluster.local/ns/bank/sa/a".into()),
            Source::Address(None),
        );
        let quarantine = Quarantine::new(gauges());
        let resource = EncodedResource::new("a", &Cluster::default());
        let _refusals = [(); REFUSERS as usize].map(|()| {
            let refusal = Refusal::new(ResourceType::Cluster, &resource, "bad".to_owned(), None);
            quarantine.add(Build::of(&node, &own), Arc::new(refusal))
        });
        let withheld = |source| {
            let build = Build::of(&node, source);
            quarantine.withheld(build, ResourceType::Cluster).len()
        };
        assert_eq!([&own, &same, &other, &unknown].map(withheld), [1, 1, 0, 0]);
    }

    #[test]
    fn unused_refusals_are_removed_now_and_then() {
        let quarantine = Quarantine::new(gauges());
        let builds = [Build(0), Build(1)];
        let add = |number: usize| {
            let name = number.to_string();
            let cluster = Cluster {
                name: name.clone(),
                ..Default::default()
            };
            let resource = EncodedResource::new(name, &cluster);
            let refusal = Refusal::new(ResourceType::Cluster, &resource, "bad".to_owned(), None);
            quarantine.add(builds[number % 2], Arc::new(refusal))
        };
        let used: Vec<_> = (0..FEW).map(add).collect();
        (FEW..10 * FEW).for_each(|number| drop(add(number)));
        for build in builds {
            let withheld = quarantine.withheld(build, ResourceType::Cluster);
            assert!(withheld.is_empty(), "one refusal each");
        }
        let refusals = quarantine.refusals.lock().expect("no panic");
        let held: usize = refusals.by_build.values().map(FxHashMap::len).sum();
        assert_eq!(held, used.len());
        assert!(refusals.until_removal <= 2 * FEW);
    }

    #[test]
    fn one_proxy_keeps_nothing_from_others() {
        let gauges = gauges();
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
