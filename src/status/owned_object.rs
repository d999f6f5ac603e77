//! Applies objects that belong to this control plane.
//!
//! An object is read first. An equal one is not written, and one without the label of such objects is not changed.

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::store::{Store, WriteError};
use crate::{
    base::SmolStr,
    inject::gateway::{self, GatewayObject, ObjectKind},
};

/// Attempts to apply an object that others change at the same time.
const ATTEMPTS: u32 = 3;

/// The owner of objects in one cluster. Cheap to clone.
#[derive(Clone)]
pub(super) struct Owner {
    /// Client of the cluster.
    pub(super) client: ::kube::Client,
    /// Field manager.
    pub(super) manager: SmolStr,
    /// Label of the objects.
    pub(super) label: &'static str,
}

impl Owner {
    /// Applies an object if it differs. Returns its fingerprint, and true if it was written; `None` if the object
    /// exists without the label.
    pub(super) async fn ensure(
        &self,
        namespace: &str,
        object: &GatewayObject,
    ) -> Result<Option<(u64, bool)>, WriteError> {
        let mut attempt = 1;
        loop {
            match self.try_once(namespace, object).await {
                Err(WriteError::Conflict(_)) if attempt < ATTEMPTS => attempt += 1,
                result => return result,
            }
        }
    }

    async fn try_once(&self, namespace: &str, object: &GatewayObject) -> Result<Option<(u64, bool)>, WriteError> {
        let name = &object.name;
        let (group, version, plural) = object.kind.resource();
        let store = Store::new(self.client.clone(), group, version, object.kind.name(), plural);
        let mut desired = object.clone();
        if let Some(live) = store.get(namespace, name).await? {
            if live["metadata"]["labels"][self.label].is_null() {
                let (kind, label) = (object.kind.name(), self.label);
                tracing::warn!(%namespace, kind, name, label, "object exists without the label, left alone");
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

/// Returns a hash of what an object asks for.
pub(super) fn fingerprint(object: Value) -> u64 {
    xxh3_64(gateway::without_status(object).to_string().as_bytes())
}
