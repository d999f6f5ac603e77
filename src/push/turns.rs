//! The order of first configurations. Generation for a namespace with very large objects must not delay the proxies of
//! other namespaces. So namespaces whose generation took long are generated one at a time, after all others: the one
//! that has used the least time goes first, and its turn comes when the others have used as much time as it needs, or
//! when none of them waits. What a namespace did not use while it did not wait, it cannot use later (start-time fair
//! queueing).

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
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
/// The maximum time that others use before the turn of a slow namespace.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// The maximum number of slow namespaces that are remembered.
const MAX_SLOW: usize = 1024;

/// Proxies that have connected.
pub(super) type Connected = Vec<(ConnectionId, Arc<Proxy>)>;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct NamespaceTurns {
    slow: BTreeMap<Namespace, Cost>,
    waiting: BTreeMap<Namespace, BTreeMap<ConnectionId, Arc<Proxy>>>,
    /// Namespaces of the waiting proxies.
    namespaces: BTreeMap<ConnectionId, Namespace>,
    /// The time that the namespace of the last turn had used before that turn.
    served: Duration,
    /// The time that others have used since the last turn.
    others: Duration,
    /// True if a turn was not recorded yet.
    is_turn: bool,
}

/// The measured cost of a slow namespace.
#[derive(Clone, Copy, Default)]
struct Cost {
    /// The duration of its last batch.
    last: Duration,
    /// The time that it has used in turns; at least [`NamespaceTurns::served`] when it becomes slow, and when it begins
    /// to wait.
    used: Duration,
}

impl NamespaceTurns {
    /// Takes the proxies of slow namespaces out of a batch. They wait for their turn, except clients that are served on
    /// demand: their requests must follow them.
    pub(super) fn defer(&mut self, connected: &mut Connected) {
        let waits = |proxy: &Proxy| self.slow.contains_key(&proxy.node.namespace) && !proxy.node.is_proxyless();
        let deferred: Connected = connected.extract_if(.., |(_, proxy)| waits(proxy)).collect();
        for (id, proxy) in deferred {
            let namespace = proxy.node.namespace.clone();
            if let Some(cost) = self.slow.get_mut(&namespace)
                && !self.waiting.contains_key(&namespace)
            {
                cost.used = cost.used.max(self.served);
            }
            self.namespaces.insert(id, namespace.clone());
            self.waiting.entry(namespace).or_default().insert(id, proxy);
        }
    }

    /// Returns true if a namespace waits for its turn.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns true if a namespace waits whose turn precedes proxies of other namespaces.
    pub(super) fn is_due(&self) -> bool {
        let next = self.next_namespace();
        next.is_some_and(|next| self.others >= self.cost(&next).last.min(LONGEST_WAIT))
    }

    /// Returns the waiting proxies of the next namespace.
    pub(super) fn next(&mut self) -> Option<Connected> {
        self.others = Duration::ZERO;
        let namespace = self.next_namespace()?;
        let next = self.waiting.remove(&namespace);
        self.is_turn = next.is_some();
        self.served = self.served.max(self.cost(&namespace).used);
        let next = next?;
        for id in next.keys() {
            self.namespaces.remove(id);
        }
        Some(next.into_iter().collect())
    }

    fn next_namespace(&self) -> Option<Namespace> {
        let least = self.waiting.keys().min_by_key(|namespace| self.cost(namespace).used);
        least.cloned()
    }

    fn cost(&self, namespace: &Namespace) -> Cost {
        self.slow.get(namespace).copied().unwrap_or_default()
    }

    /// Returns true if the proxy waits for the turn of its namespace.
    pub(super) fn is_waiting_for(&self, id: ConnectionId) -> bool {
        self.namespaces.contains_key(&id)
    }

    /// Removes a waiting proxy that has disconnected. Returns false if it does not wait.
    pub(super) fn remove(&mut self, id: ConnectionId) -> bool {
        let Some(namespace) = self.namespaces.remove(&id) else {
            return false;
        };
        if let Entry::Occupied(mut connected) = self.waiting.entry(namespace) {
            connected.get_mut().remove(&id);
            if connected.get().is_empty() {
                connected.remove();
            }
        }
        true
    }

