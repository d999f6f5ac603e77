//! Filters of users: WasmPlugins and TrafficExtensions, and the configuration that WebAssembly ones are sent by itself.
//! Where they stand in a filter stack is decided by its builder.
//!
//! What one would get wrong: a filter of WebAssembly carries no configuration, it asks for it by its name; so whoever
//! is sent such a filter has to be served a resource of this name, or its listener never gets ready.

mod config;
mod json;
mod pull_secret;
#[cfg(test)]
mod tests;

use std::{cmp::Reverse, collections::BTreeSet};

use super::{
    BuildContext, EncodedResource, ResourceType,
    constant::ads_source,
    group::{Built, ListedResource, Resource},
    listener::{FilterStack, client::ListenerClass, http_filters::filter as http_filter_of},
    patch::{self, PatchRef, set},
    select::Selected,
};
use crate::{
    base::{ClusterId, Namespace, Shared},
    model::{
        envoy_filter::Operation,
        extension::{ExtensionCode, ExtensionFilter, ExtensionId, ExtensionLayer},
        policy::{self, Subject},
        waypoint,
    },
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::{DataSource, ExtensionConfigSource, TypedExtensionConfig, data_source},
                listener::v3::{Filter, filter},
            },
            extensions::filters::{
                http::{self, lua::v3::Lua},
                network::{
                    self,
                    http_connection_manager::v3::{HttpFilter, http_filter},
                },
            },
        },
        istio::r#type::v1beta1::WorkloadMode,
    },
};

pub use crate::model::extension::ExtensionPhase;

/// The extension that runs WebAssembly on requests.
const HTTP_WASM: &str = "envoy.filters.http.wasm";
/// The extension that runs WebAssembly on connections.
const NETWORK_WASM: &str = "envoy.filters.network.wasm";
/// The extension that runs Lua.
const HTTP_LUA: &str = "envoy.filters.http.lua";

impl ExtensionPhase {
    /// Every phase in order.
    pub const ALL: [Self; 4] = [
        Self::Authentication,
        Self::Authorization,
        Self::Stats,
        Self::Unspecified,
    ];
}

/// The extensions for a workload in the order of application.
pub fn attached(ctx: &BuildContext, subject: &Subject) -> Shared<[ExtensionId]> {
    let (cx, mesh) = (ctx.cx, ctx.mesh);
    let plugins = policy::attached(cx, mesh, &mesh.wasm_plugins_by_namespace, subject);
    let extensions = policy::attached(cx, mesh, &mesh.traffic_extensions_by_namespace, subject);
    let plugins = plugins.into_iter().map(ExtensionId::WasmPlugin);
    let extensions = extensions.into_iter().map(ExtensionId::TrafficExtension);
    let mut found: Vec<_> = plugins
        .chain(extensions)
        .filter_map(|id| mesh.extension_filters.get(cx, &id).map(|row| (id, row)))
        .collect();
    found.sort_by(|(a, a_row), (b, b_row)| order(subject, a, a_row).cmp(&order(subject, b, b_row)));
    found.into_iter().map(|(id, _)| id).collect::<Vec<_>>().into()
}

/// By phase; within one the higher priority first, those without last; then those of the workload's namespace before
/// those of the root namespace; then by age and name.
fn order<'a>(subject: &Subject, id: &ExtensionId, row: &'a ExtensionFilter) -> impl Ord + use<'a> {
    let is_foreign = *id.namespace() != subject.namespace;
    let priority = Reverse(row.priority.unwrap_or(i32::MIN));
    (row.phase, priority, is_foreign, row.creation, &row.name)
}

/// The HTTP filters of a phase on a listener with this port.
pub fn http_filters(stack: &FilterStack, phase: ExtensionPhase, port: u32) -> Vec<HttpFilter> {
    let filters = runnable(stack, ExtensionLayer::Http, phase, port);
    filters.into_iter().map(http_filter).collect()
}

/// The network filters of a phase on a listener with this port.
pub fn network_filters(stack: &FilterStack, phase: ExtensionPhase, port: u32) -> Vec<Filter> {
    let filters = runnable(stack, ExtensionLayer::Network, phase, port);
    filters.into_iter().map(network_filter).collect()
}

/// True if traffic through this port must not pass because the client cannot run a plugin that fails closed. `layers` are
/// those that the chain has filters of.
pub fn denies(stack: &FilterStack, layers: &[ExtensionLayer], port: u32) -> bool {
    let mut lacking = layers.iter().flat_map(|layer| {
        let filters = applying(stack, *layer, port);
        filters.filter(|filter| !can_run(stack, filter))
    });
    let fails_closed = |filter: &ExtensionFilter| match filter.code {
        ExtensionCode::Wasm { fails_open, .. } => !fails_open,
        ExtensionCode::Lua(_) => false,
    };
    lacking.any(fails_closed)
}

/// The extensions that work on a layer of traffic through a port.
fn applying<'s>(stack: &'s FilterStack, layer: ExtensionLayer, port: u32) -> impl Iterator<Item = &'s ExtensionFilter> {
    let mode = match stack.class {
        ListenerClass::SidecarInbound => WorkloadMode::Server,
        ListenerClass::SidecarOutbound | ListenerClass::Gateway => WorkloadMode::Client,
    };
    let ids = stack.client.extension_filters.iter();
    ids.filter_map(|id| stack.ctx.mesh.extension_filters.get(stack.ctx.cx, id))
        .map(|row| &**row)
        .filter(move |row| row.layer() == layer && row.matches(mode, port))
}

