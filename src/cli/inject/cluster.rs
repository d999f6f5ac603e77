//! Reads the injector's configuration and the mesh config from a cluster.

use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::{Api, Client, api::ListParams};

use super::{InjectCommandError, InjectFlags, Sources};
use crate::{
    inject::kubelet_minor,
    kube::{
        client::{self, Access, Rate},
        kubeconfig::selected_config,
    },
};

/// Reads the ConfigMaps of the revision, and the versions of all kubelets.
pub(super) fn read(flags: &InjectFlags) -> Result<Sources, InjectCommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(super::file_error(std::path::Path::new("tokio")))?;
    runtime.block_on(request(flags))
}

async fn request(flags: &InjectFlags) -> Result<Sources, InjectCommandError> {
    let client = connect(flags).await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &flags.istio_namespace);
    let injector = config_map(&maps, flags, &flags.inject_config_map_name).await?;
    let mesh = config_map(&maps, flags, &flags.mesh_config_map_name).await?;
    let nodes: Api<Node> = Api::all(client);
    let nodes = nodes
        .list(&ListParams::default())
        .await
        .map_err(|error| request_error("nodes", &error))?;
    let kubelets = nodes.items.into_iter().filter_map(|node| {
        let info = node.status.and_then(|status| status.node_info);
        let version = info.map(|info| info.kubelet_version).unwrap_or_default();
        Some((node.metadata.name?, kubelet_minor(&version)))
    });
    Ok(Sources {
        config: key(&injector, "config")?,
        values: key(&injector, "values")?,
        mesh: key(&mesh, "mesh")?,
        kubelets: kubelets.collect(),
    })
}

async fn connect(flags: &InjectFlags) -> Result<Client, InjectCommandError> {
    client::install_cryptography();
    let config = selected_config(flags.kubeconfig.as_deref(), flags.context.as_deref()).await?;
    Ok(client::client(&Access::Given(Box::new(config)), Rate::UNLIMITED).await?)
}

/// Reads a ConfigMap of the revision. That of the default one has no suffix.
async fn config_map(maps: &Api<ConfigMap>, flags: &InjectFlags, name: &str) -> Result<ConfigMap, InjectCommandError> {
    let name = match flags.revision.as_str() {
        "" | "default" => name.to_owned(),
        revision => format!("{name}-{revision}"),
    };
    let what = format!("ConfigMap {}/{name}", flags.istio_namespace);
    maps.get(&name).await.map_err(|error| request_error(&what, &error))
}

fn request_error(what: &str, error: &kube::Error) -> InjectCommandError {
    InjectCommandError::Request {
        what: what.to_owned(),
        message: client::message(error),
    }
}

fn key(map: &ConfigMap, key: &'static str) -> Result<String, InjectCommandError> {
    let text = map.data.as_ref().and_then(|data| data.get(key)).cloned();
    text.ok_or_else(|| InjectCommandError::NoKey {
        namespace: map.metadata.namespace.clone().unwrap_or_default(),
        name: map.metadata.name.clone().unwrap_or_default(),
        key,
    })
}
