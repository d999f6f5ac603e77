//! Kubeconfigs of users: checks of what they may request, and their client configuration.
//!
//! The right to write a Secret of the mesh must not include running programs in istiod or sending istiod's files as
//! credentials. The rules follow Istio's sanitisation of kubeconfigs (pkg/kube/multicluster). Note: no message of this
//! module may contain text of the kubeconfig except names of users, contexts, clusters and fields.

use std::{collections::BTreeSet, fmt, path::Path};

use kube::{
    Config,
    config::{AuthInfo, Cluster, KubeConfigOptions, Kubeconfig, KubeconfigError as LoadError},
};
use serde_json::Value;

use crate::base::ClusterId;

/// Largest kubeconfig in bytes: what a Secret can hold.
pub const MAX_KUBECONFIG_BYTES: usize = 1 << 20;

/// Reason why a kubeconfig is refused. Not retryable: its content must change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KubeconfigError {
    /// It is empty.
    #[error("the kubeconfig is empty")]
    Empty,
    /// More than [`MAX_KUBECONFIG_BYTES`].
    #[error("the kubeconfig has more than {MAX_KUBECONFIG_BYTES} bytes")]
    TooLarge,
    /// The text is not YAML, or not a single document.
    #[error("the kubeconfig is not one YAML document (line {line}, column {column})")]
    NotYaml {
        /// Line, from 1.
        line: u64,
        /// Column, from 1.
        column: u64,
    },
    /// A field has the wrong type, or a required one is missing.
    #[error("the kubeconfig is not valid: {field} has the wrong form or lacks a field")]
    Form {
        /// Path of the field.
        field: String,
    },
    /// It requests something that is not allowed.
    #[error("the kubeconfig is not allowed: {0}; hint: PILOT_INSECURE_MULTICLUSTER_KUBECONFIG_OPTIONS permits it")]
    NotAllowed(String),
    /// It is inconsistent.
    #[error("the kubeconfig is not valid: {0}")]
    NotUsable(String),
}

/// A checked kubeconfig. Its content is never printed.
#[derive(Clone)]
pub struct CheckedKubeconfig(Kubeconfig);

impl CheckedKubeconfig {
    /// Checks a kubeconfig. `allowed` has exceptions from the rules, by the name of the field or of the auth provider
    /// (`PILOT_INSECURE_MULTICLUSTER_KUBECONFIG_OPTIONS`).
    pub fn of(mut value: Value, allowed: &BTreeSet<String>) -> Result<Self, KubeconfigError> {
        if value.is_null() {
            return Err(KubeconfigError::Empty);
        }
        drop_empty_texts(&mut value);
        let config: Kubeconfig = serde_path_to_error::deserialize(value).map_err(|error| KubeconfigError::Form {
            field: error.path().to_string(),
        })?;
        for user in &config.auth_infos {
            if let Some(info) = &user.auth_info {
                allow(info, allowed).map_err(KubeconfigError::NotAllowed)?;
            }
        }
        usable(&config).map_err(KubeconfigError::NotUsable)?;
        Ok(Self(config))
    }

    /// Returns the client configuration: server, credentials and certificates of the current context.
    pub async fn client_config(&self) -> Result<Config, KubeconfigError> {
        let loaded = client_config(self.0.clone(), &KubeConfigOptions::default()).await;
        loaded.map_err(|error| KubeconfigError::NotUsable(problem_of(&error).to_owned()))
    }

    /// Returns the cluster of the current context.
    pub fn cluster(&self) -> ClusterId {
        let current = self.0.current_context.as_deref();
        let contexts = self.0.contexts.iter();
        let found = contexts.filter(|context| Some(context.name.as_str()) == current);
        let mut clusters = found.filter_map(|context| context.context.as_ref());
        clusters
            .next()
            .map_or_else(ClusterId::default, |context| ClusterId::new(&context.cluster))
    }
}

impl fmt::Debug for CheckedKubeconfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CheckedKubeconfig").field(&self.cluster()).finish()
    }
}

/// Returns the client configuration. A proxy counts only if the kubeconfig names it: the library alone would also read
/// one from the environment, which only `settings` may do.
pub async fn client_config(kubeconfig: Kubeconfig, options: &KubeConfigOptions) -> Result<Config, LoadError> {
    let current = options.context.clone().or_else(|| kubeconfig.current_context.clone());
    let cluster = cluster_of(&kubeconfig, current.as_deref().unwrap_or_default());
    let has_proxy = cluster.is_some_and(|cluster| cluster.proxy_url.as_ref().is_some_and(|url| !url.is_empty()));
    let mut config = Config::from_custom_kubeconfig(kubeconfig, options).await?;
    if !has_proxy {
        config.proxy_url = None;
    }
    Ok(config)
}

