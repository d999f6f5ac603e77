//! Patches of one filter chain and of the network filters in it.

use super::{
    Patching,
    matches::{self, Traits},
};
use crate::{
    generate::{
        constant::HTTP_CONNECTION_MANAGER,
        patch::{
            filters::{Naming, Patched, merge_filter},
            merge::{MergeError, merge_any},
        },
    },
    model::envoy_filter::{ApplyTo, Operation, Patch},
    proto::{
        Any,
        envoy::config::{
            core::v3::{TransportSocket, transport_socket::ConfigType},
            listener::v3::FilterChain,
        },
    },
};

impl Patching<'_> {
    /// Patches a chain; returns false if a patch removes it.
    pub(super) fn chain(&self, traits: &Traits, chain: &mut FilterChain) -> bool {
        for patch in self.set.of(ApplyTo::FilterChain) {
            if !traits.matches(patch) || !traits.matches_chain(chain, patch) {
                continue;
            }
            match patch.operation {
                Operation::Remove => {
                    self.set.applied(patch);
                    return false;
                }
                Operation::Merge => self.merge_chain(patch, chain),
                _ => {}
            }
        }
        self.network_filters(traits, chain);
        true
    }

    /// Merges a patch into a chain. If both have a transport socket of the same name, only the configurations of the
    /// sockets are merged: a patch of a socket is not a patch of the chain.
    fn merge_chain(&self, patch: &Patch, chain: &mut FilterChain) {
        let value: Option<FilterChain> = patch.read();
        let from_patch = value.and_then(|value| value.transport_socket);
        match (&mut chain.transport_socket, from_patch) {
            (Some(socket), Some(from_patch)) if socket.name == from_patch.name => {
                self.merge_socket(patch, socket, &from_patch);
            }
            _ => self.merge(patch, chain),
        }
    }

    fn merge_socket(&self, patch: &Patch, socket: &mut TransportSocket, from_patch: &TransportSocket) {
        let merged = match (config(socket), config(from_patch)) {
            (Some(config), Some(from_patch)) => merge_any(config, from_patch),
            _ => return self.set.applied(patch),
        };
        match merged {
            Ok(merged) => {
                socket.config_type = Some(ConfigType::TypedConfig(merged));
                self.set.applied(patch);
            }
            Err(error @ MergeError::TypeMismatch { .. }) => self.set.stop(patch, error),
            Err(error) => self.set.problem(patch, error),
        }
    }

    fn network_filters(&self, traits: &Traits, chain: &mut FilterChain) {
        let about_chain = |patch: &&Patch| traits.matches(patch) && traits.matches_chain(chain, patch);
        let patches: Vec<&Patch> = self.set.of(ApplyTo::NetworkFilter).filter(about_chain).collect();
        let of_http: Vec<&Patch> = self.set.of(ApplyTo::HttpFilter).filter(about_chain).collect();
        for patch in &patches {
            self.rearrange(patch, &mut chain.filters, matches::network_filter(patch));
        }
        for filter in &mut chain.filters {
            self.merge_filter(&patches, filter, matches::network_filter);
            if filter.name == HTTP_CONNECTION_MANAGER && !self.set.is_stopped() {
                self.http_filters(&of_http, filter);
            }
        }
    }
}

impl Patching<'_> {
    /// Merges the patches that match a filter into it; `matched_name` returns the filter name that a patch matches.
    pub(super) fn merge_filter<F: Patched>(
        &self,
        patches: &[&Patch],
        filter: &mut F,
        matched_name: impl Fn(&Patch) -> Option<&str>,
    ) {
        for patch in patches.iter().filter(|patch| patch.operation == Operation::Merge) {
            let is_matched = matched_name(patch).is_none_or(|name| name == filter.name());
            if is_matched && !self.set.is_stopped() {
                merge_filter(&self.set, patch, filter, Naming::OfPatch);
            }
        }
    }
}

fn config(socket: &TransportSocket) -> Option<&Any> {
    match &socket.config_type {
        Some(ConfigType::TypedConfig(config)) => Some(config),
        None => None,
    }
}
