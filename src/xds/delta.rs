//! Incremental: the content of a response of one type.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use smol_str::SmolStr;

use super::{
    order,
    share::{
        initial_versions::{InitialVersions, Versions},
        names::Names,
        response_cache::{CachedUpdate, ResponseCache, resource},
    },
    watched::{InFlight, WatchedResource},
};
use crate::{
    base::keyed::KeyedMap,
    generate::{EncodedResource, ResourceSnapshot, ResourceType, resource::TypeResources},
};

/// Returns what must be sent now, if anything. Then the view counts as sent; removals that must wait are recorded.
pub(super) fn content(
    watched: &mut WatchedResource,
    resource_type: ResourceType,
    latest: &ResourceSnapshot,
    cache: &ResponseCache,
) -> Option<InFlight> {
    let view = latest.resources(resource_type);
    let Some(sent) = watched.sent.replace(view.clone()) else {
        return Some(first(watched, resource_type, latest, cache));
    };
    let must_respond = std::mem::take(&mut watched.must_respond);
    let mut content = Content::default();
    let mut pending = std::mem::take(&mut watched.pending);
    content.add_difference(watched, &sent, view);
    if !content.is_empty() {
        pending.append(&mut watched.retry());
    }
    if std::mem::take(&mut watched.resend_all) {
        if watched.wildcard || watched.on_demand {
            content.send.extend(by_name(view.iter()));
        }
        pending.extend(watched.names.iter().cloned());
    }
    if order::removed_last(resource_type) {
        // An empty assignment in place of removed endpoints would take them at once from a cluster that still serves.
        pending.retain(|name| !content.removed.contains(name));
    }
    content.add_names(watched, resource_type, latest, pending);
    content.finish(watched, resource_type, must_respond)
}

/// Returns the first response to a subscription: everything except what the client holds already and does not wait for.
/// Resources that it holds and that no longer exist are removed, now or later.
fn first(
    watched: &mut WatchedResource,
    resource_type: ResourceType,
    latest: &ResourceSnapshot,
    cache: &ResponseCache,
) -> InFlight {
    let initial_versions = std::mem::take(&mut watched.initial_versions);
    let pending = std::mem::take(&mut watched.pending);
    let resend_all = std::mem::take(&mut watched.resend_all);
    watched.must_respond = false;
    let subscription: &WatchedResource = watched;
    let first = FirstResponse {
        watched: subscription,
        resource_type,
        latest,
        initial_versions,
        resend_all,
    };
    let (mut response, announced) = match subscription.as_single_list() {
        Ok(names) if !subscription.on_demand => first.of_list(cache, names, pending),
        Ok(_) | Err(_) => first.of_names(pending),
    };
    if !order::is_removed(resource_type) {
        response.removed.clear();
        return response;
    }
    watched.announced = cache.held().charge_names(announced.count, announced.size_bytes);
    if order::removed_last(resource_type) {
        // Routes that the client holds may refer to what it has not requested by name.
        let is_requested = |name: &SmolStr| watched.names.contains(name);
        let (absent, removed): (Vec<_>, Vec<_>) = response.removed.into_iter().partition(is_requested);
        response.removed = absent;
        watched.deferred_removals.extend(removed);
    }
    response
}

/// Names that only one connection keeps: those that the client announced to hold and that do not exist.
#[derive(Default)]
struct Announced {
    count: usize,
    size_bytes: usize,
}

impl Announced {
    fn of(names: &[SmolStr]) -> Self {
        Self {
            count: names.len(),
            size_bytes: names.iter().map(SmolStr::len).sum(),
        }
    }

    /// Returns those that are the same in memory for several connections. Each has a reference to them.
    fn shared(names: &[SmolStr]) -> Self {
        Self {
            count: 0,
            size_bytes: size_of_val(names),
        }
    }
}

/// The inputs of the first response to a subscription.
struct FirstResponse<'a> {
    watched: &'a WatchedResource,
    resource_type: ResourceType,
    latest: &'a ResourceSnapshot,
    /// The resources that the client announced to hold.
    initial_versions: InitialVersions,
    /// True if resources that the client holds are sent, too.
    resend_all: bool,
}

