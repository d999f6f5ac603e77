//! The store of generated configuration: profiles, selections, scopes, parts, fragments, resources and groups, each kept
//! while somebody uses it and computed again only when something it read has changed.
//!
//! The memos are brought up to date in order, like the tables of the model, and within one memo in parallel by
//! whatever [`Executor`] is handed in. What one would get wrong: a part lists resource keys, not bytes; its bytes are
//! assembled afterwards, so a change of one resource touches one entry of each list that has it and nothing else. Parts
//! with equal lists, as those of most namespaces are, share the list and all that is assembled from it.

mod members;
#[cfg(test)]
mod tests;
mod views;

use std::{collections::BTreeSet, sync::Arc};

use imbl::OrdSet;
use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    BuildContext, RequestedResources,
    build_context::PushMemo,
    encoded::ResourceType,
    plan::{self, ListedResource, PartKey, ProxyGroupKey, ResourceKey},
    proxy::Proxy,
    resource::{Built, Note, ResourceSnapshot, TypeResources},
    route::{fragment::FragmentKey, routes::Routes},
};
use crate::{
    api::access_review::Subject,
    base::{Hashed, Shared},
    model::{MeshSnapshot, ScopeKey, SidecarScope, sidecar_scope},
    table::{ChangeSet, Cx, Derived, Evaluated, Key, RelationId, Table, Transaction},
};
use members::Members;
use views::{PartResourceMaps, patch_views, whole_views};

/// A connected proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// Runs independent evaluations, in order of the results.
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

const SELECTIONS: RelationId = RelationId(2000);
const SCOPES: RelationId = RelationId(2001);
const PARTS: RelationId = RelationId(2002);
const RESOURCES: RelationId = RelationId(2003);
const FRAGMENTS: RelationId = RelationId(2004);

/// What the store is told between two updates.
#[derive(Default)]
pub struct ProxyEvents {
    /// Proxies that connected.
    pub connected: Vec<(ConnectionId, Arc<Proxy>)>,
    /// Members that ask for other names than before: the names that they ask for now.
    pub requested: Vec<(ConnectionId, Shared<RequestedResources>)>,
    /// Proxies that went away.
    pub disconnected: Vec<ConnectionId>,
}

/// What an update has changed.
#[derive(Default)]
pub struct StoreUpdate {
    /// Groups that have a new snapshot, each once.
    pub groups: Vec<(ProxyGroupKey, Arc<ResourceSnapshot>)>,
    /// Members that belong to another group now, new ones included.
    pub moved: Vec<(ConnectionId, ProxyGroupKey)>,
    /// Who reads Secrets is not who did before, see [`ConfigStore::subjects`].
    pub subjects_changed: bool,
    /// How many resources were built.
    pub built: usize,
    /// Evaluations that panicked and kept what was there before, described for the log.
    pub panics: Vec<String>,
}

/// How much the store holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreSize {
    /// Connected proxies.
    pub members: usize,
    /// Distinct profiles, each selected once.
    pub profiles: usize,
    /// Distinct groups.
    pub groups: usize,
    /// Distinct parts.
    pub parts: usize,
    /// Distinct lists of resources that parts have.
    pub lists: usize,
    /// Distinct resources.
    pub resources: usize,
    /// Bytes of all distinct resources.
    pub bytes: usize,
    /// Recorded dependencies.
    pub reads: usize,
}

/// See the module's text.
pub struct ConfigStore {
    members: Members,
    scopes: Derived<ScopeKey, SidecarScope>,
    parts: Derived<PartKey, List>,
    fragments: Derived<FragmentKey, Routes>,
    resources: Derived<ResourceKey, Built>,
    scope_users: FxHashMap<ScopeKey, FxHashSet<ProxyGroupKey>>,
    part_users: FxHashMap<PartKey, FxHashSet<ProxyGroupKey>>,
    /// The parts that have a list; most parts of a kind have the same.
    list_users: FxHashMap<List, FxHashSet<PartKey>>,
    resource_users: FxHashMap<ResourceKey, Vec<List>>,
    /// How many resources are put together from a fragment.
    fragment_users: FxHashMap<FragmentKey, usize>,
    views: FxHashMap<List, PartResourceMaps>,
    groups: FxHashMap<ProxyGroupKey, Group>,
    subjects: Subjects,
    /// Bytes of all resources, kept as they change.
    bytes: usize,
}

