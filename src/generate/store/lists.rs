//! The lists of parts, and the resources of each list by name.
//!
//! A list has an id, by which its resources refer to it. When another list takes the place of one (the parts that had
//! the one have the other), the id passes on. Then only the difference of both is registered, and the maps of resources
//! share all that is equal with those from before. So one service more or less costs a connection only what differs.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    List,
    maps::{Edit, ListMaps, PartResourceMaps},
};
use crate::{
    base::Shared,
    generate::{
        EncodedResource,
        encoded::ResourceType,
        plan::{ListedResource, PartKey, ResourceKey},
        resource::Built,
    },
    table::{Cx, RowChange, Table, Users},
};

/// The identity of a list, which no other list has at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ListId(u64);

/// A list that contains a resource, and the type that it gives the resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ListUse {
    list: ListId,
    resource_type: ResourceType,
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Lists {
    /// Most parts of one kind have the same list.
    parts: Users<List, PartKey>,
    ids: FxHashMap<List, ListId>,
    entries: FxHashMap<ListId, Entry>,
    uses: Users<ResourceKey, ListUse>,
    next_id: u64,
}

struct Entry {
    list: List,
    maps: ListMaps,
}

/// Changes of lists in an update.
#[derive(Default)]
pub(super) struct ListChanges {
    /// Resources that no list contained before.
    pub(super) resources: Vec<ResourceKey>,
    /// Lists that no part had before, and that replace no other.
    new: Vec<ListId>,
    /// Lists that replaced another one.
    replaced: Vec<(ListId, Difference)>,
    /// Lists that no part has any more, and that no other replaces.
    gone: Vec<(ListId, List)>,
}

/// The difference between two lists, apart from the order.
#[derive(Debug, Default, PartialEq, Eq)]
struct Difference {
    removed: Vec<ListedResource>,
    added: Vec<ListedResource>,
}

impl Lists {
    /// Returns the number of lists.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the equal list that is in use.
    pub(super) fn known(&self, list: &List) -> Option<&List> {
        self.parts.key(list)
    }

    /// Returns the equal key of a resource that is in use.
    pub(super) fn known_resource(&self, key: &ResourceKey) -> Option<&ResourceKey> {
        self.uses.key(key)
    }

    /// Returns the parts that have a list.
    pub(super) fn parts(&self, list: &List) -> impl Iterator<Item = &PartKey> {
        self.parts.get(list)
    }

    /// Returns the lists that contain a resource.
    pub(super) fn containing(&self, key: &ResourceKey) -> impl Iterator<Item = &List> {
        let entries = self
            .uses
            .get(key)
            .filter_map(|list_use| self.entries.get(&list_use.list));
        entries.map(|entry| &entry.list)
    }

    /// Returns the resources of a list.
    pub(super) fn maps(&self, list: &List) -> Option<&PartResourceMaps> {
        let entry = self.entries.get(self.ids.get(list)?)?;
        Some(&entry.maps.types)
    }

    /// Registers the changed lists of parts. What is no longer used stays until [`Self::release`].
    pub(super) fn update(&mut self, parts: &[RowChange<PartKey, List>]) -> ListChanges {
        let mut new: Vec<(&List, Option<&List>)> = Vec::new();
        for (part, before, now) in parts {
            if let Some(now) = now
                && self.parts.add(now, part.clone())
            {
                new.push((now, before.as_deref()));
            }
        }
        // Users are removed last, so that a list which moves from one part to another stays.
        let mut gone: FxHashSet<&List> = FxHashSet::default();
        for (part, before, _) in parts {
            if let Some(before) = before
                && self.parts.remove(before, part)
            {
                gone.insert(before);
            }
        }
        let mut changes = ListChanges::default();
        for (list, before) in new {
            match before.filter(|before| gone.remove(*before)) {
                Some(before) => self.replace(before, list, &mut changes),
                None => self.add(list, &mut changes),
            }
        }
        for list in gone {
            changes.gone.extend(self.ids.remove(list).map(|id| (id, list.clone())));
        }
        changes
    }

