//! Writes the addresses of the ingress gateway into the statuses of Ingresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ::kube::core::ApiResource;
use serde_json::Value;
use smol_str::SmolStr;
use tokio::sync::watch;

use super::{
    leader::{Election, Lock},
    object_status::{Observed, Statuses, Writer, is_equal},
    revisions, store,
    watching::{WatchedNamespaces, Watches},
};
use crate::{
    api::Kind,
    model::{
        gateway_api::status::{Revisions, StatusKey, Written},
        ingress::status::IngressStatuses,
        snapshot::MeshSnapshot,
    },
};

/// Inputs of the writer.
#[derive(Clone)]
pub struct Inputs {
    /// Watches in the config cluster.
    pub watches: Watches,
    /// The mesh.
    pub mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// Tags of the own revision; `None` while unknown.
    pub tags: watch::Receiver<Option<BTreeSet<SmolStr>>>,
    /// The namespaces that are read.
    pub only: WatchedNamespaces,
}

/// Writes while this replica leads. All revisions have one lock, and the leader writes for its own revision only.
pub async fn run(election: &Election, inputs: Inputs) {
    election
        .run(Lock::INGRESS, |token| {
            let (inputs, default_tag) = (inputs.clone(), election.default_revision.clone());
            async move {
                let (watches, tags) = (inputs.watches.clone(), inputs.tags.clone());
                let writing = revisions::run_with(watches, tags, default_tag, move |revisions| {
                    write(inputs.clone(), revisions)
                });
                token.run_until_cancelled(Box::pin(writing)).await;
            }
        })
        .await;
}

/// Writes until a source ends.
async fn write(inputs: Inputs, revisions: Revisions) {
    let (_held, served) = watch::channel(Some(BTreeMap::from([(Kind::Ingress, resource())])));
    let statuses = IngressStatuses::new(revisions);
    let writer = Writer::new(inputs.watches, inputs.mesh, served, inputs.only, statuses);
    Box::pin(writer.run()).await;
}

fn resource() -> ApiResource {
    let kind = Kind::Ingress;
    store::resource(kind.group(), kind.version(), kind.name(), kind.plural())
}

impl Statuses for IngressStatuses {
    fn update(&mut self, mesh: &Arc<MeshSnapshot>, _: Vec<Written>) -> Vec<StatusKey> {
        let keys = Self::update(self, mesh).into_iter();
        let key = |object| StatusKey {
            kind: Kind::Ingress,
            object,
        };
        keys.map(key).collect()
    }

    fn fields(&self, key: &StatusKey, observed: &Observed, _: &str) -> Option<Value> {
        let wanted = self.get(&key.object)?;
        (!is_equal(&wanted, &observed.status, &[])).then_some(wanted)
    }

    fn depend_on(&self, _: Kind) -> bool {
        false
    }
}
