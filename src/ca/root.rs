//! The root certificates of the mesh, live: from the folder of plugged-in CA certificates, else from the Secret
//! `cacerts`, else from the Secret in which a self-signed root is kept. Unknown stays unknown: what was known last is
//! kept when a source goes away, since peers depend on it.

use std::{
    future::Future,
    path::{Path, PathBuf},
    time::Duration,
};

use ::kube::core::ApiResource;
use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};

use crate::{
    base::ClusterId,
    kube::{
        Object,
        health::{WatchHealth, WatchMetrics},
        watch::{WatchEvent, WatchTarget, watch_as},
    },
};

/// The root of a plugged-in CA.
const ROOT: &str = "root-cert.pem";
/// The root in Secrets of cert-manager and type `kubernetes.io/tls`.
const TLS_ROOT: &str = "ca.crt";
/// The certificate of a self-signed CA, which is its own root.
const SELF_SIGNED: &str = "ca-cert.pem";
/// Secrets that may hold a root, by priority.
const SECRETS: [&str; 2] = ["cacerts", "istio-ca-secret"];
/// The poll interval of the folder: the kubelet updates mounted Secrets at most about once a minute.
const FOLDER_INTERVAL: Duration = Duration::from_secs(5);

/// The sources of root certificates.
#[derive(Clone)]
pub struct RootSource {
    /// `ROOT_CA_DIR`.
    pub folder: PathBuf,
    /// Client of the config cluster.
    pub client: ::kube::Client,
    /// The config cluster, for metrics.
    pub cluster: ClusterId,
    /// The control plane's namespace.
    pub namespace: String,
    /// Watch metrics.
    pub metrics: WatchMetrics,
}

/// The root of each source, by priority.
#[derive(Default)]
struct RootCandidates([Option<Bytes>; 1 + SECRETS.len()]);

impl RootSource {
    /// Publishes the root until the receiver is dropped.
    pub async fn run(self, roots: watch::Sender<Option<Bytes>>) {
        let (first, mut first_events) = self.secret(SECRETS[0]);
        let (second, mut second_events) = self.secret(SECRETS[1]);
        let following = async {
            let mut candidates = RootCandidates([read(&self.folder), None, None]);
            // Publish nothing before both Secrets are listed: a root of lower priority would be distributed for a
            // moment.
            let (Some(one), Some(other)) = tokio::join!(first_events.recv(), second_events.recv()) else {
                return;
            };
            candidates.0[1] = pem(one);
            candidates.0[2] = pem(other);
            if candidates.0.iter().all(Option::is_none) {
                let folder = self.folder.display();
                tracing::warn!(
                    %folder,
                    "no root certificates found, none are distributed; hint: create Secret cacerts with root-cert.pem"
                );
            }
            loop {
                publish(&roots, &candidates);
                tokio::select! {
                    event = first_events.recv() => match event {
                        Some(event) => candidates.0[1] = pem(event),
                        None => return,
                    },
                    event = second_events.recv() => match event {
                        Some(event) => candidates.0[2] = pem(event),
                        None => return,
                    },
                    () = sleep(FOLDER_INTERVAL) => candidates.0[0] = read(&self.folder),
                    () = roots.closed() => return,
                }
            }
        };
        tokio::select! {
            () = first => {}
            () = second => {}
            () = following => {}
        }
    }

    fn secret(
        &self,
        name: &str,
    ) -> (
        impl Future<Output = ()> + use<>,
        mpsc::Receiver<WatchEvent<Option<Bytes>>>,
    ) {
        let (sender, receiver) = mpsc::channel(4);
        let resource = ApiResource {
            group: String::new(),
            version: "v1".into(),
            api_version: "v1".into(),
            kind: "Secret".into(),
            plural: "secrets".into(),
        };
        let target = WatchTarget {
            namespace: Some(self.namespace.clone()),
            fields: Some(format!("metadata.name={name}")),
            ..WatchTarget::all(resource)
        };
        let health = WatchHealth::new(&self.cluster, &target.name(), &self.metrics);
        (watch_as(self.client.clone(), target, health, root_of, sender), receiver)
    }
}

/// Publishes the best root; keeps the last one if there is none.
fn publish(roots: &watch::Sender<Option<Bytes>>, candidates: &RootCandidates) {
    let best = candidates.0.iter().flatten().next().cloned();
    let changed = roots.send_if_modified(|known| {
        let changed = best.is_some() && *known != best;
        if changed {
            known.clone_from(&best);
        }
        changed
    });
    if changed {
        tracing::info!("root certificates changed");
    }
}

fn pem(event: WatchEvent<Option<Bytes>>) -> Option<Bytes> {
    match event {
        WatchEvent::Restarted(all) => all.into_iter().next().flatten(),
        WatchEvent::Applied(root) => root,
        WatchEvent::Deleted(_) => None,
    }
}

/// Returns the root in a Secret.
fn root_of(secret: Object) -> Option<Bytes> {
    [ROOT, TLS_ROOT, SELF_SIGNED].into_iter().find_map(|key| {
        let text = secret.value["data"][key].as_str()?;
        let root = Bytes::from(BASE64_STANDARD.decode(text).ok()?);
        is_pem(&root).then_some(root)
    })
}

/// Returns the root in a folder.
fn read(folder: &Path) -> Option<Bytes> {
    [ROOT, TLS_ROOT].into_iter().find_map(|name| {
        let root = Bytes::from(std::fs::read(folder.join(name)).ok()?);
        is_pem(&root).then_some(root)
    })
}

fn is_pem(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_ok_and(|text| text.contains("-----BEGIN CERTIFICATE-----"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const PEM: &str = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n";

    #[test]
    fn secrets_have_roots_under_three_keys() {
        let secret = |key: &str, text: &str| {
            let data = json!({key: BASE64_STANDARD.encode(text)});
            Object::from_value(json!({"metadata": {"name": "x"}, "data": data})).expect("an object")
        };
        for key in [ROOT, TLS_ROOT, SELF_SIGNED] {
            assert_eq!(root_of(secret(key, PEM)), Some(Bytes::from(PEM)));
        }
        assert_eq!(root_of(secret(ROOT, "")), None, "Secrets of a fresh install are empty");
        assert_eq!(root_of(secret("tls.crt", PEM)), None);
    }

    #[test]
    fn the_first_source_wins_and_the_root_is_never_withdrawn() {
        let (sender, receiver) = watch::channel(None);
        let root = |text: &'static str| Some(Bytes::from_static(text.as_bytes()));
        publish(&sender, &RootCandidates([None, None, root("self")]));
        publish(&sender, &RootCandidates([None, root("plugged"), root("self")]));
        assert_eq!(*receiver.borrow(), root("plugged"));
        publish(&sender, &RootCandidates::default());
        assert_eq!(*receiver.borrow(), root("plugged"));
    }
}
