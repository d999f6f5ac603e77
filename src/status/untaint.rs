//! Untaint controller: removes a taint from nodes where the CNI plugin is ready
//! (`PILOT_ENABLE_NODE_UNTAINT_CONTROLLERS`). Nodes start with the taint, so that no pod of the mesh is scheduled to
//! one that cannot redirect its traffic yet.
//!
//! Parity (pilot/pkg/controllers/untaint/nodeuntainter.go).

use std::{collections::BTreeMap, time::Duration};

use futures::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::{sync::mpsc, time::sleep};

use super::{
    leader::{Election, Lock},
    store::{Store, resource},
    watching::Watches,
};
use crate::{
    base::SmolStr,
    kube::{
        Object,
        watch::{WatchEvent, WatchTarget},
    },
};

/// Label of the CNI plugin's pods.
const PODS: &str = "k8s-app=istio-cni-node";
/// Pods that are not coming back.
const LIVE: &str = "status.phase!=Failed";
/// Concurrent writes.
const MAX_CONCURRENT: usize = 8;
/// Delay of a retry of failed writes.
const RETRY: Duration = Duration::from_secs(5);

/// Removes taints while this replica leads. `namespace` is that of the CNI plugin, `taint` the key of the taints.
pub async fn run(election: &Election, watches: Watches, namespace: &str, taint: &SmolStr) {
    let pods = WatchTarget {
        namespace: Some(namespace.to_owned()),
        labels: Some(PODS.to_owned()),
        fields: Some(LIVE.to_owned()),
        ..WatchTarget::all(resource("", "v1", "Pod", "pods"))
    };
    election
        .run(Lock::UNTAINT, |token| {
            let store = Store::new(election.client.clone(), "", "v1", "Node", "nodes");
            let (watching_pods, pods) = watches.open(pods.clone(), ready_pod);
            let key = taint.clone();
            let tainted_node = move |object| tainted_node(&object, &key);
            let (watching_nodes, nodes) = watches.open(WatchTarget::all(store.resource().clone()), tainted_node);
            let taint = taint.clone();
            let work = Box::pin(async move {
                tokio::select! {
                    () = watching_pods => {}
                    () = watching_nodes => {}
                    () = untaint(store, taint, pods, nodes) => {}
                }
            });
            async move {
                token.run_until_cancelled(work).await;
            }
        })
        .await;
}

/// Name of a pod, and its node if it is ready.
type PodFacts = (SmolStr, Option<SmolStr>);
/// Name of a node, and all its taints if it has the one to remove.
type NodeFacts = (SmolStr, Option<Value>);

async fn untaint(
    store: Store,
    taint: SmolStr,
    mut pods: mpsc::Receiver<WatchEvent<PodFacts>>,
    mut nodes: mpsc::Receiver<WatchEvent<NodeFacts>>,
) {
    let mut ready = BTreeMap::<SmolStr, SmolStr>::new();
    let mut tainted = BTreeMap::<SmolStr, Value>::new();
    let mut is_retry_due = false;
    loop {
        tokio::select! {
            Some(event) = pods.recv() => apply(&mut ready, event),
            Some(event) = nodes.recv() => apply(&mut tainted, event),
            () = sleep(RETRY), if is_retry_due => {}
            else => return,
        }
        let patches = patches(&taint, &ready, &tainted);
        let written: Vec<_> = stream::iter(patches)
            .map(|(node, operations)| {
                let store = &store;
                async move {
                    let written = store.patch("", &node, &operations).await;
                    (node, written)
                }
            })
            .buffer_unordered(MAX_CONCURRENT)
            .collect()
            .await;
        is_retry_due = false;
        for (node, written) in written {
            match written {
                Ok(_) => {
                    tracing::info!(%node, %taint, "taint removed");
                    // An event adds the node again if the taint comes back.
                    tainted.remove(&node);
                }
                Err(error) => {
                    tracing::warn!(%node, %taint, %error, "failed to remove taint");
                    is_retry_due = true;
                }
            }
        }
    }
}

