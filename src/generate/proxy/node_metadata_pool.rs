//! NodeMetadataPool, held once however many proxies are of them.

use std::{
    collections::BTreeSet,
    hash::Hash,
    sync::{Mutex, PoisonError},
};

use smol_str::SmolStr;

use super::{NodeMetadata, Proxy};
use crate::base::Hashed;

/// How many values there are before unused ones are looked for.
const FEW: usize = 64;

/// The kinds of connected proxies, and the lists of extensions that they are built with: an Envoy lists hundreds.
#[derive(Default)]
pub struct NodeMetadataPool(Mutex<(Pool<NodeMetadata>, Pool<BTreeSet<SmolStr>>)>);

impl NodeMetadataPool {
    /// Lets a proxy have what an equal one holds already.
    pub fn share(&self, proxy: &mut Proxy) {
        let mut pools = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (kinds, extensions) = &mut *pools;
        if let Some(held) = kinds.get(&proxy.node) {
            proxy.node = held;
            return;
        }
        if let Some(listed) = &proxy.node.extensions.listed {
            let mut kind = NodeMetadata::clone(&proxy.node);
            kind.extensions.listed = Some(extensions.share(listed));
            proxy.node = Hashed::new(kind);
        }
        proxy.node = kinds.share(&proxy.node);
    }
}

/// Equal values, each once. Those that nobody else holds are dropped when their number has doubled.
struct Pool<T> {
    values: BTreeSet<Hashed<T>>,
    enough: usize,
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self {
            values: BTreeSet::default(),
            enough: FEW,
        }
    }
}

impl<T: Eq + Hash> Pool<T> {
    fn get(&self, value: &Hashed<T>) -> Option<Hashed<T>> {
        self.values.get(value).cloned()
    }

    fn share(&mut self, value: &Hashed<T>) -> Hashed<T> {
        if let Some(held) = self.get(value) {
            return held;
        }
        if self.values.len() >= self.enough {
            self.values.retain(Hashed::is_shared);
            self.enough = FEW.max(2 * self.values.len());
        }
        self.values.insert(value.clone());
        value.clone()
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
        fixture::changed(proxy, |kind| kind.extensions = fixture::extensions(Some(&["a", "b"])))
    }

    #[test]
    fn equal_proxies_share_one_value() {
        let kinds = NodeMetadataPool::default();
        let shared = |number, name: &str| {
            let mut proxy = proxy(number, name);
            kinds.share(&mut proxy);
            proxy
        };
        let [one, two, other] = [shared(1, "w"), shared(2, "w"), shared(3, "v")];
        assert!(one.node.same(&two.node) && !one.node.same(&other.node));
        let listed = |proxy: &Proxy| proxy.extensions.listed.clone().expect("it lists extensions");
        assert!(listed(&one).same(&listed(&other)));
        assert_eq!(one.node, proxy(1, "w").node, "sharing changes nothing");
    }

    #[test]
    fn unused_values_are_dropped() {
        let kinds = NodeMetadataPool::default();
        let mut held = proxy(0, "held");
        kinds.share(&mut held);
        for number in 0..10 * FEW {
            kinds.share(&mut proxy(number, &format!("gone{number}")));
        }
        let mut again = proxy(1, "held");
        kinds.share(&mut again);
        assert!(again.node.same(&held.node));
        let pools = kinds.0.lock().expect("nobody has panicked");
        assert!(pools.0.values.len() <= FEW + 1, "{}", pools.0.values.len());
    }
}