impl FirstResponse<'_> {
    fn view(&self) -> &TypeResources {
        self.latest.resources(self.resource_type)
    }

    /// Returns the response to a subscription to a list of names, or to everything. Clients with the same list share
    /// it.
    fn of_list(
        &self,
        cache: &ResponseCache,
        names: Option<&Arc<Names>>,
        pending: BTreeSet<SmolStr>,
    ) -> (InFlight, Announced) {
        let all = cache.all(self.resource_type, self.latest, names);
        let mut content = Content::default();
        content.removed.extend(all.missing.iter().cloned());
        if self.initial_versions.is_empty() || self.resend_all {
            let response = InFlight {
                resources: all.resources,
                coalesced: Some(all.coalesced),
                removed: content.removed.into_iter().collect(),
                held: all.held,
                unconfirmed: Arc::default(),
            };
            return (response, Announced::default());
        }
        let update = cache.update(&all, &self.initial_versions, |held| CachedUpdate {
            resources: all
                .resources
                .iter()
                .filter(|resource| !is_held(held, resource))
                .cloned()
                .collect(),
            removed: self.gone(held).into(),
            unconfirmed: self.unconfirmed(),
        });
        content.removed.extend(update.removed.iter().cloned());
        let is_cached = Arc::strong_count(&update.removed) > 1;
        let announced = if is_cached {
            Announced::shared(&update.removed)
        } else {
            Announced::of(&update.removed)
        };
        let resources = if pending.is_empty() {
            update.resources
        } else {
            content.send.extend(by_name(update.resources.iter()));
            content.add_names(self.watched, self.resource_type, self.latest, pending);
            content.send.into_values().collect()
        };
        let response = InFlight {
            resources,
            coalesced: None,
            removed: content.removed.into_iter().collect(),
            held: all.held,
            unconfirmed: update.unconfirmed,
        };
        (response, announced)
    }

    /// Returns the response to any other subscription.
    fn of_names(&self, mut pending: BTreeSet<SmolStr>) -> (InFlight, Announced) {
        let (watched, view) = (self.watched, self.view());
        let held = self.initial_versions.versions();
        let mut content = Content::default();
        if watched.wildcard || watched.on_demand {
            let unheld = view
                .iter()
                .filter(|resource| self.resend_all || !is_held(&held, resource));
            content.send.extend(by_name(unheld));
        }
        let is_unheld =
            |name: &&SmolStr| self.resend_all || !view.get(name).is_some_and(|resource| is_held(&held, resource));
        pending.extend(watched.names.iter().filter(is_unheld).cloned());
        content.add_names(watched, self.resource_type, self.latest, pending);
        let gone = self.gone(&held);
        let announced = Announced::of(&gone);
        content.removed.extend(gone);
        let response = InFlight {
            resources: content.send.into_values().collect(),
            removed: content.removed.into_iter().collect(),
            unconfirmed: self.unconfirmed(),
            ..InFlight::default()
        };
        (response, announced)
    }

    /// Returns the names that the client holds and that no longer exist.
    fn gone(&self, held: &Versions<'_>) -> Vec<SmolStr> {
        let (watched, view) = (self.watched, self.view());
        // A name that the client subscribes to may have a placeholder, which is not removed.
        let has_placeholder =
            |name: &SmolStr| watched.names.contains(name) && self.latest.absent(self.resource_type, name).is_some();
        let is_gone = |name: &SmolStr| watched.may_hold(name) && view.get(name).is_none() && !has_placeholder(name);
        held.keys().map(SmolStr::new).filter(is_gone).collect()
    }

    /// Returns the names that the client holds unconfirmed and that exist.
    fn unconfirmed(&self) -> Arc<[SmolStr]> {
        let view = self.view();
        let exists = |name: &&str| view.get(name).is_some();
        let names = self.initial_versions.unconfirmed().filter(exists);
        // A client may repeat a name.
        let names: BTreeSet<SmolStr> = names.map(SmolStr::new).collect();
        names.into_iter().collect()
    }
}

fn is_held(held: &Versions<'_>, resource: &EncodedResource) -> bool {
    held.get(&*resource.name) == Some(&Some(resource.version))
}

/// Resources that a response sends and removes, by name.
#[derive(Default)]
struct Content {
    send: BTreeMap<SmolStr, Arc<EncodedResource>>,
    removed: BTreeSet<SmolStr>,
}

impl Content {
    fn is_empty(&self) -> bool {
        self.send.is_empty() && self.removed.is_empty()
    }

    /// Adds the changes since the view that was sent last.
    fn add_difference(&mut self, watched: &WatchedResource, sent: &TypeResources, view: &TypeResources) {
        let difference = sent.difference(view);
        let subscribed = difference.changed.iter().filter(|changed| watched.wants(&changed.name));
        self.send.extend(by_name(subscribed));
        self.removed
            .extend(difference.removed.into_iter().filter(|name| watched.may_hold(name)));
    }

    /// Adds names one by one, as far as the client still subscribes to them.
    fn add_names(
        &mut self,
        watched: &WatchedResource,
        resource_type: ResourceType,
        latest: &ResourceSnapshot,
        names: BTreeSet<SmolStr>,
    ) {
        let mut by_alias = None;
        for name in names.into_iter().filter(|name| watched.may_hold(name)) {
            if let Some(resource) = resource(latest, resource_type, &name) {
                self.send.insert(name, resource);
                continue;
            }
            let aliased = if watched.has_aliases {
                let by_alias = by_alias.get_or_insert_with(|| with_aliases(latest.resources(resource_type)));
                by_alias.get(&name).map_or(&[][..], Vec::as_slice)
            } else {
                &[]
            };
            if aliased.is_empty() {
                self.removed.insert(name);
            }
            self.send.extend(by_name(aliased.iter().copied()));
        }
    }

    fn finish(
        self,
        watched: &mut WatchedResource,
        resource_type: ResourceType,
        must_respond: bool,
    ) -> Option<InFlight> {
        let Self { send, mut removed } = self;
        removed.retain(|name| !send.contains_key(name));
        watched.deferred_removals.retain(|name| !send.contains_key(name));
        if !order::is_removed(resource_type) {
            removed.clear();
        } else if order::removed_last(resource_type) {
            watched.deferred_removals.append(&mut removed);
        }
        if send.is_empty() && removed.is_empty() && !must_respond {
            return None;
        }
        Some(InFlight {
            resources: send.into_values().collect(),
            removed: removed.into_iter().collect(),
            ..InFlight::default()
        })
    }
}

/// Returns resources by their aliases.
fn with_aliases(view: &TypeResources) -> KeyedMap<&SmolStr, Vec<&Arc<EncodedResource>>> {
    let mut found: KeyedMap<&SmolStr, Vec<&Arc<EncodedResource>>> = KeyedMap::default();
    for resource in view.iter() {
        for alias in resource.aliases() {
            found.entry(alias).or_default().push(resource);
        }
    }
    found
}

fn by_name<'a>(
    resources: impl Iterator<Item = &'a Arc<EncodedResource>>,
) -> impl Iterator<Item = (SmolStr, Arc<EncodedResource>)> {
    resources.map(|resource| (resource.name.clone(), resource.clone()))
}
