//! Exports every Service of a cluster that is not cluster-local, by a ServiceExport owned by the Service
//! (`ENABLE_MCS_AUTO_EXPORT`). Only new Services matter, because a ServiceExport has no content.

use std::{collections::BTreeSet, sync::Arc};

use serde_json::json;
use smol_str::SmolStr;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::{
    leader::{Election, Lock},
    store::{self, Store, WriteError},
    watching::Watches,
};
use crate::{
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    model::snapshot::MeshSnapshot,
    table::Cx,
};

/// Attempts to create one ServiceExport.
const ATTEMPTS: u32 = 5;
/// First retry delay.
const RETRY: std::time::Duration = std::time::Duration::from_millis(100);

/// Namespace, name and uid of a Service.
type Service = (SmolStr, SmolStr, SmolStr);

/// Exports in one cluster while this replica leads there. `group` and `version` are `MCS_API_GROUP` and
/// `MCS_API_VERSION`.
pub async fn run(
    election: &Election,
    watches: Watches,
    group: &str,
    version: &str,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
) {
    let exports = Store::new(
        election.client.clone(),
        group,
        version,
        "ServiceExport",
        "serviceexports",
    );
    election
        .run(Lock::SERVICE_EXPORT, |token| {
            export(exports.clone(), watches.clone(), mesh.clone(), token)
        })
        .await;
}

async fn export(
    exports: Store,
    watches: Watches,
    mut mesh: watch::Receiver<Arc<MeshSnapshot>>,
    token: CancellationToken,
) {
    // Before the mesh config is known, no Service would seem to be cluster-local.
    tokio::select! {
        () = token.cancelled() => return,
        first = mesh.wait_for(|mesh| mesh.revision.0 > 0) => if first.is_err() { return },
    }
    let target = WatchTarget {
        metadata_only: true,
        ..WatchTarget::all(store::resource("", "v1", "Service", "services"))
    };
    let (services, mut events) = watches.open(target, service);
    tokio::select! {
        () = token.cancelled() => {}
        () = services => {}
        () = follow(&exports, &mut events, &mesh) => {}
    }
}

fn service(object: Object) -> Service {
    let metadata = object.metadata;
    (
        metadata.namespace.unwrap_or_default().into(),
        metadata.name.unwrap_or_default().into(),
        metadata.uid.unwrap_or_default().into(),
    )
}

async fn follow(
    exports: &Store,
    events: &mut mpsc::Receiver<WatchEvent<Service>>,
    mesh: &watch::Receiver<Arc<MeshSnapshot>>,
) {
    let mut exported = BTreeSet::new();
    while let Some(event) = events.recv().await {
        let services = match event {
            WatchEvent::Restarted(all) => {
                exported.retain(|known| all.contains(known));
                all
            }
            WatchEvent::Applied(service) => vec![service],
            WatchEvent::Deleted(service) => {
                exported.remove(&service);
                continue;
            }
        };
        for service in services {
            if exported.contains(&service) || is_cluster_local(&mesh.borrow().clone(), &service) {
                continue;
            }
            match create(exports, &service).await {
                Ok(()) => {
                    exported.insert(service);
                }
                Err(WriteError::NotFound(error)) => {
                    tracing::warn!(
                        error,
                        "Services cannot be exported; hint: is the CRD of ServiceExports installed?"
                    );
                }
                Err(error) => {
                    let (namespace, name, _) = &service;
                    tracing::warn!(%namespace, %name, %error, "failed to export Service");
                }
            }
        }
    }
}

async fn create(exports: &Store, (namespace, name, uid): &Service) -> Result<(), WriteError> {
    let object = json!({
        "apiVersion": exports.resource().api_version,
        "kind": "ServiceExport",
        "metadata": {
            "name": name,
            "namespace": namespace,
            // It is deleted with its Service.
            "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": name, "uid": uid}],
        },
    });
    for attempt in 0.. {
        match exports.create(namespace, &object).await {
            // It exists already.
            Ok(_) | Err(WriteError::Conflict(_)) => return Ok(()),
            Err(WriteError::Failed(_)) if attempt + 1 < ATTEMPTS => {
                tokio::time::sleep(RETRY * 2_u32.pow(attempt)).await;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_cluster_local(mesh: &MeshSnapshot, (namespace, name, _): &Service) -> bool {
    let host = format!("{name}.{namespace}.svc.{}", mesh.installation.domain);
    mesh.is_cluster_local(&Cx::untracked(), &host)
}
