//! Encoded filter chains. A listener may have hundreds, so their fields are written without the Rust types, see
//! [`crate::generate::wire`].

use super::stack::FilterStack;
use crate::{
    generate::{
        BuildContext, EncodedResource,
        patch::{self, PatchContext},
        resource::Built,
        wire::{Encoded, Writer},
    },
    proto::{
        Any,
        envoy::config::listener::v3::{Filter, FilterChain, Listener},
        field::{MessageFields, filter, filter_chain, listener},
    },
};

/// Initial capacities in bytes: the filters of a TCP chain, and some chains of a listener.
const USUAL_FILTERS: usize = 1 << 10;
const USUAL_CHAINS: usize = 1 << 12;

/// Network filters, encoded as fields of a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkFilters {
    fields: Encoded<FilterChain>,
    /// True if one of them resolves the server name.
    pub resolves_sni: bool,
}

impl NetworkFilters {
    /// Returns an empty list with the usual capacity.
    pub fn new() -> Self {
        Self {
            fields: Encoded::with_capacity(USUAL_FILTERS),
            resolves_sni: false,
        }
    }

    /// Adds a filter.
    pub fn push(&mut self, filter: &Filter) {
        self.fields.append(|out| out.message(filter_chain::FILTERS, filter));
    }

    /// Adds a filter with its configuration.
    pub fn push_config(&mut self, name: &str, config: &Any) {
        self.fields.append(|out| {
            out.nested(filter_chain::FILTERS, |out| {
                out.text(filter::NAME, name);
                out.message(filter::TYPED_CONFIG, config);
            });
        });
    }

    /// Adds a filter and encodes its configuration by a function.
    pub fn write<C: MessageFields>(&mut self, name: &str, write: impl FnOnce(&mut Writer<C>)) {
        self.fields.append(|out| {
            out.nested(filter_chain::FILTERS, |out| {
                out.text(filter::NAME, name);
                out.any(filter::TYPED_CONFIG, write);
            });
        });
    }

    /// Appends filters.
    pub fn append(&mut self, further: &Self) {
        self.fields.append(|out| out.fields(&further.fields));
        self.resolves_sni |= further.resolves_sni;
    }

    /// Returns true without filters.
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    /// Returns the fields.
    pub fn fields(&self) -> &Encoded<FilterChain> {
        &self.fields
    }
}

/// A listener under construction: the message without its chains, and the encoded chains.
pub(crate) struct EncodedListener {
    pub(crate) rest: Listener,
    chains: Encoded<Listener>,
    default_chain: Encoded<Listener>,
}

impl Default for EncodedListener {
    fn default() -> Self {
        Self {
            rest: Listener::default(),
            chains: Encoded::with_capacity(USUAL_CHAINS),
            default_chain: Encoded::empty(),
        }
    }
}

impl EncodedListener {
    /// Adds a chain.
    pub(crate) fn add_chain(&mut self, write: impl FnOnce(&mut Writer<FilterChain>)) {
        self.chains.append(|out| out.nested(listener::FILTER_CHAINS, write));
    }

    /// Adds encoded chains.
    pub(crate) fn append_chains(&mut self, chains: &Encoded<Listener>) {
        self.chains.append(|out| out.fields(chains));
    }

    /// Returns the chains alone.
    pub(crate) fn into_chains(self) -> Encoded<Listener> {
        self.chains
    }

    /// Sets the default chain.
    pub(crate) fn set_default_chain(&mut self, write: impl FnOnce(&mut Writer<FilterChain>)) {
        self.default_chain = Encoded::write(USUAL_FILTERS, |out| out.nested(listener::DEFAULT_FILTER_CHAIN, write));
    }

    /// Returns true if there is no chain except a default one.
    pub(crate) fn has_no_chains(&self) -> bool {
        self.chains.is_empty()
    }

    fn write(&self, out: &mut Writer<Listener>) {
        out.reserve(self.chains.len() + self.default_chain.len());
        out.spliced(&self.rest, [&self.chains, &self.default_chain]);
    }

    /// Patches and encodes the listener.
    pub(crate) fn finish(self, ctx: &BuildContext, stack: FilterStack, context: PatchContext) -> Built {
        let client = stack.client;
        let notes = stack.into_notes();
        let patches = &client.listener_patches;
        if !patches.is_empty() {
            let listener = Encoded::write(0, |out| self.write(out)).decode();
            return patch::build_listener(ctx, patches, &client.extensions, context, listener, notes);
        }
        let name = self.rest.name.as_str().into();
        let encoded = EncodedResource::write(name, |out| self.write(out));
        Built::new(encoded).with_notes(notes)
    }
}
