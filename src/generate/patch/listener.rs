//! Patches of listeners and their content, from the outside in: the listener, its listener filters, each chain with its
//! filters, and finally added chains.
//!
//! Note: patches are applied by kind, not in the order in which they are written. All patches of listeners precede
//! those of chains, whatever object they come from.

mod chain;
mod http;
mod matches;

use super::{
    PatchContext, PatchRef, Patches,
    filters::{self, Naming, merge_filter, rearrange, runnable},
    merge::merge_into,
    resolve,
    set::{self, PatchSet},
};
use crate::{
    generate::{
        BuildContext,
        encoded::EncodedResource,
        proxy::{Extensions, ProxyType},
        resource::{Built, Note},
    },
    model::envoy_filter::{ApplyTo, Operation, Patch},
    proto::envoy::{
        config::listener::v3::{FilterChain, Listener},
        extensions::filters::network::http_connection_manager::v3::HttpConnectionManager,
    },
};
use matches::Traits;

/// Applies the patches to a listener and encodes it, unless one of them removes it.
pub fn build_listener(
    ctx: &BuildContext,
    patches: &[PatchRef],
    extensions: &Extensions,
    context: PatchContext,
    listener: Listener,
    mut notes: Vec<Note>,
) -> Built {
    let set = PatchSet::new(ctx, patches, context);
    let patched = if set.is_empty() {
        Some(listener)
    } else {
        let patching = Patching { set, extensions };
        let patched = patching.listener(listener);
        patching.set.into_notes(&mut notes);
        patched
    };
    match patched {
        Some(listener) => Built::new(EncodedResource::new(listener.name.clone(), &listener)).with_notes(notes),
        None => Built::none().with_notes(notes),
    }
}

/// Returns the listeners that patches add for a proxy.
pub fn added(ctx: &BuildContext, proxy_type: ProxyType, patches: &Patches) -> Vec<PatchRef> {
    let contexts = super::contexts(proxy_type);
    let adds = |reference: &&PatchRef| {
        let patch = resolve(ctx, std::slice::from_ref(*reference));
        patch
            .iter()
            .any(|patch| patch.apply_to == ApplyTo::Listener && contexts.iter().any(|context| patch.adds_in(*context)))
    };
    patches.listeners.iter().filter(adds).cloned().collect()
}

/// A listener that a patch adds. No other patch changes it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AddedListener {
    /// Patch.
    pub patch: PatchRef,
    /// Extensions of the proxy.
    pub extensions: Extensions,
}

impl AddedListener {
    /// Builds the listener from the patch. A listener without a name is not sent.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let patches = resolve(ctx, std::slice::from_ref(&self.patch));
        let Some((patch, listener)) = patches
            .first()
            .and_then(|patch| Some((*patch, patch.read::<Listener>()?)))
        else {
            return Built::none();
        };
        if listener.name.is_empty() {
            return Built::none().with_notes(vec![set::problem(patch, "the listener has no name")]);
        }
        if let Some(name) = lacking_in_listener(&self.extensions, &listener) {
            return Built::none().with_notes(vec![set::missing(patch, &name)]);
        }
        Built::new(EncodedResource::new(listener.name.clone(), &listener)).with_notes(vec![set::applied(patch)])
    }
}

/// Returns a filter of a listener that the proxy cannot run, if there is one.
fn lacking_in_listener(extensions: &Extensions, listener: &Listener) -> Option<String> {
    let mut chains = listener.filter_chains.iter().chain(&listener.default_filter_chain);
    lacking(extensions, &listener.listener_filters).or_else(|| chains.find_map(|chain| lacking_in(extensions, chain)))
}

/// Returns a filter of a chain, including HTTP filters, that the proxy cannot run, if there is one.
fn lacking_in(extensions: &Extensions, chain: &FilterChain) -> Option<String> {
    let configs = chain.filters.iter().filter_map(filters::Patched::config);
    let mut managers = configs.filter_map(|config| config.unpack::<HttpConnectionManager>().ok().flatten());
    lacking(extensions, &chain.filters)
        .or_else(|| managers.find_map(|manager| lacking(extensions, &manager.http_filters)))
}

