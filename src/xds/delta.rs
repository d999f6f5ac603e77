//! Incremental: what a response of a type holds.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use smol_str::SmolStr;

use super::{
    answers::{Answer, Answers},
    order,
    watched::{InFlight, WatchedResource},
};
use crate::generate::{EncodedResource, ResourceSnapshot, ResourceType, resource::TypeResources};

/// What is to be sent now, if anything. Afterwards the view counts as sent; removals that must wait are noted.
pub(super) fn content(
    watched: &mut WatchedResource,
    resource_type: ResourceType,
    latest: &ResourceSnapshot,
    answers: &Answers,
) -> Option<InFlight> {
    let view = latest.view(resource_type);
    if watched.sent.is_none()
        && !watched.on_demand
        && let Ok(names) = watched.whole()
    {
        let answer = answers.all(resource_type, latest, names);
        return Some(first(watched, resource_type, view, answer));
    }
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

/// The first answer to a subscription that is everything or one list: all of it but what the client holds already; what it
/// holds and is gone is removed.
fn first(watched: &mut WatchedResource, resource_type: ResourceType, view: &TypeResources, answer: Answer) -> InFlight {
    (watched.must_answer, watched.owed_all) = (false, false);
    watched.owed.clear();
    watched.sent = Some(view.clone());
    let claims = std::mem::take(&mut watched.claimed);
    let mut claimed = claims.versions();
    let (mut resources, mut laid) = (answer.resources, Some(answer.laid));
    if !claimed.is_empty() {
        laid = None;
        let mut is_held = |resource: &EncodedResource| claimed.remove(&*resource.name) == Some(Some(resource.version));
        resources = resources
            .iter()
            .filter(|resource| !is_held(resource))
            .cloned()
            .collect();
    }
    let mut removed = BTreeSet::new();
    if order::is_removed(resource_type) {
        let gone = claimed.into_keys().map(SmolStr::new);
        removed.extend(gone.filter(|name| watched.asks_for(name)));
        removed.extend(answer.missing.iter().cloned());
    }
    InFlight {
        resources,
        laid,
        removed: removed.into_iter().collect(),
    }
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
    fn first(&mut self, watched: &mut WatchedResource, view: &TypeResources, owed: &mut BTreeSet<SmolStr>) {
        self.first = true;
        let claims = std::mem::take(&mut watched.claimed);
        let claimed = claims.versions();
        let held = |resource: &EncodedResource| claimed.get(&*resource.name) == Some(&Some(resource.version));
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
        let gone = claimed.keys().map(SmolStr::new);
        let gone = gone.filter(|name| watched.asks_for(name) && view.get(name).is_none());
        self.removed.extend(gone);
    }

    fn change(&mut self, watched: &WatchedResource, sent: &TypeResources, view: &TypeResources) {
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
            laid: None,
            removed: removed.into_iter().collect(),
        })
    }
}
