//! Data that streams share: request names, encoded lists and responses. It makes streams cheap; the protocol works the
//! same without it.

pub mod coalesced;
pub mod held;
pub mod initial_versions;
pub mod names;
pub mod quarantine;
mod recent;
pub mod response_cache;
mod set_hash;

use std::sync::Arc;

use self::{held::HeldBytes, initial_versions::InitialVersionsInterner, names::NameListInterner};

/// The interners of what requests repeat.
#[derive(Default)]
pub(in crate::xds) struct Interners {
    pub(in crate::xds) names: NameListInterner,
    pub(in crate::xds) initial_versions: InitialVersionsInterner,
}

impl Interners {
    /// Creates interners that charge the lists of subscriptions here.
    pub(in crate::xds) fn new(held: Arc<HeldBytes>) -> Self {
        Self {
            names: NameListInterner::new(held),
            initial_versions: InitialVersionsInterner::default(),
        }
    }
}
