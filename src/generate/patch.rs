//! EnvoyFilter patches, applied as the last step of building a resource.
//!
//! Selection finds the patches of a proxy once ([`Patches::of`]). Every resource key holds the patches of its class, so
//! proxies without patches keep sharing resources. Note: the order of patches is their order of effect and must be
//! preserved.

pub mod cluster;
pub mod filters;
mod listener;
pub mod merge;
pub mod route;
pub mod set;
#[cfg(test)]
mod tests;

pub use listener::{AddedListener, added as added_listeners, build_listener};
pub use route::inbound as inbound_routes;

use std::collections::BTreeSet;

use super::{BuildContext, proxy::ProxyType, proxy_class::ProxyClass};
use crate::{
    base::{ObjectKey, Shared, SmolStr},
    model::envoy_filter::{Patch, PatchClass, ReferencedService},
};

pub use crate::model::envoy_filter::PatchContext;

/// The number of patches of a resource above which its key has all patches of the proxy, which are one allocation. A
/// list of its own would take memory for each pair of a resource and a patch, and a tenant may write thousands of
/// patches.
const MOST_OWN: usize = 64;

/// Reference to one patch of an EnvoyFilter.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PatchRef {
    /// EnvoyFilter.
    pub filter: ObjectKey,
    /// Index among its compiled patches.
    pub index: usize,
}

/// Patches of one proxy, each list in the order of application.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Patches {
    /// Patches of clusters.
    pub clusters: Shared<[PatchRef]>,
    /// Patches of listeners, filter chains and filters.
    pub listeners: Shared<[PatchRef]>,
    /// Patches of route configurations, virtual hosts and routes.
    pub routes: Shared<[PatchRef]>,
    /// Patches of extension configurations.
    pub extensions: Shared<[PatchRef]>,
    /// Omitted patches of clusters and routes, with the filter that the proxy lacks.
    pub lacking: Shared<[(PatchRef, SmolStr)]>,
    /// Services that the EnvoyFilters refer to, sorted.
    pub referenced_services: Shared<[ReferencedService]>,
}

impl Patches {
    /// Returns the patches of the EnvoyFilters that select a proxy and apply to such a proxy's configuration.
    pub fn of(ctx: &BuildContext, proxy_class: &ProxyClass, objects: &[ObjectKey]) -> Self {
        let proxy = &proxy_class.node;
        let mut lists: [Vec<PatchRef>; 4] = Default::default();
        let mut lacking = Vec::new();
        let mut referenced = BTreeSet::new();
        for key in objects {
            let Some(row) = ctx.mesh.envoy_filter_patches.get(ctx.cx, key) else {
                continue;
            };
            referenced.extend(row.referenced_services.iter().cloned());
            for (index, patch) in row.patches.iter().enumerate() {
                let Some(class) = patch.class() else { continue };
                // Parity (pilot/pkg/networking/core/envoyfilter/extension_configuration_patch.go): an extension
                // configuration is served wherever it is requested, whatever the context.
                let counts = class == PatchClass::Extension
                    || contexts(proxy.proxy_type).iter().any(|context| patch.is_for(*context));
                if !counts || !patch.proxy.matches(&proxy.version_text, &proxy_class.metadata) {
                    continue;
                }
                let reference = PatchRef {
                    filter: key.clone(),
                    index,
                };
                match filters::absent(&proxy.extensions, patch) {
                    Some(filter) if matches!(class, PatchClass::Cluster | PatchClass::Route) => {
                        lacking.push((reference, filter));
                    }
                    _ => lists[class as usize].push(reference),
                }
            }
        }
        let [clusters, listeners, routes, extensions] = lists.map(Shared::from);
        Self {
            clusters,
            listeners,
            routes,
            extensions,
            lacking: lacking.into(),
            referenced_services: referenced.into_iter().collect::<Vec<_>>().into(),
        }
    }
}

/// Returns the contexts of a proxy type's configuration.
fn contexts(proxy_type: ProxyType) -> &'static [PatchContext] {
    match proxy_type {
        ProxyType::Sidecar => &[PatchContext::SidecarInbound, PatchContext::SidecarOutbound],
        ProxyType::Router => &[PatchContext::Gateway],
        ProxyType::Waypoint => &[PatchContext::SidecarInbound, PatchContext::SidecarOutbound],
        ProxyType::Ztunnel | ProxyType::Agentgateway => &[],
    }
}

/// Resolves references, in their order. A patch that was removed in this revision is omitted: the selection of this
/// revision no longer refers to it.
pub fn resolve<'a>(ctx: &BuildContext<'a>, refs: &[PatchRef]) -> Vec<&'a Patch> {
    resolve_each(ctx, refs).map(|(_, patch)| patch).collect()
}

/// Resolves references like [`resolve`], and returns each patch with its reference.
pub fn resolve_each<'a, 'r>(
    ctx: &BuildContext<'a>,
    refs: &'r [PatchRef],
) -> impl Iterator<Item = (&'r PatchRef, &'a Patch)> {
    let ctx = *ctx;
    // An object may have thousands of patches, so its row is looked up once for those that follow each other.
    let mut last: Option<&ObjectKey> = None;
    let mut row = None;
    refs.iter().filter_map(move |reference| {
        if last != Some(&reference.filter) {
            last = Some(&reference.filter);
            row = ctx.mesh.envoy_filter_patches.get(ctx.cx, &reference.filter);
        }
        Some((reference, row?.patches.get(reference.index)?))
    })
}
