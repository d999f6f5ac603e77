//! Measurement of one mesh: its commit, all resources of a first proxy in a fresh store, and the cost of each further
//! proxy.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    collections::BTreeMap,
    sync::{Arc, LazyLock},
};

use istiod::{
    generate::{
        PartKey, Proxy, ResourceKey, ResourceType,
        plan::{Part, Resource},
        proxy_class::ProxyClassKey,
        store::{ConfigStore, ConnectionId, Executor, ProxyEvents, Serial, StoreUpdate},
    },
    model::{Change, Installation, MeshSnapshot, ScopeKey, World},
    table::ChangeSet,
};

use crate::fixture::cpu;

/// Minimum number of runs. A figure is the minimum of its runs, because disturbances only add to it.
const RUNS: usize = 7;
/// Short runs are repeated until they have taken this many milliseconds together.
const MIN_TOTAL: f64 = 400.0;
const MAX_RUNS: usize = 2000;

/// The cost and size of the resources of one type.
#[derive(Clone, Copy)]
pub(super) struct Generation {
    /// Milliseconds of CPU.
    pub(super) cost: f64,
    /// StoreSize on the wire.
    pub(super) bytes: usize,
    pub(super) count: usize,
}

/// CPU milliseconds of a case, and sizes.
pub(super) struct Measured {
    /// The commit of all objects.
    pub(super) model: f64,
    /// The selection of objects and the scope of the first proxy.
    pub(super) selection: f64,
    pub(super) types: BTreeMap<ResourceType, Generation>,
    /// All costs of a further proxy of the same kind: the mean over the proxies that join one after the other, as
    /// istiod's times are means.
    pub(super) second: f64,
}

/// An executor that runs on the calling thread, type after type, and records the time of each.
#[derive(Default)]
struct Meter {
    costs: RefCell<BTreeMap<Option<ResourceType>, f64>>,
    /// The overhead of the measurement itself, which is subtracted.
    own: Cell<f64>,
}

impl Executor for Meter {
    fn map<T: Send + 'static, R: Send>(&self, items: Vec<T>, function: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
        let entered = cpu();
        let mut kinds: BTreeMap<Option<ResourceType>, Vec<(usize, T)>> = BTreeMap::new();
        for (at, item) in items.into_iter().enumerate() {
            kinds.entry(resource_type(&item)).or_default().push((at, item));
        }
        let (mut results, mut evaluated) = (Vec::new(), 0.0);
        for (kind, items) in kinds {
            let started_at = cpu();
            results.extend(items.into_iter().map(|(at, item)| (at, function(item))));
            let cost = since(started_at);
            evaluated += cost;
            *self.costs.borrow_mut().entry(kind).or_default() += cost;
        }
        results.sort_by_key(|(at, _)| *at);
        let results = results.into_iter().map(|(_, result)| result).collect();
        self.own.set(self.own.get() + cpu() - entered + tick() - evaluated);
        results
    }
}

/// Returns the time spent since `started_at`, without the reading of the clock.
fn since(started_at: f64) -> f64 {
    (cpu() - started_at - tick()).max(0.0)
}

/// Returns the time of one reading of the clock.
fn tick() -> f64 {
    static TICK: LazyLock<f64> = LazyLock::new(|| {
        let ticks = (0..1000).map(|_| {
            let started_at = cpu();
            cpu() - started_at
        });
        ticks.fold(f64::MAX, f64::min)
    });
    *TICK
}

/// The type that a key is evaluated for; none for profiles, selections and scopes.
fn resource_type(key: &dyn Any) -> Option<ResourceType> {
    if key.is::<ConnectionId>() || key.is::<ProxyClassKey>() || key.is::<ScopeKey>() {
        return None;
    }
    if let Some(part) = key.downcast_ref::<PartKey>() {
        return Some(match **part {
            Part::Clusters(_) | Part::Grpc(_) => ResourceType::Cluster,
            Part::Listeners(_) => ResourceType::Listener,
            Part::Routes(_) => ResourceType::Route,
            Part::Extensions(_) => ResourceType::Extension,
            Part::NameTable(_) => ResourceType::NameTable,
            Part::TrustAnchors(_) => ResourceType::ProxyConfig,
            Part::Addresses(ref part) => part.resource_type(),
            Part::Authorizations(_) => ResourceType::Authorization,
            Part::Secrets(_) => ResourceType::Secret,
        });
    }
    let Some(resource) = key.downcast_ref::<ResourceKey>() else {
        // The parts of route configurations.
        return Some(ResourceType::Route);
    };
    Some(match **resource {
        Resource::Cluster(_) | Resource::Grpc(_) => ResourceType::Cluster,
        Resource::Endpoint(_) => ResourceType::Endpoint,
        Resource::Listener(_) => ResourceType::Listener,
        Resource::Route(_) => ResourceType::Route,
        Resource::Extension(_) => ResourceType::Extension,
        Resource::NameTable(_) => ResourceType::NameTable,
        Resource::TrustAnchors(_) => ResourceType::ProxyConfig,
        Resource::Address(_) => ResourceType::Address,
        Resource::Authorization(_) => ResourceType::Authorization,
        Resource::Secret(_) => ResourceType::Secret,
    })
}

