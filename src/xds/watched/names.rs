//! Changes of the names that a subscription has.

use std::sync::Arc;

use smol_str::SmolStr;

use super::WatchedResource;
use crate::{generate::resource::TypeResources, xds::share::names::Names};

impl WatchedResource {
    /// Replaces the names of a subscription. Returns true if there are new ones.
    pub(in crate::xds) fn set_names(&mut self, names: Arc<Names>, wildcard: bool) -> bool {
        if Arc::ptr_eq(&self.requested, &names) && self.wildcard == wildcard {
            return false;
        }
        let before = std::mem::replace(&mut self.names, names.set().clone());
        self.name_bytes = names.size_bytes();
        self.requested = names;
        self.wildcard = wildcard;
        let added = self.names.iter().filter(|name| !before.contains(*name));
        let added: Vec<SmolStr> = added.cloned().collect();
        let grew = !added.is_empty();
        self.add_unacknowledged(added.iter().cloned());
        self.pending.extend(added);
        let names = &self.names;
        self.pending.retain(|name| wildcard || names.contains(name));
        if self.has_aliases {
            for name in &before {
                if !self.names.contains(name) {
                    self.forget(name);
                }
            }
        } else {
            self.nacked.retain(|name| wildcard || names.contains(name));
            self.unacknowledged.retain(|name, _| wildcard || names.contains(name));
        }
        grew
    }

    /// Changes an incremental subscription. Every name in `subscribe` is sent, even if the client holds it already.
    pub(in crate::xds) fn update_names(&mut self, subscribe: Arc<Names>, unsubscribe: &[SmolStr], first: bool) {
        if subscribe.wildcard() {
            // A client that is served on demand has no wildcard.
            self.resend_all |= !first && !self.wildcard && !self.on_demand;
            self.wildcard = !self.on_demand;
        }
        if !first {
            let added = subscribe.set().iter().filter(|name| !self.names.contains(*name));
            let added: Vec<SmolStr> = added.cloned().collect();
            self.add_unacknowledged(added);
            self.pending.extend(subscribe.set().iter().cloned());
        }
        if self.names.is_empty() {
            self.names = subscribe.set().clone();
            self.name_bytes = subscribe.size_bytes();
            self.requested = subscribe;
        } else {
            for name in subscribe.set() {
                if self.names.insert(name.clone()).is_none() {
                    self.name_bytes += name.len();
                }
            }
        }
        for name in unsubscribe {
            if name == "*" {
                self.wildcard = false;
            }
            if self.names.remove(name).is_some() {
                self.name_bytes = self.name_bytes.saturating_sub(name.len());
            }
            self.pending.remove(name);
            self.forget(name);
            // With a wildcard, the client still holds the resource.
            if !self.wildcard {
                self.deferred_removals.remove(name);
            }
        }
    }

    /// Forgets what was not acknowledged under a name that is no longer requested.
    fn forget(&mut self, name: &SmolStr) {
        // The resource may still be requested by another name, or with all others.
        let may_be_requested = self.has_aliases || self.wildcard;
        if !may_be_requested {
            self.nacked.remove(name);
        }
        // Otherwise a client that answers nothing could add one name after the other.
        if !(may_be_requested && self.is_resource(name)) {
            self.unacknowledged.remove(name);
        }
    }

    /// Returns true if a resource with this name was sent or is held.
    fn is_resource(&self, name: &SmolStr) -> bool {
        let is_held = self.unacknowledged.get(name).is_some_and(Option::is_some);
        let is_present = |view: &TypeResources| view.get(name).is_some();
        is_held || self.nacked.contains(name) || self.sent.as_ref().is_some_and(is_present)
    }
}
