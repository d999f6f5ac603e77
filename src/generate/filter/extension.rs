//! Filters of users: WasmPlugins and TrafficExtensions. The builder of a filter stack decides their position.
//!
//! Note: a Wasm filter carries no configuration but requests it by name. Every proxy with such a filter must be served
//! a resource of this name, or its listener never becomes ready.

use super::{FilterStack, ListenerClass};
use crate::{
    generate::constant::{ads_source, http_filter as http_filter_of},
    model::extension::{ExtensionCode, ExtensionFilter, ExtensionLayer},
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::{DataSource, ExtensionConfigSource, data_source},
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

/// Extension that runs Wasm on requests.
const HTTP_WASM: &str = "envoy.filters.http.wasm";

/// Extension that runs Wasm on connections.
const NETWORK_WASM: &str = "envoy.filters.network.wasm";

/// Extension that runs Lua.
const HTTP_LUA: &str = "envoy.filters.http.lua";

impl ExtensionPhase {
    /// All phases in order.
    pub const ALL: [Self; 4] = [
        Self::Authentication,
        Self::Authorization,
        Self::Stats,
        Self::Unspecified,
    ];
}

/// Returns the HTTP filters of a phase on a listener with this port.
pub fn http_filters(stack: &FilterStack, phase: ExtensionPhase, port: u32) -> Vec<HttpFilter> {
    let filters = runnable(stack, ExtensionLayer::Http, phase, port);
    filters.into_iter().map(http_filter).collect()
}

/// Returns the network filters of a phase on a listener with this port.
pub fn network_filters(stack: &FilterStack, phase: ExtensionPhase, port: u32) -> Vec<Filter> {
    let filters = runnable(stack, ExtensionLayer::Network, phase, port);
    filters.into_iter().map(network_filter).collect()
}

/// Returns true if traffic through this port must be denied because the proxy cannot run a plugin that fails closed.
/// `layers` are the layers that the chain has filters of.
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

/// Returns the extensions that apply to a layer of traffic through a port.
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

/// Returns the extensions of a phase that the proxy can run, and notes the others.
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

/// Returns the Envoy extension that runs the code.
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
            // The agent replaces a module that it cannot fetch by RBAC.
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

/// Returns a source on the same ADS stream. The listener waits for the configuration, which may be security relevant.
fn discovery(types: [String; 2]) -> ExtensionConfigSource {
    ExtensionConfigSource {
        config_source: Some(ads_source()),
        type_urls: types.to_vec(),
        ..Default::default()
    }
}
