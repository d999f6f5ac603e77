//! Incremental: what a response of a type holds.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use smol_str::SmolStr;

use super::{
    order,
    watched::{InFlight, WatchedResource},
};
use crate::generate::{EncodedResource, ResourceSnapshot, ResourceType, group::TypeView};

/// What is to be sent now, if anything. Afterwards the view counts as sent; removals that must wait are noted.
pub(super) fn content(
    watched: &mut WatchedResource,
    resource_type: ResourceType,
    latest: &ResourceSnapshot,
) -> Option<InFlight> {
    let view = latest.view(resource_type);
    let must_answer = std::mem::take(&mut watched.must_answer);
    let mut content = Content::default();
    let mut owed = std::mem::take(&mut watched.owed);
    match watched.sent.take() {
        None => content.first(watched, view, &mut owed),
        Some(sent) => {
            content.change(watched, &sent, view);
            if !content.is_empty() {
                owed.append(&mut watched.refused);
            }
        }
    }
    if std::mem::take(&mut watched.owed_all) {
        if watched.wildcard || watched.on_demand {
            content
                .send
                .extend(view.iter().map(|resource| (resource.name.clone(), resource.clone())));
        }
        owed.extend(watched.names.iter().cloned());
    }
    for name in owed {
        if !watched.asks_for(&name) {
            continue;
        }
        match view
            .get(&name)
            .cloned()
            .or_else(|| latest.absent(resource_type, &name).map(Arc::new))
        {
            Some(resource) => {
                content.send.insert(name, resource);
            }
            None => {
                content.removed.insert(name);
            }
        }
    }
    watched.sent = Some(view.clone());
    content.finish(watched, resource_type, must_answer)
}

#[derive(Default)]
struct Content {
    send: BTreeMap<SmolStr, Arc<EncodedResource>>,
    removed: BTreeSet<SmolStr>,
    first: bool,
}

impl Content {
    fn is_empty(&self) -> bool {
        self.send.is_empty() && self.removed.is_empty()
    }

    /// The first answer: everything wanted but what the client holds already; what it holds and is gone is removed.
    fn first(&mut self, watched: &mut WatchedResource, view: &TypeView, owed: &mut BTreeSet<SmolStr>) {
        self.first = true;
        let claimed = std::mem::take(&mut watched.claimed);
        let held = |resource: &EncodedResource| claimed.get(&resource.name) == Some(&Some(resource.version));
        if watched.wildcard || watched.on_demand {
            self.send
                .extend(view.iter().filter(|r| !held(r)).map(|r| (r.name.clone(), r.clone())));
        }
        owed.extend(
            watched
                .names
                .iter()
                .filter(|name| !view.get(name).is_some_and(|r| held(r)))
                .cloned(),
        );
        let gone = claimed
            .keys()
            .filter(|name| watched.asks_for(name) && view.get(name).is_none());
        self.removed.extend(gone.cloned());
    }

    fn change(&mut self, watched: &WatchedResource, sent: &TypeView, view: &TypeView) {
        let difference = sent.difference(view);
        self.send.extend(
            difference
                .changed
                .into_iter()
                .filter(|r| watched.wants(&r.name))
                .map(|r| (r.name.clone(), r)),
        );
        self.removed
            .extend(difference.removed.into_iter().filter(|name| watched.asks_for(name)));
    }

    fn finish(self, watched: &mut WatchedResource, resource_type: ResourceType, must_answer: bool) -> Option<InFlight> {
        let Self {
            send,
            mut removed,
            first,
        } = self;
        removed.retain(|name| !send.contains_key(name));
        watched.removed_later.retain(|name| !send.contains_key(name));
        if !order::is_removed(resource_type) {
            removed.clear();
        } else if order::removed_last(resource_type) && !first {
            watched.removed_later.append(&mut removed);
        }
        if send.is_empty() && removed.is_empty() && !must_answer {
            return None;
        }
        Some(InFlight {
            resources: send.into_values().collect(),
            removed: removed.into_iter().collect(),
        })
    }
}
