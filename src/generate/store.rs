//! The store of generated configuration: memos of classes, scopes, parts, fragments, resources and groups. A value
//! lives while it has users and is computed again only if something that it read has changed.
//!
//! An update brings the memos up to date in order, like the tables of the model. Within one memo an [`Executor`] may
//! evaluate in parallel.
//!
//! Note: a part lists resource keys, not bytes. The bytes are assembled afterwards, so a changed resource touches one
//! entry of each list that contains it. Parts with equal lists, as in most namespaces, share the list and the
//! assembled resources.

mod connections;
pub mod effect;
mod fragments;
mod lists;
mod maps;
mod parts;
mod scopes;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, sync::Arc};

use imbl::OrdSet;
use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    BuildContext, RequestedResources, ScopeTables,
    build_context::PushMemo,
    encoded::ResourceType,
    listener::waypoint::chains::{BuiltChains, ServiceChainsKey},
    plan::{self, List, PartKey, Pools, ProxyGroupKey, ResourceKey},
    proxy::Proxy,
    proxy_class::ProxyClassKey,
    requested::ADDRESSES,
    resource::{Built, Note, ResourceSnapshot, TypeResources},
    route::{CommonRoutesMemo, fragment::FragmentKey, routes::Routes},
};
use crate::{
    api::access_review::Subject,
    base::Shared,
    model::{MeshSnapshot, ScopeKey, SidecarScope, ambient::SHARDS},
    table::{ChangeSet, Cx, Derived, Evaluated, Key, Refcounts, Table, TableWriter, Transaction, Users},
};
use connections::Connections;
use fragments::FragmentMemo;
use lists::Lists;
use maps::PartResourceMaps;
use parts::Parts;
use scopes::Scopes;

/// The maximum number of virtual hosts in the common route configurations that are kept, of up to a kilobyte each.
const MAX_KEPT_HOSTS: usize = 1 << 15;

/// The id of a connected proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// Runs independent evaluations and keeps the order of the results.
pub trait Executor {
    /// Applies a function to every item.
    fn map<T: Send + 'static, R: Send>(&self, items: Vec<T>, function: impl Fn(T) -> R + Sync + Send) -> Vec<R>;
}

/// Runs everything on the calling thread.
pub struct Serial;

impl Executor for Serial {
    fn map<T: Send, R: Send>(&self, items: Vec<T>, function: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
        items.into_iter().map(function).collect()
    }
}

/// Identities of the memos, which no table of the mesh has.
mod relation {
    use crate::table::RelationId;

    pub(super) const GROUPS: RelationId = RelationId(2000);
    pub(super) const SCOPES: RelationId = RelationId(2001);
    pub(super) const LISTS: RelationId = RelationId(2002);
    pub(super) const RESOURCES: RelationId = RelationId(2003);
    pub(super) const FRAGMENTS: RelationId = RelationId(2004);
    pub(super) const CHAINS: RelationId = RelationId(2005);
    pub(super) const TCP_SCOPES: RelationId = RelationId(2006);
    pub(super) const COMMON_SCOPES: RelationId = RelationId(2007);
    pub(super) const COMMON_LISTS: RelationId = RelationId(2008);
}

/// Events of proxies between two updates.
#[derive(Default)]
pub struct ProxyEvents {
    /// Proxies that connected.
    pub connected: Vec<(ConnectionId, Arc<Proxy>)>,
    /// Proxies whose requested names changed, with all the names that they request now.
    pub requested: Vec<(ConnectionId, Shared<RequestedResources>)>,
    /// Proxies that disconnected.
    pub disconnected: Vec<ConnectionId>,
}

/// The result of an update.
#[derive(Default)]
pub struct StoreUpdate {
    /// Groups with a new snapshot, each once.
    pub groups: Vec<(ProxyGroupKey, Arc<ResourceSnapshot>)>,
    /// Connections that have another group than before, including new ones.
    pub moved: Vec<(ConnectionId, ProxyGroupKey)>,
    /// True if [`ConfigStore::subjects`] changed.
    pub subjects_changed: bool,
    /// The number of built resources.
    pub built: usize,
    /// The number of built fragments of resources.
    pub fragments: usize,
    /// Evaluations that panicked and kept the value from before, described for the log.
    pub panics: Vec<String>,
}

