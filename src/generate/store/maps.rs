//! Resources by name, assembled from the list of a part.

use std::{
    collections::BTreeSet,
    sync::{Arc, LazyLock},
};

use crate::{
    base::SmolStr,
    generate::{
        EncodedResource,
        encoded::ResourceType,
        plan::{ListedResource, ResourceKey},
        resource::{Built, PartResources},
    },
    table::{Cx, Table},
};

/// The map of every part that has no resources of a type. A part has a map for each type, and most are empty. As they
/// are one, groups that differ in one type are known to be equal in the others: the proxies of a namespace share their
/// first responses although their listeners name the workload.
static EMPTY: LazyLock<Arc<PartResources>> = LazyLock::new(Arc::default);

/// One map for each type.
pub(super) type PartResourceMaps = [Arc<PartResources>; ResourceType::ALL.len()];

/// The resources of a list. The first resource of a name wins.
#[derive(Default)]
pub(super) struct ListMaps {
    pub(super) types: PartResourceMaps,
    /// Names of several different resources in the list, of which all but the first are hidden.
    contested: BTreeSet<(ResourceType, SmolStr)>,
}

/// A change of one listed resource.
pub(super) struct Edit {
    pub(super) resource_type: ResourceType,
    pub(super) before: Option<Arc<EncodedResource>>,
    pub(super) after: Option<Arc<EncodedResource>>,
}

impl ListMaps {
    /// Assembles the maps of a whole list.
    pub(super) fn assemble(list: &[ListedResource], resources: &Table<ResourceKey, Built>) -> Self {
        let cx = Cx::untracked();
        let mut maps: [PartResources; ResourceType::ALL.len()] = Default::default();
        let mut contested = BTreeSet::new();
        for listed in list {
            let built = resources.get(&cx, &listed.key);
            let Some(resource) = built.and_then(|built| built.resource.as_ref()) else {
                continue;
            };
            let map = &mut maps[listed.resource_type as usize];
            match map.resources.insert(resource.name.clone(), resource.clone()) {
                None => map.digest = map.digest.wrapping_add(resource.version.value()),
                Some(first) => {
                    // A list may contain a resource several times, for a Service with a number for TCP and for SCTP.
                    if !Arc::ptr_eq(&first, resource) {
                        contested.insert((listed.resource_type, first.name.clone()));
                    }
                    map.resources.insert(first.name.clone(), first);
                }
            }
        }
        let mut maps = Self {
            types: maps.map(Arc::new),
            contested,
        };
        maps.share_empty();
        maps
    }

    fn share_empty(&mut self) {
        for map in self.types.iter_mut().filter(|map| map.resources.is_empty()) {
            map.clone_from(&EMPTY);
        }
    }

    /// Returns true if some resources are hidden behind others of their names.
    pub(super) fn hides(&self) -> bool {
        !self.contested.is_empty()
    }

    /// Changes single resources. Returns false if names collide: then the whole list must be assembled again.
    /// With whole lists, the push of an EndpointSlice takes 15 times the instructions (1,000 services; bench `steps`).
    pub(super) fn patch(&mut self, edits: &[Edit]) -> bool {
        let concerns = |resource: &Arc<EncodedResource>, resource_type: ResourceType| {
            self.contested.contains(&(resource_type, resource.name.clone()))
        };
        let is_contested = |edit: &Edit| {
            let mut versions = edit.before.iter().chain(&edit.after);
            versions.any(|resource| concerns(resource, edit.resource_type))
        };
        if self.hides() && edits.iter().any(is_contested) {
            return false;
        }
        for edit in edits {
            let Some(before) = &edit.before else { continue };
            let map = Arc::make_mut(&mut self.types[edit.resource_type as usize]);
            let held = map.resources.get(&before.name);
            if held.is_none_or(|held| !Arc::ptr_eq(held, before)) {
                return false;
            }
            map.resources.remove(&before.name);
            map.digest = map.digest.wrapping_sub(before.version.value());
        }
        for edit in edits {
            let Some(after) = &edit.after else { continue };
            let map = Arc::make_mut(&mut self.types[edit.resource_type as usize]);
            if map.resources.contains_key(&after.name) {
                return false;
            }
            map.digest = map.digest.wrapping_add(after.version.value());
            map.resources.insert(after.name.clone(), after.clone());
        }
        self.share_empty();
        true
    }
}
