//! Validation of WasmPlugins and TrafficExtensions.

use std::collections::BTreeSet;

use super::{common, field_path::FieldPath};
use crate::{
    api::Meta,
    base::url::Url,
    proto::istio::{
        extensions::v1alpha1::{
            EnvValueSource, TrafficExtension, VmConfig, WasmConfig, WasmPlugin, traffic_extension::FilterConfig,
        },
        r#type::v1beta1::PortSelector,
    },
};

/// The maximum length of Lua code, in bytes.
const MAX_LUA: usize = 64 << 10;
/// The maximum length of the name of a Secret, in bytes.
const MAX_SECRET: usize = 253;
/// The maximum length of the name of a plugin or a variable, in bytes.
const MAX_NAME: usize = 256;

/// Checks a WasmPlugin.
pub fn wasm_plugin(at: &FieldPath<'_>, plugin: &WasmPlugin, _meta: &Meta) {
    common::attachment(
        at,
        plugin.selector.as_ref(),
        plugin.target_ref.as_ref(),
        &plugin.target_refs,
    );
    wasm(
        at,
        &Wasm {
            url: &plugin.url,
            sha256: &plugin.sha256,
            pull_secret: &plugin.image_pull_secret,
            plugin_name: &plugin.plugin_name,
            vm: plugin.vm_config.as_ref(),
        },
    );
    at.each("match", &plugin.r#match, |at, selector| ports(at, &selector.ports));
}

/// Checks a TrafficExtension.
pub fn traffic_extension(at: &FieldPath<'_>, extension: &TrafficExtension, _meta: &Meta) {
    common::attachment(at, extension.selector.as_ref(), None, &extension.target_refs);
    match &extension.filter_config {
        Some(FilterConfig::Wasm(config)) => wasm(&at.field("wasm"), &Wasm::of(config)),
        Some(FilterConfig::Lua(lua)) => {
            let length = lua.inline_code.len();
            let lua_at = at.field("lua");
            let at = lua_at.field("inlineCode");
            at.require(length > 0, "is required");
            at.require(length <= MAX_LUA, "has more than 65536 bytes");
        }
        None => at.error("needs wasm or lua"),
    }
    at.each("match", &extension.r#match, |at, selector| ports(at, &selector.ports));
}

fn ports(at: &FieldPath<'_>, ports: &[PortSelector]) {
    at.each("ports", ports, |at, port| {
        let is_port = (1..=u32::from(u16::MAX)).contains(&port.number);
        at.field("number")
            .require_on_admission(is_port, "is not a port, want 1 to 65535");
    });
}

/// Checks the fields that both kinds have.
struct Wasm<'a> {
    url: &'a str,
    sha256: &'a str,
    pull_secret: &'a str,
    plugin_name: &'a str,
    vm: Option<&'a VmConfig>,
}

impl<'a> Wasm<'a> {
    fn of(config: &'a WasmConfig) -> Self {
        Self {
            url: &config.url,
            sha256: &config.sha256,
            pull_secret: &config.image_pull_secret,
            plugin_name: &config.plugin_name,
            vm: config.vm_config.as_ref(),
        }
    }
}

/// Returns the scheme of a module's URL as admission reads it: `http` for a text that is neither a URL nor a path, but
/// a URL with `http://` before it. `None` if it is invalid.
///
/// Parity (pkg/config/validation/validation.go, `strictParseURL`): admission accepts addresses with a port, for which
/// generation configures no module.
fn admitted_scheme(text: &str) -> Option<String> {
    let is_path = text.starts_with('/') || text == "*";
    let written = Url::parse(text).map(|url| url.scheme);
    match written {
        Some(scheme) if is_path || !scheme.is_empty() => Some(scheme),
        _ if is_path => None,
        _ => Url::parse(&format!("http://{text}")).map(|url| url.scheme),
    }
}

fn wasm(at: &FieldPath<'_>, wasm: &Wasm<'_>) {
    let url = at.field("url");
    url.require(!wasm.url.is_empty(), "is required");
    match (admitted_scheme(wasm.url), Url::parse(wasm.url)) {
        (Some(scheme), parsed) => {
            url.require_on_admission(
                matches!(scheme.as_str(), "" | "http" | "https" | "oci" | "file"),
                "want http, https, oci or file",
            );
            if parsed.is_none() {
                url.warning(
                    "is not a URL, so the module is not loaded; hint: write oci:// before an address with a port",
                );
            }
        }
        (None, Some(_)) => url.refuse("is not a URL"),
        (None, None) => url.error("is not a URL"),
    }
    let hex = wasm
        .sha256
        .bytes()
        .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    at.field("sha256").require_on_admission(
        wasm.sha256.is_empty() || wasm.sha256.len() == 64 && hex,
        "want 64 hexadecimal digits in lower case",
    );
    at.field("imagePullSecret")
        .require_on_admission(wasm.pull_secret.len() <= MAX_SECRET, "is too long");
    at.field("pluginName")
        .require_on_admission(wasm.plugin_name.len() <= MAX_NAME, "is too long");
    let vm_at = at.field("vmConfig");
    let mut names = BTreeSet::new();
    vm_at.each("env", wasm.vm.iter().flat_map(|vm| &vm.env), |at, variable| {
        let name = at.field("name");
        name.require_on_admission(!variable.name.is_empty(), "is required");
        name.require_on_admission(variable.name.len() <= MAX_NAME, "is too long");
        name.require_on_admission(names.insert(&variable.name), "is a duplicate");
        let inline = variable.value_from == EnvValueSource::Inline as i32;
        at.field("value")
            .require_on_admission(inline || variable.value.is_empty(), "counts with valueFrom INLINE only");
    });
}
