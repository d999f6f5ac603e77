//! Secrets of the control plane's namespace: watch, create, replace. A trait, so that tests can race replicas against a
//! store in memory.

use std::collections::BTreeMap;

use ::kube::{
    Api, Client,
    core::{ApiResource, params::PostParams},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use k8s_openapi::{ByteString, api::core::v1 as core};
use smol_str::{SmolStr, ToSmolStr};
use tokio::sync::mpsc;

use crate::{
    base::{ClusterId, Sensitive},
    kube::{
        Object,
        client::limited,
        health::{WatchHealth, WatchMetrics},
        watch::{WatchEvent, WatchTarget, watch_as},
    },
};

/// The type of Secrets with a self-signed root.
const SECRET_TYPE: &str = "istio.io/ca-root";

/// A Secret. Its values are redacted in debug output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secret {
    /// Its name.
    pub name: SmolStr,
    /// Its resource version; empty for a new one.
    pub version: String,
    /// Its data.
    pub data: BTreeMap<SmolStr, Sensitive>,
}

/// A failed write of a Secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// The Secret exists already, or has changed. The present one must be used.
    #[error("the Secret was written concurrently")]
    Conflict,
    /// Any other error. Retryable: the API server may be unavailable, or permissions may be added.
    #[error("{0}")]
    Failed(String),
}

/// A store of Secrets.
pub trait SecretStore: Send + Sync {
    /// Watches one Secret: sends its present state (`None` if absent), then every change. Sends nothing while the state
    /// is unknown. Ends when the receiver is dropped.
    fn watch(&self, name: &'static str, sender: mpsc::Sender<Option<Secret>>) -> BoxFuture<'static, ()>;
    /// Creates a Secret.
    fn create(&self, secret: Secret) -> BoxFuture<'_, Result<(), SecretError>>;
    /// Replaces the data of a Secret if its resource version is unchanged.
    fn replace(&self, secret: Secret) -> BoxFuture<'_, Result<(), SecretError>>;
}

/// Secrets of a namespace, in the API server.
#[derive(Clone)]
pub struct KubernetesSecretStore {
    /// The client of the config cluster.
    pub client: Client,
    /// The config cluster, for metrics.
    pub cluster: ClusterId,
    /// The control plane's namespace.
    pub namespace: String,
    /// Watch metrics.
    pub metrics: WatchMetrics,
}

impl KubernetesSecretStore {
    fn api(&self) -> Api<core::Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}

impl SecretStore for KubernetesSecretStore {
    fn watch(&self, name: &'static str, sender: mpsc::Sender<Option<Secret>>) -> BoxFuture<'static, ()> {
        let (event_sender, mut events) = mpsc::channel(4);
        let resource = ApiResource::erase::<core::Secret>(&());
        let target = WatchTarget {
            namespace: Some(self.namespace.clone()),
            fields: Some(format!("metadata.name={name}")),
            ..WatchTarget::all(resource)
        };
        let health = WatchHealth::new(&self.cluster, &target.name(), &self.metrics);
        let watching = watch_as(self.client.clone(), target, health, read, event_sender);
        let forwarding = async move {
            while let Some(event) = events.recv().await {
                let present = match event {
                    WatchEvent::Restarted(all) => all.into_iter().next(),
                    WatchEvent::Applied(secret) => Some(secret),
                    WatchEvent::Deleted(_) => None,
                };
                if sender.send(present).await.is_err() {
                    return;
                }
            }
        };
        async move {
            tokio::select! {
                () = watching => {}
                () = forwarding => {}
            }
        }
        .boxed()
    }

    fn create(&self, secret: Secret) -> BoxFuture<'_, Result<(), SecretError>> {
        async move {
            let mut object = core::Secret {
                type_: Some(SECRET_TYPE.into()),
                data: Some(data(&secret)),
                ..core::Secret::default()
            };
            object.metadata.name = Some(secret.name.to_string());
            object.metadata.namespace = Some(self.namespace.clone());
            let api = self.api();
            let created = limited(api.create(&PostParams::default(), &object)).await;
            created.map(|_| ()).map_err(|error| write_error(&error))
        }
        .boxed()
    }

    fn replace(&self, secret: Secret) -> BoxFuture<'_, Result<(), SecretError>> {
        async move {
            let api = self.api();
            // Keep labels, owners and other fields.
            let found = limited(api.get(&secret.name)).await;
            let mut object = found.map_err(|error| write_error(&error))?;
            if object.metadata.resource_version.as_ref() != Some(&secret.version) {
                return Err(SecretError::Conflict);
            }
            object.data = Some(data(&secret));
            let replaced = limited(api.replace(&secret.name, &PostParams::default(), &object)).await;
            replaced.map(|_| ()).map_err(|error| write_error(&error))
        }
        .boxed()
    }
}

fn data(secret: &Secret) -> BTreeMap<String, ByteString> {
    let data = secret.data.iter();
    data.map(|(key, value)| (key.to_string(), ByteString(value.reveal().to_vec())))
        .collect()
}

fn write_error(error: &::kube::Error) -> SecretError {
    match error {
        ::kube::Error::Api(status) if status.code == 409 => SecretError::Conflict,
        _ => SecretError::Failed(error.to_string()),
    }
}

/// Parses a listed Secret. Values that are not base64 are skipped.
fn read(object: Object) -> Secret {
    let data = object.value["data"].as_object().into_iter().flatten();
    let data = data.filter_map(|(key, value)| {
        let bytes = BASE64_STANDARD.decode(value.as_str()?).ok()?;
        Some((key.to_smolstr(), Sensitive::new(Bytes::from(bytes))))
    });
    Secret {
        name: object.name().into(),
        version: object.resource_version().into(),
        data: data.collect(),
    }
}
