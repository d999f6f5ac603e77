//! Kubeconfigs that somebody else wrote: what they may ask of us, and the client configuration they stand for.
//!
//! Whoever may write a Secret of the mesh must not thereby be able to run programs in istiod or to send istiod's own files
//! away as credentials. Source of the rules: Istio's sanitation of kubeconfigs. What a reader would get wrong: no message
//! of this module may hold anything that stood in the kubeconfig but names of users, contexts, clusters and fields.

use std::{collections::BTreeSet, fmt};

use kube::{
    Config,
    config::{AuthInfo, Cluster, KubeConfigOptions, Kubeconfig, KubeconfigError as LoadError},
};
use serde_json::Value;

use crate::base::ClusterId;

/// The largest kubeconfig, in bytes: what a Secret can hold.
pub const MAX_KUBECONFIG_BYTES: usize = 1 << 20;

/// Why a kubeconfig is refused. Never retryable: its content has to change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KubeconfigError {
    /// Nothing is there.
    #[error("the kubeconfig is empty")]
    Empty,
    /// More than [`MAX_KUBECONFIG_BYTES`].
    #[error("the kubeconfig has more than {MAX_KUBECONFIG_BYTES} bytes")]
    TooLarge,
    /// The text is no YAML, or not one document of it.
    #[error("the kubeconfig is not one YAML document (line {line}, column {column})")]
    NotYaml {
        /// The line, from 1.
        line: u64,
        /// The column, from 1.
        column: u64,
    },
    /// A field has a form that it cannot have, or a needed one is not there.
    #[error("the kubeconfig is not valid: {field} has the wrong form or lacks a field")]
    Form {
        /// The path of the field.
        field: String,
    },
    /// Something that others may not ask of us.
    #[error("the kubeconfig is not allowed: {0}")]
    NotAllowed(String),
    /// Its parts do not fit together.
    #[error("the kubeconfig is not valid: {0}")]
    NotUsable(String),
}

/// A kubeconfig that passed the checks. Its content never prints.
#[derive(Clone)]
pub struct CheckedKubeconfig(Kubeconfig);

impl CheckedKubeconfig {
    /// Checks a kubeconfig. `allowed` holds what is allowed in spite of the rules, by the name of the field or of the auth
    /// provider (`PILOT_INSECURE_MULTICLUSTER_KUBECONFIG_OPTIONS`).
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

    /// The configuration of a client: the current context's server, credentials and certificates.
    pub async fn client_config(&self) -> Result<Config, KubeconfigError> {
        let loaded = client_config(self.0.clone(), &KubeConfigOptions::default()).await;
        loaded.map_err(|error| KubeconfigError::NotUsable(what_fails(&error).to_owned()))
    }

    /// The cluster of the current context.
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

/// The configuration of a client. A proxy counts if the kubeconfig names it: the library alone would also take one from the
/// environment, of which only `settings` may know.
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

/// The cluster of a context.
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

/// Empty texts mean that nothing is given; the client would take some of them at their word.
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
        return Err(format!("its current-context {current:?} is none of its contexts"));
    };
    let mut clusters = config.clusters.iter();
    let cluster = clusters
        .find(|cluster| cluster.name == context.cluster)
        .and_then(|cluster| cluster.cluster.as_ref());
    let Some(cluster) = cluster else {
        return Err(format!(
            "the cluster {:?} of its current-context is none of its clusters",
            context.cluster
        ));
    };
    if cluster.server.as_deref().unwrap_or_default().is_empty() {
        return Err(format!("the cluster {:?} has no server", context.cluster));
    }
    let user = context.user.as_deref().unwrap_or_default();
    if !user.is_empty() && !config.auth_infos.iter().any(|info| info.name == user) {
        return Err(format!("the user {user:?} of its current-context is none of its users"));
    }
    Ok(())
}

/// The library's messages may quote what they could not read.
fn what_fails(error: &LoadError) -> &'static str {
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
