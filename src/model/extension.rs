//! WasmPlugins and TrafficExtensions in one form, with the attributes that decide the position of their filters.
//!
//! A WasmPlugin counts as a TrafficExtension with another name. Note: the row contains only attributes that appear in
//! listeners. The plugin's configuration is a resource of its own, so that changing it affects no listener.

use smol_str::{SmolStr, format_smolstr};

use super::MeshSnapshot;
use crate::{
    api::{Config, Meta},
    base::{Namespace, ObjectKey, Shared, url},
    proto::istio::{
        extensions::v1alpha1::{
            FailStrategy, PluginPhase, PluginType, TrafficExtension, TrafficSelector, WasmConfig, WasmPlugin,
            traffic_extension::{ExecutionPhase, FilterConfig},
        },
        r#type::v1beta1::WorkloadMode,
    },
    table::Cx,
};

/// Prefix of the names of filters and their configuration.
pub const RESOURCE_PREFIX: &str = "extensions.istio.io/trafficextension/";
/// Suffix of the names of WasmPlugins.
const TRANSLATED: &str = "~istio-translated-wasmplugin";
/// Longest Lua code that is sent, in bytes.
const MAX_LUA: usize = 64 << 10;
/// Scheme of URLs without one.
const DEFAULT_SCHEME: &str = "oci";

/// Object that declares an extension.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExtensionId {
    /// A WasmPlugin.
    WasmPlugin(ObjectKey),
    /// A TrafficExtension.
    TrafficExtension(ObjectKey),
}

/// Phases of extensions in a filter stack, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExtensionPhase {
    /// Before Istio's authentication.
    Authentication,
    /// Before Istio's authorization.
    Authorization,
    /// Before statistics.
    Stats,
    /// No phase: after the others.
    Unspecified,
}

/// Layer that a filter works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExtensionLayer {
    /// Requests.
    Http,
    /// Connections.
    Network,
}

/// Attributes that decide the position of an extension's filter.
#[derive(Clone, Debug, PartialEq)]
pub struct ExtensionFilter {
    /// `namespace.name`.
    pub name: SmolStr,
    /// Creation time, in seconds since 1970.
    pub creation: i64,
    /// Position among the filters of Istio.
    pub phase: ExtensionPhase,
    /// Priority within a phase, higher first; none last.
    pub priority: Option<i32>,
    /// Traffic selectors, of which one must match; empty for all traffic.
    pub matches: Vec<TrafficSelector>,
    /// The code that the filter runs.
    pub code: ExtensionCode,
}

/// Code of a filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtensionCode {
    /// Wasm, whose configuration is a resource of its own.
    Wasm {
        /// The layer that it works on.
        layer: ExtensionLayer,
        /// True if traffic passes if the plugin does not run.
        fails_open: bool,
        /// True if it refers to an image pull secret.
        pulls_with_secret: bool,
    },
    /// A Lua script for requests.
    Lua(String),
}

impl ExtensionId {
    /// Returns the object's key.
    pub fn object(&self) -> &ObjectKey {
        match self {
            Self::WasmPlugin(key) | Self::TrafficExtension(key) => key,
        }
    }

    /// Returns the namespace of the object.
    pub fn namespace(&self) -> &Namespace {
        &self.object().namespace
    }

    /// Returns `namespace.name`.
    pub fn name(&self) -> SmolStr {
        let key = self.object();
        match self {
            Self::WasmPlugin(_) => format_smolstr!("{}.{}{TRANSLATED}", key.namespace, key.name),
            Self::TrafficExtension(_) => format_smolstr!("{}.{}", key.namespace, key.name),
        }
    }

    /// Returns the metadata of the object and its Wasm configuration.
    pub fn wasm(&self, cx: &Cx, mesh: &MeshSnapshot) -> Option<(Shared<Meta>, WasmConfig)> {
        match self {
            Self::WasmPlugin(key) => {
                let row = mesh.wasm_plugins.get(cx, key)?;
                Some((row.meta.clone(), plugin_config(&row.spec)))
            }
            Self::TrafficExtension(key) => {
                let row = mesh.traffic_extensions.get(cx, key)?;
                match &row.spec.filter_config {
                    Some(FilterConfig::Wasm(config)) => Some((row.meta.clone(), config.clone())),
                    _ => None,
                }
            }
        }
    }
}

impl ExtensionFilter {
    /// Returns the name of the filter, and of the configuration that it requests.
    pub fn resource_name(&self) -> String {
        format!("{RESOURCE_PREFIX}{}", self.name)
    }

    /// Returns the layer that the filter works on.
    pub fn layer(&self) -> ExtensionLayer {
        match self.code {
            ExtensionCode::Wasm { layer, .. } => layer,
            ExtensionCode::Lua(_) => ExtensionLayer::Http,
        }
    }

