//! Groups of connections with equal configuration: connections join here and receive the publications of their group.

use std::{
    future::pending,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use rayon::prelude::*;
use tokio::sync::{mpsc, watch};

pub use super::delivery::Deliveries;
use super::delivery::Delivery;
pub use crate::generate::store::ConnectionId;
use crate::{
    base::Shared,
    generate::{Proxy, RequestedResources, ResourceSnapshot, store::Executor},
};

/// The configuration that a connection should hold.
#[derive(Clone, Debug)]
pub struct Publication {
    /// The resources; `None` until the first configuration is generated.
    pub resources: Option<Arc<ResourceSnapshot>>,
    /// The changes that the connection has not received yet.
    pub unreceived: SharedUnreceived,
    /// The time when it was published.
    pub published_at: Option<Instant>,
}

/// The changes that a connection has not received yet, shared by its publications and taken once.
///
/// A publication that replaces one that was not received keeps its changes; one that follows a received one starts with
/// its own. Locked for one comparison; a `watch` channel has no way back to the sender.
#[derive(Clone, Debug, Default)]
pub struct SharedUnreceived(Arc<Mutex<Unreceived>>);

/// Changes that a connection has not received yet.
#[derive(Debug, Default)]
pub struct Unreceived {
    /// The arrival time of the oldest one; `None` if there is only a first configuration.
    pub since: Option<Instant>,
    /// The pushes with them.
    pub deliveries: Deliveries,
}

impl SharedUnreceived {
    /// Takes the changes.
    fn take(&self) -> Unreceived {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds a push. `since` is the arrival time of its oldest change.
    pub(super) fn add(&self, since: Option<Instant>, delivery: Option<&Arc<Delivery>>) {
        let mut unreceived = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        unreceived.since = match (unreceived.since, since) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        if let Some(delivery) = delivery {
            unreceived.deliveries.add(delivery.clone());
        }
    }
}

/// The latest request of a subscription, until the push loop reads it. A later request replaces an earlier one, so a
/// client that changes its request often uses no more memory. Locked for one exchange.
#[derive(Clone, Default)]
pub(super) struct LatestRequest(Arc<Mutex<Option<Shared<RequestedResources>>>>);

impl LatestRequest {
    /// Sets the request. Returns true if none was waiting, so that the push loop must be notified.
    fn put(&self, requested: Shared<RequestedResources>) -> bool {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.replace(requested).is_none()
    }

    /// Takes the latest request.
    pub(super) fn take(&self) -> Option<Shared<RequestedResources>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// An event of a connection, for the push loop.
pub(super) enum ProxyEvent {
    Join {
        id: ConnectionId,
        proxy: Arc<Proxy>,
        sender: watch::Sender<Publication>,
    },
    Request {
        id: ConnectionId,
        latest: LatestRequest,
    },
    Leave(ConnectionId),
}

/// The entry point for connections. Cheap to clone.
#[derive(Clone)]
pub struct Groups {
    events: mpsc::UnboundedSender<ProxyEvent>,
    next: Arc<AtomicU64>,
}

impl Groups {
    /// Creates the entry point and the receiver for the push loop. The channel has no bound of its own: it holds at
    /// most one message of each kind for each connection, so the bound on connections applies.
    #[expect(
        clippy::disallowed_methods,
        reason = "bounded by the number of connections; leaving must never fail"
    )]
    pub(super) fn channel() -> (Self, mpsc::UnboundedReceiver<ProxyEvent>) {
        let (events, receiver) = mpsc::unbounded_channel();
        (
            Self {
                events,
                next: Arc::default(),
            },
            receiver,
        )
    }

    /// Joins as a proxy. Dropping the subscription leaves.
    pub fn join(&self, proxy: Arc<Proxy>) -> Subscription {
        let id = ConnectionId(self.next.fetch_add(1, Ordering::Relaxed));
        let (sender, receiver) = watch::channel(Publication {
            resources: None,
            unreceived: SharedUnreceived::default(),
            published_at: None,
        });
        // The channel is closed at shutdown; then the receiver reports that its sender was dropped.
        let _ = self.events.send(ProxyEvent::Join { id, proxy, sender });
        Subscription {
            id,
            receiver,
            latest: LatestRequest::default(),
            events: self.events.clone(),
        }
    }
}

/// The subscription of a connection to the publications of its group.
pub struct Subscription {
    /// Its id in debug pages.
    pub id: ConnectionId,
    receiver: watch::Receiver<Publication>,
    latest: LatestRequest,
    events: mpsc::UnboundedSender<ProxyEvent>,
}

impl Subscription {
    /// Waits for a publication that was not received yet, and takes the changes that it contains; `None` if the push
    /// loop has ended and the connection has no configuration.
    ///
    /// A connection with a configuration keeps it without the push loop, and waits until it is drained.
    pub async fn next(&mut self) -> Option<(Publication, Unreceived)> {
        if self.receiver.changed().await.is_err() {
            let has_configuration = self.receiver.borrow().resources.is_some();
            return if has_configuration { pending().await } else { None };
        }
        // Taken while the publication is locked: later changes belong to the next one.
        let publication = self.receiver.borrow_and_update();
        Some((publication.clone(), publication.unreceived.take()))
    }

    /// Returns true if [`Self::next`] need not wait for a publication.
    pub fn has_next(&self) -> bool {
        self.receiver.has_changed().unwrap_or_default()
    }

    /// Requests other names than before. A publication says which names it was generated for
    /// ([`ResourceSnapshot::requested`]).
    pub fn request(&self, requested: Shared<RequestedResources>) {
        if self.latest.put(requested) {
            let (id, latest) = (self.id, self.latest.clone());
            // See [`Groups::join`].
            let _ = self.events.send(ProxyEvent::Request { id, latest });
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let _ = self.events.send(ProxyEvent::Leave(self.id));
    }
}

/// An executor on all cores.
pub struct Parallel;

impl Executor for Parallel {
    fn map<T: Send, R: Send>(&self, items: Vec<T>, function: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
        // Few items are not worth the hand-over to other threads.
        if items.len() < 8 {
            return items.into_iter().map(function).collect();
        }
        // The library's types then do not contain the closure's captures. The compiler proves again and again that what
        // these types contain may move between threads, which would take an eighth of its time.
        let function: &(dyn Fn(T) -> R + Sync) = &function;
        items.into_par_iter().map(function).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::FutureExt;

    use super::*;
    use crate::environment;
    use crate::generate::{ResourceType, fixture};

    fn sidecar() -> Arc<Proxy> {
        let node = "sidecar~10.0.0.1~a-0.default~default.svc.cluster.local";
        Arc::new(fixture::client(node, &serde_json::json!({})))
    }

    fn requested(name: &str) -> Shared<RequestedResources> {
        let names = [name.into()].into();
        Shared::new(RequestedResources::new([(ResourceType::Listener, names)]))
    }

    #[test]
    fn only_the_latest_request_is_queued() {
        let (groups, mut events) = Groups::channel();
        let subscription = groups.join(sidecar());
        assert!(matches!(events.try_recv(), Ok(ProxyEvent::Join { .. })));
        for round in 1..3 {
            for name in 0..1000 {
                subscription.request(requested(&format!("{round}.{name}")));
            }
            let Ok(ProxyEvent::Request { latest, .. }) = events.try_recv() else {
                panic!("the push loop is not notified");
            };
            assert_eq!(latest.take(), Some(requested(&format!("{round}.999"))));
            assert!(events.try_recv().is_err(), "more than one message");
        }
    }

    #[test]
    fn the_time_of_the_oldest_change_is_taken_once() {
        let unreceived = SharedUnreceived::default();
        let first = environment::now();
        let second = first + Duration::from_secs(1);
        unreceived.add(Some(first), None);
        unreceived.add(None, None);
        unreceived.add(Some(second), None);
        assert_eq!(unreceived.clone().take().since, Some(first));
        assert_eq!(unreceived.take().since, None);
        unreceived.add(Some(second), None);
        assert_eq!(
            unreceived.take().since,
            Some(second),
            "a taken time is not returned again"
        );
    }

    #[test]
    fn a_publication_is_received_without_later_changes() {
        let (groups, mut events) = Groups::channel();
        let mut subscription = groups.join(sidecar());
        let Ok(ProxyEvent::Join { sender, .. }) = events.try_recv() else {
            panic!("the push loop is not notified");
        };
        let first = environment::now();
        let second = first + Duration::from_secs(1);
        let publish = |since| sender.send_modify(|publication| publication.unreceived.add(Some(since), None));
        assert!(!subscription.has_next());
        publish(first);
        assert!(subscription.has_next());
        let mut received = || subscription.next().now_or_never().flatten();
        let (_, earlier) = received().expect("a publication");
        publish(second);
        assert_eq!(earlier.since, Some(first));
        let (_, later) = received().expect("a publication");
        assert_eq!(later.since, Some(second));
        assert!(received().is_none(), "nothing else was published");
    }

    #[test]
    fn a_configuration_outlives_the_push_loop() {
        let (groups, mut events) = Groups::channel();
        let (mut configured, mut other) = (groups.join(sidecar()), groups.join(sidecar()));
        let Ok(ProxyEvent::Join { sender, .. }) = events.try_recv() else {
            panic!("the push loop is not notified");
        };
        sender.send_modify(|publication| publication.resources = Some(Arc::new(ResourceSnapshot::empty())));
        drop((sender, events));
        assert!(matches!(configured.next().now_or_never(), Some(Some(_))));
        assert!(
            configured.next().now_or_never().is_none(),
            "it waits until it is drained"
        );
        assert!(matches!(other.next().now_or_never(), Some(None)), "nothing will arrive");
        assert!(matches!(groups.join(sidecar()).next().now_or_never(), Some(None)));
    }
}