/// The size of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreSize {
    /// Connected proxies.
    pub connections: usize,
    /// Distinct classes of proxies, each selected once.
    pub classes: usize,
    /// Distinct groups.
    pub groups: usize,
    /// Distinct parts.
    pub parts: usize,
    /// Distinct lists of resources.
    pub lists: usize,
    /// Distinct resources.
    pub resources: usize,
    /// Bytes of all distinct resources.
    pub bytes: usize,
    /// Recorded dependencies.
    pub reads: usize,
}

/// The generated configuration of all connected proxies. See the module documentation.
#[doc(alias = "XdsCache")]
pub struct ConfigStore {
    connections: Connections,
    scopes: Scopes,
    parts: Parts,
    fragments: FragmentMemo<FragmentKey, Routes>,
    chains: FragmentMemo<ServiceChainsKey, BuiltChains>,
    resources: Derived<ResourceKey, Built>,
    pools: Pools,
    /// Those of the present mesh, for the proxies that connect next. Without them, 200 proxies of 50 namespaces, which
    /// connect one after the other, cost a sixth more CPU time (bench `scale sotw`).
    common_routes: Arc<CommonRoutesMemo>,
    groups: FxHashMap<ProxyGroupKey, Group>,
    groups_of_scope: Refcounts<ScopeKey>,
    groups_of_part: Users<PartKey, ProxyGroupKey>,
    lists: Lists,
    subjects: Subjects,
    /// Bytes of all resources, updated as they change.
    bytes: usize,
}

/// Subjects whose access to Secrets must be reviewed, with the number of parts that read Secrets for them.
#[derive(Default)]
struct Subjects {
    parts: Refcounts<Subject>,
    all: OrdSet<Subject>,
    changed: bool,
}

impl Subjects {
    fn add(&mut self, part: &PartKey) {
        if let Some(subject) = part.subject().filter(|subject| self.parts.add(subject)) {
            self.all.insert(subject.clone());
            self.changed = true;
        }
    }

    fn remove(&mut self, part: &PartKey) {
        if let Some(subject) = part.subject().filter(|subject| self.parts.remove(subject)) {
            self.all.remove(subject);
            self.changed = true;
        }
    }
}

struct Group {
    connections: usize,
    snapshot: Arc<ResourceSnapshot>,
}

/// Keys that are new in an update.
#[derive(Default)]
struct NewKeys {
    scopes: Vec<ScopeKey>,
    parts: Vec<PartKey>,
}

impl NewKeys {
    fn is_empty(&self) -> bool {
        self.scopes.is_empty() && self.parts.is_empty()
    }
}

impl Default for ConfigStore {
    fn default() -> Self {
        Self {
            connections: Connections::new(relation::GROUPS),
            scopes: Scopes::default(),
            parts: Parts::default(),
            fragments: FragmentMemo::new(relation::FRAGMENTS),
            chains: FragmentMemo::new(relation::CHAINS),
            resources: Derived::new(relation::RESOURCES),
            pools: Pools::default(),
            common_routes: Arc::default(),
            groups: FxHashMap::default(),
            groups_of_scope: Refcounts::default(),
            groups_of_part: Users::default(),
            lists: Lists::default(),
            subjects: Subjects::default(),
            bytes: 0,
        }
    }
}

impl ConfigStore {
    /// Brings everything up to date with a revision of the mesh. `changes` are those since the last update.
    pub fn update(
        &mut self,
        mesh: &MeshSnapshot,
        changes: &ChangeSet,
        events: ProxyEvents,
        executor: &impl Executor,
    ) -> StoreUpdate {
        let mut evaluator = Evaluator::new(changes, executor);
        let mut update = StoreUpdate::default();
        let mut touched: FxHashSet<ProxyGroupKey> = FxHashSet::default();

        let scopes = self.scopes.tables();
        if !changes.is_empty() {
            self.release_common_routes();
        }
        let memo = self.push_memo().with(self.common_routes.clone());
        let inputs = BuildInputs {
            mesh,
            scopes: &scopes,
            memo: &memo,
        };
        let used = &self.groups_of_part;
        let released = self
            .connections
            .update(&mut evaluator, inputs, used, events, &mut update.moved);
        let new = self.add_connections(&update.moved, &mut touched);
        if !(evaluator.tx.is_empty() && new.is_empty()) {
            self.generate(&mut evaluator, inputs, &new, &mut update, &mut touched);
        }
        self.release_groups(&mut evaluator.tx, released);
        self.update_bytes();
        update.panics = evaluator.tx.take_panics();
        update.subjects_changed = std::mem::take(&mut self.subjects.changed);
        update.groups = self.assemble_groups(touched, mesh);
        self.forget_changes();
        update
    }