/// Measures these rows with proxies of one kind, at least two. The mesh is committed first, repeatedly. Generation then
/// uses the last of these snapshots, each time with a new store; istiod's suite also creates its push context once.
pub(super) fn measure(
    installation: &Installation,
    changes: &[Change],
    proxies: Vec<Proxy>,
) -> Result<Measured, String> {
    let proxies: Vec<_> = proxies.into_iter().map(Arc::new).collect();
    let (mut model, mut mesh) = commit(installation, changes);
    repeat(|| {
        let (cost, snapshot) = commit(installation, changes);
        model = model.min(cost);
        mesh = snapshot;
        Ok(cost)
    })?;
    let mut least: Option<Measured> = None;
    repeat(|| {
        let (started_at, once) = (cpu(), generate(&mesh, &proxies)?);
        least = Some(match least.take() {
            Some(least) => least.least(once),
            None => once,
        });
        Ok(since(started_at))
    })?;
    let least = least.ok_or("nothing was run")?;
    Ok(Measured { model, ..least })
}

/// Repeats a function that returns its cost, as often as a stable figure needs.
fn repeat(mut once: impl FnMut() -> Result<f64, String>) -> Result<(), String> {
    let (mut spent, mut runs) = (0.0, 0);
    while runs < RUNS || (spent < MIN_TOTAL && runs < MAX_RUNS) {
        spent += once()?;
        runs += 1;
    }
    Ok(())
}

/// Returns a mesh of these objects alone, and its cost.
fn commit(installation: &Installation, changes: &[Change]) -> (f64, Arc<MeshSnapshot>) {
    let changes = changes.to_vec();
    let mut world = World::new(installation.clone());
    let started_at = cpu();
    let mesh = world.commit(changes).snapshot;
    (since(started_at), mesh)
}

fn generate(mesh: &MeshSnapshot, proxies: &[Arc<Proxy>]) -> Result<Measured, String> {
    let (first, further) = proxies.split_first().ok_or("no proxy")?;
    let mut store = ConfigStore::default();
    let meter = Meter::default();
    let started_at = cpu();
    let update = store.update(mesh, &ChangeSet::default(), connected(0, first), &meter);
    let all = since(started_at) - meter.own.get();
    check(&update)?;
    let mut costs = meter.costs.into_inner();
    let selection = costs.remove(&None).unwrap_or_default();
    let snapshot = update.groups.first().map(|(_, snapshot)| snapshot.clone());
    let snapshot = snapshot.ok_or("the proxy is in no group")?;

    let mut types = BTreeMap::new();
    for resource_type in ResourceType::ALL {
        let view = snapshot.resources(*resource_type);
        let generation = Generation {
            cost: costs.get(&Some(*resource_type)).copied().unwrap_or_default(),
            bytes: view.iter().map(|resource| resource.sotw_frame().size()).sum(),
            count: view.iter().count(),
        };
        types.insert(*resource_type, generation);
    }
    // The store's overhead is divided between the resources.
    let evaluated: f64 = selection + costs.values().sum::<f64>();
    let count: usize = types.values().map(|generation| generation.count).sum();
    let share = (all - evaluated) / count.max(1) as f64;
    for generation in types.values_mut() {
        generation.cost += share * generation.count as f64;
    }

    let memberships: Vec<_> = (1..)
        .zip(further)
        .map(|(number, proxy)| connected(number, proxy))
        .collect();
    let mut updates = Vec::with_capacity(memberships.len());
    let started_at = cpu();
    for membership in memberships {
        updates.push(store.update(mesh, &ChangeSet::default(), membership, &Serial));
    }
    let second = since(started_at) / updates.len() as f64;
    for update in updates {
        check(&update)?;
        if update.built > 0 || !update.groups.is_empty() {
            return Err("a further proxy is not in the first one's group".to_owned());
        }
    }
    Ok(Measured {
        model: 0.0,
        selection,
        types,
        second,
    })
}

/// Generates everything for the first proxy once to warm up and once for an instruction count, which must not include
/// clock readings.
pub(super) fn count(installation: &Installation, changes: &[Change], proxy: Proxy) -> Result<(), String> {
    let proxy = Arc::new(proxy);
    let (_, mesh) = commit(installation, changes);
    ConfigStore::default().update(&mesh, &ChangeSet::default(), connected(0, &proxy), &Serial);
    let update = counted_update(&mut ConfigStore::default(), &mesh, connected(0, &proxy));
    check(&update)
}

#[inline(never)]
fn counted_update(store: &mut ConfigStore, mesh: &MeshSnapshot, connected: ProxyEvents) -> StoreUpdate {
    store.update(mesh, &ChangeSet::default(), connected, &Serial)
}

fn connected(member: u64, proxy: &Arc<Proxy>) -> ProxyEvents {
    ProxyEvents {
        connected: vec![(ConnectionId(member), proxy.clone())],
        ..ProxyEvents::default()
    }
}

fn check(update: &StoreUpdate) -> Result<(), String> {
    if update.panics.is_empty() {
        Ok(())
    } else {
        Err(update.panics.join("\n"))
    }
}

impl Measured {
    fn least(mut self, other: Self) -> Self {
        self.model = self.model.min(other.model);
        self.selection = self.selection.min(other.selection);
        self.second = self.second.min(other.second);
        for (resource_type, generation) in other.types {
            let least = self.types.entry(resource_type).or_insert(generation);
            least.cost = least.cost.min(generation.cost);
        }
        self
    }
}
