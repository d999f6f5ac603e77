//! The built-in GatewayClasses: created if they are missing, and never changed, so that users may adapt them.
//!
//! Parity (pilot/pkg/config/kube/gatewaycommon/gatewayclass.go): every replica creates them, not a leader.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};

use super::{
    store::{Store, WriteError, resource},
    watching::Watches,
};
use crate::{
    base::SmolStr,
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
    model::{gateway_api::class::Controller, snapshot::MeshSnapshot},
};

const GROUP: &str = "gateway.networking.k8s.io";
/// First delay of a retry of failed writes; doubled each time.
const RETRY: Duration = Duration::from_secs(5);
/// Longest delay of a retry.
const LONGEST_RETRY: Duration = Duration::from_mins(5);

/// Creates missing classes while their CustomResourceDefinition exists, and again after they were deleted.
pub async fn run(watches: Watches, mesh: watch::Receiver<Arc<MeshSnapshot>>) {
    let definitions = resource(
        "apiextensions.k8s.io",
        "v1",
        "CustomResourceDefinition",
        "customresourcedefinitions",
    );
    let target = WatchTarget {
        fields: Some(format!("metadata.name=gatewayclasses.{GROUP}")),
        metadata_only: true,
        ..WatchTarget::all(definitions)
    };
    let (watching, mut definitions) = watches.open(target, |_| ());
    let work = async {
        while until(&mut definitions, Definition::Exists).await {
            let snapshot = mesh.borrow().clone();
            tokio::select! {
                () = create(&watches, &snapshot) => {}
                goes_on = until(&mut definitions, Definition::Missing) => if !goes_on { return },
            }
        }
    };
    tokio::select! {
        () = watching => {}
        () = work => {}
    }
}

/// The state of the CustomResourceDefinition.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Definition {
    Exists,
    Missing,
}

/// Waits until the definition has a state; returns false once the watch has ended.
async fn until(definitions: &mut mpsc::Receiver<WatchEvent<()>>, wanted: Definition) -> bool {
    while let Some(event) = definitions.recv().await {
        let state = match event {
            WatchEvent::Restarted(all) if all.is_empty() => Definition::Missing,
            WatchEvent::Restarted(_) | WatchEvent::Applied(()) => Definition::Exists,
            WatchEvent::Deleted(()) => Definition::Missing,
        };
        if state == wanted {
            return true;
        }
    }
    false
}

/// Creates missing classes, until the watch of classes ends.
async fn create(watches: &Watches, mesh: &MeshSnapshot) {
    let store = Store::new(watches.client.clone(), GROUP, "v1", "GatewayClass", "gatewayclasses");
    let target = WatchTarget {
        metadata_only: true,
        ..WatchTarget::all(store.resource().clone())
    };
    let (watching, mut events) = watches.open(target, |object: Object| SmolStr::new(object.name()));
    let work = async {
        let mut known = BTreeSet::new();
        while let Some(event) = events.recv().await {
            apply_event(&mut known, event);
            let mut delay = RETRY;
            while !create_missing(&store, mesh, &mut known).await {
                sleep(delay).await;
                delay = (delay * 2).min(LONGEST_RETRY);
                while let Ok(event) = events.try_recv() {
                    apply_event(&mut known, event);
                }
            }
        }
    };
    tokio::select! {
        () = watching => {}
        () = work => {}
    }
}

fn apply_event(known: &mut BTreeSet<SmolStr>, event: WatchEvent<SmolStr>) {
    match event {
        WatchEvent::Restarted(all) => *known = all.into_iter().collect(),
        WatchEvent::Applied(name) => drop(known.insert(name)),
        WatchEvent::Deleted(name) => drop(known.remove(&name)),
    }
}

/// Creates the classes that are not known; returns false if one could not be created.
async fn create_missing(store: &Store, mesh: &MeshSnapshot, known: &mut BTreeSet<SmolStr>) -> bool {
    let mut is_done = true;
    for (name, controller) in Controller::built_in_classes(mesh) {
        if known.contains(&name) {
            continue;
        }
        match store.create("", &class(mesh, &name, controller)).await {
            Ok(_) => {
                tracing::info!(%name, "GatewayClass created");
                known.insert(name);
            }
            // Another replica was faster.
            Err(WriteError::Conflict(_)) => drop(known.insert(name)),
            Err(error) => {
                tracing::warn!(%name, %error, "failed to create GatewayClass");
                is_done = false;
            }
        }
    }
    is_done
}

/// Returns the description, of which API servers accept 64 characters.
fn description(controller: Controller) -> &'static str {
    match controller {
        Controller::Gateway => "Gateways for ingress and egress, deployed by istiod",
        Controller::Remote => "Gateways of other networks, which istiod does not deploy",
        Controller::Waypoint => "Waypoints of the ambient mesh, deployed by istiod",
        Controller::EastWest => "Ambient gateways between networks, deployed by istiod",
    }
}

fn class(mesh: &MeshSnapshot, name: &SmolStr, controller: Controller) -> Value {
    let description = description(controller);
    json!({"apiVersion": format!("{GROUP}/v1"), "kind": "GatewayClass", "metadata": {"name": name},
        "spec": {"controllerName": controller.name(mesh), "description": description}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_are_accepted() {
        for controller in [
            Controller::Gateway,
            Controller::Remote,
            Controller::Waypoint,
            Controller::EastWest,
        ] {
            assert!(description(controller).len() <= 64);
        }
    }
}
