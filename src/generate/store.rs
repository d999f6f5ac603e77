//! The store of generated configuration: selections, scopes, parts, resources and groups, each kept while somebody
//! uses it and computed again only when something it read has changed.
//!
//! The four memos are brought up to date in order, like the tables of the model, and within one memo in parallel by
//! whatever [`Executor`] is handed in. What one would get wrong: a part lists resource keys, not bytes; its bytes are
//! assembled afterwards, so a change of one resource touches one entry of each part that lists it and nothing else.

use std::{
    collections::{BTreeSet, hash_map::Entry},
    sync::Arc,
};

use imbl::OrdSet;
use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    Demand, View,
    encoded::ResourceType,
    group::{Built, Listed, Note, PartKey, PartView, ProxyGroupKey, ResourceKey, ResourceSnapshot, TypeView},
    proxy::Proxy,
    route::fragment::{FragmentKey, Routes},
    select,
};
use crate::{
    api::access_review::Subject,
    base::Shared,
    model::{MeshSnapshot, ScopeKey, SidecarScope, sidecar_scope},
    table::{ChangeSet, Cx, Derived, Evaluated, Key, RelationId, Table, Transaction},
};

/// A connected proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

/// Runs independent evaluations, in order of the results.
pub trait Executor {
    /// Applies a function to every item.
    fn map<T: Send, R: Send>(&self, items: Vec<T>, function: impl Fn(T) -> R + Sync + Send) -> Vec<R>;
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
pub struct Membership {
    /// Proxies that connected.
    pub joined: Vec<(MemberId, Arc<Proxy>)>,
    /// Members that ask for other names than before: the names that they ask for now.
    pub demanded: Vec<(MemberId, Shared<Demand>)>,
    /// Proxies that went away.
    pub left: Vec<MemberId>,
}

/// What an update has changed.
#[derive(Default)]
pub struct Update {
    /// Groups that have a new snapshot, each once.
    pub groups: Vec<(ProxyGroupKey, Arc<ResourceSnapshot>)>,
    /// Members that belong to another group now, new ones included.
    pub moved: Vec<(MemberId, ProxyGroupKey)>,
    /// Who reads Secrets is not who did before, see [`Store::subjects`].
    pub subjects_changed: bool,
    /// How many resources were built.
    pub built: usize,
    /// Evaluations that panicked and kept what was there before, described for the log.
    pub panics: Vec<String>,
}

/// How much the store holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Connected proxies.
    pub members: usize,
    /// Distinct groups.
    pub groups: usize,
    /// Distinct parts.
    pub parts: usize,
    /// Distinct resources.
    pub resources: usize,
    /// Bytes of all distinct resources.
    pub bytes: usize,
    /// Recorded dependencies.
    pub reads: usize,
}

