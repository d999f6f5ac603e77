//! What the mesh wants of ingestion, taken out of its snapshots: ingestion sees nothing else of them.

use std::sync::Arc;

use tokio::sync::watch;

use crate::{
    environment::Environment,
    model::{MeshSnapshot, wants::Wants},
};

/// Follows the wants of the mesh; tells only what differs.
pub(super) fn follow(
    environment: &Environment,
    mut mesh: watch::Receiver<Arc<MeshSnapshot>>,
) -> watch::Receiver<Arc<Wants>> {
    let (sender, wants) = watch::channel(Arc::default());
    environment.tasks.spawn_until_shutdown("wants", async move {
        loop {
            let now = Wants::of(&mesh.borrow_and_update());
            sender.send_if_modified(|last: &mut Arc<Wants>| {
                let news = **last != now;
                if news {
                    *last = Arc::new(now);
                }
                news
            });
            if mesh.changed().await.is_err() {
                return;
            }
        }
    });
    wants
}
