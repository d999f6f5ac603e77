//! The state of one type on one connection: what the client holds and what it still has to be sent.

mod names;

use std::{
    borrow::Cow,
    cell::LazyCell,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use imbl::OrdSet;
use smol_str::SmolStr;

use super::{
    attribution::{self, RefusedName},
    protocol::Protocol,
    share::{
        coalesced::CoalescedResources,
        held::Charge,
        initial_versions::InitialVersions,
        names::Names,
        quarantine::{Build, ByVersion, Quarantine, Refusal},
        response_cache::ResponseCache,
    },
};
use crate::{
    base::Version,
    generate::{EncodedResource, ResourceType, requested::WILDCARD, resource::TypeResources},
};

/// One type on one connection.
///
/// The client holds the view that was sent last, restricted to its subscription, except for a small overlay: the
/// versions that it announced when it reconnected, what it rejected, and what was not sent yet.
#[derive(Debug, Default)]
pub struct WatchedResource {
    /// True if the subscription is a wildcard.
    pub wildcard: bool,
    /// True if the snapshot's resources of the type were generated for the names of this client: all of them are sent.
    pub on_demand: bool,
    /// True if resources may be requested by other names than their own. Then the client may hold resources that are
    /// not among [`Self::names`].
    pub has_aliases: bool,
    /// The names that are subscribed to.
    pub names: OrdSet<SmolStr>,
    /// The size of these names, or a little more.
    pub(super) name_bytes: usize,
    /// The list of the last request, if it is shared. It stays shared while a connection holds it.
    pub requested: Arc<Names>,
    /// The view that was sent last; `None` before the first response.
    pub sent: Option<TypeResources>,
    /// The view that was acknowledged last; `None` before the first ACK. What is in `refused` and `unacknowledged` is
    /// not part of it.
    pub acknowledged: Option<TypeResources>,
    /// Names that are new in the subscription, and those in rejected or superseded responses, until the client
    /// acknowledges the present version or the removal; with the resource that it holds, as far as that is known.
    pub(super) unacknowledged: BTreeMap<SmolStr, Option<Arc<EncodedResource>>>,
    /// Resources that the client, or clients of the same build, refused, until it accepts another version.
    pub refused: BTreeMap<SmolStr, Withheld>,
    /// `initial_resource_versions` of the client; used by the first response.
    pub initial_versions: InitialVersions,
    /// Names that must be sent even if they did not change: new in the subscription, or to be warmed again.
    pub pending: BTreeSet<SmolStr>,
    /// True if everything must be sent, even if it did not change.
    pub resend_all: bool,
    /// True if the client waits for a response, even an empty one.
    pub must_respond: bool,
    /// Names in rejected or superseded responses, without those in `refused` that are withheld until they change: sent
    /// again with the next change of the type.
    pub nacked: BTreeSet<SmolStr>,
    /// Removed clusters and endpoints: announced once routes no longer refer to them.
    pub deferred_removals: BTreeSet<SmolStr>,
    /// The response that was not acknowledged yet. It is absent most of the time, and takes 64 bytes more than the
    /// pointer.
    pub in_flight: Option<Box<InFlight>>,
    /// Nonce of the last response.
    pub nonce_sent: SmolStr,
    /// Nonce of the last response that was acknowledged.
    pub nonce_acked: SmolStr,
    /// The error of the last rejected response, until everything in it was accepted.
    pub last_error: Option<String>,
    /// The memory of names beyond those of the last list.
    pub held: Option<Arc<Charge>>,
    /// The memory of names that the client announced to hold and that do not exist, until it has acknowledged their
    /// removal.
    pub(super) announced: Option<Arc<Charge>>,
}

/// A refused resource.
#[derive(Clone, Debug)]
pub struct Withheld {
    /// The refusal.
    pub refusal: Arc<Refusal>,
    /// The resource that the client holds instead.
    pub(super) held: Option<Arc<EncodedResource>>,
    /// True if the client refused it itself; false if it is withheld because others did.
    is_own: bool,
    /// True if it is sent again with the next change of the type.
    is_retried: bool,
    /// True if the client waits for it and was sent the rest of the response first.
    is_postponed: bool,
}

/// The names for which a client waits: Envoy delays clusters, listeners and its own readiness until it is answered.
#[derive(Debug, Default)]
pub(super) struct Awaited {
    /// True for all names.
    all: bool,
    names: BTreeSet<SmolStr>,
    /// Resources that the client announced to hold. It waits for other names that it does not hold.
    announced: InitialVersions,
}

impl Awaited {
    /// Returns a function of a name, and of whether the client holds its resource: true if the client waits for it.
    fn lookup(&self) -> impl Fn(&SmolStr, bool) -> bool {
        let announced = &self.announced;
        let announced = LazyCell::new(move || announced.versions());
        move |name: &SmolStr, is_held: bool| {
            self.all || self.names.contains(name) || !(is_held || announced.contains_key(name.as_str()))
        }
    }
}

/// The progress of one resource on its way to a client.
#[derive(Clone, Debug)]
pub enum Progress {
    /// The client does not subscribe to it.
    Unrequested,
    /// It was not sent yet.
    Waiting,
    /// It was sent and not answered yet.
    Sent,
    /// The client acknowledged it, or its removal.
    Acknowledged,
    /// The client, or one of the same build, refused it.
    Refused(Arc<Refusal>),
    /// The client refused a response that contained it, with this error, which does not say which resource is wrong.
    Rejected(String),
}

/// The error for a subscription that is neither one list nor a wildcard.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mixed;

/// A response that waits for its ACK or NACK.
#[derive(Debug, Default)]
pub struct InFlight {
    /// Its resources; the same list that is being sent.
    pub resources: Arc<[Arc<EncodedResource>]>,
    /// The encoded list, if other streams are sent it too; until it is sent.
    pub coalesced: Option<Arc<CoalescedResources>>,
    /// The names that it removes.
    pub removed: Vec<SmolStr>,
    /// The memory of resources that only this response has.
    pub held: Option<Arc<Charge>>,
    /// Resources that the client announced to hold [unconfirmed](EncodedResource::unconfirmed), and that exist.
    pub unconfirmed: Arc<[SmolStr]>,
}

impl InFlight {
    /// Sends resources with these names [unconfirmed](EncodedResource::unconfirmed).
    pub(super) fn confirm_later(&mut self, cache: &ResponseCache, is_concerned: impl Fn(&SmolStr) -> bool) {
        if !self.resources.iter().any(|resource| is_concerned(&resource.name)) {
            // Clients that reconnect and lack nothing share the empty list.
            return;
        }
        // The encoded list, which other streams are sent too, has the resources as confirmed.
        self.coalesced = None;
        let sent = self.resources.iter().map(|resource| {
            if is_concerned(&resource.name) {
                cache.unconfirmed(resource)
            } else {
                resource.clone()
            }
        });
        self.resources = sent.collect();
    }
}

impl WatchedResource {
    /// Returns true if the resource is sent to the client.
    pub fn wants(&self, name: &SmolStr) -> bool {
        self.on_demand || self.asks_for(name)
    }

    /// Returns the names for which the resources must be generated: `*` for all.
    pub fn requested_names(&self) -> Cow<'_, OrdSet<SmolStr>> {
        if self.wildcard {
            Cow::Owned(OrdSet::unit(SmolStr::new_static(WILDCARD)))
        } else {
            Cow::Borrowed(&self.names)
        }
    }

    /// Changes a new subscription that names resources by their aliases. What the client announced to hold counts as
    /// requested.
    pub(super) fn serve_on_demand(&mut self) {
        self.on_demand = true;
        let held: Vec<SmolStr> = self.initial_versions.versions().keys().map(SmolStr::new).collect();
        self.names.extend(held);
        self.measure_names();
    }

    /// Sets the size of the names.
    pub(super) fn measure_names(&mut self) {
        self.name_bytes = self.names.iter().map(SmolStr::len).sum();
    }

    /// Returns true if the client may hold the resource, so that its removal is announced.
    pub fn may_hold(&self, name: &SmolStr) -> bool {
        self.asks_for(name) || (self.on_demand && self.has_aliases)
    }

    /// Returns true if the client was sent resources, or announced that it holds some.
    pub(super) fn may_hold_any(&self) -> bool {
        self.sent.is_some() || !self.initial_versions.is_empty()
    }

    /// Returns true if the client subscribes to the resource by its name.
    pub fn asks_for(&self, name: &SmolStr) -> bool {
        self.wildcard || self.names.contains(name)
    }

    /// Returns the list that contains all names, or `None` for a wildcard subscription; an error if it is neither.
    pub(super) fn as_single_list(&self) -> Result<Option<&Arc<Names>>, Mixed> {
        if self.wildcard && self.names.is_empty() {
            Ok(None)
        } else if !self.wildcard && self.names.ptr_eq(self.requested.set()) {
            Ok(Some(&self.requested))
        } else {
            Err(Mixed)
        }
    }

    /// Returns the number and the size of names that are not part of the shared list.
    pub(super) fn unshared_names(&self) -> (usize, usize) {
        let count = self.names.len().saturating_sub(self.requested.set().len());
        (count, self.name_bytes.saturating_sub(self.requested.size_bytes()))
    }

    /// Returns the memory that the subscription holds.
    pub(super) fn held_bytes(&self) -> usize {
        let response = self.in_flight.as_ref().and_then(|in_flight| in_flight.held.as_ref());
        let charges = self.held.iter().chain(&self.announced).chain(response);
        self.requested.share() + charges.map(Charge::share).sum::<usize>()
    }

    /// Records an ACK of the last response.
    pub(super) fn ack(&mut self, resource_type: ResourceType, quarantine: Option<&(Arc<Quarantine>, Build)>) {
        self.nonce_acked = self.nonce_sent.clone();
        if let Some(in_flight) = self.in_flight.take() {
            if let Some((quarantine, build)) = quarantine {
                quarantine.accept(*build, resource_type, &in_flight.resources);
            }
            // Without an error, these are of superseded responses, which the client has answered before.
            if self.last_error.is_none() {
                for name in std::mem::take(&mut self.nacked) {
                    self.unacknowledged.remove(&name);
                }
            }
            if !self.refused.is_empty() || !self.unacknowledged.is_empty() {
                self.forget_accepted(&in_flight);
            }
            self.acknowledge_sent();
        }
        // The client may have acknowledged other resources than those that it rejected.
        if self.nacked.is_empty() {
            self.last_error = None;
        }
        self.release_announced();
    }

    /// Ends the charge of announced names, unless some of them are still kept.
    fn release_announced(&mut self) {
        if self.nacked.is_empty() && self.deferred_removals.is_empty() {
            self.announced = None;
        }
    }

    /// Forgets the refusals and rejections of resources whose present version or removal was accepted. Also forgets the
    /// refusals of those that no longer exist.
    fn forget_accepted(&mut self, accepted: &InFlight) {
        let view = self.sent.as_ref();
        let present = |name: &SmolStr| Some(view?.get(name)?.version);
        self.refused.retain(|name, _| present(name).is_some());
        for resource in accepted.resources.iter() {
            // A resource that is not in the view is a placeholder. A different version replaced one that is withheld.
            let version = present(&resource.name).unwrap_or(resource.version);
            if version == resource.version {
                self.refused.remove(&resource.name);
                self.unacknowledged.remove(&resource.name);
                self.nacked.remove(&resource.name);
            }
        }
        for name in &accepted.removed {
            self.unacknowledged.remove(name);
            self.nacked.remove(name);
        }
    }

    /// Records that nothing of a new view has to be sent: the client holds all of it.
    pub(super) fn skip(&mut self) {
        if self.in_flight.is_none() {
            self.acknowledge_sent();
            self.release_announced();
        }
    }

    /// Records that the client holds the view that was sent last, except for what is in `refused` and `unacknowledged`.
    fn acknowledge_sent(&mut self) {
        self.acknowledged.clone_from(&self.sent);
        if self.unacknowledged.is_empty() {
            return;
        }
        // A resource that does not exist needs no acknowledgement, unless a later response will remove it.
        let Self {
            acknowledged,
            unacknowledged,
            pending,
            nacked,
            deferred_removals,
            ..
        } = self;
        let exists = |name: &SmolStr| acknowledged.as_ref().is_some_and(|view| view.get(name).is_some());
        unacknowledged.retain(|name, _| {
            exists(name) || pending.contains(name) || nacked.contains(name) || deferred_removals.contains(name)
        });
    }

    /// Records names that are new in the subscription. The last view may contain them, but was not sent to the client.
    pub(super) fn add_unacknowledged(&mut self, names: impl IntoIterator<Item = SmolStr>) {
        if self.sent.is_some() && !self.wildcard {
            self.unacknowledged.extend(names.into_iter().map(|name| (name, None)));
        }
    }

    /// Records a NACK of the last response. Returns the refused resources, if the error says which they are. Then the
    /// others are sent again without them, if `quarantines` is set. Otherwise the client may or may not hold them.
    pub(super) fn nack(&mut self, resource_type: ResourceType, error: String, quarantines: bool) -> Vec<Arc<Refusal>> {
        let Some(in_flight) = self.in_flight.take().map(|in_flight| *in_flight) else {
            self.last_error = Some(error);
            return Vec::new();
        };
        let blamed = self.blamed(&in_flight, &error);
        let rest = self.changed_names(&in_flight);
        let (refusals, is_attributed) = self.refuse(resource_type, &in_flight, &blamed, quarantines);
        self.last_error = Some(error);
        // Envoy removes resources even if it rejects those of the response.
        let removed = in_flight.removed.iter().map(|name| (name.clone(), None));
        self.unacknowledged.extend(removed);
        if quarantines && is_attributed {
            let rest = rest.into_iter().filter(|name| !self.refused.contains_key(name));
            self.pending.extend(rest.chain(in_flight.removed));
            let is_retried = |name: &SmolStr| self.refused.get(name).is_some_and(|withheld| withheld.is_retried);
            let names = blamed.into_iter().map(|refused| refused.name);
            self.nacked.extend(names.filter(is_retried));
        } else {
            self.doubt(in_flight);
        }
        refusals
    }

    /// Returns the names of the resources in a response that the client does not hold already.
    fn changed_names(&self, in_flight: &InFlight) -> Vec<SmolStr> {
        let changed = in_flight.resources.iter().filter(|resource| !self.holds(resource));
        changed.map(|resource| resource.name.clone()).collect()
    }

    /// Returns the resources of a response that the error of a NACK is about; none if it does not say.
    fn blamed(&self, in_flight: &InFlight, error: &str) -> Vec<RefusedName> {
        let names = in_flight.resources.iter().map(|resource| &resource.name);
        let blamed = attribution::refused(error, names, || self.changed_names(in_flight));
        if !blamed.is_empty() {
            return blamed;
        }
        // The client waits for these, so it was sent them although it or others had refused them.
        let is_known = |resource: &&Arc<EncodedResource>| self.refusal(resource).is_some();
        let known = in_flight.resources.iter().filter(is_known);
        attribution::all(error, known.map(|resource| &resource.name))
    }

    /// Records the refused resources of a response. Returns the new refusals, and true if the error is about a resource
    /// that the client did not accept before.
    fn refuse(
        &mut self,
        resource_type: ResourceType,
        in_flight: &InFlight,
        blamed: &[RefusedName],
        quarantines: bool,
    ) -> (Vec<Arc<Refusal>>, bool) {
        let mut is_attributed = false;
        let mut refusals = Vec::with_capacity(blamed.len());
        for refused in blamed {
            let mut resources = in_flight.resources.iter();
            let Some(resource) = resources.find(|resource| resource.name == refused.name) else {
                continue;
            };
            let held = self.held(&refused.name).cloned();
            // The client accepted this content before. Sending the rest again would fail for the same reason.
            if held.as_ref().is_some_and(|held| held.version == resource.version) {
                continue;
            }
            is_attributed = true;
            // A client counts once, even if it requests a resource again.
            if self.refusal(resource).is_some_and(|withheld| withheld.is_own) {
                continue;
            }
            let refusal = Refusal::new(resource_type, resource, refused.reason.clone(), held.clone());
            let refusal = Arc::new(refusal);
            refusals.push(refusal.clone());
            let withheld = Withheld {
                is_retried: !quarantines || refusal.may_pass(),
                refusal,
                held,
                is_own: true,
                is_postponed: false,
            };
            self.refused.insert(refused.name.clone(), withheld);
        }
        (refusals, is_attributed)
    }

    /// Stops waiting for the answer to the last response.
    pub(super) fn supersede(&mut self) {
        if let Some(in_flight) = self.in_flight.take() {
            let removed = in_flight.removed.iter().map(|name| (name.clone(), None));
            self.unacknowledged.extend(removed);
            self.doubt(*in_flight);
        }
    }

    /// Records that the client may or may not hold the resources of a response. They are sent again with the next
    /// change of the type.
    fn doubt(&mut self, in_flight: InFlight) {
        for resource in in_flight.resources.iter() {
            let held = self.held(&resource.name).cloned();
            self.unacknowledged.insert(resource.name.clone(), held);
        }
        let names = in_flight.resources.iter().map(|resource| resource.name.clone());
        self.nacked.extend(names.chain(in_flight.removed));
    }

    /// Returns what the client holds under this name.
    fn held(&self, name: &SmolStr) -> Option<&Arc<EncodedResource>> {
        match (self.refused.get(name), self.unacknowledged.get(name)) {
            (Some(withheld), _) => withheld.held.as_ref(),
            (None, Some(held)) => held.as_ref(),
            (None, None) => self.acknowledged.as_ref()?.get(name),
        }
    }

    fn holds(&self, resource: &EncodedResource) -> bool {
        let held = self.held(&resource.name);
        held.is_some_and(|held| held.version == resource.version) && !self.refused.contains_key(&resource.name)
    }

    /// Returns the refusal of this content by the client or by others.
    fn refusal(&self, resource: &EncodedResource) -> Option<&Withheld> {
        let withheld = self.refused.get(&resource.name);
        withheld.filter(|withheld| withheld.refusal.version == resource.version)
    }

    /// Forgets refusals of resources that no longer exist. Those of other versions stay until the client has accepted
    /// one: until then, it holds what it held before.
    pub(super) fn forget_refusals(&mut self, view: &TypeResources) {
        self.retain_refusals(|name, _| view.get(name).is_some());
    }

    /// Marks resources that are no longer withheld because of others, so that they are sent.
    pub(super) fn release(&mut self) {
        let released = self.retain_refusals(|_, withheld| withheld.is_own || withheld.refusal.concerns_others());
        self.pending.extend(released);
    }

    /// Marks resources that the client refused because it did not know one of these clusters, so that they are sent
    /// again.
    pub(super) fn retry_with(&mut self, clusters: &TypeResources) {
        let retried = self.retain_refusals(|_, withheld| {
            let unknown = withheld.refusal.unknown_cluster();
            unknown.is_none_or(|name| clusters.get(name).is_none())
        });
        self.pending.extend(retried);
    }

    /// Returns the names that are sent again with a change of the type: those in rejected responses.
    pub(super) fn retry(&mut self) -> BTreeSet<SmolStr> {
        let retried = std::mem::take(&mut self.nacked);
        self.retain_refusals(|name, withheld| !(withheld.is_retried && retried.contains(name)));
        retried
    }

    /// Forgets the other refusals and returns their names. The client still holds what it held before.
    fn retain_refusals(&mut self, stays: impl Fn(&SmolStr, &Withheld) -> bool) -> Vec<SmolStr> {
        let forgotten = self.refused.extract_if(.., |name, withheld| !stays(name, withheld));
        let forgotten: Vec<_> = forgotten.map(|(name, withheld)| (name, withheld.held)).collect();
        let names = forgotten.iter().map(|(name, _)| name.clone()).collect();
        self.unacknowledged.extend(forgotten);
        names
    }

    /// Returns the names for which the client waits, before the next response is made.
    pub(super) fn awaited(&self) -> Awaited {
        Awaited {
            all: self.resend_all,
            names: self.pending.clone(),
            announced: self.initial_versions.clone(),
        }
    }

    /// Replaces each resource of a response that the client or others refused, if the client waits for it or an
    /// omission would remove it: by the version that the client holds, or else by the one that a client that refused it
    /// holds. Omits the other refused resources. Returns `None` if nothing is left to send.
    ///
    /// A client waits only for types that it requests by name. Without a version to replace it, a resource for which it
    /// waits is sent as it is: if Envoy rejects it too, it waits no longer (`RdsRouteConfigSubscription` and
    /// `EdsClusterImpl`, `onConfigUpdateFailed`). As Envoy may reject a whole response for it, the rest is sent before.
    pub(super) fn withhold(
        &mut self,
        resource_type: ResourceType,
        content: InFlight,
        awaited: &Awaited,
        protocol: Protocol,
        of_others: &ByVersion<Arc<Refusal>>,
    ) -> Option<InFlight> {
        let removes_by_omission = protocol == Protocol::Sotw && resource_type.is_wildcard();
        let is_awaited = awaited.lookup();
        let mut sent = Vec::with_capacity(content.resources.len());
        let mut last = BTreeSet::new();
        let mut is_changed = false;
        for resource in content.resources.iter() {
            let known = self.refusal(resource).cloned();
            let refusal = of_others.get(&resource.version);
            if known.is_none() && refusal.is_none() {
                sent.push(resource.clone());
                continue;
            }
            is_changed = true;
            let held = self.held(&resource.name).cloned();
            // A client that refused the resource itself does not wait for it any more.
            let is_held = held.is_some() || known.as_ref().is_some_and(|withheld| withheld.is_own);
            let new = || {
                let refusal = refusal?.clone();
                let held = held.or_else(|| refusal.held.clone());
                let withheld = Withheld {
                    refusal,
                    held,
                    is_own: false,
                    is_retried: false,
                    is_postponed: false,
                };
                self.refused.insert(resource.name.clone(), withheld.clone());
                Some(withheld)
            };
            let Some(withheld) = known.or_else(new) else {
                continue;
            };
            let waits = !self.wildcard && is_awaited(&resource.name, is_held);
            match withheld.held {
                Some(held) if waits || removes_by_omission => sent.push(held),
                None if waits => {
                    let known = self.refused.get_mut(&resource.name);
                    let was_postponed = known.is_some_and(|known| std::mem::take(&mut known.is_postponed));
                    if !was_postponed && !removes_by_omission {
                        last.insert(resource.name.clone());
                    }
                    sent.push(resource.clone());
                }
                Some(_) | None => {}
            }
        }
        if !is_changed {
            return Some(content);
        }
        if last.len() < sent.len() {
            sent.retain(|resource| !last.contains(&resource.name));
            self.postpone(last);
        }
        let is_first = self.acknowledged.is_none();
        if sent.is_empty() && content.removed.is_empty() && !removes_by_omission && !is_first {
            return None;
        }
        Some(InFlight {
            resources: sent.into(),
            removed: content.removed,
            unconfirmed: content.unconfirmed,
            ..InFlight::default()
        })
    }

    /// Postpones resources that the client waits for to the next response.
    fn postpone(&mut self, names: BTreeSet<SmolStr>) {
        for name in names {
            if let Some(withheld) = self.refused.get_mut(&name) {
                withheld.is_postponed = true;
            }
            self.pending.insert(name);
        }
    }

    /// Returns the progress of a resource whose present content this is; `None` if it does not exist.
    pub fn progress(&self, name: &SmolStr, wanted: Option<Version>) -> Progress {
        if !self.wants(name) {
            return Progress::Unrequested;
        }
        if let Some(withheld) = self.refused.get(name)
            && wanted == Some(withheld.refusal.version)
        {
            return Progress::Refused(withheld.refusal.clone());
        }
        let version = |view: &TypeResources| view.get(name).map(|resource| resource.version);
        let Some(sent) = &self.sent else {
            return Progress::Waiting;
        };
        let is_pending = self.resend_all || self.pending.contains(name) || self.deferred_removals.contains(name);
        if version(sent) != wanted || (is_pending && self.in_flight.is_none()) {
            return Progress::Waiting;
        }
        let is_held = self
            .acknowledged
            .as_ref()
            .is_some_and(|view| match self.unacknowledged.get(name) {
                // A removal must be acknowledged, too.
                Some(held) => wanted.is_some() && held.as_ref().map(|held| held.version) == wanted,
                None => version(view) == wanted,
            });
        if let Some(error) = &self.last_error
            && self.nacked.contains(name)
            && !is_held
        {
            return Progress::Rejected(error.clone());
        }
        match &self.in_flight {
            Some(_) if is_pending => Progress::Waiting,
            Some(_) if !is_held => Progress::Sent,
            _ if is_held => Progress::Acknowledged,
            _ => Progress::Waiting,
        }
    }

    /// Returns true if this view was sent and nothing is pending.
    pub(super) fn is_up_to_date(&self, view: &TypeResources) -> bool {
        self.sent.as_ref().is_some_and(|sent| sent.ptr_eq(view))
            && self.pending.is_empty()
            && !self.resend_all
            && !self.must_respond
    }
}