    /// Returns true if it applies to traffic of this mode through this port. `mode` is [`WorkloadMode::Server`] for
    /// inbound traffic of a sidecar, otherwise [`WorkloadMode::Client`].
    pub fn matches(&self, mode: WorkloadMode, port: u32) -> bool {
        let matches = |selector: &TrafficSelector| {
            let goes = match selector.mode() {
                WorkloadMode::ClientAndServer | WorkloadMode::Undefined => true,
                selected => selected == mode,
            };
            let through = |selected: u32| selected != 0 && selected == port;
            goes && (selector.ports.is_empty() || selector.ports.iter().any(|selected| through(selected.number)))
        };
        self.matches.is_empty() || self.matches.iter().any(matches)
    }
}

/// Derives the row of an extension; `None` if the object is unusable.
pub(super) fn filter(cx: &Cx, mesh: &MeshSnapshot, id: &ExtensionId) -> Option<ExtensionFilter> {
    match id {
        ExtensionId::WasmPlugin(key) => {
            let plugin = mesh.wasm_plugins.get(cx, key)?;
            let matches = plugin.spec.r#match.iter();
            Some(ExtensionFilter {
                name: id.name(),
                creation: plugin.meta.creation,
                phase: match plugin.spec.phase() {
                    PluginPhase::Authn => ExtensionPhase::Authentication,
                    PluginPhase::Authz => ExtensionPhase::Authorization,
                    PluginPhase::Stats => ExtensionPhase::Stats,
                    PluginPhase::UnspecifiedPhase => ExtensionPhase::Unspecified,
                },
                priority: plugin.spec.priority,
                matches: matches
                    .map(|selector| TrafficSelector {
                        mode: selector.mode,
                        ports: selector.ports.clone(),
                    })
                    .collect(),
                code: wasm_code(&plugin_config(&plugin.spec))?,
            })
        }
        ExtensionId::TrafficExtension(key) => {
            let extension: &Config<TrafficExtension> = mesh.traffic_extensions.get(cx, key)?;
            let code = match extension.spec.filter_config.as_ref()? {
                FilterConfig::Wasm(config) => wasm_code(config)?,
                FilterConfig::Lua(lua) if (1..=MAX_LUA).contains(&lua.inline_code.len()) => {
                    ExtensionCode::Lua(lua.inline_code.clone())
                }
                FilterConfig::Lua(_) => return None,
            };
            Some(ExtensionFilter {
                name: id.name(),
                creation: extension.meta.creation,
                phase: match extension.spec.phase() {
                    ExecutionPhase::Authn => ExtensionPhase::Authentication,
                    ExecutionPhase::Authz => ExtensionPhase::Authorization,
                    ExecutionPhase::Stats => ExtensionPhase::Stats,
                    ExecutionPhase::Unspecified => ExtensionPhase::Unspecified,
                },
                priority: extension.spec.priority,
                matches: extension.spec.r#match.clone(),
                code,
            })
        }
    }
}

fn wasm_code(config: &WasmConfig) -> Option<ExtensionCode> {
    module_url(config)?;
    Some(ExtensionCode::Wasm {
        layer: match config.r#type() {
            PluginType::Network => ExtensionLayer::Network,
            PluginType::Http | PluginType::UnspecifiedPluginType => ExtensionLayer::Http,
        },
        fails_open: config.fail_strategy() == FailStrategy::FailOpen,
        pulls_with_secret: !config.image_pull_secret.is_empty(),
    })
}

/// Returns the URL of the module; `None` if it is invalid.
pub fn module_url(config: &WasmConfig) -> Option<url::Url> {
    if config.url.is_empty() {
        return None;
    }
    let mut parsed = url::Url::parse(&config.url)?;
    if parsed.scheme.is_empty() {
        DEFAULT_SCHEME.clone_into(&mut parsed.scheme);
    }
    Some(parsed)
}

/// Returns the Wasm configuration of a WasmPlugin, in the form of TrafficExtensions.
fn plugin_config(plugin: &WasmPlugin) -> WasmConfig {
    WasmConfig {
        url: plugin.url.clone(),
        sha256: plugin.sha256.clone(),
        image_pull_policy: plugin.image_pull_policy,
        image_pull_secret: plugin.image_pull_secret.clone(),
        verification_key: plugin.verification_key.clone(),
        plugin_config: plugin.plugin_config.clone(),
        plugin_name: plugin.plugin_name.clone(),
        fail_strategy: plugin.fail_strategy,
        vm_config: plugin.vm_config.clone(),
        r#type: plugin.r#type,
    }
}

/// Returns the keys whose rows may have changed with the inputs.
pub(super) fn candidates(inputs: &super::inputs::InputWriters) -> Vec<ExtensionId> {
    let plugins = inputs.wasm_plugins.changes().iter();
    let extensions = inputs.traffic_extensions.changes().iter();
    plugins
        .map(|(key, ..)| ExtensionId::WasmPlugin(key.clone()))
        .chain(extensions.map(|(key, ..)| ExtensionId::TrafficExtension(key.clone())))
        .collect()
}
