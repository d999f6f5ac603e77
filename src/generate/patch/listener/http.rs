//! Patches of the HTTP filters in a connection manager.

use super::{Patching, matches};
use crate::{
    generate::patch::filters::Patched,
    model::envoy_filter::Patch,
    proto::{
        Any,
        envoy::{
            config::listener::v3::Filter,
            extensions::filters::network::http_connection_manager::v3::HttpConnectionManager,
        },
    },
};

impl Patching<'_> {
    /// Patches the HTTP filters of a connection manager with the patches that match its chain.
    pub(super) fn http_filters(&self, patches: &[&Patch], filter: &mut Filter) {
        let about_filter = |patch: &&&Patch| matches::network_filter(patch).is_none_or(|name| name == filter.name);
        let patches: Vec<&Patch> = patches.iter().filter(about_filter).copied().collect();
        if patches.is_empty() {
            return;
        }
        // A patch may have replaced the filter by one of another type.
        let Some(Ok(Some(mut manager))) = filter.config().map(Any::unpack::<HttpConnectionManager>) else {
            return;
        };
        for patch in &patches {
            self.rearrange(patch, &mut manager.http_filters, matches::http_filter(patch));
        }
        for http_filter in &mut manager.http_filters {
            self.merge_filter(&patches, http_filter, matches::http_filter);
        }
        // Parity (pilot/pkg/networking/core/envoyfilter/listener_patch.go): the manager stays unchanged if one of the
        // merges is impossible.
        if !self.set.is_stopped() {
            filter.configure(Any::pack(&manager));
        }
    }
}
