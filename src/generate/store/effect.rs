//! Effects of one object: the resources that would be different without it.
//!
//! The memos are evaluated for a mesh without the object, as far as the recorded reads lead, and the results are
//! compared with the present ones by content. So an object that is read but decides nothing has no effect. Nothing of
//! the store changes.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use smol_str::SmolStr;

use super::{
    BuildInputs, ConfigStore, ConnectionId, Evaluator, Executor, List,
    maps::{ListMaps, PartResourceMaps},
    scopes::contains,
};
use crate::{
    base::Version,
    generate::{
        PartKey, ProxyGroupKey, ResourceKey,
        encoded::ResourceType,
        resource::{Built, ResourceSnapshot, TypeResources},
    },
    model::MeshSnapshot,
    table::{ChangeSet, Cx, Key, Table, TableWriter},
};

/// The effect of an object on one resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Effect {
    /// Without the object, the resource would not exist.
    Adds,
    /// Without the object, the resource would have another content.
    Changes,
    /// Without the object, the resource would exist.
    Removes,
}

/// A resource that an object has an effect on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AffectedResource {
    /// The type.
    pub resource_type: ResourceType,
    /// The name.
    pub name: SmolStr,
    /// The effect.
    pub effect: Effect,
    /// Its present content; `None` if it does not exist.
    pub version: Option<Version>,
    /// Its content without the object; `None` if it would not exist.
    pub without: Option<Version>,
}

/// The effect of an object on proxies that have the same configuration with and without it.
#[derive(Clone, Debug)]
pub struct GroupEffect {
    /// The present group of the proxies.
    pub group: ProxyGroupKey,
    /// The proxies, sorted.
    pub connections: Vec<ConnectionId>,
    /// The resources, sorted.
    pub resources: Arc<[AffectedResource]>,
    /// True if the answer to unknown names of route configurations would be another one.
    pub unknown_routes: bool,
}

impl ConfigStore {
    /// Returns the effect of an object on each connected proxy. `without` is the mesh without the object, and `changes`
    /// are the differences between that mesh and the present one.
    pub fn effects(&self, without: &MeshSnapshot, changes: &ChangeSet, executor: &impl Executor) -> Vec<GroupEffect> {
        let preview = Preview::new(self, without, changes, executor);
        let groups = preview.groups();
        let maps = preview.maps(groups.iter().flat_map(|((_, other), _)| &other.parts));
        let mut effects = Vec::new();
        for &(pair, connections) in &groups {
            let (group, other) = pair;
            let Some(present) = self.snapshot(group) else { continue };
            let types = (group == other).then_some(&preview.types);
            let parts: Vec<&PartResourceMaps> = other.parts.iter().filter_map(|part| maps.get(part)).collect();
            let resources = difference(present, &parts, types);
            let unknown_routes = group.unknown_routes != other.unknown_routes;
            if resources.is_empty() && !unknown_routes {
                continue;
            }
            let mut connections = connections.clone();
            connections.sort_unstable();
            effects.push(GroupEffect {
                group: group.clone(),
                connections,
                resources: resources.into(),
                unknown_routes,
            });
        }
        effects.sort_by(|a, b| a.connections.cmp(&b.connections));
        effects
    }
}

/// The memos as they would be in another mesh.
struct Preview<'a> {
    store: &'a ConfigStore,
    /// The groups that connections would have, with those that they have.
    groups: FxHashMap<(ProxyGroupKey, ProxyGroupKey), Vec<ConnectionId>>,
    parts: TableWriter<PartKey, List>,
    resources: TableWriter<ResourceKey, Built>,
    /// Lists with a resource that would be another one.
    changed_lists: FxHashSet<List>,
    /// The types of resources that would differ in groups that stay the same.
    types: FxHashSet<ResourceType>,
}