    /// Records how long a batch took.
    pub(super) fn record(&mut self, namespaces: BTreeSet<Namespace>, worked: Duration) {
        let is_turn = std::mem::take(&mut self.is_turn);
        let has_room = self.slow.len() + namespaces.len() <= MAX_SLOW;
        let are_known = namespaces.iter().all(|namespace| self.slow.contains_key(namespace));
        let become_slow = worked >= SLOW && has_room && !are_known;
        // Namespaces that become slow do not count as others. Clients that are served on demand do, whatever they cost.
        if !is_turn && !become_slow {
            self.others += worked;
        }
        if worked < SLOW {
            self.slow.retain(|slow, _| !namespaces.contains(slow));
            return;
        }
        for namespace in namespaces {
            if !has_room && !self.slow.contains_key(&namespace) {
                continue;
            }
            let (last, used) = (worked, self.served);
            let cost = self.slow.entry(namespace).or_insert(Cost { last, used });
            cost.last = last;
            cost.used += worked;
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
    fn r21_slow_namespaces_wait_for_others() {
        let mut turns = NamespaceTurns::default();
        turns.record(set(&["a", "b", "c"]), 2 * SLOW);
        let mut batch = connected(&["a", "x", "b", "a", "c"]);
        turns.defer(&mut batch);
        assert_eq!(ids(&batch), [1], "the others go first");
        assert!(turns.is_waiting_for(ConnectionId(4)) && !turns.is_waiting_for(ConnectionId(1)));
        assert!(!turns.is_due(), "others have used less time");
        turns.record(set(&["x"]), SLOW / 2);
        assert!(!turns.is_due());
        (0..3).for_each(|_| turns.record(set(&["x"]), SLOW / 2));
        assert!(turns.is_due());
        assert_eq!(turns.next().as_ref().map(ids), Some(vec![0, 3]));
        turns.record(set(&["a"]), Duration::ZERO);
        let mut batch = connected(&["a"]);
        turns.defer(&mut batch);
        assert_eq!(ids(&batch), [0], "no longer slow");
        assert_eq!(turns.next().as_ref().map(ids), Some(vec![2]));
        assert!(turns.remove(ConnectionId(4)) && !turns.remove(ConnectionId(4)));
        assert!(!turns.is_waiting() && turns.next().is_none());
        assert!(turns.namespaces.is_empty());
    }

    #[test]
    fn r21_slow_namespaces_do_not_wait_for_what_they_used_before() {
        let mut turns = NamespaceTurns::default();
        turns.record(set(&["idle", "old"]), SLOW);
        for _ in 0..100 {
            turns.defer(&mut connected(&["old"]));
            assert!(turns.next().is_some(), "no other one waits");
            turns.record(set(&["old"]), SLOW);
        }
        turns.record(set(&["new"]), SLOW);
        turns.defer(&mut connected(&["old"]));
        let precedes = |_: &u32| {
            // Its proxies connect without a pause.
            turns.defer(&mut connected(&["other", "new"]));
            let is_new = turns.next().as_ref().map(ids) == Some(vec![1]);
            turns.record(set(&[if is_new { "new" } else { "old" }]), SLOW);
            is_new
        };
        let preceding = (0..100).take_while(precedes).count();
        assert!(preceding <= 1, "{preceding} turns");
    }

    #[test]
    fn r21_turns_are_counted_if_no_more_namespaces_are_remembered() {
        let mut turns = NamespaceTurns::default();
        for number in 0..MAX_SLOW {
            turns.record(set(&[format!("n{number}").as_str()]), SLOW);
        }
        turns.defer(&mut connected(&["n0", "n1"]));
        assert_eq!(turns.next().as_ref().map(ids), Some(vec![0]));
        turns.record(set(&["n0"]), SLOW);
        turns.defer(&mut connected(&["n0"]));
        assert_eq!(turns.next().as_ref().map(ids), Some(vec![1]));
    }

    #[test]
    fn r21_expensive_requests_do_not_keep_slow_namespaces_waiting() {
        let mut turns = NamespaceTurns::default();
        turns.record(set(&["a"]), 2 * SLOW);
        turns.defer(&mut connected(&["a"]));
        assert!(turns.is_waiting() && !turns.is_due());
        // A client on demand that has connected before requests other names.
        turns.record(set(&[]), 2 * SLOW);
        assert!(turns.is_due());
        assert!(turns.next().is_some());
        turns.record(set(&["a"]), 2 * SLOW);
        turns.defer(&mut connected(&["a"]));
        assert!(!turns.is_due(), "its own turn does not count as time of others");
        // Another one in the same namespace connects, for which it does not wait.
        turns.record(set(&["a"]), 2 * SLOW);
        assert!(turns.is_due());
    }
}