/// Those whose access to Secrets has to be reviewed, each with the number of parts that read for it.
#[derive(Default)]
struct Subjects {
    parts: FxHashMap<Subject, usize>,
    all: OrdSet<Subject>,
    changed: bool,
}

impl Subjects {
    fn add(&mut self, part: &PartKey) {
        let Some(subject) = part.subject() else { return };
        let parts = self.parts.entry(subject.clone()).or_default();
        *parts += 1;
        if *parts == 1 {
            self.all.insert(subject.clone());
            self.changed = true;
        }
    }

    fn remove(&mut self, part: &PartKey) {
        let Some(subject) = part.subject() else { return };
        let Some(parts) = self.parts.get_mut(subject) else {
            return;
        };
        *parts -= 1;
        if *parts == 0 {
            self.parts.remove(subject);
            self.all.remove(subject);
            self.changed = true;
        }
    }
}

/// What a part lists: held once however many parts list it.
type List = Hashed<Vec<ListedResource>>;

struct Group {
    members: usize,
    snapshot: Arc<ResourceSnapshot>,
}

impl Default for ConfigStore {
    fn default() -> Self {
        Self {
            members: Members::new(SELECTIONS),
            scopes: Derived::new(SCOPES),
            parts: Derived::new(PARTS),
            fragments: Derived::new(FRAGMENTS),
            resources: Derived::new(RESOURCES),
            scope_users: FxHashMap::default(),
            part_users: FxHashMap::default(),
            list_users: FxHashMap::default(),
            resource_users: FxHashMap::default(),
            fragment_users: FxHashMap::default(),
            views: FxHashMap::default(),
            groups: FxHashMap::default(),
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
        membership: ProxyEvents,
        executor: &impl Executor,
    ) -> StoreUpdate {
        let mut tx = Transaction::after(changes);
        let mut update = StoreUpdate::default();
        let mut touched: FxHashSet<ProxyGroupKey> = FxHashSet::default();

        let scopes = self.scopes.table().clone();
        let memo = plan::push_memo(self.fragments.table().clone());
        let source = Source {
            mesh,
            scopes: &scopes,
            memo: &memo,
        };
        let members = &mut self.members;
        let abandoned = members.update(&mut tx, source, membership, executor, &mut update);
        let (new_scopes, new_parts) = self.demand(&update.moved, &mut touched);
        if !(tx.is_empty() && new_scopes.is_empty() && new_parts.is_empty()) {
            let demanded = (&new_scopes[..], &new_parts[..]);
            self.generate(&mut tx, source, demanded, executor, &mut update, &mut touched);
        }
        self.abandon(&mut tx, abandoned);
        self.weigh();
        update.subjects_changed = std::mem::take(&mut self.subjects.changed);
        update.groups = self.assemble_groups(touched, mesh);
        self.forget_changes();
        update
    }

    /// Ends an update: what was before it is dropped now, not by the next one.
    fn forget_changes(&mut self) {
        self.members.forget_changes();
        self.scopes.begin();
        self.parts.begin();
        self.fragments.begin();
        self.resources.begin();
    }

    /// Brings everything up to date that stands behind selections; adds the groups that have to be assembled.
    fn generate(
        &mut self,
        tx: &mut Transaction,
        source: Source,
        demanded: (&[ScopeKey], &[PartKey]),
        executor: &impl Executor,
        update: &mut StoreUpdate,
        touched: &mut FxHashSet<ProxyGroupKey>,
    ) {
        let (new_scopes, new_parts) = demanded;
        let scope = |cx: &Cx, key: &ScopeKey| sidecar_scope::scope(cx, source.mesh, key);
        evaluate(&mut self.scopes, tx, new_scopes, executor, &mut update.panics, scope);
        let scopes = self.scopes.table().clone();
        let source = Source {
            scopes: &scopes,
            ..source
        };
        let (lists, resources) = (&self.list_users, &self.resource_users);
        let mut new_lists = FxHashSet::default();
        evaluate_each(
            &mut self.parts,
            tx,
            new_parts,
            executor,
            &mut update.panics,
            |cx, key| Some(List::new(key.list(&source.ctx(cx)))),
            |list| share(list, &mut new_lists, lists, resources),
        );
        let (new_resources, new_lists, old_lists) = self.relist();
        let new_fragments = self.need_fragments(&new_resources);
        let build = |cx: &Cx, key: &FragmentKey| Some(key.build(&source.ctx(cx)));
        evaluate(
            &mut self.fragments,
            tx,
            &new_fragments,
            executor,
            &mut update.panics,
            build,
        );
        let memo = source.memo.clone().with(self.fragments.table().clone());
        let source = Source { memo: &memo, ..source };
        let build = |cx: &Cx, key: &ResourceKey| Some(key.build(&source.ctx(cx)));
        update.built = evaluate(
            &mut self.resources,
            tx,
            &new_resources,
            executor,
            &mut update.panics,
            build,
        );
        self.forget_lists(tx, old_lists);
        let changed_lists = self.assemble_lists(new_lists);
        let relisted = self.parts.writer().changes().iter().map(|(part, _, _)| part);
        let users = changed_lists.iter().filter_map(|list| self.list_users.get(list));
        for part in relisted.chain(users.flatten()) {
            touched.extend(self.part_users.get(part).into_iter().flatten().cloned());
        }
    }

    /// The snapshot of a group.
    pub fn snapshot(&self, key: &ProxyGroupKey) -> Option<&Arc<ResourceSnapshot>> {
        self.groups.get(key).map(|group| &group.snapshot)
    }

    /// The group of a member.
    pub fn group_of(&self, member: ConnectionId) -> Option<&ProxyGroupKey> {
        self.members.group(member)
    }

    /// A connected proxy.
    pub fn proxy(&self, member: ConnectionId) -> Option<&Arc<Proxy>> {
        self.members.proxy(member)
    }

    /// Those whose access to Secrets has to be reviewed for what is served now.
    pub fn subjects(&self) -> &OrdSet<Subject> {
        &self.subjects.all
    }

    /// The scopes, for debug pages.
    pub fn scopes(&self) -> &Table<ScopeKey, SidecarScope> {
        self.scopes.table()
    }

    /// Everything that was noticed while building what is now held, each once, sorted.
    pub fn notes(&self) -> BTreeSet<Note> {
        let rows = self.resources.table().rows(&Cx::untracked()).clone();
        rows.iter().flat_map(|(_, built)| built.notes.iter().cloned()).collect()
    }

    /// How much is held. Cheap: nothing is gone through for it.
    pub fn size(&self) -> StoreSize {
        StoreSize {
            members: self.members.len(),
            profiles: self.members.profiles(),
            groups: self.groups.len(),
            parts: self.part_users.len(),
            lists: self.views.len(),
            resources: self.resources.table().len(),
            bytes: self.bytes,
            reads: self.members.recorded_reads()
                + self.scopes.recorded_reads()
                + self.parts.recorded_reads()
                + self.fragments.recorded_reads()
                + self.resources.recorded_reads(),
        }
    }

    /// Adds what this update changed to the sum of bytes.
    fn weigh(&mut self) {
        let bytes = |built: &Option<Shared<Built>>| built.as_ref().map_or(0, |built| built.bytes());
        for (_, old, new) in self.resources.writer().changes() {
            self.bytes = self.bytes + bytes(new) - bytes(old);
        }
    }

    /// Adds members to groups; gives the scopes and parts that nobody used before.
    fn demand(
        &mut self,
        moved: &[(ConnectionId, ProxyGroupKey)],
        touched: &mut FxHashSet<ProxyGroupKey>,
    ) -> (Vec<ScopeKey>, Vec<PartKey>) {
        let (mut scopes, mut parts) = (Vec::new(), Vec::new());
        for (_, key) in moved {
            if let Some(group) = self.groups.get_mut(key) {
                group.members += 1;
                continue;
            }
            self.groups.insert(
                key.clone(),
                Group {
                    members: 1,
                    snapshot: Arc::new(ResourceSnapshot::empty()),
                },
            );
            touched.insert(key.clone());
            let users = self.scope_users.entry(key.scope.clone()).or_default();
            if users.is_empty() {
                scopes.push(key.scope.clone());
            }
            users.insert(key.clone());
            for part in &key.parts {
                let users = self.part_users.entry(part.clone()).or_default();
                if users.is_empty() {
                    self.subjects.add(part);
                    parts.push(part.clone());
                }
                users.insert(key.clone());
            }
        }
        (scopes, parts)
    }

    /// After parts were listed anew: the resources that nobody listed before, the lists that no part had before, and those
    /// that no part has any more.
    fn relist(&mut self) -> (Vec<ResourceKey>, Vec<List>, Vec<List>) {
        let (mut new, mut added, mut left) = (Vec::new(), Vec::new(), Vec::new());
        for (part, old, now) in self.parts.writer().changes() {
            if let Some(list) = now {
                let users = self.list_users.entry((**list).clone()).or_default();
                if users.is_empty() {
                    added.push((**list).clone());
                }
                users.insert(part.clone());
            }
            left.extend(old.as_ref().map(|list| (part, (**list).clone())));
        }
        for list in &added {
            if self.resource_users.is_empty() {
                self.resource_users.reserve(list.len());
            }
            for listed in list.iter() {
                // Most resources have one user, and a Vec that grows takes room for four.
                let users = self.resource_users.entry(listed.key.clone());
                let users = users.or_insert_with(|| Vec::with_capacity(1));
                if users.is_empty() {
                    new.push(listed.key.clone());
                }
                // A list may name a resource twice.
                if users.last() != Some(list) {
                    users.push(list.clone());
                }
            }
        }
        let mut dropped = Vec::new();
        for (part, list) in left {
            if remove_user(&mut self.list_users, &list, part) {
                dropped.push(list);
            }
        }
        (new, added, dropped)
    }

    /// The fragments of new resources that no other resource has.
    fn need_fragments(&mut self, new_resources: &[ResourceKey]) -> Vec<FragmentKey> {
        let mut new = Vec::new();
        for key in new_resources.iter().flat_map(|resource| resource.fragments()) {
            let users = self.fragment_users.entry(key.clone()).or_default();
            if *users == 0 {
                new.push(key.clone());
            }
            *users += 1;
        }
        new
    }

    fn forget_fragments(&mut self, tx: &mut Transaction, resource: &ResourceKey) {
        for key in resource.fragments() {
            let Some(users) = self.fragment_users.get_mut(key) else {
                continue;
            };
            *users -= 1;
            if *users == 0 {
                self.fragment_users.remove(key);
                self.fragments.forget(tx, key);
            }
        }
    }

    fn forget_lists(&mut self, tx: &mut Transaction, lists: Vec<List>) {
        for list in lists {
            self.views.remove(&list);
            for listed in list.iter() {
                let Some(users) = self.resource_users.get_mut(&listed.key) else {
                    continue;
                };
                users.retain(|user| *user != list);
                if users.is_empty() {
                    self.resource_users.remove(&listed.key);
                    self.resources.forget(tx, &listed.key);
                    self.forget_fragments(tx, &listed.key);
                }
            }
        }
    }

    /// Brings the maps of lists up to date; gives the lists whose maps changed.
    fn assemble_lists(&mut self, new: Vec<List>) -> FxHashSet<List> {
        let mut changed: FxHashSet<List> = new.into_iter().collect();
        for list in &changed {
            self.views
                .insert(list.clone(), whole_views(list, self.resources.table()));
        }
        let mut patches: FxHashMap<List, Vec<usize>> = FxHashMap::default();
        let changes = self.resources.writer().changes();
        for (index, (key, _, new)) in changes.iter().enumerate() {
            if new.is_none() {
                continue;
            }
            for list in self.resource_users.get(key).into_iter().flatten() {
                if !changed.contains(list) {
                    patches.entry(list.clone()).or_default().push(index);
                }
            }
        }
        for (list, indexes) in patches {
            let old: FxHashMap<&ResourceKey, Option<&Shared<Built>>> = indexes
                .iter()
                .map(|index| (&changes[*index].0, changes[*index].1.as_ref()))
                .collect();
            let listed = list.iter().filter(|listed| old.contains_key(&listed.key));
            let Some(views) = self.views.get_mut(&list) else {
                continue;
            };
            if !patch_views(views, listed, &old, self.resources.table()) {
                // A name collided within the list: which resource wins depends on all of it.
                *views = whole_views(&list, self.resources.table());
            }
            changed.insert(list);
        }
        changed
    }

    /// Takes members out of groups, and forgets what nobody uses any more.
    fn abandon(&mut self, tx: &mut Transaction, abandoned: Vec<ProxyGroupKey>) {
        for key in abandoned {
            let Some(group) = self.groups.get_mut(&key) else {
                continue;
            };
            group.members -= 1;
            if group.members > 0 {
                continue;
            }
            self.groups.remove(&key);
            if remove_user(&mut self.scope_users, &key.scope, &key) {
                self.scopes.forget(tx, &key.scope);
            }
            for part in &key.parts {
                if !remove_user(&mut self.part_users, part, &key) {
                    continue;
                }
                self.subjects.remove(part);
                let list = self.parts.table().get(&Cx::untracked(), part).cloned();
                if let Some(list) = list
                    && remove_user(&mut self.list_users, &*list, part)
                {
                    self.forget_lists(tx, vec![(*list).clone()]);
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
            let lists = key.parts.iter().filter_map(|part| self.parts.table().get(&cx, part));
            let parts: Vec<&PartResourceMaps> = lists.filter_map(|list| self.views.get(&**list)).collect();
            let views = ResourceType::ALL.iter().map(|resource_type| TypeResources {
                parts: parts
                    .iter()
                    .map(|views| views[*resource_type as usize].clone())
                    .collect(),
            });
            let snapshot = ResourceSnapshot::new(mesh.revision, views.collect(), key.answers_unknown_routes);
            group.snapshot = Arc::new(snapshot.with_requested(key.requested.clone()));
            published.push((key, group.snapshot.clone()));
        }
        published.sort_by(|(a, _), (b, _)| a.cmp(b));
        published
    }
}

/// What views are made of.
#[derive(Clone, Copy)]
struct Source<'a> {
    mesh: &'a MeshSnapshot,
    scopes: &'a Table<ScopeKey, SidecarScope>,
    memo: &'a PushMemo,
}

impl<'a> Source<'a> {
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

/// Brings one memo up to date; gives the number of evaluations.
fn evaluate<K: Key, V: PartialEq + Send>(
    memo: &mut Derived<K, V>,
    tx: &mut Transaction,
    candidates: &[K],
    executor: &impl Executor,
    panics: &mut Vec<String>,
    function: impl Fn(&Cx, &K) -> Option<V> + Sync + Send,
) -> usize {
    evaluate_each(memo, tx, candidates, executor, panics, function, |_| {})
}

/// As [`evaluate`], with a last touch to each row, which must not change what it is equal to.
fn evaluate_each<K: Key, V: PartialEq + Send>(
    memo: &mut Derived<K, V>,
    tx: &mut Transaction,
    candidates: &[K],
    executor: &impl Executor,
    panics: &mut Vec<String>,
    function: impl Fn(&Cx, &K) -> Option<V> + Sync + Send,
    mut finish: impl FnMut(&mut V),
) -> usize {
    memo.begin();
    // Candidates are new, but for members that ask for other names than before.
    memo.reserve(candidates.len());
    let dirty = memo.dirty(tx, candidates);
    let evaluations = dirty.len();
    for mut evaluated in executor.map(dirty, |key| Evaluated::guarded(key, &function)) {
        if evaluated.panicked() {
            panics.push(format!("{:?}", evaluated.key()));
        }
        evaluated.row_mut().map(&mut finish);
        memo.apply(tx, evaluated);
    }
    evaluations
}

/// Takes an equal list that is there already, or at least the keys that other lists use: most of what parts list is the
/// same.
fn share(
    list: &mut List,
    new: &mut FxHashSet<List>,
    lists: &FxHashMap<List, FxHashSet<PartKey>>,
    resources: &FxHashMap<ResourceKey, Vec<List>>,
) {
    let known = lists.get_key_value(list).map(|(known, _)| known);
    if let Some(known) = known.or_else(|| new.get(list)) {
        *list = known.clone();
        return;
    }
    let shared = list.iter().map(|listed| {
        let known = resources.get_key_value(&listed.key).map(|(known, _)| known);
        ListedResource {
            resource_type: listed.resource_type,
            key: known.unwrap_or(&listed.key).clone(),
        }
    });
    *list = List::new(shared.collect());
    new.insert(list.clone());
}

/// True if that was the last user.
fn remove_user<K: Eq + std::hash::Hash, U: Eq + std::hash::Hash>(
    users: &mut FxHashMap<K, FxHashSet<U>>,
    key: &K,
    user: &U,
) -> bool {
    let Some(set) = users.get_mut(key) else { return false };
    set.remove(user);
    if set.is_empty() {
        users.remove(key);
        return true;
    }
    false
}