impl<'a> Preview<'a> {
    fn new(store: &'a ConfigStore, mesh: &MeshSnapshot, changes: &ChangeSet, executor: &impl Executor) -> Self {
        let mut evaluator = Evaluator::new(changes, executor);
        let memo = store.push_memo();
        let scopes = store.scopes.tables();
        let inputs = BuildInputs {
            mesh,
            scopes: &scopes,
            memo: &memo,
        };
        let groups = store.connections.preview(&mut evaluator, inputs);
        let others = || groups.keys().map(|(_, other)| other);
        let new = missing(store.scopes.all(), others().flat_map(|group| group.scopes()));
        let scopes = store.scopes.preview(&mut evaluator, mesh, &new);
        let inputs = BuildInputs {
            scopes: &scopes,
            ..inputs
        };
        let new = missing(store.parts.table(), others().flat_map(|group| &group.parts));
        let parts = store.parts.preview(&mut evaluator, inputs, &new);
        let lists = parts.changes().iter().filter_map(|(_, _, list)| list.as_ref());
        let listed = lists.flat_map(|list| list.iter().map(|listed| &listed.key));
        let new = missing(store.resources.table(), listed);
        let new_fragments = new.iter().flat_map(|resource| resource.fragments());
        let new_fragments = missing(store.fragments.rows().table(), new_fragments);
        let fragments = evaluator.preview(store.fragments.rows(), &new_fragments, |cx, key| {
            Some(key.build(&inputs.ctx(cx)))
        });
        let new_chains = new.iter().flat_map(|resource| resource.chains());
        let new_chains = missing(store.chains.rows().table(), new_chains);
        let chains = evaluator.preview(store.chains.rows(), &new_chains, |cx, key| {
            Some(key.build(&inputs.ctx(cx)))
        });
        let memo = memo
            .clone()
            .with(fragments.table().clone())
            .with(chains.table().clone());
        let inputs = BuildInputs { memo: &memo, ..inputs };
        let resources = evaluator.preview(&store.resources, &new, |cx, key| Some(key.build(&inputs.ctx(cx))));
        let changed = resources.changes().iter().map(|(key, ..)| key);
        let changed_lists: FxHashSet<List> = changed.flat_map(|key| store.lists.containing(key)).cloned().collect();
        let relisted = parts
            .changes()
            .iter()
            .flat_map(|(_, before, after)| before.iter().chain(after));
        let types = changed_lists.iter().chain(relisted.map(|list| &**list));
        let types = types
            .flat_map(|list| list.iter().map(|listed| listed.resource_type))
            .collect();
        Self {
            store,
            groups,
            parts,
            resources,
            changed_lists,
            types,
        }
    }

    /// Returns the present and the other group of all connections that may differ, with the connections.
    fn groups(&self) -> Vec<(&(ProxyGroupKey, ProxyGroupKey), &Vec<ConnectionId>)> {
        let relisted: FxHashSet<&PartKey> = self.parts.changes().iter().map(|(part, ..)| part).collect();
        let is_affected = |part: &PartKey| {
            let list = self.store.parts.table().get(&Cx::untracked(), part);
            relisted.contains(part) || list.is_some_and(|list| self.changed_lists.contains(&**list))
        };
        let mut affected: FxHashMap<&PartKey, bool> = FxHashMap::default();
        let mut is_affected = |part| *affected.entry(part).or_insert_with(|| is_affected(part));
        let groups = self.groups.iter();
        let differ = groups.filter(|((group, other), _)| group != other || group.parts.iter().any(&mut is_affected));
        differ.collect()
    }

    /// Returns the resources of parts as they would be, for each part once: groups have most parts in common.
    fn maps<'b>(&self, parts: impl Iterator<Item = &'b PartKey>) -> FxHashMap<&'b PartKey, PartResourceMaps> {
        let mut assembled: FxHashMap<&List, PartResourceMaps> = FxHashMap::default();
        let mut seen = FxHashSet::default();
        let mut of_part = FxHashMap::default();
        for part in parts.filter(|part| seen.insert(*part)) {
            let Some(list) = self.parts.table().get(&Cx::untracked(), part) else {
                continue;
            };
            let held = self.store.lists.maps(list);
            let held = held.filter(|_| !self.changed_lists.contains(&**list));
            let maps = match held {
                Some(maps) => maps.clone(),
                None => assembled
                    .entry(list)
                    .or_insert_with(|| ListMaps::assemble(list, self.resources.table()).types)
                    .clone(),
            };
            of_part.insert(part, maps);
        }
        of_part
    }
}

/// Returns the keys without a row in a table.
fn missing<'k, K: Key, V>(table: &Table<K, V>, keys: impl Iterator<Item = &'k K>) -> Vec<K> {
    keys.filter(|key| !contains(table, key)).cloned().collect()
}

/// Returns the differences between the present resources of a group and those of these parts, of these types or of all.
fn difference(
    present: &ResourceSnapshot,
    parts: &[&PartResourceMaps],
    types: Option<&FxHashSet<ResourceType>>,
) -> Vec<AffectedResource> {
    let mut affected = Vec::new();
    let differ = |resource_type: &&ResourceType| types.is_none_or(|types| types.contains(*resource_type));
    for resource_type in ResourceType::ALL.iter().filter(differ) {
        let now = present.resources(*resource_type);
        let without = TypeResources {
            parts: parts.iter().map(|maps| maps[*resource_type as usize].clone()).collect(),
            is_sharded: now.is_sharded,
        };
        let difference = now.difference(&without);
        let changed = difference.changed.iter().map(|resource| &resource.name);
        for name in changed.chain(&difference.removed) {
            let version = |view: &TypeResources| view.get(name).map(|resource| resource.version);
            let (version, without) = (version(now), version(&without));
            affected.push(AffectedResource {
                resource_type: *resource_type,
                name: name.clone(),
                effect: match (version, without) {
                    (Some(_), None) => Effect::Adds,
                    (None, _) => Effect::Removes,
                    (Some(_), Some(_)) => Effect::Changes,
                },
                version,
                without,
            });
        }
    }
    affected.sort_unstable();
    affected
}
