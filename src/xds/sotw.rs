//! State of the world: the content of a response of one type.
//!
//! Clusters and listeners are always listed in full, since a resource that is missing from the list is removed. Other
//! types are sent name by name: a resource that is not mentioned stays.

use std::{collections::BTreeMap, sync::Arc};

use smol_str::SmolStr;

use super::{
    share::response_cache::{ResponseCache, resource},
    watched::{InFlight, WatchedResource},
};
use crate::generate::{EncodedResource, ResourceSnapshot, ResourceType};

/// Returns what must be sent now, if anything. Then the view counts as sent.
pub(super) fn content(
    watched: &mut WatchedResource,
    resource_type: ResourceType,
    latest: &ResourceSnapshot,
    cache: &ResponseCache,
) -> Option<InFlight> {
    let view = latest.resources(resource_type);
    let must_respond = std::mem::take(&mut watched.must_respond);
    let mut pending = std::mem::take(&mut watched.pending);
    let mut all = std::mem::take(&mut watched.resend_all);
    let mut changed: BTreeMap<SmolStr, Arc<EncodedResource>> = BTreeMap::new();
    match &watched.sent {
        None => all = true,
        Some(sent) => {
            let difference = sent.difference(view);
            let removed = difference.removed.iter().any(|name| watched.may_hold(name));
            let wanted = difference.changed.into_iter();
            let wanted = wanted.filter(|resource| watched.wants(&resource.name));
            changed.extend(wanted.map(|resource| (resource.name.clone(), resource)));
            if !changed.is_empty() || removed {
                pending.append(&mut watched.retry());
            }
            // A full list removes resources by omission.
            all |= resource_type.is_wildcard() && (!changed.is_empty() || !pending.is_empty() || removed);
        }
    }
    watched.sent = Some(view.clone());
    // Everything is sent, so the changes are included.
    if all
        && !watched.on_demand
        && let Ok(names) = watched.as_single_list()
    {
        let answer = cache.all(resource_type, latest, names);
        return Some(InFlight {
            resources: answer.resources,
            coalesced: Some(answer.coalesced),
            held: answer.held,
            ..InFlight::default()
        });
    }
    let resources: Vec<Arc<EncodedResource>> = if all && watched.wildcard {
        view.iter().cloned().collect()
    } else {
        if all && watched.on_demand {
            changed.extend(view.iter().map(|resource| (resource.name.clone(), resource.clone())));
        }
        let mut add = |name: &SmolStr| {
            let resource = resource(latest, resource_type, name);
            changed.extend(resource.map(|resource| (name.clone(), resource)));
        };
        if all {
            watched.names.iter().for_each(&mut add);
        } else {
            pending.iter().filter(|name| watched.asks_for(name)).for_each(&mut add);
        }
        changed.into_values().collect()
    };
    (must_respond || all || !resources.is_empty()).then(|| InFlight {
        resources: resources.into(),
        ..InFlight::default()
    })
}
