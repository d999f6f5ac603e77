//! EnvoyFilter patches: the last step of every resource.
//!
//! GroupSpec finds the patches for a proxy once ([`Patches::of`]) and every resource key holds those of its class, so
//! that proxies without any go on sharing. What one would get wrong: the order of patches is their order of effect, so it
//! must not be changed on the way.

pub mod cluster;
pub mod filters;
mod listener;
pub mod merge;
pub mod route;
pub mod set;
#[cfg(test)]
mod tests;

pub use listener::{AddedListener, added as added_listeners, listener};
pub use route::inbound as inbound_routes;

use std::collections::BTreeSet;

use super::{BuildContext, proxy::ProxyType, proxy_class::ProxyClass};
use crate::{
    base::{ObjectKey, Shared, SmolStr},
    model::envoy_filter::{Patch, PatchClass, ReferencedService},
};

pub use crate::model::envoy_filter::PatchContext;

/// Names one patch of one EnvoyFilter.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PatchRef {
    /// The EnvoyFilter.
    pub filter: ObjectKey,
    /// The place among its compiled patches.
    pub index: usize,
}

/// The patches for one proxy, each list in the order of application.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Patches {
    /// Of clusters.
    pub clusters: Shared<[PatchRef]>,
    /// Of listeners, filter chains and filters.
    pub listeners: Shared<[PatchRef]>,
    /// Of route configurations, virtual hosts and routes.
    pub routes: Shared<[PatchRef]>,
    /// Extension configurations.
    pub extensions: Shared<[PatchRef]>,
    /// Patches of clusters and routes that are left out, with the filter that the proxy lacks.
    pub lacking: Shared<[(PatchRef, SmolStr)]>,
    /// Services that the EnvoyFilters name, sorted.
    pub referenced_services: Shared<[ReferencedService]>,
}

impl Patches {
    /// The patches of the EnvoyFilters that are for a proxy and can have an effect on what such a proxy is sent.
    pub fn of(ctx: &BuildContext, profile: &ProxyClass, objects: &[ObjectKey]) -> Self {
        let proxy = &profile.kind;
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
                // Parity: an extension is served wherever it is asked for, whatever the context.
                let counts = class == PatchClass::Extension
                    || contexts(proxy.proxy_type).iter().any(|context| patch.is_for(*context));
                if !counts || !patch.proxy.matches(&proxy.version_text, &profile.metadata) {
                    continue;
                }
                let one = PatchRef {
                    filter: key.clone(),
                    index,
                };
                match filters::absent(&proxy.extensions, patch) {
                    Some(filter) if matches!(class, PatchClass::Cluster | PatchClass::Route) => {
                        lacking.push((one, filter));
                    }
                    _ => lists[class as usize].push(one),
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

/// The contexts that there are in the configuration of a kind of proxy.
fn contexts(proxy_type: ProxyType) -> &'static [PatchContext] {
    match proxy_type {
        ProxyType::Sidecar => &[PatchContext::SidecarInbound, PatchContext::SidecarOutbound],
        ProxyType::Router => &[PatchContext::Gateway],
        ProxyType::Waypoint => &[PatchContext::SidecarInbound, PatchContext::SidecarOutbound],
        ProxyType::Ztunnel | ProxyType::Agentgateway => &[],
    }
}

/// The patches behind references, in their order. One that an edit took away in this very revision is left out: the
/// selection of the same revision does not name it.
pub fn resolve<'a>(ctx: &BuildContext<'a>, refs: &[PatchRef]) -> Vec<&'a Patch> {
    resolve_each(ctx, refs).map(|(_, patch)| patch).collect()
}

/// As [`resolve`], each patch with its reference.
pub fn resolve_each<'a, 'r>(
    ctx: &BuildContext<'a>,
    refs: &'r [PatchRef],
) -> impl Iterator<Item = (&'r PatchRef, &'a Patch)> {
    let ctx = *ctx;
    refs.iter().filter_map(move |one| {
        let row = ctx.mesh.envoy_filter_patches.get(ctx.cx, &one.filter)?;
        Some((one, row.patches.get(one.index)?))
    })
}
