//! Sheds connections when replicas are added, so that each replica soon has a fair share.
//!
//! Proxies keep their connection for as long as it lives, so a new replica would wait for their maximum age
//! (`--keepaliveMaxServerConnectionAge`). The number of replicas is that of the ready endpoints of istiod's Service in
//! its own cluster. When it grows, the open connections of every replica close once, each at a random time within
//! [`OVER`]. The Service spreads those that reconnect over all replicas, so that shares are equal afterwards. To close
//! fewer would not be enough: a Service chooses at random, also among the replicas that have too many.
//!
//! A replica whose readiness changes all the time must not close connections each time. After an order, the next one
//! for as many replicas or fewer waits for the end of a [`PAUSE`].

use std::{collections::BTreeSet, time::Duration};

use tokio::{sync::watch, time::Instant};

use crate::{
    distribution::replicas::{Replica, Replicas},
    rpc::Shedding,
    task::{Tasks, until},
};

/// The time over which connections close: 33 a second in a mesh of 10,000 proxies.
const OVER: Duration = Duration::from_mins(5);
/// The shortest time between the beginnings of two orders, unless there are more replicas than at the first.
const PAUSE: Duration = Duration::from_mins(15);

/// Returns the number of ready replicas; 0 if it is unknown.
fn ready(replicas: &Replicas) -> usize {
    let all = replicas.iter().flat_map(|replicas| replicas.iter());
    all.filter(|replica| replica.is_ready)
        .map(Replica::address)
        .collect::<BTreeSet<_>>()
        .len()
}

/// The orders to close connections, as they follow from the number of replicas.
#[derive(Default)]
struct Rebalancing {
    /// Number of ready replicas; 0 while it is unknown.
    ready: usize,
    /// The end of the pause after the last order, and the number of replicas of that order.
    pause: Option<(Instant, usize)>,
    /// True if replicas were added during the pause, so that an order follows it.
    is_deferred: bool,
}

impl Rebalancing {
    /// Takes the number of ready replicas. Returns the order that follows from it; `None` if there is none. Fewer
    /// replicas, as in a rolling restart, end the order.
    fn change(&mut self, now: usize, at: Instant) -> Option<Shedding> {
        // Unknown is not none.
        if now == 0 {
            return None;
        }
        let before = std::mem::replace(&mut self.ready, now);
        if before == 0 || before == now {
            return None;
        }
        let is_growth = now > before;
        self.is_deferred = is_growth && self.pause.is_some_and(|(end, replicas)| at < end && now <= replicas);
        match (is_growth, self.is_deferred) {
            (false, _) => Some(None),
            (true, true) => None,
            (true, false) => Some(self.begin(at)),
        }
    }

    /// Returns the time of the deferred order, if there is one.
    fn due(&self) -> Option<Instant> {
        self.pause.filter(|_| self.is_deferred).map(|(end, _)| end)
    }

    /// Returns an order to close connections.
    fn begin(&mut self, at: Instant) -> Shedding {
        self.pause = Some((at + PAUSE, self.ready));
        self.is_deferred = false;
        Some(OVER)
    }
}

/// Publishes when connections close.
pub(super) fn follow(tasks: &Tasks, mut replicas: watch::Receiver<Replicas>) -> watch::Receiver<Shedding> {
    let (sender, shedding) = watch::channel(None);
    tasks.spawn_until_shutdown("rebalancing", async move {
        let mut rebalancing = Rebalancing::default();
        loop {
            let before = rebalancing.ready;
            let order = rebalancing.change(ready(&replicas.borrow_and_update()), Instant::now());
            if let Some(order) = order {
                sender.send_replace(order);
            }
            let now = rebalancing.ready;
            if now != before {
                // Connections that are opened after this line was written stay open.
                let reconnect_within = order.flatten().map(tracing::field::debug);
                tracing::info!(before, now, reconnect_within, "ready replicas changed");
            }
            tokio::select! {
                changed = replicas.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                () = until(rebalancing.due()) => {
                    let order = rebalancing.begin(Instant::now());
                    sender.send_replace(order);
                    let reconnect_within = order.map(tracing::field::debug);
                    tracing::info!(now, reconnect_within, "rebalancing after a pause");
                }
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

    #[test]
    fn replicas_that_flap_close_connections_once_in_a_pause() {
        let begin = Instant::now();
        let mut rebalancing = Rebalancing::default();
        let mut change = |now, minutes| {
            let order = rebalancing.change(now, begin + Duration::from_mins(minutes));
            (order, rebalancing.due())
        };
        let end = begin + PAUSE;
        assert_eq!(change(2, 0), (None, None));
        assert_eq!(change(3, 0), (Some(Some(OVER)), None));
        for minutes in [1, 3, 5, 7] {
            assert_eq!(change(2, minutes), (Some(None), None));
            assert_eq!(change(3, minutes + 1), (None, Some(end)), "deferred");
        }
        assert_eq!(change(3, 9), (None, Some(end)), "the same number changes nothing");
        // More replicas than ever do not wait.
        assert_eq!(change(4, 10), (Some(Some(OVER)), None));
        assert_eq!(change(3, 11), (Some(None), None));
        let end = begin + Duration::from_mins(10) + PAUSE;
        assert_eq!(change(4, 12), (None, Some(end)));
        // The next growth after the pause counts again.
        assert_eq!(change(3, 24), (Some(None), None));
        assert_eq!(change(4, 25), (Some(Some(OVER)), None));
        assert_eq!(change(3, 26), (Some(None), None));
        // Replicas that stay get their share after the pause.
        let end = begin + Duration::from_mins(25) + PAUSE;
        assert_eq!(change(4, 27), (None, Some(end)));
        assert_eq!((rebalancing.begin(end), rebalancing.due()), (Some(OVER), None));
    }
}
