//! The maps of resources by name that lists come to.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::{
    base::Shared,
    generate::{
        encoded::ResourceType,
        group::{Built, Listed, PartView, ResourceKey},
    },
    table::{Cx, Table},
};

/// One map for each type.
pub(super) type PartViews = [Arc<PartView>; ResourceType::ALL.len()];

/// The maps of a whole list; the first resource of a name wins.
pub(super) fn whole_views(list: &[Listed], resources: &Table<ResourceKey, Built>) -> PartViews {
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
        match view.resources.insert(resource.name.clone(), resource.clone()) {
            None => view.digest = view.digest.wrapping_add(resource.version.value()),
            Some(first) => {
                view.resources.insert(first.name.clone(), first);
            }
        }
    }
    let mut maps = maps.into_iter().map(Arc::new);
    std::array::from_fn(|_| maps.next().expect("because there is one map for each type"))
}

/// Replaces single resources; false if names collide, so that the whole list has to decide.
pub(super) fn patch_views<'a>(
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