    fn add(&mut self, list: &List, changes: &mut ListChanges) {
        let id = ListId(self.next_id);
        self.next_id += 1;
        self.ids.insert(list.clone(), id);
        let entry = Entry {
            list: list.clone(),
            maps: ListMaps::default(),
        };
        self.entries.insert(id, entry);
        if self.uses.is_empty() {
            self.uses.reserve(list.len());
        }
        self.register(id, list, changes);
        changes.new.push(id);
    }

    fn replace(&mut self, before: &List, list: &List, changes: &mut ListChanges) {
        let Some(id) = self.ids.remove(before) else {
            return self.add(list, changes);
        };
        self.ids.insert(list.clone(), id);
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.list = list.clone();
        }
        let difference = Difference::of(before, list);
        self.register(id, &difference.added, changes);
        changes.replaced.push((id, difference));
    }

    fn register(&mut self, list: ListId, resources: &[ListedResource], changes: &mut ListChanges) {
        for ListedResource { resource_type, key } in resources {
            let resource_type = *resource_type;
            if self.uses.add(key, ListUse { list, resource_type }) {
                changes.resources.push(key.clone());
            }
        }
    }

    /// Removes a part. Returns the resources that no list contains any more.
    pub(super) fn remove_part(&mut self, part: &PartKey, list: &List) -> Vec<ResourceKey> {
        let mut changes = ListChanges::default();
        if self.parts.remove(list, part) {
            changes.gone.extend(self.ids.remove(list).map(|id| (id, list.clone())));
        }
        self.release(&changes)
    }

    /// Ends the uses that the changes ended. Returns the resources that no list contains any more.
    pub(super) fn release(&mut self, changes: &ListChanges) -> Vec<ResourceKey> {
        let mut unused = Vec::new();
        let mut remove = |list: ListId, resources: &[ListedResource]| {
            for ListedResource { resource_type, key } in resources {
                let resource_type = *resource_type;
                if self.uses.remove(key, &ListUse { list, resource_type }) {
                    unused.push(key.clone());
                }
            }
        };
        for (id, difference) in &changes.replaced {
            remove(*id, &difference.removed);
        }
        for (id, list) in &changes.gone {
            remove(*id, list);
            self.entries.remove(id);
        }
        unused
    }

    /// Brings the maps up to date with the changes of lists and resources. Returns the lists whose maps changed.
    pub(super) fn assemble(
        &mut self,
        changes: &ListChanges,
        built: &[RowChange<ResourceKey, Built>],
        table: &Table<ResourceKey, Built>,
    ) -> Vec<List> {
        let mut edits = self.edits(changes, built, table);
        let mut changed = Vec::with_capacity(edits.len() + changes.new.len());
        for id in &changes.new {
            edits.remove(id);
            if let Some(entry) = self.entries.get_mut(id) {
                entry.maps = ListMaps::assemble(&entry.list, table);
                changed.push(entry.list.clone());
            }
        }
        let reordered: FxHashSet<ListId> = changes.replaced.iter().map(|(id, _)| *id).collect();
        for (id, edits) in edits {
            let Some(entry) = self.entries.get_mut(&id) else {
                continue;
            };
            // Another order may show another one of several resources with one name.
            let may_differ = reordered.contains(&id) && entry.maps.hides();
            if may_differ || !entry.maps.patch(&edits) {
                entry.maps = ListMaps::assemble(&entry.list, table);
            }
            changed.push(entry.list.clone());
        }
        changed
    }

    /// Returns the changes of the resources of each list, and an empty entry for each list in another order.
    fn edits(
        &self,
        changes: &ListChanges,
        built: &[RowChange<ResourceKey, Built>],
        table: &Table<ResourceKey, Built>,
    ) -> FxHashMap<ListId, Vec<Edit>> {
        let present = |key: &ResourceKey| resource(table.get(&Cx::untracked(), key));
        // A resource may have changed and then gone; the first change has what it was before.
        let mut before: FxHashMap<&ResourceKey, Option<Arc<EncodedResource>>> = FxHashMap::default();
        for (key, old, _) in built {
            before.entry(key).or_insert_with(|| resource(old.as_ref()));
        }
        let mut edits: FxHashMap<ListId, Vec<Edit>> = FxHashMap::default();
        let mut added: FxHashSet<(ListUse, &ResourceKey)> = FxHashSet::default();
        for (id, difference) in &changes.replaced {
            let edits = edits.entry(*id).or_default();
            edits.extend(difference.removed.iter().map(|listed| Edit {
                resource_type: listed.resource_type,
                before: before.get(&listed.key).cloned().unwrap_or_else(|| present(&listed.key)),
                after: None,
            }));
            for ListedResource { resource_type, key } in &difference.added {
                let (list, resource_type) = (*id, *resource_type);
                added.insert((ListUse { list, resource_type }, key));
                edits.push(Edit {
                    resource_type,
                    before: None,
                    after: present(key),
                });
            }
        }
        for (key, before) in before {
            let uses = self
                .uses
                .get(key)
                .filter(|list_use| !added.contains(&(**list_use, key)));
            for ListUse { list, resource_type } in uses.copied() {
                edits.entry(list).or_default().push(Edit {
                    resource_type,
                    before: before.clone(),
                    after: present(key),
                });
            }
        }
        edits
    }
}

