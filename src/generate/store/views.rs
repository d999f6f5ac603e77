//! The maps of resources by name that lists come to.

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

/// The maps of a whole list; the first resource of a name wins.
pub(super) fn whole_views(list: &[ListedResource], resources: &Table<ResourceKey, Built>) -> PartResourceMaps {
    let cx = Cx::untracked();
    let mut maps: Vec<PartResources> = ResourceType::ALL.iter().map(|_| PartResources::default()).collect();
    for listed in list {
        let Some(resource) = resources
            .get(&cx, &listed.key)
            .and_then(|built| built.resource.as_ref())
        else {
            continue;
        };
        let ctx = &mut maps[listed.resource_type as usize];
        match ctx.resources.insert(resource.name.clone(), resource.clone()) {
            None => ctx.digest = ctx.digest.wrapping_add(resource.version.value()),
            Some(first) => {
                ctx.resources.insert(first.name.clone(), first);
            }
        }
    }
    let mut maps = maps.into_iter().map(Arc::new);
    std::array::from_fn(|_| maps.next().expect("because there is one map for each type"))
}

/// Replaces single resources; false if names collide, so that the whole list has to decide.
pub(super) fn patch_views<'a>(
    views: &mut PartResourceMaps,
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
        let ctx = Arc::make_mut(&mut views[listed.resource_type as usize]);
        if let Some(before) = before {
            match ctx.resources.get(&before.name) {
                Some(held) if Arc::ptr_eq(held, &before) => {}
                _ => return false,
            }
            ctx.resources.remove(&before.name);
            ctx.digest = ctx.digest.wrapping_sub(before.version.value());
        }
        if let Some(after) = after {
            if ctx.resources.contains_key(&after.name) {
                return false;
            }
            ctx.digest = ctx.digest.wrapping_add(after.version.value());
            ctx.resources.insert(after.name.clone(), after);
        }
    }
    true
}
