//! Writes the objects of one Gateway.

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::known::{Key, fingerprint};
use crate::{
    base::SmolStr,
    inject::gateway::{self, GatewayObject, MANAGED, ObjectKind},
    status::store::{Store, WriteError},
};

/// Attempts to apply an object that others change at the same time.
const ATTEMPTS: u32 = 3;

/// An object as it was applied or found equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Applied {
    /// Hash of what was to be applied.
    desired: u64,
    /// Fingerprint of the object after that.
    pub(super) live: u64,
}

/// The result of a round.
pub(super) struct Written {
    /// The objects that were applied or found equal.
    pub(super) applied: Vec<((ObjectKind, Key), Applied)>,
    /// Number of writes.
    pub(super) writes: u32,
    /// The reason why the round has ended early.
    pub(super) failure: Option<String>,
}

/// An object to compare and apply.
pub(super) struct Due {
    id: (ObjectKind, Key),
    /// Hash of the object.
    desired: u64,
    object: GatewayObject,
}

/// Returns the objects to compare and apply. `present` returns how an object was last applied, if it has not changed
/// since.
pub(super) fn due(
    (namespace, _): &Key,
    objects: Vec<GatewayObject>,
    present: impl Fn(&(ObjectKind, Key)) -> Option<Applied>,
) -> Vec<Due> {
    let due = objects.into_iter().filter_map(|object| {
        let id = (object.kind, (namespace.clone(), SmolStr::new(&object.name)));
        let desired = xxh3_64(object.value.to_string().as_bytes());
        let is_same = present(&id).is_some_and(|applied| applied.desired == desired);
        (!is_same).then_some(Due { id, desired, object })
    });
    due.collect()
}

/// The resources of one cluster, and the field manager. Cheap to clone.
#[derive(Clone)]
pub(super) struct Stores {
    client: ::kube::Client,
    manager: SmolStr,
}

impl Stores {
    pub(super) fn new(client: &::kube::Client, manager: SmolStr) -> Self {
        let client = client.clone();
        Self { client, manager }
    }

    /// Returns a round: it writes each object that differs, in order.
    pub(super) fn round(&self, gateway: Key, due: Vec<Due>) -> impl Future<Output = (Key, Written)> + Send + use<> {
        let stores = self.clone();
        async move {
            let mut written = Written {
                applied: Vec::new(),
                writes: 0,
                failure: None,
            };
            for Due { id, desired, object } in due {
                match stores.ensure(&gateway, &object).await {
                    Ok(Some((live, is_written))) => {
                        written.writes += u32::from(is_written);
                        written.applied.push((id, Applied { desired, live }));
                    }
                    Ok(None) => {}
                    Err(error) => {
                        written.failure = Some(format!("{} {}: {error}", object.kind.name(), object.name));
                        return (gateway, written);
                    }
                }
            }
            (gateway, written)
        }
    }

    /// Applies an object if it differs. Returns its fingerprint, and true if it was written; `None` if the object
    /// exists without the label of managed objects.
    async fn ensure(&self, gateway: &Key, object: &GatewayObject) -> Result<Option<(u64, bool)>, WriteError> {
        let mut attempt = 1;
        loop {
            match self.try_once(gateway, object).await {
                Err(WriteError::Conflict(_)) if attempt < ATTEMPTS => attempt += 1,
                result => return result,
            }
        }
    }

    async fn try_once(&self, gateway: &Key, object: &GatewayObject) -> Result<Option<(u64, bool)>, WriteError> {
        let (namespace, name) = (&gateway.0, &object.name);
        let (group, version, plural) = object.kind.resource();
        let store = Store::new(self.client.clone(), group, version, object.kind.name(), plural);
        let mut desired = object.clone();
        if let Some(live) = store.get(namespace, name).await? {
            if live["metadata"]["labels"][MANAGED].is_null() {
                let (kind, gateway) = (object.kind.name(), &gateway.1);
                tracing::warn!(%namespace, %gateway, kind, name, "object exists without label {MANAGED}, left alone");
                return Ok(None);
            }
            if object.kind == ObjectKind::Deployment {
                gateway::keep_selector(&mut desired.value, &live);
            }
            if desired.is_current(&live, &self.manager) {
                return Ok(Some((fingerprint(live), false)));
            }
            // The object must not have changed since it was read.
            desired.value["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"].clone();
        }
        let applied: Value = store.apply(namespace, name, &self.manager, &desired.value).await?;
        Ok(Some((fingerprint(applied), true)))
    }
}