    /// Returns the values that resources share during one update, with what is present.
    fn push_memo(&self) -> PushMemo {
        let common = self.parts.common_lists();
        plan::push_memo(common, self.fragments.table(), self.chains.table(), &self.pools)
    }

    /// Returns true if common route configurations are kept for the proxies that connect next.
    pub fn keeps_common_routes(&self) -> bool {
        self.common_routes.hosts() > 0
    }

    /// Drops the common route configurations. They are built again when they are needed.
    pub fn release_common_routes(&mut self) {
        self.common_routes = Arc::default();
    }

    /// Ends an update and drops the values from before it, so that the next update does not have to.
    fn forget_changes(&mut self) {
        if self.common_routes.hosts() > MAX_KEPT_HOSTS {
            self.release_common_routes();
        }
        self.connections.forget_changes();
        self.scopes.begin();
        self.parts.begin();
        self.fragments.forget_changes();
        self.chains.forget_changes();
        self.resources.begin();
        self.pools.blocks.collect();
    }

    /// Updates scopes, parts, fragments and resources. Adds the groups that must be assembled to `touched`.
    fn generate(
        &mut self,
        evaluator: &mut Evaluator<impl Executor>,
        inputs: BuildInputs,
        new: &NewKeys,
        update: &mut StoreUpdate,
        touched: &mut FxHashSet<ProxyGroupKey>,
    ) {
        self.scopes.update(evaluator, inputs.mesh, &new.scopes);
        let scopes = self.scopes.tables();
        let inputs = BuildInputs {
            scopes: &scopes,
            ..inputs
        };
        self.parts.update(evaluator, inputs, &new.parts, &self.lists);
        let lists = self.lists.update(self.parts.writer().changes());
        let new = lists.resources.iter();
        let fragments = new.clone().flat_map(|resource| resource.fragments());
        let build = |cx: &Cx, key: &FragmentKey| Some(key.build(&inputs.ctx(cx)));
        update.fragments = self.fragments.update(evaluator, fragments, build);
        let chains = new.flat_map(|resource| resource.chains());
        let build = |cx: &Cx, key: &ServiceChainsKey| Some(key.build(&inputs.ctx(cx)));
        update.fragments += self.chains.update(evaluator, chains, build);
        let memo = inputs
            .memo
            .clone()
            .with(self.fragments.table())
            .with(self.chains.table());
        let inputs = BuildInputs { memo: &memo, ..inputs };
        let build = |cx: &Cx, key: &ResourceKey| Some(key.build(&inputs.ctx(cx)));
        update.built = evaluator.update(&mut self.resources, &lists.resources, build);
        let unused = self.lists.release(&lists);
        self.forget_resources(&mut evaluator.tx, &unused);
        let built = self.resources.writer().changes();
        let changed_lists = self.lists.assemble(&lists, built, self.resources.table());
        let relisted = self.parts.writer().changes().iter().map(|(part, _, _)| part);
        let users = changed_lists.iter().flat_map(|list| self.lists.parts(list));
        for part in relisted.chain(users) {
            touched.extend(self.groups_of_part.get(part).cloned());
        }
    }

    /// Returns the snapshot of a group.
    pub fn snapshot(&self, key: &ProxyGroupKey) -> Option<&Arc<ResourceSnapshot>> {
        self.groups.get(key).map(|group| &group.snapshot)
    }

    /// Returns the group of a connection.
    pub fn group_of(&self, id: ConnectionId) -> Option<&ProxyGroupKey> {
        self.connections.group(id)
    }

    /// Returns a connected proxy.
    pub fn proxy(&self, id: ConnectionId) -> Option<&Arc<Proxy>> {
        self.connections.proxy(id)
    }

    /// Returns the connected proxies with their classes, for metrics.
    pub fn proxies(&self) -> impl Iterator<Item = (ConnectionId, &Arc<Proxy>, Option<&ProxyClassKey>)> {
        self.connections.proxies()
    }

    /// Returns the class of a connection.
    pub fn class_of(&self, id: ConnectionId) -> Option<&ProxyClassKey> {
        self.connections.class(id)
    }

    /// Returns the present resources, for debug pages.
    pub fn resources(&self) -> &Table<ResourceKey, Built> {
        self.resources.table()
    }

