//! The external data that the mesh depends on, derived from its snapshots. Sources see nothing else of a snapshot.

use std::sync::Arc;

use tokio::sync::watch;

use crate::{
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
            loop {
                let now = {
                    let mesh = mesh.borrow_and_update();
                    let config = mesh
                        .mesh_config
                        .get(&Cx::untracked(), &mesh.installation.mesh_config_key());
                    config.map(|_| Arc::new(ExternalDependencies::of(&mesh)))
                };
                sender.send_if_modified(|last| {
                    let news = *last != now;
                    *last = now;
                    news
                });
                if mesh.changed().await.is_err() {
                    return;
                }
            }
        });
    dependencies
}
