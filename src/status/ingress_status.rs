//! Writes the addresses of the ingress gateway into the statuses of Ingresses.

use std::{collections::BTreeMap, sync::Arc};

use ::kube::core::ApiResource;
use serde_json::Value;
use smol_str::SmolStr;
use tokio::sync::watch;

use super::{
    leader::{Election, Lock},
    object_status::{Observed, Statuses, Writer, is_equal},
    store,
    watching::Watches,
};
use crate::{
    api::Kind,
    model::{
        gateway_api::status::{StatusKey, Written},
        ingress::status::IngressStatuses,
        snapshot::MeshSnapshot,
    },
};

/// Writes while this replica leads. `only` is `ISTIO_WATCH_NAMESPACE`; empty for all.
pub async fn run(election: &Election, watches: Watches, mesh: watch::Receiver<Arc<MeshSnapshot>>, only: SmolStr) {
    election
        .run(Lock::INGRESS, |token| {
            let (watches, mesh, only) = (watches.clone(), mesh.clone(), only.clone());
            async move {
                let (_held, served) = watch::channel(Some(BTreeMap::from([(Kind::Ingress, resource())])));
                let writer = Writer::new(watches, mesh, served, only, IngressStatuses::default());
                token.run_until_cancelled(Box::pin(writer.run())).await;
            }
        })
        .await;
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
