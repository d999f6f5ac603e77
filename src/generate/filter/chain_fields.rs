//! Encoded filter chains. A listener may have hundreds, and as messages they cost many times as much to build, measure
//! and drop as their bytes.

use prost::Message;

use super::stack::FilterStack;
use crate::{
    generate::{
        BuildContext, EncodedResource, ResourceType,
        patch::{self, PatchContext},
        resource::Built,
        wire,
    },
    proto::{
        Any,
        envoy::config::listener::v3::{Filter, FilterChainMatch, Listener},
    },
};

/// Fields `filter_chains` and `default_filter_chain` of listeners.
const FILTER_CHAINS: u32 = 3;
const DEFAULT_CHAIN: u32 = 25;

/// Initial capacities in bytes: the filters of a TCP chain, and some chains of a listener.
const USUAL_FILTERS: usize = 1 << 10;
const USUAL_CHAINS: usize = 1 << 12;

/// Fields of filter chains.
pub(crate) mod field {
    pub(crate) const MATCH: u32 = 1;
    pub(crate) const FILTERS: u32 = 3;
    pub(crate) const METADATA: u32 = 5;
    pub(crate) const TRANSPORT_SOCKET: u32 = 6;
    pub(crate) const NAME: u32 = 7;
    pub(crate) const CONNECT_TIMEOUT: u32 = 9;
}

/// Network filters, encoded as fields of a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkFilters {
    fields: Vec<u8>,
    /// True if one of them resolves the server name.
    pub resolves_sni: bool,
}

impl NetworkFilters {
    /// Returns an empty list with the usual capacity.
    pub fn new() -> Self {
        Self {
            fields: Vec::with_capacity(USUAL_FILTERS),
            resolves_sni: false,
        }
    }

    /// Adds a filter.
    pub fn push(&mut self, filter: &Filter) {
        wire::nested(&mut self.fields, field::FILTERS, |out| filter.encode_raw(out));
    }

    /// Adds a filter with its configuration.
    pub fn push_config(&mut self, name: &str, config: &Any) {
        self.push_written(name, &config.type_url, |out| out.extend_from_slice(&config.value));
    }

    /// Adds a filter and encodes its configuration of this type by a function.
    pub fn push_written(&mut self, name: &str, type_url: &str, write: impl FnOnce(&mut Vec<u8>)) {
        wire::nested(&mut self.fields, field::FILTERS, |out| {
            wire::text(out, 1, name);
            wire::nested(out, 4, |out| {
                wire::text(out, 1, type_url);
                let at = out.len();
                wire::nested(out, 2, write);
                if out.len() == at + 2 {
                    out.truncate(at);
                }
            });
        });
    }

    /// Appends filters.
    pub fn append(&mut self, further: &Self) {
        self.fields.extend_from_slice(&further.fields);
        self.resolves_sni |= further.resolves_sni;
    }

    /// Returns true without filters.
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    /// Returns the fields.
    pub fn fields(&self) -> &[u8] {
        &self.fields
    }
}

/// A listener under construction: the message without its chains, and the encoded chains.
pub(crate) struct WrittenListener {
    pub(crate) rest: Listener,
    chains: Vec<u8>,
    default_chain: Vec<u8>,
}

impl Default for WrittenListener {
    fn default() -> Self {
        Self {
            rest: Listener::default(),
            chains: Vec::with_capacity(USUAL_CHAINS),
            default_chain: Vec::new(),
        }
    }
}

impl WrittenListener {
    /// Adds a chain.
    pub(crate) fn add_chain(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        wire::nested(&mut self.chains, FILTER_CHAINS, write);
    }

    /// Sets the default chain.
    pub(crate) fn set_default_chain(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.default_chain.reserve(USUAL_FILTERS);
        wire::nested(&mut self.default_chain, DEFAULT_CHAIN, write);
    }

    /// Returns true if there is no chain except a default one.
    pub(crate) fn has_no_chains(&self) -> bool {
        self.chains.is_empty()
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.reserve(self.chains.len() + self.default_chain.len());
        let pieces = [
            (FILTER_CHAINS, self.chains.as_slice()),
            (DEFAULT_CHAIN, &self.default_chain),
        ];
        wire::spliced_message(out, &self.rest, pieces, |field| field);
    }

    /// Patches and encodes the listener.
    pub(crate) fn finish(self, ctx: &BuildContext, stack: FilterStack, context: PatchContext) -> Built {
        let client = stack.client;
        let mut notes = stack.into_notes();
        let patches = (&*client.listener_patches, &client.extensions);
        let is_patched = !client.listener_patches.is_empty();
        if is_patched || cfg!(debug_assertions) {
            let mut written = Vec::new();
            self.write(&mut written);
            let listener = Listener::decode(&*written).expect("because it was written according to the message");
            debug_assert_eq!(listener.encode_to_vec(), written, "fields are written in their order");
            if is_patched {
                return match patch::listener(ctx, patches, context, listener, &mut notes) {
                    Some(listener) => {
                        Built::new(EncodedResource::new(listener.name.clone(), &listener)).with_notes(notes)
                    }
                    None => Built::none().with_notes(notes),
                };
            }
        }
        let name = self.rest.name.as_str().into();
        let encoded = EncodedResource::written(name, ResourceType::Listener.url(), |out| self.write(out));
        Built::new(encoded).with_notes(notes)
    }
}

/// Encodes the match of a chain.
pub(crate) fn write_match(out: &mut Vec<u8>, by: &FilterChainMatch) {
    wire::nested(out, field::MATCH, |out| by.encode_raw(out));
}
