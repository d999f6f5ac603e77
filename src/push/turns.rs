//! The order of first configurations. Generation for a namespace with very large objects must not delay the proxies of
//! other namespaces. So namespaces whose generation took long are generated one at a time, in turns, after all others.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    sync::Arc,
    time::Duration,
};

use crate::{
    base::Namespace,
    generate::{Proxy, store::ConnectionId},
};

/// The duration of a batch after which its namespaces wait for others. Each then has a batch of its own, which shows
/// whether it was the cause.
const SLOW: Duration = Duration::from_millis(100);
/// The maximum number of slow namespaces that are remembered.
const MAX_SLOW: usize = 1024;

/// Proxies that have connected.
pub(super) type Connected = Vec<(ConnectionId, Arc<Proxy>)>;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Turns {
    slow: BTreeSet<Namespace>,
    waiting: BTreeMap<Namespace, Connected>,
    /// The namespace of the last turn.
    last: Option<Namespace>,
}

impl Turns {
    /// Takes the proxies of slow namespaces out of a batch. They wait for their turn, except clients that are served on
    /// demand: their requests must follow them.
    pub(super) fn defer(&mut self, connected: &mut Connected) {
        let waits = |proxy: &Proxy| self.slow.contains(&proxy.node.namespace) && !proxy.node.is_proxyless();
        for (id, proxy) in connected.extract_if(.., |(_, proxy)| waits(proxy)) {
            let waiting = self.waiting.entry(proxy.node.namespace.clone()).or_default();
            waiting.push((id, proxy));
        }
    }

    /// Returns true if a namespace waits for its turn.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the waiting proxies of the next namespace.
    pub(super) fn next(&mut self) -> Option<Connected> {
        let after = self.last.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let following = self.waiting.range::<Namespace, _>((after, Bound::Unbounded)).next();
        let (namespace, _) = following.or_else(|| self.waiting.first_key_value())?;
        let namespace = namespace.clone();
        let connected = self.waiting.remove(&namespace);
        self.last = Some(namespace);
        connected
    }

    /// Removes a waiting proxy that has disconnected. Returns false if it does not wait.
    pub(super) fn remove(&mut self, id: ConnectionId) -> bool {
        let mut removed = false;
        self.waiting.retain(|_, connected| {
            let before = connected.len();
            connected.retain(|(waiting, _)| *waiting != id);
            removed |= connected.len() < before;
            !connected.is_empty()
        });
        removed
    }

    /// Records how long a batch took.
    pub(super) fn record(&mut self, namespaces: BTreeSet<Namespace>, worked: Duration) {
        if worked < SLOW {
            self.slow.retain(|slow| !namespaces.contains(slow));
        } else if self.slow.len() + namespaces.len() <= MAX_SLOW {
            self.slow.extend(namespaces);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::fixture;

    fn connected(namespaces: &[&str]) -> Connected {
        let proxy = |(number, namespace): (usize, &&str)| {
            let id = format!("sidecar~10.0.0.1~web-{number}.{namespace}~{namespace}.svc.cluster.local");
            let metadata = serde_json::json!({ "NAMESPACE": namespace });
            (ConnectionId(number as u64), Arc::new(fixture::client(&id, &metadata)))
        };
        namespaces.iter().enumerate().map(proxy).collect()
    }

    fn set(namespaces: &[&str]) -> BTreeSet<Namespace> {
        namespaces.iter().map(|namespace| Namespace::new(*namespace)).collect()
    }

    fn ids(connected: &Connected) -> Vec<u64> {
        connected.iter().map(|(id, _)| id.0).collect()
    }

    #[test]
    fn r20_slow_namespaces_wait_for_others() {
        let mut turns = Turns::default();
        turns.record(set(&["a", "b", "c"]), 2 * SLOW);
        let mut batch = connected(&["a", "x", "b", "a", "c"]);
        turns.defer(&mut batch);
        assert_eq!(ids(&batch), [1], "the others go first");
        assert_eq!(turns.next().as_ref().map(ids), Some(vec![0, 3]));
        turns.record(set(&["a"]), Duration::ZERO);
        let mut batch = connected(&["a"]);
        turns.defer(&mut batch);
        assert_eq!(ids(&batch), [0], "no longer slow");
        assert_eq!(turns.next().as_ref().map(ids), Some(vec![2]));
        assert!(turns.remove(ConnectionId(4)) && !turns.remove(ConnectionId(4)));
        assert!(!turns.is_waiting() && turns.next().is_none());
    }
}