/// Those of a phase that the client can run; the others are noted.
fn runnable<'s>(
    stack: &'s FilterStack,
    layer: ExtensionLayer,
    phase: ExtensionPhase,
    port: u32,
) -> Vec<&'s ExtensionFilter> {
    let of_phase = applying(stack, layer, port).filter(|filter| filter.phase == phase);
    of_phase
        .filter(|filter| {
            let can_run = can_run(stack, filter);
            if !can_run {
                let code = match filter.code {
                    ExtensionCode::Wasm { fails_open: false, .. } => "security_extension_missing",
                    _ => "proxy_extension_missing",
                };
                stack.note(code, format!("{} for {}", extension(filter), filter.name));
            }
            can_run
        })
        .collect()
}

fn can_run(stack: &FilterStack, filter: &ExtensionFilter) -> bool {
    stack.client.extensions.has(extension(filter))
}

/// The extension of Envoy that runs the code.
fn extension(filter: &ExtensionFilter) -> &'static str {
    match filter.code {
        ExtensionCode::Wasm {
            layer: ExtensionLayer::Http,
            ..
        } => HTTP_WASM,
        ExtensionCode::Wasm {
            layer: ExtensionLayer::Network,
            ..
        } => NETWORK_WASM,
        ExtensionCode::Lua(_) => HTTP_LUA,
    }
}

fn http_filter(extension: &ExtensionFilter) -> HttpFilter {
    match &extension.code {
        ExtensionCode::Lua(code) => {
            let config = Lua {
                default_source_code: Some(DataSource {
                    specifier: Some(data_source::Specifier::InlineString(code.clone())),
                    ..Default::default()
                }),
                ..Default::default()
            };
            http_filter_of(&extension.resource_name(), Any::pack(&config))
        }
        ExtensionCode::Wasm { .. } => {
            // The agent puts RBAC in the place of a module that it cannot fetch.
            let types = [type_url::<http::wasm::v3::Wasm>(), type_url::<http::rbac::v3::Rbac>()];
            HttpFilter {
                name: extension.resource_name(),
                config_type: Some(http_filter::ConfigType::ConfigDiscovery(discovery(types))),
                ..Default::default()
            }
        }
    }
}

fn network_filter(extension: &ExtensionFilter) -> Filter {
    let types = [
        type_url::<network::wasm::v3::Wasm>(),
        type_url::<network::rbac::v3::Rbac>(),
    ];
    Filter {
        name: extension.resource_name(),
        config_type: Some(filter::ConfigType::ConfigDiscovery(discovery(types))),
    }
}

fn type_url<M: prost::Name>() -> String {
    M::type_url()
}

/// The configuration comes by itself over the same stream. The listener waits for it: it may be about security.
fn discovery(types: [String; 2]) -> ExtensionConfigSource {
    ExtensionConfigSource {
        config_source: Some(ads_source()),
        type_urls: types.to_vec(),
        ..Default::default()
    }
}

/// The extension configurations that a client may ask for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ExtensionPart {
    keys: Shared<[ExtensionKey]>,
}

/// What a configuration is built from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ExtensionKey {
    /// A module of WebAssembly.
    Wasm {
        /// The object that names it.
        id: ExtensionId,
        /// The cluster of the client, if it may have the Secret that the image is pulled with; it then shows in the
        /// resource.
        secret_for: Option<ClusterId>,
    },
    /// What an EnvoyFilter adds.
    Patch(PatchRef),
}

/// The configurations for a proxy, of its own namespace, the root namespace and those of services that it serves as a
/// waypoint. Those that do not select it can be asked for too, by filters that
/// EnvoyFilters add; secrets come only with those that do.
pub fn select(ctx: &BuildContext, selected: &Selected) -> Option<ExtensionPart> {
    let (cx, mesh) = (ctx.cx, ctx.mesh);
    let root = policy::root_namespace(cx, mesh);
    // Chains of a waypoint have the filters that are attached to the services that it serves.
    let served = waypoint::served(cx, mesh, &selected.waypoints);
    let attached = if served.is_empty() {
        selected.extensions.clone()
    } else {
        let own = selected.subject.clone();
        let subject = served
            .iter()
            .fold(own, |subject, service| subject.with_service(service));
        attached(ctx, &subject)
    };
    let own = [&selected.proxy.namespace, &root].into_iter();
    let namespaces: BTreeSet<&Namespace> = own.chain(served.iter().map(|service| &service.key.namespace)).collect();
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
            let secret_for = may_read.then(|| pull_secret::reader(selected.profile)).flatten();
            keys.push(ExtensionKey::Wasm { id, secret_for });
        }
    }
    (!keys.is_empty()).then(|| ExtensionPart { keys: keys.into() })
}

impl ExtensionPart {
    /// The resources of the part.
    pub fn list(&self) -> Vec<ListedResource> {
        let listed =
            |key: &ExtensionKey| ListedResource::new(ResourceType::Extension, Resource::Extension(key.clone()));
        self.keys.iter().map(listed).collect()
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

/// The configuration that a patch adds. Nothing else can be done to extension configurations.
fn added(ctx: &BuildContext, patch: &PatchRef) -> Built {
    let patches = patch::resolve(ctx, std::slice::from_ref(patch));
    let adding = patches.first().filter(|patch| patch.operation == Operation::Add);
    let value = adding.and_then(|patch| Some((patch, patch.read::<TypedExtensionConfig>()?)));
    value.map_or_else(Built::none, |(patch, config)| {
        Built::new(EncodedResource::new(config.name.as_str(), &config)).with_notes(vec![set::applied(patch)])
    })
}