/// Returns the client configuration that flags of a command select: of this file, or of `KUBECONFIG` and then
/// `~/.kube/config`, and of this context, or the current one.
pub async fn selected_config(file: Option<&Path>, context: Option<&str>) -> Result<Config, LoadError> {
    let kubeconfig = match file {
        Some(path) => Kubeconfig::read_from(path)?,
        None => Kubeconfig::read()?,
    };
    let options = KubeConfigOptions {
        context: context.map(str::to_owned),
        ..KubeConfigOptions::default()
    };
    client_config(kubeconfig, &options).await
}

/// Returns the cluster of a context.
fn cluster_of<'a>(kubeconfig: &'a Kubeconfig, context: &str) -> Option<&'a Cluster> {
    let named = kubeconfig.contexts.iter().find(|named| named.name == context)?;
    let cluster = &named.context.as_ref()?.cluster;
    kubeconfig
        .clusters
        .iter()
        .find(|named| named.name == *cluster)?
        .cluster
        .as_ref()
}

/// Removes empty texts, which count as unset; the client would use some of them.
fn drop_empty_texts(value: &mut Value) {
    let Some(users) = value.get_mut("users").and_then(Value::as_array_mut) else {
        return;
    };
    for user in users {
        if let Some(fields) = user.get_mut("user").and_then(Value::as_object_mut) {
            fields.retain(|_, field| field.as_str() != Some(""));
        }
    }
}

fn allow(info: &AuthInfo, allowed: &BTreeSet<String>) -> Result<(), String> {
    if let Some(provider) = &info.auth_provider
        && provider.name != "oidc"
        && !allowed.contains(&provider.name)
    {
        return Err(format!("auth provider {} is not allowed", provider.name));
    }
    let fields = [
        ("clientKey", info.client_key.is_some()),
        ("clientCertificate", info.client_certificate.is_some()),
        ("tokenFile", info.token_file.is_some()),
        ("exec", info.exec.is_some()),
    ];
    for (field, is_given) in fields {
        if is_given && !allowed.contains(field) {
            return Err(format!("{field} is not allowed"));
        }
    }
    Ok(())
}

fn usable(config: &Kubeconfig) -> Result<(), String> {
    for (what, mut names) in [
        (
            "users",
            config.auth_infos.iter().map(|user| &user.name).collect::<Vec<_>>(),
        ),
        (
            "contexts",
            config.contexts.iter().map(|context| &context.name).collect(),
        ),
        (
            "clusters",
            config.clusters.iter().map(|cluster| &cluster.name).collect(),
        ),
    ] {
        names.sort_unstable();
        if let Some([name, ..]) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("two {what} have the name {name:?}"));
        }
    }
    let current = config.current_context.as_deref().unwrap_or_default();
    if current.is_empty() {
        return Err("it has no current-context".to_owned());
    }
    let mut contexts = config.contexts.iter();
    let context = contexts
        .find(|context| context.name == current)
        .and_then(|context| context.context.as_ref());
    let Some(context) = context else {
        return Err(format!("current-context {current:?} is not one of the contexts"));
    };
    let mut clusters = config.clusters.iter();
    let cluster = clusters
        .find(|cluster| cluster.name == context.cluster)
        .and_then(|cluster| cluster.cluster.as_ref());
    let Some(cluster) = cluster else {
        return Err(format!(
            "cluster {:?} of current-context is not one of the clusters",
            context.cluster
        ));
    };
    if cluster.server.as_deref().unwrap_or_default().is_empty() {
        return Err(format!("the cluster {:?} has no server", context.cluster));
    }
    let user = context.user.as_deref().unwrap_or_default();
    if !user.is_empty() && !config.auth_infos.iter().any(|info| info.name == user) {
        return Err(format!("user {user:?} of current-context is not one of the users"));
    }
    Ok(())
}

/// Describes an error without the library's message, which may quote the kubeconfig.
fn problem_of(error: &LoadError) -> &'static str {
    match error {
        LoadError::ParseClusterUrl(_) => "server is no URL",
        LoadError::ParseProxyUrl(_) => "proxy-url is no URL",
        LoadError::LoadCertificateAuthority(_) | LoadError::ParseCertificates(_) => {
            "the certificate authority cannot be read"
        }
        LoadError::LoadClientCertificate(_) => "the client certificate is not there or cannot be read",
        LoadError::LoadClientKey(_) => "the client key is not there or cannot be read",
        _ => "the current context cannot be used",
    }
}

#[cfg(test)]
mod tests;
