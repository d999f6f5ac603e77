//! Connections join here and are handed what their group is sent.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use rayon::prelude::*;
use tokio::sync::{mpsc, watch};

pub use crate::generate::store::MemberId;
use crate::{
    base::Shared,
    generate::{Proxy, RequestedResources, ResourceSnapshot, store::Executor},
};

/// What a connection is to hold, and why.
#[derive(Clone, Debug)]
pub struct Publication {
    /// The resources; `None` until the first configuration is generated.
    pub resources: Option<Arc<ResourceSnapshot>>,
    /// When the oldest change in it arrived.
    pub since: Since,
}

/// When the oldest change arrived that the connection has not taken yet; nothing for a first configuration.
///
/// Shared by the publications of one connection and taken once: what replaces a publication that was not taken keeps its
/// time, what follows one that was taken begins anew. Locked for one comparison; a `watch` has no way back.
#[derive(Clone, Debug, Default)]
pub struct Since(Arc<Mutex<Option<Instant>>>);

impl Since {
    /// The time, which nobody gets again.
    pub fn take(&self) -> Option<Instant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(super) fn add(&self, since: Option<Instant>) {
        let mut oldest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *oldest = match (*oldest, since) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
}

/// What a member asks for, until the pump reads it: later demands take the place of earlier ones, so that a client that
/// keeps changing its mind costs no more than one that does not. Locked for one exchange.
#[derive(Clone, Default)]
pub(super) struct Asked(Arc<Mutex<Option<Shared<RequestedResources>>>>);

impl Asked {
    /// Puts a demand; true if none was waiting, so that the pump has to be told.
    fn put(&self, demand: Shared<RequestedResources>) -> bool {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.replace(demand).is_none()
    }

    /// The last demand, which nobody gets again.
    pub(super) fn take(&self) -> Option<Shared<RequestedResources>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// What connections tell the pump.
pub(super) enum Membership {
    Join {
        id: MemberId,
        proxy: Arc<Proxy>,
        sender: watch::Sender<Publication>,
    },
    Demand {
        id: MemberId,
        asked: Asked,
    },
    Leave(MemberId),
}

/// The way in for connections. Cheap to clone.
#[derive(Clone)]
pub struct Groups {
    events: mpsc::UnboundedSender<Membership>,
    next: Arc<AtomicU64>,
}

impl Groups {
    /// Makes the way in and what the pump reads from it. The channel holds at most one message of each sort for each
    /// connection, so it is bounded by the bound on connections.
    #[allow(
        clippy::disallowed_methods,
        reason = "bounded by the number of connections; leaving must never fail"
    )]
    pub(super) fn channel() -> (Self, mpsc::UnboundedReceiver<Membership>) {
        let (events, receiver) = mpsc::unbounded_channel();
        (
            Self {
                events,
                next: Arc::default(),
            },
            receiver,
        )
    }

    /// Joins as a proxy. Dropping the member leaves.
    pub fn join(&self, proxy: Arc<Proxy>) -> Member {
        let id = MemberId(self.next.fetch_add(1, Ordering::Relaxed));
        let (sender, receiver) = watch::channel(Publication {
            resources: None,
            since: Since::default(),
        });
        // A closed channel means shutdown: the receiver then reports that its sender is gone.
        let _ = self.events.send(Membership::Join { id, proxy, sender });
        Member {
            id,
            receiver,
            asked: Asked::default(),
            events: self.events.clone(),
        }
    }
}

/// A connection's place in its group.
pub struct Member {
    /// Names it in debug pages.
    pub id: MemberId,
    /// Follows what the proxy is to hold.
    pub receiver: watch::Receiver<Publication>,
    asked: Asked,
    events: mpsc::UnboundedSender<Membership>,
}

impl Member {
    /// Asks for other names than before. What is published for them says so ([`ResourceSnapshot::demand`]).
    pub fn demand(&self, demand: Shared<RequestedResources>) {
        if self.asked.put(demand) {
            let (id, asked) = (self.id, self.asked.clone());
            // As in [`Groups::join`].
            let _ = self.events.send(Membership::Demand { id, asked });
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.events.send(Membership::Leave(self.id));
    }
}

/// Evaluates on all cores.
pub struct Parallel;

impl Executor for Parallel {
    fn map<T: Send, R: Send>(&self, items: Vec<T>, function: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
        // A handful of items is not worth the hand-over.
        if items.len() < 8 {
            return items.into_iter().map(function).collect();
        }
        items.into_par_iter().map(function).collect()
    }
}

/// Groups without a pump: every connection follows the same snapshots. Ends when the sender is dropped. For tests and fuzz
/// targets, which try a server without a mesh.
pub fn hand_fed(tasks: &crate::task::Tasks) -> (Groups, watch::Sender<Option<Arc<ResourceSnapshot>>>) {
    let (groups, mut membership) = Groups::channel();
    let (feed, mut fed) = watch::channel(None);
    tasks.spawn_until_shutdown("hand-fed groups", async move {
        let mut members = std::collections::BTreeMap::new();
        loop {
            let fresh = tokio::select! {
                event = membership.recv() => match event {
                    Some(Membership::Join { id, sender, .. }) => {
                        members.insert(id.0, sender);
                        vec![id.0]
                    }
                    Some(Membership::Leave(id)) => {
                        members.remove(&id.0);
                        Vec::new()
                    }
                    Some(Membership::Demand { .. }) => Vec::new(),
                    None => return,
                },
                changed = fed.changed() => match changed {
                    Ok(()) => members.keys().copied().collect(),
                    Err(_) => return,
                },
            };
            let resources: Option<Arc<ResourceSnapshot>> = fed.borrow().clone();
            for id in fresh {
                members[&id].send_modify(|publication| {
                    // What a connection finds when it joins is no change.
                    publication
                        .since
                        .add(publication.resources.is_some().then(crate::environment::now));
                    publication.resources.clone_from(&resources);
                });
            }
        }
    });
    (groups, feed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment;
    use crate::generate::{ResourceType, fixture};

    fn asks(name: &str) -> Shared<RequestedResources> {
        let names = [name.into()].into();
        Shared::new(RequestedResources::new([(ResourceType::Listener, names)]))
    }

    #[test]
    fn of_many_demands_the_last_one_waits() {
        let (groups, mut events) = Groups::channel();
        let node = "sidecar~10.0.0.1~a-0.default~default.svc.cluster.local";
        let member = groups.join(Arc::new(fixture::client(node, &serde_json::json!({}))));
        assert!(matches!(events.try_recv(), Ok(Membership::Join { .. })));
        for round in 1..3 {
            for name in 0..1000 {
                member.demand(asks(&format!("{round}.{name}")));
            }
            let Ok(Membership::Demand { asked, .. }) = events.try_recv() else {
                panic!("the pump is told");
            };
            assert_eq!(asked.take(), Some(asks(&format!("{round}.999"))));
            assert!(events.try_recv().is_err(), "one message is enough");
        }
    }

    #[test]
    fn the_oldest_change_is_taken_once() {
        let since = Since::default();
        let first = environment::now();
        let second = first + std::time::Duration::from_secs(1);
        since.add(Some(first));
        since.add(None);
        since.add(Some(second));
        assert_eq!(since.clone().take(), Some(first));
        assert_eq!(since.take(), None);
        since.add(Some(second));
        assert_eq!(since.take(), Some(second), "what was taken does not count again");
    }
}