fn lacking<F: filters::Patched>(extensions: &Extensions, list: &[F]) -> Option<String> {
    let lacks = |filter: &&F| !filters::can_run(extensions, *filter) && !filters::is_security(*filter);
    list.iter().find(lacks).map(|filter| filter.name().to_owned())
}

/// Patches of one listener, and the proxy that they are for.
struct Patching<'a> {
    set: PatchSet<'a>,
    extensions: &'a Extensions,
}

impl Patching<'_> {
    fn listener(&self, mut listener: Listener) -> Option<Listener> {
        for patch in self.set.of(ApplyTo::Listener) {
            if !Traits::of(&listener).matches(patch) {
                continue;
            }
            match patch.operation {
                Operation::Remove => {
                    self.set.applied(patch);
                    return None;
                }
                Operation::Merge => self.merge(patch, &mut listener),
                _ => {}
            }
        }
        let traits = Traits::of(&listener);
        self.listener_filters(&traits, &mut listener);
        self.chains(&traits, &mut listener);
        Some(listener)
    }

    /// Merges the value of a patch into a message.
    fn merge<M: prost::Message + prost::Name + Default>(&self, patch: &Patch, message: &mut M) {
        let Some(value) = &patch.value else { return };
        match merge_into(message, &value.message) {
            Ok(()) => self.set.applied(patch),
            Err(error) => self.set.problem(patch, error),
        }
    }

    fn listener_filters(&self, traits: &Traits, listener: &mut Listener) {
        for patch in self.set.of(ApplyTo::ListenerFilter) {
            if !traits.matches(patch) {
                continue;
            }
            let matched_name = matches::listener_filter(patch);
            if patch.operation != Operation::Merge {
                self.rearrange(patch, &mut listener.listener_filters, matched_name);
            } else if matched_name.is_some() {
                // Parity (pilot/pkg/networking/core/envoyfilter/listener_patch.go): a name is required, but the patch
                // is merged into all listener filters.
                for filter in &mut listener.listener_filters {
                    if !self.set.is_stopped() {
                        merge_filter(&self.set, patch, filter, Naming::Kept);
                    }
                }
            }
        }
    }

    /// Applies a patch to a list of filters, except for merges.
    fn rearrange<F: filters::Patched>(&self, patch: &Patch, list: &mut Vec<F>, matched_name: Option<&str>) {
        let value = match patch.operation {
            Operation::Merge => return,
            Operation::Remove => None,
            _ => match runnable(&self.set, self.extensions, patch) {
                Some(filter) => Some(filter),
                None => return,
            },
        };
        if rearrange(list, patch, value, matched_name) {
            self.set.applied(patch);
        }
    }

    fn chains(&self, traits: &Traits, listener: &mut Listener) {
        listener
            .filter_chains
            .retain_mut(|chain| !chain.filters.is_empty() && self.chain(traits, chain));
        if let Some(mut chain) = listener.default_filter_chain.take() {
            let stays = chain.filters.is_empty() || self.chain(traits, &mut chain);
            listener.default_filter_chain = stays.then_some(chain);
        }
        for patch in self.set.of(ApplyTo::FilterChain) {
            if patch.operation == Operation::Add && traits.matches(patch) {
                listener.filter_chains.extend(self.added_chain(patch));
            }
        }
    }

    /// Returns the chain that a patch adds. A chain without filters is not added.
    fn added_chain(&self, patch: &Patch) -> Option<FilterChain> {
        let chain: FilterChain = patch.read()?;
        if let Some(name) = lacking_in(self.extensions, &chain) {
            self.set.push(set::missing(patch, &name));
            return None;
        }
        if chain.filters.is_empty() {
            self.set.problem(patch, "the chain has no filters");
            return None;
        }
        self.set.applied(patch);
        Some(chain)
    }
}
