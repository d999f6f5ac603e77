//! The external data that the mesh depends on, derived from its snapshots. Sources see nothing else of a snapshot.

use std::sync::Arc;

use tokio::sync::watch;

use crate::{
    base::Shared,
    environment::Environment,
    model::{MeshSnapshot, external_dependencies::ExternalDependencies},
    table::Cx,
};

/// Publishes the external dependencies of the mesh when they change. `None` until the mesh config is known.
pub(super) fn follow(
    environment: &Environment,
    mut mesh: watch::Receiver<Arc<MeshSnapshot>>,
) -> watch::Receiver<Option<Arc<ExternalDependencies>>> {
    let (sender, dependencies) = watch::channel(None);
    environment
        .tasks
        .spawn_until_shutdown("external dependencies", async move {
            let mut last: Option<Shared<ExternalDependencies>> = None;
            loop {
                let now = {
                    let mesh = mesh.borrow_and_update();
                    let config = mesh
                        .mesh_config
                        .get(&Cx::untracked(), &mesh.installation.mesh_config_key());
                    config.map(|_| ExternalDependencies::shared(&mesh))
                };
                // Compares pointers in most cases.
                if now != last {
                    sender.send_replace(now.as_ref().map(|now| Arc::new((**now).clone())));
                    last = now;
                }
                if mesh.changed().await.is_err() {
                    return;
                }
            }
        });
    dependencies
}
