//! Resources by name, assembled from the lists of parts.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::{
    base::Shared,
    generate::{
        encoded::ResourceType,
        plan::{ListedResource, ResourceKey},
        resource::{Built, PartResources},
    },
    table::{Cx, Table},
};

/// One map for each type.
pub(super) type PartResourceMaps = [Arc<PartResources>; ResourceType::ALL.len()];

/// Assembles the maps of a whole list. The first resource of a name wins.
pub(super) fn assemble(list: &[ListedResource], resources: &Table<ResourceKey, Built>) -> PartResourceMaps {
    let cx = Cx::untracked();
    let mut maps: Vec<PartResources> = ResourceType::ALL.iter().map(|_| PartResources::default()).collect();
    for listed in list {
        let Some(resource) = resources
            .get(&cx, &listed.key)
            .and_then(|built| built.resource.as_ref())
        else {
            continue;
        };
        let map = &mut maps[listed.resource_type as usize];
        match map.resources.insert(resource.name.clone(), resource.clone()) {
            None => map.digest = map.digest.wrapping_add(resource.version.value()),
            Some(first) => {
                map.resources.insert(first.name.clone(), first);
            }
        }
    }
    let mut maps = maps.into_iter().map(Arc::new);
    std::array::from_fn(|_| maps.next().expect("because there is one map for each type"))
}

/// Replaces single resources. Returns false if names collide, in which case the whole list must be assembled again.
/// With whole lists, the push of an EndpointSlice takes 15 times the instructions (1,000 services; bench `steps`).
pub(super) fn patch<'a>(
    maps: &mut PartResourceMaps,
    listed: impl Iterator<Item = &'a ListedResource>,
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
        let map = Arc::make_mut(&mut maps[listed.resource_type as usize]);
        if let Some(before) = before {
            match map.resources.get(&before.name) {
                Some(held) if Arc::ptr_eq(held, &before) => {}
                _ => return false,
            }
            map.resources.remove(&before.name);
            map.digest = map.digest.wrapping_sub(before.version.value());
        }
        if let Some(after) = after {
            if map.resources.contains_key(&after.name) {
                return false;
            }
            map.digest = map.digest.wrapping_add(after.version.value());
            map.resources.insert(after.name.clone(), after);
        }
    }
    true
}
