//! The trust bundle as a source of changes, for proxies of a mesh with several roots (`ISTIO_MULTIROOT_MESH`).

use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::{
    api::trust_anchors::TrustAnchors,
    base::ClusterId,
    ingest::source::Source,
    model::change::{Batch, Change},
};

/// The source.
pub(super) struct TrustAnchorsSource {
    /// Config cluster.
    pub(super) cluster: ClusterId,
    /// Sorted PEM blocks; empty while they are unknown.
    pub(super) anchors: watch::Receiver<Arc<Vec<String>>>,
}

impl Source for TrustAnchorsSource {
    fn name(&self) -> &'static str {
        "trust anchors"
    }

    async fn run(mut self, changes: mpsc::Sender<Batch>) {
        loop {
            let certificates = (**self.anchors.borrow_and_update()).clone();
            // Unknown is not empty: a bundle without roots would make proxies distrust all peers.
            if !certificates.is_empty() {
                let row = TrustAnchors {
                    key: TrustAnchors::key(&self.cluster),
                    certificates,
                };
                if changes.send(vec![Change::Upsert(row.into())]).await.is_err() {
                    return;
                }
            }
            if self.anchors.changed().await.is_err() {
                return;
            }
        }
    }
}