/// Applies an event to the facts that are known.
fn apply<T>(known: &mut BTreeMap<SmolStr, T>, event: WatchEvent<(SmolStr, Option<T>)>) {
    match event {
        WatchEvent::Restarted(all) => *known = all.into_iter().filter_map(|(name, fact)| Some((name, fact?))).collect(),
        WatchEvent::Applied((name, Some(fact))) => {
            known.insert(name, fact);
        }
        WatchEvent::Applied((name, None)) | WatchEvent::Deleted((name, _)) => {
            known.remove(&name);
        }
    }
}

/// Returns a JSON patch for each tainted node with a ready pod. It fails if the taints have changed since.
fn patches(
    taint: &str,
    ready: &BTreeMap<SmolStr, SmolStr>,
    tainted: &BTreeMap<SmolStr, Value>,
) -> BTreeMap<SmolStr, Value> {
    let nodes = ready.values().filter_map(|node| Some((node, tainted.get(node)?)));
    let patch = |taints: &Value| {
        let all = taints.as_array().into_iter().flatten();
        let left: Vec<&Value> = all.filter(|found| found["key"] != taint).collect();
        json!([
            {"op": "test", "path": "/spec/taints", "value": taints},
            {"op": "replace", "path": "/spec/taints", "value": left},
        ])
    };
    nodes.map(|(node, taints)| (node.clone(), patch(taints))).collect()
}

fn ready_pod(object: Object) -> PodFacts {
    let conditions = object.value["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let is_ready = conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
    let node = object.value["spec"]["nodeName"].as_str().filter(|_| is_ready);
    (object.name().into(), node.map(SmolStr::new))
}

fn tainted_node(object: &Object, taint: &str) -> NodeFacts {
    let taints = &object.value["spec"]["taints"];
    let has_taint = taints
        .as_array()
        .into_iter()
        .flatten()
        .any(|found| found["key"] == taint);
    (object.name().into(), has_taint.then(|| taints.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAINT: &str = "cni.istio.io/not-ready";

    fn object(value: Value) -> Object {
        Object::from_value(value).expect("an object")
    }

    #[test]
    fn nodes_with_a_ready_pod_lose_the_taint() {
        let pod = |name: &str, node: &str, status: &str| {
            let conditions = json!([{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": status}]);
            ready_pod(object(
                json!({"metadata": {"name": name}, "spec": {"nodeName": node}, "status": {"conditions": conditions}}),
            ))
        };
        let node = |name: &str, taints: Value| {
            tainted_node(
                &object(json!({"metadata": {"name": name}, "spec": {"taints": taints}})),
                TAINT,
            )
        };
        let other = json!({"key": "other", "effect": "NoSchedule"});
        let ours = [
            json!({"key": TAINT, "effect": "NoSchedule"}),
            json!({"key": TAINT, "effect": "NoExecute"}),
        ];
        let mixed = json!([other, ours[0], ours[1]]);
        let (mut ready, mut tainted) = (BTreeMap::new(), BTreeMap::new());
        let pods = vec![pod("a", "n1", "True"), pod("b", "n2", "False"), pod("c", "n3", "True")];
        apply(&mut ready, WatchEvent::Restarted(pods));
        let nodes = vec![
            node("n1", mixed.clone()),
            node("n2", json!([ours[0]])),
            node("n3", json!([other])),
        ];
        apply(&mut tainted, WatchEvent::Restarted(nodes));
        let want = json!([
            {"op": "test", "path": "/spec/taints", "value": mixed},
            {"op": "replace", "path": "/spec/taints", "value": [other]},
        ]);
        assert_eq!(patches(TAINT, &ready, &tainted), BTreeMap::from([("n1".into(), want)]));
        apply(&mut ready, WatchEvent::Applied(pod("a", "n1", "False")));
        assert_eq!(patches(TAINT, &ready, &tainted), BTreeMap::new());
        apply(&mut ready, WatchEvent::Applied(pod("b", "n2", "True")));
        assert_eq!(patches(TAINT, &ready, &tainted).len(), 1);
        apply(&mut tainted, WatchEvent::Deleted(node("n2", json!([ours[0]]))));
        assert_eq!(patches(TAINT, &ready, &tainted), BTreeMap::new());
    }
}
