//! Sheds connections when replicas are added, so that each replica soon has a fair share.
//!
//! Proxies keep their connection for as long as it lives, so a new replica would wait for their maximum age
//! (`--keepaliveMaxServerConnectionAge`). The number of replicas is that of the ready endpoints of istiod's Service in
//! its own cluster. When it grows, the open connections of every replica close once, each at a random time within
//! [`OVER`]. The Service spreads those that reconnect over all replicas, so that shares are equal afterwards. To close
//! fewer would not be enough: a Service chooses at random, also among the replicas that have too many.

use std::{collections::BTreeSet, time::Duration};

use tokio::sync::watch;

use crate::{
    distribution::replicas::{Replica, Replicas},
    rpc::Shedding,
    task::Tasks,
};

/// The time over which connections close: 33 a second in a mesh of 10,000 proxies.
const OVER: Duration = Duration::from_mins(5);

/// Returns the number of ready replicas; 0 if it is unknown.
fn ready(replicas: &Replicas) -> usize {
    let all = replicas.iter().flat_map(|replicas| replicas.iter());
    all.filter(|replica| replica.is_ready)
        .map(Replica::address)
        .collect::<BTreeSet<_>>()
        .len()
}

/// Returns the order that follows from a changed number of replicas; `None` if there is none. Fewer replicas, as in a
/// rolling restart, end the order.
fn order(before: usize, now: usize) -> Option<Shedding> {
    // Unknown is not none.
    let was_known = before > 0;
    was_known.then(|| (now > before).then_some(OVER))
}

/// Publishes when connections close.
pub(super) fn follow(tasks: &Tasks, mut replicas: watch::Receiver<Replicas>) -> watch::Receiver<Shedding> {
    let (sender, shedding) = watch::channel(None);
    tasks.spawn_until_shutdown("rebalancing", async move {
        let mut before = 0;
        loop {
            let now = ready(&replicas.borrow_and_update());
            if now > 0 && now != before {
                let order = order(before, now);
                if let Some(order) = order {
                    sender.send_replace(order);
                }
                // Connections that are opened after this line was written stay open.
                let reconnect_within = order.flatten().map(tracing::field::debug);
                tracing::info!(before, now, reconnect_within, "ready replicas changed");
                before = now;
            }
            if replicas.changed().await.is_err() {
                return;
            }
        }
    });
    shedding
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Returns ready replicas, and one that is not ready.
    fn replicas(ready: u8) -> Replicas {
        let replica = |number: u8| Replica {
            name: format!("istiod-{number}").into(),
            host: format!("10.1.0.{number}").into(),
            port: 15012,
            is_ready: number < ready,
            serves: number < ready,
        };
        Some(Arc::new((0..=ready).map(replica).collect()))
    }

    #[tokio::test]
    async fn added_replicas_close_connections_and_removed_ones_end_that() {
        let (sender, known) = watch::channel(None);
        let mut shedding = follow(&Tasks::default(), known);
        // A new replica learns the number of the others first: that changes nothing.
        for (ready, expected) in [
            (1, None),
            (2, Some(Some(OVER))),
            (2, None),
            (0, None),
            (2, None),
            (1, Some(None)),
        ] {
            sender.send_replace(replicas(ready));
            // The task has read the replicas when it waits for the next ones.
            tokio::task::yield_now().await;
            tokio::task::yield_now().await;
            let changed = shedding.has_changed().expect("a running task");
            let order = changed.then(|| *shedding.borrow_and_update());
            assert_eq!(order, expected, "{ready} replicas");
        }
    }
}
