//! Writes conditions of ambient objects into their statuses (`AMBIENT_ENABLE_STATUS`), by server-side apply.
//!
//! The snapshot has the conditions that objects must have. The leader alone watches those that they have. An object is
//! written when its row has changed and differs from its status. A status that comes back, or that another writer has
//! changed, is no reason: several writers of one list would replace each other's results forever.
//!
//! Of Istio's kinds, a write replaces the list as a whole. So it repeats the conditions of others, such as the health
//! of a WorkloadEntry, and names the version of the object that has them.
//!
//! Parity (pilot/pkg/serviceregistry/ambient/statusqueue/queue.go).

mod plan;

use std::{sync::Arc, time::Duration};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream, stream::FuturesUnordered};
use serde_json::Value;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};

use self::plan::{Plan, Published, Write};
use super::{
    leader::{Election, Lock},
    store::{Store, WriteError, resource},
    watching::{WatchedNamespaces, Watches},
};
use crate::{
    api::Kind,
    base::ClusterId,
    environment,
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    model::snapshot::MeshSnapshot,
};

/// Kinds with conditions.
const KINDS: [Kind; 4] = [
    Kind::Service,
    Kind::ServiceEntry,
    Kind::WorkloadEntry,
    Kind::AuthorizationPolicy,
];
/// Concurrent writes.
const MAX_CONCURRENT: usize = 8;
/// Writes after which events are read again.
const BATCH: usize = 64;
/// Delay of the first retry of a failed write; each further retry takes twice as long.
const RETRY: Duration = Duration::from_secs(2);
/// Capacity of the queue of events.
const QUEUE: usize = 64;

type KindEvent = (Kind, WatchEvent<Published>);

/// Writes conditions while this replica leads. The snapshot has objects of the namespaces in `only`.
pub async fn run(
    election: &Election,
    watches: Watches,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
    only: WatchedNamespaces,
) {
    election
        .run(Lock::STATUS, |token| {
            let (sender, events) = mpsc::channel(QUEUE);
            let watching: FuturesUnordered<BoxFuture<'static, ()>> = KINDS
                .into_iter()
                .map(|kind| follow(kind, watches.clone(), only.target(), sender.clone()).boxed())
                .collect();
            let writing = write_all(watches.client.clone(), watches.cluster.clone(), mesh.clone(), events);
            async move {
                tokio::select! {
                    () = token.cancelled() => {}
                    () = watching.collect() => {}
                    () = writing => {}
                }
            }
        })
        .await;
}

fn store(client: ::kube::Client, kind: Kind) -> Store {
    Store::new(client, kind.group(), kind.version(), kind.name(), kind.plural())
}

/// Forwards the events of a kind, of one namespace or of all.
async fn follow(kind: Kind, watches: Watches, namespace: Option<String>, sender: mpsc::Sender<KindEvent>) {
    let target = WatchTarget {
        namespace,
        ..WatchTarget::all(resource(kind.group(), kind.version(), kind.name(), kind.plural()))
    };
    let (watching, mut events) = watches.open(target, move |object: Object| Published::of(kind, &object));
    let forwarding = async {
        while let Some(event) = events.recv().await {
            if sender.send((kind, event)).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = watching => {}
        () = forwarding => {}
    }
}

async fn write_all(
    client: ::kube::Client,
    cluster: ClusterId,
    mut mesh: watch::Receiver<Arc<MeshSnapshot>>,
    mut events: mpsc::Receiver<KindEvent>,
) {
    let mut plan = Plan::new(cluster);
    mesh.mark_changed();
    // Kept over events, which would otherwise put off retries forever.
    let mut retry_at: Option<Instant> = None;
    loop {
        tokio::select! {
            biased;
            changed = mesh.changed() => if changed.is_err() { return },
            event = events.recv() => match event {
                Some((kind, event)) => plan.apply_event(kind, event),
                None => return,
            },
            () = std::future::ready(()), if plan.is_due() => {}
            () = sleep_until(retry_at.unwrap_or_else(Instant::now)), if retry_at.is_some() => {
                retry_at = None;
                plan.retry();
            }
        }
        while let Ok((kind, event)) = events.try_recv() {
            plan.apply_event(kind, event);
        }
        let snapshot = mesh.borrow_and_update().clone();
        // Before the first commit nothing is known.
        if snapshot.revision.0 > 0 {
            plan.observe(&snapshot.ambient_statuses);
        }
        let now = OffsetDateTime::from(environment::wall_clock())
            .format(&Rfc3339)
            .unwrap_or_default();
        let writes: Vec<Write> = std::iter::from_fn(|| plan.next(&now)).take(BATCH).collect();
        let written: Vec<(Write, Result<Value, WriteError>)> = stream::iter(writes)
            .map(|write| apply(&client, write))
            .buffer_unordered(MAX_CONCURRENT)
            .collect()
            .await;
        for (write, result) in written {
            on_written(&mut plan, &write, result);
        }
        if retry_at.is_none() {
            let attempts = plan.failed_attempts();
            retry_at = attempts.map(|attempts| Instant::now() + RETRY * 2_u32.pow(attempts - 1));
        }
    }
}

async fn apply(client: &::kube::Client, write: Write) -> (Write, Result<Value, WriteError>) {
    let key = &write.target.object;
    let store = store(client.clone(), write.target.kind);
    let written = store
        .apply_status(&key.namespace, &key.name, write.manager, &write.fields)
        .await;
    (write, written)
}

fn on_written(plan: &mut Plan, write: &Write, result: Result<Value, WriteError>) {
    let (kind, key) = (write.target.kind.name(), &write.target.object);
    let (namespace, name) = (&key.namespace, &key.name);
    match result {
        Ok(object) => {
            tracing::debug!(kind, %namespace, %name, "conditions written");
            if let Ok(object) = Object::from_value(object) {
                plan.written(&write.target, Published::of(write.target.kind, &object));
            }
        }
        Err(WriteError::NotFound(_)) => {}
        // Another writer was faster, and the watch brings what it wrote.
        Err(WriteError::Conflict(_)) => plan.conflicted(&write.target),
        Err(error) => {
            tracing::warn!(kind, %namespace, %name, %error, "failed to write conditions");
            if matches!(error, WriteError::Failed(_)) {
                plan.unanswered(&write.target);
            } else {
                plan.failed(&write.target);
            }
        }
    }
}