fn resource(built: Option<&Shared<Built>>) -> Option<Arc<EncodedResource>> {
    built.and_then(|built| built.resource.clone())
}

impl Difference {
    /// Returns the difference. One insertion is found by comparing pointers.
    fn of(before: &[ListedResource], after: &[ListedResource]) -> Self {
        let same = |pair: &(&ListedResource, &ListedResource)| pair.0 == pair.1;
        let prefix = before.iter().zip(after).take_while(same).count();
        let (old, new) = (&before[prefix..], &after[prefix..]);
        let suffix = old.iter().rev().zip(new.iter().rev()).take_while(same).count();
        let (old, new) = (&old[..old.len() - suffix], &new[..new.len() - suffix]);
        let (old, new): (FxHashSet<_>, FxHashSet<_>) = (old.iter().collect(), new.iter().collect());
        let mut removed: FxHashSet<&ListedResource> = old.difference(&new).copied().collect();
        let mut added: FxHashSet<&ListedResource> = new.difference(&old).copied().collect();
        // A list may contain a resource several times.
        for listed in before[..prefix].iter().chain(&before[before.len() - suffix..]) {
            removed.remove(listed);
            added.remove(listed);
        }
        let listed = |set: FxHashSet<&ListedResource>| set.into_iter().cloned().collect();
        Self {
            removed: listed(removed),
            added: listed(added),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::{
        generate::{
            endpoint::{EndpointKey, EndpointProxyView},
            fixture,
            name::ClusterMode,
            plan::Resource,
            resource::PartResources,
        },
        model::{Installation, ServiceKey},
        proto::envoy::config::endpoint::v3::ClusterLoadAssignment,
        table::{RelationId, TableWriter, Transaction},
    };

    const RESOURCES: usize = 6;
    const PARTS: usize = 3;

    /// Returns the keys of some parts.
    fn parts() -> Vec<PartKey> {
        let client = fixture::client("sidecar~10.9.0.1~a-0.default~default.svc.cluster.local", &json!({}));
        let store = fixture::store(Installation::default(), &[], vec![client]);
        let cx = Cx::untracked();
        store.parts.table().keys(&cx).take(PARTS).cloned().collect()
    }

    fn listed(number: usize) -> ListedResource {
        let key = EndpointKey {
            service: ServiceKey {
                hostname: number.to_string().into(),
                namespace: "default".into(),
            },
            port: 80,
            merged: None,
            subset: Default::default(),
            mode: ClusterMode::Default,
            rule: None,
            client: EndpointProxyView::default(),
        };
        ListedResource::new(ResourceType::Endpoint, Resource::Endpoint(key))
    }

    /// Returns a resource; two numbers have the same name. Content 0 is none.
    fn built(number: usize, content: u8) -> Shared<Built> {
        let name = (number / 2).to_string();
        let message = ClusterLoadAssignment {
            cluster_name: format!("{number} {content}"),
            ..Default::default()
        };
        Shared::new(match content {
            0 => Built::none(),
            _ => Built::new(EncodedResource::new(name, &message)),
        })
    }

    fn resources(maps: &PartResourceMaps) -> Vec<(u128, Vec<Arc<EncodedResource>>)> {
        let of_type = |map: &Arc<PartResources>| (map.digest, map.resources.values().cloned().collect());
        maps.iter().map(of_type).collect()
    }

    /// The new lists of some parts, and the new contents of some resources.
    type Step = (BTreeMap<usize, Option<Vec<usize>>>, BTreeMap<usize, u8>);

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let list = prop::option::weighted(0.9, prop::collection::vec(0..RESOURCES, 0..8));
        let lists = prop::collection::btree_map(0..PARTS, list, 0..=PARTS);
        let contents = prop::collection::btree_map(0..RESOURCES, 0..4u8, 0..3);
        prop::collection::vec((lists, contents), 1..12)
    }

    proptest! {
        #[test]
        fn maps_after_any_changes_are_those_of_the_present_lists(steps in steps()) {
            let parts = parts();
            let mut lists = Lists::default();
            let mut rows: TableWriter<ResourceKey, Built> = TableWriter::new(RelationId(0));
            let mut present: BTreeMap<usize, Shared<List>> = BTreeMap::new();
            let mut contents = [1; RESOURCES];
            for (relisted, changed) in steps {
                let mut tx = Transaction::default();
                rows.begin();
                let mut moves = Vec::new();
                for (part, list) in relisted {
                    let list = list.map(|list| Shared::new(List::new(list.into_iter().map(listed).collect())));
                    let before = match list.clone() {
                        Some(list) => present.insert(part, list),
                        None => present.remove(&part),
                    };
                    if before != list {
                        moves.push((parts[part].clone(), before, list));
                    }
                }
                let changes = lists.update(&moves);
                contents.iter_mut().enumerate().for_each(|(number, content)| {
                    *content = changed.get(&number).copied().unwrap_or(*content);
                });
                for (number, content) in contents.iter().copied().enumerate() {
                    let key = listed(number).key;
                    let exists = rows.table().get(&Cx::untracked(), &key).is_some();
                    if exists || changes.resources.contains(&key) {
                        rows.put(&mut tx, key, built(number, content));
                    }
                }
                for key in lists.release(&changes) {
                    rows.remove(&mut tx, &key);
                }
                lists.assemble(&changes, rows.changes(), rows.table());

                let used = present.values().flat_map(|list| list.iter().map(|one| &one.key));
                let used: BTreeSet<&ResourceKey> = used.collect();
                prop_assert_eq!(rows.table().keys(&Cx::untracked()).collect::<BTreeSet<_>>(), used);
                prop_assert_eq!(lists.len(), present.values().collect::<FxHashSet<_>>().len());
                for list in present.values() {
                    let expected = ListMaps::assemble(list, rows.table());
                    let given = lists.maps(list).map(resources);
                    prop_assert_eq!(given, Some(resources(&expected.types)));
                }
            }
        }
    }

    /// Of a list with hidden resources, other changes must assemble all maps again.
    #[test]
    fn r21_a_repeated_resource_hides_none() {
        let mut rows: TableWriter<ResourceKey, Built> = TableWriter::new(RelationId(0));
        let mut tx = Transaction::default();
        for number in 0..3 {
            rows.put(&mut tx, listed(number).key, built(number, 1));
        }
        let hides = |numbers: &[usize]| {
            let list: Vec<ListedResource> = numbers.iter().copied().map(listed).collect();
            ListMaps::assemble(&list, rows.table()).hides()
        };
        assert!(!hides(&[0, 2, 0]));
        assert!(hides(&[0, 1]), "both have one name");
    }

    #[test]
    fn a_difference_has_what_only_one_list_contains() {
        let difference = |before: &[usize], after: &[usize]| {
            let list = |numbers: &[usize]| -> Vec<ListedResource> { numbers.iter().copied().map(listed).collect() };
            let Difference { removed, added } = Difference::of(&list(before), &list(after));
            (removed, added)
        };
        let only = |number: usize| vec![listed(number)];
        assert_eq!(difference(&[1, 2, 4], &[1, 2, 3, 4]), (vec![], only(3)));
        assert_eq!(difference(&[1, 2, 4], &[1, 3, 4]), (only(2), only(3)));
        assert_eq!(difference(&[1, 2, 3], &[3, 2, 1]), (vec![], vec![]));
        assert_eq!(difference(&[1, 2, 1], &[1, 2]), (vec![], vec![]));
        assert_eq!(difference(&[1, 2], &[2, 1, 1, 2]), (vec![], vec![]));
    }
}