/// See the module's text.
pub struct Store {
    proxies: FxHashMap<MemberId, Arc<Proxy>>,
    demands: FxHashMap<MemberId, Shared<Demand>>,
    selections: Derived<MemberId, ProxyGroupKey>,
    scopes: Derived<ScopeKey, SidecarScope>,
    parts: Derived<PartKey, Vec<Listed>>,
    fragments: Derived<FragmentKey, Routes>,
    resources: Derived<ResourceKey, Built>,
    scope_users: FxHashMap<ScopeKey, FxHashSet<ProxyGroupKey>>,
    part_users: FxHashMap<PartKey, FxHashSet<ProxyGroupKey>>,
    resource_users: FxHashMap<ResourceKey, Vec<PartKey>>,
    /// How many resources are put together from a fragment.
    fragment_users: FxHashMap<FragmentKey, usize>,
    views: FxHashMap<PartKey, PartViews>,
    groups: FxHashMap<ProxyGroupKey, Group>,
    subjects: Subjects,
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

type PartViews = [Arc<PartView>; ResourceType::ALL.len()];

struct Group {
    members: usize,
    snapshot: Arc<ResourceSnapshot>,
}

impl Default for Store {
    fn default() -> Self {
        Self {
            proxies: FxHashMap::default(),
            demands: FxHashMap::default(),
            selections: Derived::new(SELECTIONS),
            scopes: Derived::new(SCOPES),
            parts: Derived::new(PARTS),
            fragments: Derived::new(FRAGMENTS),
            resources: Derived::new(RESOURCES),
            scope_users: FxHashMap::default(),
            part_users: FxHashMap::default(),
            resource_users: FxHashMap::default(),
            fragment_users: FxHashMap::default(),
            views: FxHashMap::default(),
            groups: FxHashMap::default(),
            subjects: Subjects::default(),
        }
    }
}

impl Store {
    /// Brings everything up to date with a revision of the mesh. `changes` are those since the last update.
    pub fn update(
        &mut self,
        mesh: &MeshSnapshot,
        changes: &ChangeSet,
        membership: Membership,
        executor: &impl Executor,
    ) -> Update {
        let mut tx = Transaction::after(changes);
        let mut update = Update::default();
        let mut touched: FxHashSet<ProxyGroupKey> = FxHashSet::default();

        let abandoned = self.select(&mut tx, mesh, membership, executor, &mut update);
        let (new_scopes, new_parts) = self.demand(&update.moved, &mut touched);
        evaluate(
            &mut self.scopes,
            &mut tx,
            &new_scopes,
            executor,
            &mut update.panics,
            |cx, key| sidecar_scope::scope(cx, mesh, key),
        );
        let scopes = self.scopes.table().clone();
        let fragments = self.fragments.table().clone();
        let source = Source {
            mesh,
            scopes: &scopes,
            fragments: &fragments,
        };
        let users = &mut self.resource_users;
        evaluate_each(
            &mut self.parts,
            &mut tx,
            &new_parts,
            executor,
            &mut update.panics,
            |cx, key| Some(key.list(&source.view(cx))),
            |list| share_keys(list, users),
        );
        let (new_resources, unlisted, relisted) = self.relist();
        let new_fragments = self.need_fragments(&new_resources);
        evaluate(
            &mut self.fragments,
            &mut tx,
            &new_fragments,
            executor,
            &mut update.panics,
            |cx, key| Some(key.build(&source.view(cx))),
        );
        let fragments = self.fragments.table().clone();
        let source = Source {
            fragments: &fragments,
            ..source
        };
        update.built = evaluate(
            &mut self.resources,
            &mut tx,
            &new_resources,
            executor,
            &mut update.panics,
            |cx, key| Some(key.build(&source.view(cx))),
        );
        self.forget_unlisted(&mut tx, unlisted);
        let changed_parts = self.assemble_parts(relisted);
        for part in &changed_parts {
            touched.extend(self.part_users.get(part).into_iter().flatten().cloned());
        }
        self.abandon(&mut tx, abandoned);
        update.subjects_changed = std::mem::take(&mut self.subjects.changed);
        update.groups = self.assemble_groups(touched, mesh);
        update
    }

    /// The snapshot of a group.
    pub fn snapshot(&self, key: &ProxyGroupKey) -> Option<&Arc<ResourceSnapshot>> {
        self.groups.get(key).map(|group| &group.snapshot)
    }

    /// The group of a member.
    pub fn group_of(&self, member: MemberId) -> Option<&ProxyGroupKey> {
        self.selections.table().get(&Cx::untracked(), &member).map(|key| &**key)
    }

