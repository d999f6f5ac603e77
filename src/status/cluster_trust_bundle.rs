//! Root certificates of the mesh in a ClusterTrustBundle, which pods can mount (`ENABLE_CLUSTER_TRUST_BUNDLE_API`): one
//! object per cluster instead of a ConfigMap in every namespace. Changes and deletions by others are reverted.

use std::{fmt::Write, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::json;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    leader::{Election, Lock},
    store::{Store, WriteError},
    watching::Watches,
};
use crate::{
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    task,
};

/// Name of the object. Its first part is the signer, with `:` for `/`.
const NAME: &str = "istio.io:istiod-ca:root-cert";
/// Signer of the bundle. Writing it needs the right to attest for this signer.
const SIGNER: &str = "istio.io/istiod-ca";
const API: (&str, &str) = ("certificates.k8s.io", "v1beta1");
/// First retry delay of a failed write; doubled each time.
const RETRY: Duration = Duration::from_millis(100);
const RETRY_AT_MOST: Duration = Duration::from_mins(1);
/// Longest line of PEM.
const LINE: usize = 64;

/// Writes in one cluster while this replica leads there. `roots` is PEM; `None` while there is nothing to distribute.
pub async fn run(election: &Election, watches: Watches, roots: watch::Receiver<Option<Bytes>>) {
    // Parity (pilot/pkg/bootstrap/configcontroller.go): the lock is that of the ConfigMaps, so that old and new
    // replicas do not write both.
    election
        .run(Lock::NAMESPACES, |token| {
            let (group, version) = API;
            let client = election.client.clone();
            let store = Store::new(client, group, version, "ClusterTrustBundle", "clustertrustbundles");
            keep(store, watches.clone(), roots.clone(), token)
        })
        .await;
}

async fn keep(store: Store, watches: Watches, roots: watch::Receiver<Option<Bytes>>, token: CancellationToken) {
    let target = WatchTarget {
        fields: Some(format!("metadata.name={NAME}")),
        ..WatchTarget::all(store.resource().clone())
    };
    let (watching, events) = watches.open(target, bundle_of);
    tokio::select! {
        () = token.cancelled() => {}
        () = watching => {}
        () = follow(&store, events, roots) => {}
    }
}

fn bundle_of(object: Object) -> String {
    object.value["spec"]["trustBundle"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

async fn follow(
    store: &Store,
    mut events: mpsc::Receiver<WatchEvent<String>>,
    mut roots: watch::Receiver<Option<Bytes>>,
) {
    // Before the first list, the object would seem to be missing.
    let Some(first) = events.recv().await else { return };
    let mut present = after(first);
    let mut failures = 0;
    loop {
        let bundle = roots.borrow_and_update().as_ref().and_then(|roots| normal(roots));
        let mut again = None;
        if let Some(bundle) = bundle.filter(|bundle| present.as_ref() != Some(bundle)) {
            match put(store, &bundle).await {
                Ok(()) => {
                    tracing::info!(name = NAME, "ClusterTrustBundle written");
                    (present, failures) = (Some(bundle), 0);
                }
                Err(error) => {
                    tracing::warn!(name = NAME, %error, "failed to write ClusterTrustBundle");
                    let wait = (RETRY * 2_u32.saturating_pow(failures)).min(RETRY_AT_MOST);
                    again = Some(Instant::now() + wait);
                    failures += 1;
                }
            }
        }
        tokio::select! {
            event = events.recv() => match event {
                Some(event) => present = after(event),
                None => return,
            },
            changed = roots.changed() => if changed.is_err() { return },
            () = task::until(again) => {}
        }
    }
}

/// Returns the content of the object after an event; `None` if it does not exist.
fn after(event: WatchEvent<String>) -> Option<String> {
    match event {
        WatchEvent::Restarted(all) => all.into_iter().next(),
        WatchEvent::Applied(bundle) => Some(bundle),
        WatchEvent::Deleted(_) => None,
    }
}

async fn put(store: &Store, bundle: &str) -> Result<(), WriteError> {
    let Some(mut found) = store.get("", NAME).await? else {
        let (group, version) = API;
        let new = json!({
            "apiVersion": format!("{group}/{version}"),
            "kind": "ClusterTrustBundle",
            "metadata": {"name": NAME},
            "spec": {"signerName": SIGNER, "trustBundle": bundle},
        });
        return store.create("", &new).await.map(|_| ());
    };
    if found["spec"]["trustBundle"] == bundle {
        return Ok(());
    }
    found["spec"]["trustBundle"] = bundle.into();
    store.replace("", NAME, &found).await.map(|_| ())
}

/// Normalises certificates for the API: PEM blocks without text between them and without duplicates. `None` without
/// any.
fn normal(roots: &[u8]) -> Option<String> {
    let mut certificates: Vec<CertificateDer<'_>> = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(roots) {
        match certificate {
            Ok(certificate) if !certificates.contains(&certificate) => certificates.push(certificate),
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, "failed to parse root certificates, distribution stopped");
                return None;
            }
        }
    }
    let mut text = String::new();
    for certificate in &certificates {
        text.push_str("-----BEGIN CERTIFICATE-----\n");
        for line in BASE64_STANDARD.encode(certificate).as_bytes().chunks(LINE) {
            let line = std::str::from_utf8(line).expect("because base64 is ASCII");
            writeln!(text, "{line}").expect("because a String accepts every write");
        }
        text.push_str("-----END CERTIFICATE-----\n");
    }
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bundles_contain_only_certificate_blocks() {
        let block = |text: &str| format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n");
        let (one, other) = (block("AAAA"), block("AAAB"));
        let written = format!(
            "# the first one\n{one}{}\ntext\n{other}{one}",
            one.replace('\n', "\r\n")
        );
        assert_eq!(normal(written.as_bytes()), Some(format!("{one}{other}")));
        assert_eq!(normal(b""), None);
        assert_eq!(normal(block("!").as_bytes()), None);
        let long = normal(block(&"AAAA".repeat(40)).as_bytes()).expect("a certificate");
        assert!(long.lines().all(|line| line.len() <= LINE));
        assert_eq!(normal(long.as_bytes()), Some(long));
    }

    #[test]
    fn events_report_the_current_bundle() {
        let text = || "x".to_owned();
        assert_eq!(after(WatchEvent::Restarted(vec![])), None);
        assert_eq!(after(WatchEvent::Restarted(vec![text()])), Some(text()));
        assert_eq!(after(WatchEvent::Applied(text())), Some(text()));
        assert_eq!(after(WatchEvent::Deleted(text())), None);
    }
}
