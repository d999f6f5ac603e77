//! The part of istio-agent between the daemon and Envoy that fetches the code of Wasm plugins and gives Envoy a local
//! copy. This one fetches nothing: it inserts the smallest module that Envoy accepts.

use bytes::Bytes;
use istiod::proto::Any;
use istiod::proto::envoy::config::core::v3::async_data_source::Specifier as Source;
use istiod::proto::envoy::config::core::v3::data_source::Specifier;
use istiod::proto::envoy::config::core::v3::{AsyncDataSource, DataSource, TypedExtensionConfig};
use istiod::proto::envoy::extensions::filters::{http, network};
use istiod::proto::envoy::extensions::wasm::v3::{PluginConfig, plugin_config::Vm};
use istiod::proto::envoy::service::discovery::v3::DeltaDiscoveryResponse;

/// A module with memory, the ABI version marker and an allocator that always fails.
const MODULE: &[u8] = b"\0asm\x01\0\0\0\
    \x01\x09\x02\x60\0\0\x60\x01\x7f\x01\x7f\
    \x03\x03\x02\0\x01\
    \x05\x03\x01\0\x01\
    \x07\x2d\x03\x06memory\x02\0\x17proxy_abi_version_0_2_1\0\0\x06malloc\0\x01\
    \x0a\x09\x02\x02\0\x0b\x04\0\x41\0\x0b";

/// Replaces remote code in a response. Responses without extensions are unchanged.
pub(super) fn fetch(response: &mut DeltaDiscoveryResponse) {
    for resource in &mut response.resources {
        if let Some(fetched) = resource.resource.as_ref().and_then(with_code) {
            resource.resource = Some(fetched);
        }
    }
}

fn with_code(resource: &Any) -> Option<Any> {
    let mut extension: TypedExtensionConfig = resource.unpack().ok()??;
    let config = extension.typed_config.as_ref()?;
    let fetched = if let Ok(Some(mut wasm)) = config.unpack::<http::wasm::v3::Wasm>() {
        replace(wasm.config.as_mut()?)?;
        Any::pack(&wasm)
    } else {
        let mut wasm: network::wasm::v3::Wasm = config.unpack().ok()??;
        replace(wasm.config.as_mut()?)?;
        Any::pack(&wasm)
    };
    extension.typed_config = Some(fetched);
    Some(Any::pack(&extension))
}

fn replace(config: &mut PluginConfig) -> Option<()> {
    let Some(Vm::VmConfig(vm)) = &mut config.vm else {
        return None;
    };
    let code = vm.code.as_mut()?;
    matches!(code.specifier, Some(Source::Remote(_))).then(|| {
        *code = AsyncDataSource {
            specifier: Some(Source::Local(DataSource {
                specifier: Some(Specifier::InlineBytes(Bytes::from_static(MODULE))),
                ..Default::default()
            })),
        };
    })
}