    /// A connected proxy.
    pub fn proxy(&self, member: MemberId) -> Option<&Arc<Proxy>> {
        self.proxies.get(&member)
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

    /// How much is held.
    pub fn size(&self) -> Size {
        let rows = self.resources.table().rows(&Cx::untracked()).clone();
        let bytes = rows
            .iter()
            .filter_map(|(_, built)| built.resource.as_ref())
            .map(|r| r.delta_frame().len())
            .sum();
        Size {
            members: self.proxies.len(),
            groups: self.groups.len(),
            parts: self.views.len(),
            resources: rows.len(),
            bytes,
            reads: self.selections.recorded_reads()
                + self.scopes.recorded_reads()
                + self.parts.recorded_reads()
                + self.fragments.recorded_reads()
                + self.resources.recorded_reads(),
        }
    }

    /// Re-selects members; gives the groups that lost one, once for each member lost.
    fn select(
        &mut self,
        tx: &mut Transaction,
        mesh: &MeshSnapshot,
        membership: Membership,
        executor: &impl Executor,
        update: &mut Update,
    ) -> Vec<ProxyGroupKey> {
        let mut abandoned = Vec::new();
        for member in membership.left {
            if let Some(key) = self.selections.table().get(&Cx::untracked(), &member) {
                abandoned.push((**key).clone());
            }
            self.selections.forget(tx, &member);
            self.proxies.remove(&member);
            self.demands.remove(&member);
        }
        let mut candidates: Vec<MemberId> = membership.joined.iter().map(|(member, _)| *member).collect();
        self.proxies.extend(membership.joined);
        for (member, demand) in membership.demanded {
            if self.proxies.contains_key(&member) {
                self.demands.insert(member, demand);
                candidates.push(member);
            }
        }
        let (proxies, demands, scopes) = (&self.proxies, &self.demands, self.scopes.table().clone());
        let fragments = self.fragments.table().clone();
        let nothing = Shared::<Demand>::default();
        evaluate(
            &mut self.selections,
            tx,
            &candidates,
            executor,
            &mut update.panics,
            |cx, member| {
                let proxy = proxies.get(member)?;
                Some(select::select(
                    &View {
                        cx,
                        mesh,
                        scopes: &scopes,
                        fragments: &fragments,
                    },
                    proxy,
                    demands.get(member).unwrap_or(&nothing),
                ))
            },
        );
        for (member, old, new) in self.selections.writer().changes() {
            abandoned.extend(old.as_ref().map(|key| (**key).clone()));
            update.moved.extend(new.as_ref().map(|key| (*member, (**key).clone())));
        }
        abandoned
    }

    /// Adds members to groups; gives the scopes and parts that nobody used before.
    fn demand(
        &mut self,
        moved: &[(MemberId, ProxyGroupKey)],
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

    /// After parts were listed anew: the resources that nobody listed before, those that were dropped from a list, and
    /// the parts whose list changed.
    fn relist(&mut self) -> (Vec<ResourceKey>, Vec<(ResourceKey, PartKey)>, FxHashSet<PartKey>) {
        let (mut new, mut dropped, mut relisted) = (Vec::new(), Vec::new(), FxHashSet::default());
        for (part, old, now) in self.parts.writer().changes() {
            let keys = |list: &Option<Shared<Vec<Listed>>>| -> FxHashSet<ResourceKey> {
                list.iter()
                    .flat_map(|list| list.iter())
                    .map(|listed| listed.key.clone())
                    .collect()
            };
            let (before, after) = (keys(old), keys(now));
            for key in after.difference(&before) {
                let users = self.resource_users.entry(key.clone()).or_default();
                if users.is_empty() {
                    new.push(key.clone());
                }
                users.push(part.clone());
            }
            dropped.extend(before.difference(&after).map(|key| (key.clone(), part.clone())));
            relisted.insert(part.clone());
        }
        (new, dropped, relisted)
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

    fn forget_unlisted(&mut self, tx: &mut Transaction, unlisted: Vec<(ResourceKey, PartKey)>) {
        for (resource, part) in unlisted {
            let Some(users) = self.resource_users.get_mut(&resource) else {
                continue;
            };
            users.retain(|user| *user != part);
            if users.is_empty() {
                self.resource_users.remove(&resource);
                self.resources.forget(tx, &resource);
                self.forget_fragments(tx, &resource);
            }
        }
    }

    /// Brings the maps of parts up to date; gives the parts whose maps changed.
    fn assemble_parts(&mut self, relisted: FxHashSet<PartKey>) -> FxHashSet<PartKey> {
        let mut changed = relisted;
        let mut patches: FxHashMap<PartKey, Vec<usize>> = FxHashMap::default();
        let changes = self.resources.writer().changes();
        for (index, (key, _, new)) in changes.iter().enumerate() {
            if new.is_none() {
                continue;
            }
            for part in self.resource_users.get(key).into_iter().flatten() {
                patches.entry(part.clone()).or_default().push(index);
            }
        }
        let cx = Cx::untracked();
        for part in &changed {
            let list = self.parts.table().get(&cx, part);
            let views = whole_views(list.map_or(&[], |list| list), self.resources.table());
            self.views.insert(part.clone(), views);
        }
        for (part, indexes) in patches {
            if changed.contains(&part) {
                continue;
            }
            let list = self.parts.table().get(&cx, &part);
            let rows: FxHashSet<&ResourceKey> = indexes.iter().map(|index| &changes[*index].0).collect();
            let old: FxHashMap<&ResourceKey, Option<&Shared<Built>>> = indexes
                .iter()
                .map(|index| (&changes[*index].0, changes[*index].1.as_ref()))
                .collect();
            let listed = list
                .iter()
                .flat_map(|list| list.iter())
                .filter(|listed| rows.contains(&listed.key));
            let Some(views) = self.views.get_mut(&part) else {
                continue;
            };
            if patch_views(views, listed, &old, self.resources.table()) {
                changed.insert(part);
            } else {
                // A name collided within the part: which resource wins depends on the whole list.
                let whole = whole_views(list.map_or(&[], |list| list), self.resources.table());
                self.views.insert(part.clone(), whole);
                changed.insert(part);
            }
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
                let unlisted: FxHashSet<ResourceKey> = list
                    .iter()
                    .flat_map(|list| list.iter())
                    .map(|listed| listed.key.clone())
                    .collect();
                self.forget_unlisted(
                    tx,
                    unlisted.into_iter().map(|resource| (resource, part.clone())).collect(),
                );
                self.parts.forget(tx, part);
                self.views.remove(part);
            }
        }
    }

    fn assemble_groups(
        &mut self,
        touched: FxHashSet<ProxyGroupKey>,
        mesh: &MeshSnapshot,
    ) -> Vec<(ProxyGroupKey, Arc<ResourceSnapshot>)> {
        let mut published = Vec::new();
        for key in touched {
            let Some(group) = self.groups.get_mut(&key) else {
                continue;
            };
            let views = ResourceType::ALL.iter().map(|resource_type| TypeView {
                parts: key
                    .parts
                    .iter()
                    .filter_map(|part| self.views.get(part))
                    .map(|views| views[*resource_type as usize].clone())
                    .collect(),
            });
            let snapshot = ResourceSnapshot::new(mesh.revision, views.collect(), key.answers_unknown_routes);
            group.snapshot = Arc::new(snapshot.on_demand(key.demand.clone()));
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
    fragments: &'a Table<FragmentKey, Routes>,
}

impl<'a> Source<'a> {
    fn view<'c>(&self, cx: &'c Cx) -> View<'c>
    where
        'a: 'c,
    {
        View {
            cx,
            mesh: self.mesh,
            scopes: self.scopes,
            fragments: self.fragments,
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

/// Lets a list use the keys that other lists use, since most of what parts list is the same.
fn share_keys(list: &mut [Listed], users: &mut FxHashMap<ResourceKey, Vec<PartKey>>) {
    for listed in list {
        match users.entry(listed.key.clone()) {
            Entry::Occupied(known) => listed.key = known.key().clone(),
            // Whoever lists it becomes its first user.
            Entry::Vacant(vacant) => drop(vacant.insert(Vec::new())),
        }
    }
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

fn whole_views(list: &[Listed], resources: &Table<ResourceKey, Built>) -> PartViews {
    let cx = Cx::untracked();
    let mut maps: Vec<PartView> = ResourceType::ALL.iter().map(|_| PartView::default()).collect();
    for listed in list {
        let Some(resource) = resources
            .get(&cx, &listed.key)
            .and_then(|built| built.resource.as_ref())
        else {
            continue;
        };
        let view = &mut maps[listed.resource_type as usize];
        if !view.resources.contains_key(&resource.name) {
            view.digest = view.digest.wrapping_add(resource.version.value());
            view.resources.insert(resource.name.clone(), resource.clone());
        }
    }
    let mut maps = maps.into_iter().map(Arc::new);
    std::array::from_fn(|_| maps.next().expect("because there is one map for each type"))
}

/// Replaces single resources; false if names collide, so that the whole list has to decide.
fn patch_views<'a>(
    views: &mut PartViews,
    listed: impl Iterator<Item = &'a Listed>,
    old: &FxHashMap<&ResourceKey, Option<&Shared<Built>>>,
    resources: &Table<ResourceKey, Built>,
) -> bool {
    let cx = Cx::untracked();
    for listed in listed {
        let before = old
            .get(&listed.key)
            .copied()
            .flatten()
            .and_then(|built| built.resource.clone());
        let after = resources.get(&cx, &listed.key).and_then(|built| built.resource.clone());
        let view = Arc::make_mut(&mut views[listed.resource_type as usize]);
        if let Some(before) = before {
            match view.resources.get(&before.name) {
                Some(held) if Arc::ptr_eq(held, &before) => {}
                _ => return false,
            }
            view.resources.remove(&before.name);
            view.digest = view.digest.wrapping_sub(before.version.value());
        }
        if let Some(after) = after {
            if view.resources.contains_key(&after.name) {
                return false;
            }
            view.digest = view.digest.wrapping_add(after.version.value());
            view.resources.insert(after.name.clone(), after);
        }
    }
    true
}
