//! Selectors of the nodes whose addresses represent NodePort services. Services with equal selectors share a list.

use smol_str::SmolStr;

use crate::{
    api::kube,
    base::{ClusterId, Labels, ObjectKey, Shared, select},
    model::MeshSnapshot,
    table::Cx,
};

/// Annotation that restricts the nodes whose addresses represent a NodePort service, as JSON labels.
const NODE_SELECTOR: &str = "traffic.istio.io/nodeSelector";

/// A selector of the nodes whose addresses represent NodePort services.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeSelector {
    cluster: ClusterId,
    labels: Shared<Labels>,
}

impl NodeSelector {
    /// Returns the selector of a NodePort service; `None` for other services.
    pub(super) fn of(object: &kube::Service) -> Option<Self> {
        let selector = object.meta.annotations.get(NODE_SELECTOR)?;
        if object.service_type != "NodePort" {
            return None;
        }
        // An invalid selector selects every node, as an empty one does.
        let labels: Labels = serde_json::from_str(selector).unwrap_or_default();
        Some(Self {
            cluster: object.meta.cluster().clone(),
            labels: labels.into(),
        })
    }
}

/// Emits the node selector of a Service that has no other external addresses.
pub fn of_service(_key: &ObjectKey, object: &kube::Service, emit: &mut dyn FnMut(NodeSelector)) {
    if object.external_ips.is_empty() {
        NodeSelector::of(object).into_iter().for_each(emit);
    }
}

/// Derives the addresses of the nodes of a selector: the first external one of each.
pub fn addresses(cx: &Cx, mesh: &MeshSnapshot, key: &NodeSelector) -> Option<Shared<[SmolStr]>> {
    // Nothing depends on a selector that no Service has, so that it leaves no reads. A new one is derived anyway.
    mesh.node_selectors.get(&Cx::untracked(), key)?;
    let nodes = mesh.nodes.iter(cx).filter(|(node, row)| {
        let labels = &row.meta.labels;
        node.cluster == key.cluster && select::subset(&key.labels, labels)
    });
    let addresses: Vec<SmolStr> = nodes
        .filter_map(|(_, node)| node.external_ips.first().cloned())
        .collect();
    Some(addresses.into())
}
