//! Objects of configuration for other control planes (MCP over xDS).

use std::sync::{Arc, Mutex, PoisonError};

use futures::{StreamExt, stream::BoxStream};
use smol_str::{SmolStr, format_smolstr};
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;

use super::access::Access;
use crate::{
    generate::config_object::{ObjectResources, ObjectType},
    model::MeshSnapshot,
    xds::config_objects::{ConfigObjects, Resources},
};

/// The objects of the latest snapshot. Callers that may read all debug pages may read them.
pub struct SnapshotObjects {
    access: Access,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// Locked while changed objects are encoded, so that several clients do not encode them at the same time.
    encoded: Mutex<ObjectResources>,
}

impl SnapshotObjects {
    /// Returns the objects of the latest snapshots, with these access rules.
    pub fn new(access: Access, mesh: watch::Receiver<Arc<MeshSnapshot>>) -> Self {
        Self {
            access,
            mesh,
            encoded: Mutex::default(),
        }
    }
}

impl ConfigObjects for SnapshotObjects {
    fn permits(&self, identities: &[SmolStr]) -> bool {
        self.access.permits_everything(identities)
    }

    fn list(&self, type_url: &str) -> Option<Resources> {
        let object_type = ObjectType::of_url(type_url)?;
        let mut encoded = self.encoded.lock().unwrap_or_else(PoisonError::into_inner);
        let mesh = self.mesh.borrow().clone();
        Some(encoded.list(&mesh, object_type))
    }

    fn kind(&self, type_url: &str) -> Option<SmolStr> {
        ObjectType::of_url(type_url).map(|object_type| format_smolstr!("{object_type:?}"))
    }

    fn changes(&self) -> BoxStream<'static, ()> {
        WatchStream::new(self.mesh.clone()).map(|_| ()).boxed()
    }
}
