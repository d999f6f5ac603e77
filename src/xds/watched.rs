//! What one connection holds of one type, and what it is owed.

use std::{collections::BTreeSet, sync::Arc};

use imbl::OrdSet;
use smol_str::SmolStr;

use super::{claims::Claims, laid::Laid, names::Names};
use crate::generate::{EncodedResource, resource::TypeResources};

/// One type on one connection.
///
/// What the client holds is the view last sent, restricted to the subscription, but for a small overlay: what it
/// claimed when it reconnected, what it refused, and what was not sent yet.
#[derive(Debug, Default)]
pub struct WatchedResource {
    /// Everything of the type is wanted.
    pub wildcard: bool,
    /// What the snapshot holds of the type was made for this client's names: all of it is sent.
    pub on_demand: bool,
    /// Names that are wanted one by one.
    pub names: OrdSet<SmolStr>,
    /// The list that they came from last, as far as it was shared: while it is held, so is what others share of it.
    pub asked: Arc<Names>,
    /// The view last sent; `None` before the first answer.
    pub sent: Option<TypeResources>,
    /// What the client said it holds when it reconnected; used up by the first answer.
    pub claimed: Claims,
    /// Names to be sent whatever the difference says: newly subscribed, or to be warmed again.
    pub owed: BTreeSet<SmolStr>,
    /// Everything is to be sent, whatever the difference says.
    pub owed_all: bool,
    /// The client waits for an answer, if need be an empty one.
    pub must_answer: bool,
    /// What was refused: sent again with the next change of the type.
    pub refused: BTreeSet<SmolStr>,
    /// Clusters and endpoints that are gone: named once routes no longer refer to them.
    pub removed_later: BTreeSet<SmolStr>,
    /// The response that is not answered yet.
    pub in_flight: Option<InFlight>,
    /// Nonce of the last response.
    pub nonce_sent: SmolStr,
    /// Nonce of the last response that was accepted.
    pub nonce_acked: SmolStr,
    /// Why the last response was refused, if it was.
    pub last_error: Option<String>,
}

/// A subscription that is not one list, nor everything.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mixed;

/// A response that waits for its ACK or NACK.
#[derive(Debug, Default)]
pub struct InFlight {
    /// What it holds; the same list that is being sent.
    pub resources: Arc<[Arc<EncodedResource>]>,
    /// The list on the wire, if others are sent it too; until it is sent.
    pub laid: Option<Arc<Laid>>,
    /// What it removes.
    pub removed: Vec<SmolStr>,
}

impl WatchedResource {
    /// True if the client wants the resource.
    pub fn wants(&self, name: &SmolStr) -> bool {
        self.on_demand || self.asks_for(name)
    }

    /// True if the client asks for the resource, so that it wants to know when it is gone.
    pub fn asks_for(&self, name: &SmolStr) -> bool {
        self.wildcard || self.names.contains(name)
    }

    /// The list that all names came from, or none if everything is wanted; an error if it is neither.
    pub(super) fn whole(&self) -> Result<Option<&Arc<Names>>, Mixed> {
        if self.wildcard && self.names.is_empty() {
            Ok(None)
        } else if !self.wildcard && self.names.ptr_eq(self.asked.set()) {
            Ok(Some(&self.asked))
        } else {
            Err(Mixed)
        }
    }

    /// The client accepted the last response.
    pub(super) fn accept(&mut self) {
        self.nonce_acked = self.nonce_sent.clone();
        self.last_error = None;
        self.in_flight = None;
    }

    /// The client refused the last response: what was in it is uncertain now.
    pub(super) fn refuse(&mut self, error: String) {
        self.last_error = Some(error);
        if let Some(in_flight) = self.in_flight.take() {
            self.refused
                .extend(in_flight.resources.iter().map(|resource| resource.name.clone()));
            self.refused.extend(in_flight.removed);
        }
    }

    /// True if the view is what was sent and nothing is owed.
    pub(super) fn is_settled(&self, view: &TypeResources) -> bool {
        self.sent.as_ref().is_some_and(|sent| sent.same(view))
            && self.owed.is_empty()
            && !self.owed_all
            && !self.must_answer
    }
}
