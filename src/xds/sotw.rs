//! State of the world: what a response of a type holds.
//!
//! Clusters and listeners are always listed in full, since what is missing from the list is gone. Other types are sent
//! name by name: what is not mentioned stays.

use std::{collections::BTreeMap, sync::Arc};

use smol_str::SmolStr;

use super::{
    answers::Answers,
    watched::{InFlight, WatchedResource},
};
use crate::generate::{EncodedResource, ResourceSnapshot, ResourceType};

/// What is to be sent now, if anything. Afterwards the view counts as sent.
pub(super) fn content(
    watched: &mut WatchedResource,
    resource_type: ResourceType,
    latest: &ResourceSnapshot,
    answers: &Answers,
) -> Option<InFlight> {
    let view = latest.view(resource_type);
    let must_answer = std::mem::take(&mut watched.must_answer);
    let mut owed = std::mem::take(&mut watched.owed);
    let mut all = std::mem::take(&mut watched.owed_all);
    let mut changed: BTreeMap<SmolStr, Arc<EncodedResource>> = BTreeMap::new();
    match &watched.sent {
        None => all = true,
        Some(sent) => {
            let difference = sent.difference(view);
            let removed = difference.removed.iter().any(|name| watched.asks_for(name));
            changed.extend(
                difference
                    .changed
                    .into_iter()
                    .filter(|r| watched.wants(&r.name))
                    .map(|r| (r.name.clone(), r)),
            );
            if !changed.is_empty() || removed {
                owed.append(&mut watched.refused);
            }
            // A list in full says what is gone by leaving it out.
            all |= resource_type.is_wildcard() && (!changed.is_empty() || !owed.is_empty() || removed);
        }
    }
    watched.sent = Some(view.clone());
    // All names are owed, or all there is: what changed is among it.
    if all
        && !watched.on_demand
        && let Ok(names) = watched.whole()
    {
        let answer = answers.all(resource_type, latest, names);
        return Some(InFlight {
            resources: answer.resources,
            laid: Some(answer.laid),
            removed: Vec::new(),
        });
    }
    let resources: Vec<Arc<EncodedResource>> = if all && watched.wildcard {
        view.iter().cloned().collect()
    } else {
        if all && watched.on_demand {
            changed.extend(view.iter().map(|resource| (resource.name.clone(), resource.clone())));
        }
        let mut add = |name: &SmolStr| {
            let absent = || latest.absent(resource_type, name).map(Arc::new);
            let resource = view.get(name).cloned().or_else(absent);
            changed.extend(resource.map(|resource| (name.clone(), resource)));
        };
        if all {
            watched.names.iter().for_each(&mut add);
        } else {
            owed.iter().filter(|name| watched.asks_for(name)).for_each(&mut add);
        }
        changed.into_values().collect()
    };
    (must_answer || all || !resources.is_empty()).then(|| InFlight {
        resources: resources.into(),
        ..InFlight::default()
    })
}
