//! Sharing of equal node metadata between connected proxies.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use smol_str::SmolStr;

use super::{NodeMetadata, Proxy};
use crate::base::{Hashed, Labels, pool::Pool};

/// The node metadata of connected proxies, their labels and their lists of extensions, each value held once. An Envoy
/// lists hundreds of extensions.
#[derive(Default)]
pub struct NodeMetadataPool(Mutex<Pools>);

#[derive(Default)]
struct Pools {
    nodes: Pool<Hashed<NodeMetadata>>,
    extensions: Pool<Hashed<BTreeSet<SmolStr>>>,
    labels: Pool<Hashed<Labels>>,
}

impl NodeMetadataPool {
    /// Replaces a proxy's metadata by an equal value that another proxy holds.
    pub fn share(&self, proxy: &mut Proxy) {
        let mut pools = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Pools {
            nodes,
            extensions,
            labels,
        } = &mut *pools;
        for own in [&mut proxy.node_labels, &mut proxy.static_labels] {
            *own = labels.share(own);
        }
        if let Some(held) = nodes.get(&proxy.node) {
            proxy.node = held;
            return;
        }
        if let Some(listed) = &proxy.node.extensions.listed {
            let mut node = NodeMetadata::clone(&proxy.node);
            node.extensions.listed = Some(extensions.share(listed));
            proxy.node = Hashed::new(node);
        }
        proxy.node = nodes.share(&proxy.node);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::generate::fixture;

    fn proxy(number: usize, name: &str) -> Proxy {
        let id = format!("sidecar~10.0.0.1~{name}-{number}.default~default.svc.cluster.local");
        let proxy = fixture::client(&id, &json!({"WORKLOAD_NAME": name}));
        fixture::changed(proxy, |node| node.extensions = fixture::extensions(Some(&["a", "b"])))
    }

    #[test]
    fn equal_proxies_share_metadata_and_extensions() {
        let pool = NodeMetadataPool::default();
        let shared = |number, name: &str| {
            let mut proxy = proxy(number, name);
            pool.share(&mut proxy);
            proxy
        };
        let [one, two, other] = [shared(1, "w"), shared(2, "w"), shared(3, "v")];
        assert!(one.node.ptr_eq(&two.node) && !one.node.ptr_eq(&other.node));
        assert!(one.node_labels.ptr_eq(&two.node_labels));
        let listed = |proxy: &Proxy| proxy.node.extensions.listed.clone().expect("a list of extensions");
        assert!(listed(&one).ptr_eq(&listed(&other)));
        assert_eq!(one.node, proxy(1, "w").node, "sharing changes nothing");
    }
}
