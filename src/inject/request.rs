//! One injection: a pod, what its treatment depends on, and the state between the steps.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::Value as Json;

use super::{
    InjectError,
    annotations::{PROXY_CONFIG, proxy_config_value},
    config::Config,
    environment::{CLUSTER_VARIABLE, Environment, Mesh, NETWORK_VARIABLE},
    owner::Owner,
    pod,
};
use crate::{
    api::{label::NETWORK, mesh_config},
    proto::istio::mesh::v1alpha1::ProxyConfig,
};

/// The pod after rendering.
pub(super) struct Rendered {
    /// The pod merged with all overlays.
    pub(super) pod: Json,
    /// The overlays merged with each other: what the templates contributed.
    pub(super) template: Arc<Json>,
}

/// One injection: a pod and what its treatment depends on.
pub(super) struct Request<'a> {
    pub(super) config: &'a Config,
    pub(super) environment: &'a Environment,
    /// The pod before injection.
    pub(super) pod: &'a Json,
    pub(super) owner: &'a Owner,
    /// The proxy config of the pod; `None` for that of the mesh.
    pub(super) proxy_config: Option<ProxyConfig>,
    /// Variables that the proxy gets, with its cluster and network.
    pub(super) proxy_variables: BTreeMap<String, String>,
}

impl<'a> Request<'a> {
    pub(super) fn new(
        config: &'a Config,
        environment: &'a Environment,
        pod: &'a Json,
        owner: &'a Owner,
    ) -> Result<Self, InjectError> {
        Ok(Self {
            config,
            environment,
            pod,
            owner,
            proxy_config: proxy_config(environment, pod)?,
            proxy_variables: proxy_variables(config, environment, pod),
        })
    }

    pub(super) fn mesh(&self) -> &Mesh {
        &self.environment.mesh
    }

    /// Returns the proxy config of the pod.
    pub(super) fn proxy_config(&self) -> &ProxyConfig {
        self.proxy_config
            .as_ref()
            .unwrap_or(&self.environment.mesh.default_config)
    }

    /// Returns the revision; `default` for the default one.
    pub(super) fn revision(&self) -> &str {
        match self.environment.revision.as_str() {
            "" => "default",
            revision => revision,
        }
    }
}

/// Returns the proxy config of a pod if it differs from that of the mesh.
///
/// Parity (pilot/pkg/model/proxy_config.go): the annotation precedes resources for all workloads, and the resource that
/// selects the pod precedes the annotation. But values that protobuf omits, such as the mode `REDIRECT`, count: Istio
/// loses them where it merges.
fn proxy_config(environment: &Environment, pod: &Json) -> Result<Option<ProxyConfig>, InjectError> {
    let (namespace, labels) = (pod::metadata(pod, "namespace"), pod::labels(pod));
    let Some(text) = pod::annotation(pod, PROXY_CONFIG) else {
        return Ok(environment.resource_proxy_config(namespace, &labels));
    };
    let invalid = |reason: String| InjectError::Annotations(vec![format!("annotation {PROXY_CONFIG}: {reason}")]);
    let overlay = proxy_config_value(text).map_err(invalid)?;
    let general = environment.general_proxy_configs(namespace);
    let base = mesh_config::effective_proxy_config(&environment.mesh.default_config, &general);
    let config = mesh_config::lay_over_proxy_config(&base, &overlay).map_err(|error| invalid(error.to_string()))?;
    let selecting = environment.selecting_proxy_config(namespace, &labels);
    Ok(Some(mesh_config::effective_proxy_config(&config, selecting.as_slice())))
}

/// Returns the variables from the path, and cluster and network: of the pod, the path, or the values.
fn proxy_variables(config: &Config, environment: &Environment, pod: &Json) -> BTreeMap<String, String> {
    let mut variables = environment.proxy_variables.clone();
    let mut set = |name: &str, value: &str| {
        if !value.is_empty() && variables.get(name).is_none_or(String::is_empty) {
            variables.insert(name.to_owned(), value.to_owned());
        }
    };
    set(CLUSTER_VARIABLE, config.values.cluster());
    set(NETWORK_VARIABLE, config.values.network());
    if let Some(network) = pod::label(pod, NETWORK).filter(|network| !network.is_empty()) {
        variables.insert(NETWORK_VARIABLE.to_owned(), network.to_owned());
    }
    variables
}
