//! Configuration of Wasm filters.

use std::collections::BTreeMap;

use super::{json, pull_secret};
use crate::{
    api::Meta,
    base::ClusterId,
    generate::{
        BuildContext, EncodedResource,
        resource::{Built, Note},
    },
    model::extension::{self, ExtensionId, RESOURCE_PREFIX},
    proto::{
        Any,
        envoy::{
            config::core::v3::{
                AsyncDataSource, DataSource, HttpUri, RemoteDataSource, TypedExtensionConfig, async_data_source,
                data_source, http_uri::HttpUpstreamType,
            },
            extensions::{
                filters::{http, network},
                wasm::v3::{EnvironmentVariables, FailurePolicy, PluginConfig, VmConfig, plugin_config::Vm},
            },
        },
        istio::extensions::v1alpha1::{EnvValueSource, FailStrategy, PluginType, PullPolicy, WasmConfig},
    },
};

/// Runtime of modules.
const RUNTIME: &str = "envoy.wasm.runtime.v8";
/// Timeout for fetching a module, in seconds.
const FETCH_TIMEOUT_SECONDS: i64 = 30;
/// Variable that tells the agent the pull credentials.
const PULL_SECRET: &str = "ISTIO_META_WASM_IMAGE_PULL_SECRET";
/// Variable that tells the agent when to pull.
const PULL_POLICY: &str = "ISTIO_META_WASM_IMAGE_PULL_POLICY";
/// Variable that tells the agent that the object has changed.
const RESOURCE_VERSION: &str = "ISTIO_META_WASM_PLUGIN_RESOURCE_VERSION";

/// Builds the resource of a plugin.
pub(super) fn wasm(ctx: &BuildContext, id: &ExtensionId, secret_for: Option<&ClusterId>) -> Built {
    let Some((meta, config)) = id.wasm(ctx.cx, ctx.mesh) else {
        return Built::none();
    };
    let mut environment = environment(&meta, &config);
    let note = fill_in_secret(ctx, &mut environment, &meta, &config, secret_for);
    let Some(plugin) = plugin(id, &config, environment) else {
        return Built::none();
    };
    let typed_config = match config.r#type() {
        PluginType::Network => Any::pack(&network::wasm::v3::Wasm { config: Some(plugin) }),
        PluginType::Http | PluginType::UnspecifiedPluginType => {
            Any::pack(&http::wasm::v3::Wasm { config: Some(plugin) })
        }
    };
    let name = format!("{RESOURCE_PREFIX}{}", id.name());
    let resource = TypedExtensionConfig {
        name: name.clone(),
        typed_config: Some(typed_config),
    };
    Built::new(EncodedResource::new(name, &resource)).with_notes(note.into_iter().collect())
}

fn plugin(id: &ExtensionId, config: &WasmConfig, environment: EnvironmentVariables) -> Option<PluginConfig> {
    let settings = config.plugin_config.as_ref();
    let settings = settings.filter(|settings| !settings.fields.is_empty());
    let failure_policy = match config.fail_strategy() {
        FailStrategy::FailClose => FailurePolicy::FailClosed,
        FailStrategy::FailOpen => FailurePolicy::FailOpen,
        FailStrategy::FailReload => FailurePolicy::FailReload,
    };
    Some(PluginConfig {
        name: id.name().to_string(),
        root_id: config.plugin_name.clone(),
        // An empty configuration means that there are no settings.
        configuration: Some(settings.map_or_else(Any::default, |settings| Any::pack(&json::object(settings)))),
        failure_policy: failure_policy.into(),
        vm: Some(Vm::VmConfig(VmConfig {
            runtime: RUNTIME.to_owned(),
            code: Some(code(config)?),
            environment_variables: Some(environment),
            ..Default::default()
        })),
        ..Default::default()
    })
}

/// Returns the source of the module: a file, or a URL that the agent fetches. Envoy fetches nothing itself, so the
/// cluster name has no meaning.
fn code(config: &WasmConfig) -> Option<AsyncDataSource> {
    let url = extension::module_url(config)?;
    let specifier = if url.scheme == "file" {
        let path = config.url.strip_prefix("file://").unwrap_or(&config.url);
        async_data_source::Specifier::Local(DataSource {
            specifier: Some(data_source::Specifier::Filename(path.to_owned())),
            ..Default::default()
        })
    } else {
        async_data_source::Specifier::Remote(RemoteDataSource {
            http_uri: Some(HttpUri {
                uri: url.to_string(),
                timeout: Some(prost_types::Duration {
                    seconds: FETCH_TIMEOUT_SECONDS,
                    nanos: 0,
                }),
                http_upstream_type: Some(HttpUpstreamType::Cluster("_".to_owned())),
            }),
            sha256: config.sha256.clone(),
            ..Default::default()
        })
    };
    Some(AsyncDataSource {
        specifier: Some(specifier),
    })
}

/// Returns the variables of the module: those for the agent, overridden by those of the object.
fn environment(meta: &Meta, config: &WasmConfig) -> EnvironmentVariables {
    let mut key_values = BTreeMap::from([(RESOURCE_VERSION.to_owned(), meta.resource_version.to_string())]);
    if let Some(secret) = pull_secret::resource_name(&config.image_pull_secret, meta.namespace()) {
        key_values.insert(PULL_SECRET.to_owned(), secret);
    }
    if config.image_pull_policy() != PullPolicy::UnspecifiedPolicy {
        let policy = config.image_pull_policy().as_str_name();
        key_values.insert(PULL_POLICY.to_owned(), policy.to_owned());
    }
    let mut host_env_keys = Vec::new();
    for variable in config.vm_config.iter().flat_map(|vm| &vm.env) {
        match variable.value_from() {
            EnvValueSource::Inline => {
                key_values.insert(variable.name.clone(), variable.value.clone());
            }
            EnvValueSource::Host => host_env_keys.push(variable.name.clone()),
        }
    }
    EnvironmentVariables {
        host_env_keys,
        key_values,
    }
}

/// Replaces the Secret's name by its credentials, or removes the variable if they are missing or not allowed for this
/// proxy. The name is never sent. Returns the note that they are missing.
fn fill_in_secret(
    ctx: &BuildContext,
    environment: &mut EnvironmentVariables,
    meta: &Meta,
    config: &WasmConfig,
    secret_for: Option<&ClusterId>,
) -> Option<Note> {
    let value = environment.key_values.get_mut(PULL_SECRET)?;
    let own = pull_secret::resource_name(&config.image_pull_secret, meta.namespace());
    // A variable set by the object itself may name a Secret that the object must not use.
    let asked = secret_for.filter(|_| own.as_deref() == Some(value.as_str()));
    let Some(cluster) = asked else {
        value.clear();
        return None;
    };
    let content = pull_secret::docker_config(ctx, value, cluster);
    let note = content.is_none().then(|| Note {
        code: "wasm_pull_secret_missing",
        detail: format!("{value} of {} {}", meta.kind.name(), meta.key).into(),
    });
    *value = String::from_utf8_lossy(content.unwrap_or_default().reveal()).into_owned();
    note
}