    /// Returns the subjects whose access to Secrets must be reviewed for the present configuration.
    pub fn subjects(&self) -> &OrdSet<Subject> {
        &self.subjects.all
    }

    /// Returns the scopes, for debug pages.
    pub fn scopes(&self) -> &Table<ScopeKey, SidecarScope> {
        self.scopes.all()
    }

    /// Returns the notes of all present resources, each once, sorted.
    pub fn notes(&self) -> BTreeSet<Note> {
        notes(self.resources())
    }

    /// Returns the size of the store, in constant time.
    pub fn size(&self) -> StoreSize {
        StoreSize {
            connections: self.connections.len(),
            classes: self.connections.classes(),
            groups: self.groups.len(),
            parts: self.groups_of_part.len(),
            lists: self.lists.len(),
            resources: self.resources.table().len(),
            bytes: self.bytes,
            reads: self.connections.recorded_reads()
                + self.scopes.recorded_reads()
                + self.parts.recorded_reads()
                + self.fragments.recorded_reads()
                + self.chains.recorded_reads()
                + self.resources.recorded_reads(),
        }
    }

    fn update_bytes(&mut self) {
        let bytes = |built: &Option<Shared<Built>>| built.as_ref().map_or(0, |built| built.bytes());
        for (_, old, new) in self.resources.writer().changes() {
            self.bytes = self.bytes + bytes(new) - bytes(old);
        }
    }

    /// Adds connections to groups. Returns the scopes and parts that are new.
    fn add_connections(
        &mut self,
        moved: &[(ConnectionId, ProxyGroupKey)],
        touched: &mut FxHashSet<ProxyGroupKey>,
    ) -> NewKeys {
        let mut new = NewKeys::default();
        for (_, key) in moved {
            if let Some(group) = self.groups.get_mut(key) {
                group.connections += 1;
                continue;
            }
            let group = Group {
                connections: 1,
                snapshot: Arc::new(ResourceSnapshot::empty()),
            };
            self.groups.insert(key.clone(), group);
            touched.insert(key.clone());
            let scopes = key.scopes().filter(|scope| self.groups_of_scope.add(scope));
            new.scopes.extend(scopes.cloned());
            for part in &key.parts {
                if self.groups_of_part.add(part, key.clone()) {
                    self.subjects.add(part);
                    new.parts.push(part.clone());
                }
            }
        }
        new
    }

    /// Drops resources that no list contains, with what they consist of.
    fn forget_resources(&mut self, tx: &mut Transaction, unused: &[ResourceKey]) {
        for key in unused {
            self.resources.forget(tx, key);
            self.fragments.release(tx, key.fragments());
            self.chains.release(tx, key.chains());
        }
    }

    /// Removes connections from groups, and values without users.
    fn release_groups(&mut self, tx: &mut Transaction, released: Vec<ProxyGroupKey>) {
        for key in released {
            let Some(group) = self.groups.get_mut(&key) else {
                continue;
            };
            group.connections -= 1;
            if group.connections > 0 {
                continue;
            }
            self.groups.remove(&key);
            for scope in key.scopes() {
                if self.groups_of_scope.remove(scope) {
                    self.scopes.forget(tx, scope);
                }
            }
            for part in &key.parts {
                if !self.groups_of_part.remove(part, &key) {
                    continue;
                }
                self.subjects.remove(part);
                if let Some(list) = self.parts.table().get(&Cx::untracked(), part) {
                    let unused = self.lists.remove_part(part, list);
                    self.forget_resources(tx, &unused);
                }
                self.parts.forget(tx, part);
            }
        }
    }

