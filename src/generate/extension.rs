//! Extension configurations that proxies fetch by name (ECDS): Wasm modules of WasmPlugins and TrafficExtensions, and
//! those that EnvoyFilters add.

mod config;
mod json;
mod pull_secret;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use super::{
    BuildContext, EncodedResource,
    patch::{self, PatchRef, set},
    resource::Built,
    selected::{Selected, attached_extensions},
};
use crate::{
    base::{ClusterId, Namespace, Shared},
    model::{
        envoy_filter::Operation,
        extension::{ExtensionCode, ExtensionId},
        policy, waypoint,
    },
    proto::envoy::config::core::v3::TypedExtensionConfig,
};

/// Extension configurations that a proxy may request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ExtensionPart {
    keys: Shared<[ExtensionKey]>,
}

/// Inputs of an extension configuration.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ExtensionKey {
    /// A Wasm module.
    Wasm {
        /// Object that names the module.
        id: ExtensionId,
        /// Cluster of the proxy, if it may have the image pull secret, which is then part of the resource.
        secret_for: Option<ClusterId>,
    },
    /// Configuration added by an EnvoyFilter.
    Patch(PatchRef),
}

/// Selects the configurations of a proxy's own namespace, the root namespace and the services that it serves as a
/// waypoint. Filters added by EnvoyFilters may also request configurations that do not select the proxy, but only those
/// that do carry secrets.
pub fn select(ctx: &BuildContext, selected: &Selected) -> Option<ExtensionPart> {
    let (cx, mesh) = (ctx.cx, ctx.mesh);
    let root = policy::root_namespace(cx, mesh);
    // Chains of a waypoint have the filters attached to the services that it serves.
    let served = waypoint::served_keys(cx, mesh, &selected.serves);
    let attached = if served.is_empty() {
        selected.extensions.clone()
    } else {
        let own = selected.subject.clone();
        let subject = served.iter().fold(own, |subject, (_, service)| {
            subject.with_service(service.target.clone())
        });
        attached_extensions(ctx, &subject)
    };
    let own = [&selected.proxy.namespace, &root].into_iter();
    let namespaces: BTreeSet<&Namespace> = own.chain(served.iter().map(|(key, _)| &key.namespace)).collect();
    let patches = selected.patches.extensions.iter().cloned();
    let mut keys: Vec<ExtensionKey> = patches.map(ExtensionKey::Patch).collect();
    for namespace in namespaces {
        let plugins = mesh.wasm_plugins_by_namespace.get(cx, namespace);
        let extensions = mesh.traffic_extensions_by_namespace.get(cx, namespace);
        let ids = plugins
            .map(|(key, _)| ExtensionId::WasmPlugin(key.clone()))
            .chain(extensions.map(|(key, _)| ExtensionId::TrafficExtension(key.clone())));
        for id in ids {
            let row = mesh.extension_filters.get(cx, &id);
            let Some(ExtensionCode::Wasm { pulls_with_secret, .. }) = row.map(|row| &row.code) else {
                continue;
            };
            let may_read = *pulls_with_secret && attached.contains(&id);
            let secret_for = may_read.then(|| pull_secret::reader(selected.class)).flatten();
            keys.push(ExtensionKey::Wasm { id, secret_for });
        }
    }
    (!keys.is_empty()).then(|| ExtensionPart { keys: keys.into() })
}

impl ExtensionPart {
    /// Lists the resources of the part.
    pub fn list(&self) -> impl Iterator<Item = ExtensionKey> {
        self.keys.iter().cloned()
    }
}

impl ExtensionKey {
    /// Builds the configuration.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        match self {
            Self::Wasm { id, secret_for } => config::wasm(ctx, id, secret_for.as_ref()),
            Self::Patch(patch) => added(ctx, patch),
        }
    }
}

/// Builds the configuration that a patch adds. Patches cannot change extension configurations.
fn added(ctx: &BuildContext, patch: &PatchRef) -> Built {
    let patches = patch::resolve(ctx, std::slice::from_ref(patch));
    let adding = patches.first().filter(|patch| patch.operation == Operation::Add);
    let value = adding.and_then(|patch| Some((patch, patch.read::<TypedExtensionConfig>()?)));
    value.map_or_else(Built::none, |(patch, config)| {
        Built::new(EncodedResource::new(config.name.as_str(), &config)).with_notes(vec![set::applied(patch)])
    })
}
