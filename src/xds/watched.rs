//! The state of one type on one connection: what the client holds and what it still has to be sent.

use std::{borrow::Cow, collections::BTreeSet, sync::Arc};

use imbl::OrdSet;
use smol_str::SmolStr;

use super::share::{coalesced::CoalescedResources, held::Charge, initial_versions::InitialVersions, names::Names};
use crate::generate::{EncodedResource, requested::WILDCARD, resource::TypeResources};

/// One type on one connection.
///
/// The client holds the view that was sent last, restricted to its subscription, except for a small overlay: the
/// versions that it announced when it reconnected, what it rejected, and what was not sent yet.
#[derive(Debug, Default)]
pub struct WatchedResource {
    /// The subscription is a wildcard.
    pub wildcard: bool,
    /// The snapshot's resources of the type were generated for the names of this client: all of them are sent.
    pub on_demand: bool,
    /// Resources may be requested by other names than their own. Then the client may hold resources that are not among
    /// [`Self::names`].
    pub has_aliases: bool,
    /// The names that are subscribed to.
    pub names: OrdSet<SmolStr>,
    /// The list of the last request, if it is shared. It stays shared while a connection holds it.
    pub requested: Arc<Names>,
    /// The view that was sent last; `None` before the first response.
    pub sent: Option<TypeResources>,
    /// `initial_resource_versions` of the client; used by the first response.
    pub initial_versions: InitialVersions,
    /// Names that must be sent even if they did not change: new in the subscription, or to be warmed again.
    pub pending: BTreeSet<SmolStr>,
    /// Everything must be sent, even if it did not change.
    pub resend_all: bool,
    /// The client waits for a response, even an empty one.
    pub must_respond: bool,
    /// Names in rejected responses: sent again with the next change of the type.
    pub nacked: BTreeSet<SmolStr>,
    /// Removed clusters and endpoints: announced once routes no longer refer to them.
    pub deferred_removals: BTreeSet<SmolStr>,
    /// The response that was not acknowledged yet.
    pub in_flight: Option<InFlight>,
    /// Nonce of the last response.
    pub nonce_sent: SmolStr,
    /// Nonce of the last response that was acknowledged.
    pub nonce_acked: SmolStr,
    /// The error of the last response, if it was rejected.
    pub last_error: Option<String>,
    /// The memory of names beyond those of the last list.
    pub held: Option<Arc<Charge>>,
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
    }

    /// Returns true if the client may hold the resource, so that its removal is announced.
    pub fn may_hold(&self, name: &SmolStr) -> bool {
        self.asks_for(name) || (self.on_demand && self.has_aliases)
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

    /// Returns the number of names that are not part of the shared list.
    pub(super) fn unshared_names(&self) -> usize {
        self.names.len().saturating_sub(self.requested.set().len())
    }

    /// Returns the memory that the subscription holds.
    pub(super) fn held_bytes(&self) -> usize {
        let response = self.in_flight.as_ref().and_then(|in_flight| in_flight.held.as_ref());
        let charges = self.held.iter().chain(response);
        self.requested.share() + charges.map(Charge::share).sum::<usize>()
    }

    /// Records an ACK of the last response.
    pub(super) fn ack(&mut self) {
        self.nonce_acked = self.nonce_sent.clone();
        self.last_error = None;
        self.in_flight = None;
    }

    /// Records a NACK of the last response: the client may or may not hold its resources.
    pub(super) fn nack(&mut self, error: String) {
        self.last_error = Some(error);
        if let Some(in_flight) = self.in_flight.take() {
            self.nacked
                .extend(in_flight.resources.iter().map(|resource| resource.name.clone()));
            self.nacked.extend(in_flight.removed);
        }
    }

    /// Returns true if this view was sent and nothing is pending.
    pub(super) fn is_up_to_date(&self, view: &TypeResources) -> bool {
        self.sent.as_ref().is_some_and(|sent| sent.same(view))
            && self.pending.is_empty()
            && !self.resend_all
            && !self.must_respond
    }
}