    fn assemble_groups(
        &mut self,
        touched: FxHashSet<ProxyGroupKey>,
        mesh: &MeshSnapshot,
    ) -> Vec<(ProxyGroupKey, Arc<ResourceSnapshot>)> {
        let mut published = Vec::new();
        let cx = Cx::untracked();
        for key in touched {
            let Some(group) = self.groups.get_mut(&key) else {
                continue;
            };
            let lists = key.parts.iter().map(|part| (part, self.parts.table().get(&cx, part)));
            let maps = lists.filter_map(|(part, list)| Some((part, self.lists.maps(list?)?)));
            let maps: Vec<(&PartKey, &PartResourceMaps)> = maps.collect();
            let types = ResourceType::ALL.iter().map(|resource_type| {
                let maps = maps.iter().filter(|(part, _)| part.may_have(*resource_type));
                let parts: Vec<_> = maps.map(|(_, maps)| maps[*resource_type as usize].clone()).collect();
                // Half of the types have no resources. Lists of empty maps would take 500 bytes of each group.
                if parts.iter().all(|part| part.resources.is_empty()) {
                    return TypeResources::default();
                }
                TypeResources {
                    is_sharded: ADDRESSES.contains(resource_type) && parts.len() == usize::from(SHARDS),
                    parts: parts.into(),
                }
            });
            let snapshot = ResourceSnapshot::new(mesh.revision, types.collect(), key.unknown_routes.clone());
            group.snapshot = Arc::new(snapshot.with_requested(key.requested.clone()));
            published.push((key, group.snapshot.clone()));
        }
        published.sort_by(|(a, _), (b, _)| a.cmp(b));
        published
    }
}

/// Returns the notes of resources, each once, sorted. It reads every resource, so pages call it with a copy of
/// [`ConfigStore::resources`], and not on the thread that owns the store, where pushes would wait for it.
pub fn notes(resources: &Table<ResourceKey, Built>) -> BTreeSet<Note> {
    let cx = Cx::untracked();
    let all = resources.iter(&cx).flat_map(|(_, built)| &built.notes);
    // Many resources have equal ones, such as those of a patch that applies to all of them.
    let distinct: BTreeSet<&Note> = all.collect();
    distinct.into_iter().cloned().collect()
}

/// Inputs of evaluations, from which each makes a [`BuildContext`] of its own.
#[derive(Clone, Copy)]
struct BuildInputs<'a> {
    mesh: &'a MeshSnapshot,
    scopes: &'a ScopeTables,
    memo: &'a PushMemo,
}

impl<'a> BuildInputs<'a> {
    fn ctx<'c>(&self, cx: &'c Cx) -> BuildContext<'c>
    where
        'a: 'c,
    {
        BuildContext {
            cx,
            mesh: self.mesh,
            scopes: self.scopes,
            memo: self.memo,
        }
    }
}

/// Evaluates the memos of an update, or of a preview of one.
struct Evaluator<'a, E> {
    /// The changes so far, and the evaluations that panicked.
    tx: Transaction,
    executor: &'a E,
}

impl<'a, E: Executor> Evaluator<'a, E> {
    /// Starts after these changes of the mesh.
    fn new(changes: &ChangeSet, executor: &'a E) -> Self {
        Self {
            tx: Transaction::after(changes),
            executor,
        }
    }

    /// Brings one memo up to date. Returns the number of evaluations.
    fn update<K: Key, V: PartialEq + Send>(
        &mut self,
        memo: &mut Derived<K, V>,
        candidates: &[K],
        function: impl Fn(&Cx, &K) -> Option<V> + Sync + Send,
    ) -> usize {
        self.update_each(memo, candidates, function, |evaluated| evaluated)
    }

    /// As [`Self::update`]. `finish` makes the rows from the results, on the calling thread.
    fn update_each<K: Key, V: PartialEq, R: Send>(
        &mut self,
        memo: &mut Derived<K, V>,
        candidates: &[K],
        function: impl Fn(&Cx, &K) -> Option<R> + Sync + Send,
        mut finish: impl FnMut(Evaluated<K, R>) -> Evaluated<K, V>,
    ) -> usize {
        memo.begin();
        // Most candidates are new keys.
        memo.reserve(candidates.len());
        let dirty = memo.dirty(&self.tx, candidates);
        let evaluations = dirty.len();
        for evaluated in self.executor.map(dirty, |key| Evaluated::guarded(key, &function)) {
            if evaluated.panicked() {
                self.tx.note_panic(format!("{:?}", evaluated.key()));
            }
            memo.apply(&mut self.tx, finish(evaluated));
        }
        evaluations
    }

    /// Returns a memo as it would be after an update of the candidates and of what the changes affect.
    fn preview<K: Key, V: PartialEq + Send>(
        &mut self,
        memo: &Derived<K, V>,
        candidates: &[K],
        function: impl Fn(&Cx, &K) -> Option<V> + Sync + Send,
    ) -> TableWriter<K, V> {
        let dirty = memo.dirty(&self.tx, candidates);
        let results = self.executor.map(dirty, |key| Evaluated::guarded(key, &function));
        memo.preview(&mut self.tx, results)
    }
}
