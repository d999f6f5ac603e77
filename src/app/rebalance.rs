//! Sheds connections when replicas are added, so that each replica soon has a fair share.
//!
//! Proxies keep their connection for as long as it lives, so a new replica would wait for their maximum age
//! (`--keepaliveMaxServerConnectionAge`). The number of replicas is that of the ready endpoints of istiod's Service in
//! its own cluster. When it grows, the open connections of every replica close once, each at a random time within
//! [`OVER`]. The Service spreads those that reconnect over all replicas, so that shares are equal afterwards. To close
//! fewer would not be enough: a Service chooses at random, also among the replicas that have too many.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::sync::watch;

use crate::{
    model::{Installation, MeshSnapshot, endpoint::Health, service::ServiceKey},
    rpc::Shedding,
    table::Cx,
    task::Tasks,
};

/// The time over which connections close: 33 a second in a mesh of 10,000 proxies.
const OVER: Duration = Duration::from_mins(5);

/// Returns the Service of this control plane.
fn service(installation: &Installation) -> ServiceKey {
    let suffix = match installation.revision.as_str() {
        "" | "default" => String::new(),
        revision => format!("-{revision}"),
    };
    let (namespace, domain) = (&installation.namespace, &installation.domain);
    ServiceKey {
        hostname: format!("istiod{suffix}.{namespace}.svc.{domain}").into(),
        namespace: namespace.clone(),
    }
}

/// Returns the number of ready replicas; 0 if it is unknown.
fn replicas(mesh: &MeshSnapshot) -> usize {
    let cx = Cx::untracked();
    let installation = &mesh.installation;
    let Some(row) = mesh.endpoints.get(&cx, &service(installation)) else {
        return 0;
    };
    let ready = row
        .endpoints
        .iter()
        .filter(|endpoint| endpoint.health == Health::Healthy && endpoint.origin.cluster == installation.cluster);
    ready.map(|endpoint| &endpoint.address).collect::<BTreeSet<_>>().len()
}

/// Returns the order that follows from a changed number of replicas; `None` if open orders stay. Fewer replicas, as in
/// a rolling restart, end the order.
fn order(before: usize, now: usize) -> Option<Shedding> {
    match before {
        // Unknown is not none.
        0 => None,
        _ if now == 0 || now == before => None,
        _ => Some((now > before).then_some(OVER)),
    }
}

/// Publishes when connections close.
pub(super) fn follow(tasks: &Tasks, mut mesh: watch::Receiver<Arc<MeshSnapshot>>) -> watch::Receiver<Shedding> {
    let (sender, shedding) = watch::channel(None);
    tasks.spawn_until_shutdown("rebalancing", async move {
        let mut before = 0;
        loop {
            let now = replicas(&mesh.borrow_and_update());
            if let Some(order) = order(before, now) {
                if order.is_some() {
                    tracing::info!(before, now, over = ?OVER, "replicas added, connections will reconnect");
                }
                sender.send_replace(order);
            }
            if now > 0 {
                before = now;
            }
            if mesh.changed().await.is_err() {
                return;
            }
        }
    });
    shedding
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixture;

    #[test]
    fn the_service_is_that_of_the_revision() {
        let host = |revision: &str| {
            let installation = Installation {
                revision: revision.into(),
                ..Installation::default()
            };
            service(&installation).hostname.to_string()
        };
        assert!(host("").starts_with("istiod."));
        assert!(host("default").starts_with("istiod."));
        assert!(host("canary").starts_with("istiod-canary."));
    }

    /// Returns a mesh in which istiod has ready replicas, and one that is not ready.
    fn mesh(ready: usize) -> Arc<MeshSnapshot> {
        let installation = Installation {
            namespace: "istio-system".into(),
            domain: "cluster.local".into(),
            ..Installation::default()
        };
        let service = "
apiVersion: v1
kind: Service
metadata: {name: istiod, namespace: istio-system}
spec: {clusterIP: 10.0.0.1, ports: [{name: grpc-xds, port: 15010}, {name: https-dns, port: 15012}]}
";
        let mut slice = "
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: istiod-a, namespace: istio-system, labels: {kubernetes.io/service-name: istiod}}
addressType: IPv4
ports: [{name: grpc-xds, port: 15010}, {name: https-dns, port: 15012}]
endpoints:
- {addresses: [10.1.1.1], conditions: {ready: false}}
"
        .to_owned();
        let endpoint = |replica| format!("- {{addresses: [10.1.0.{replica}], conditions: {{ready: true}}}}\n");
        slice.extend((0..ready).map(endpoint));
        let files = [("service.yaml", service), ("slice.yaml", slice.as_str())];
        fixture::folder_world(installation, &files).snapshot()
    }

    #[tokio::test]
    async fn added_replicas_close_connections_and_removed_ones_end_that() {
        let (sender, meshes) = watch::channel(mesh(0));
        let mut shedding = follow(&Tasks::default(), meshes);
        // A new replica learns the number of the others first: that changes nothing.
        for (ready, expected) in [
            (1, None),
            (2, Some(Some(OVER))),
            (2, None),
            (0, None),
            (2, None),
            (1, Some(None)),
        ] {
            sender.send_replace(mesh(ready));
            // The task has read the mesh when it waits for the next one.
            tokio::task::yield_now().await;
            tokio::task::yield_now().await;
            let changed = shedding.has_changed().expect("a running task");
            let order = changed.then(|| *shedding.borrow_and_update());
            assert_eq!(order, expected, "{ready} replicas");
        }
    }
}
