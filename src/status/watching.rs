//! Watches for writers, which live as long as the work that reads them.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    sync::Arc,
};

use ::kube::core::ApiResource;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{
    base::{ClusterId, SmolStr},
    kube::{
        Object,
        health::{WatchHealth, WatchMetrics},
        watch::{WatchEvent, WatchTarget, watch_as},
    },
};

/// Capacity of an event queue.
const QUEUE: usize = 64;

/// The namespaces whose objects a writer may read and write. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct WatchedNamespaces(Arc<BTreeSet<SmolStr>>);

impl WatchedNamespaces {
    /// Returns the namespaces with these names; without any, all of them.
    pub fn new(names: BTreeSet<SmolStr>) -> Self {
        Self(Arc::new(names))
    }

    /// Returns true if objects of a namespace count. Objects of the cluster, which have none, always do.
    pub fn contains(&self, namespace: &str) -> bool {
        self.0.is_empty() || namespace.is_empty() || self.0.contains(namespace)
    }

    /// Returns the namespace of a watch. Several namespaces have one watch of all, whose objects the reader must check.
    pub(super) fn target(&self) -> Option<String> {
        let mut names = self.0.iter();
        let first = names.next()?;
        names.next().is_none().then(|| first.to_string())
    }
}

/// Opens watches in one cluster. Cheap to clone.
#[derive(Clone)]
pub struct Watches {
    /// Client of the cluster.
    pub client: ::kube::Client,
    /// Cluster, for metrics.
    pub cluster: ClusterId,
    /// Metrics of the watches.
    pub metrics: WatchMetrics,
}

impl Watches {
    /// Opens a watch and returns its events. It runs while the future is polled, and ends when the receiver is dropped.
    pub fn open<T, C>(
        &self,
        target: WatchTarget,
        convert: C,
    ) -> (
        impl Future<Output = ()> + Send + use<T, C>,
        mpsc::Receiver<WatchEvent<T>>,
    )
    where
        T: Send + Sync + 'static,
        C: FnMut(Object) -> T + Send + Sync,
    {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let health = WatchHealth::new(&self.cluster, &target.name(), &self.metrics);
        (watch_as(self.client.clone(), target, health, convert, sender), receiver)
    }
}

/// An event with its kind and the number of the watch that it comes from.
type KindEvent<K, T> = (K, u64, WatchEvent<T>);

/// An open watch of a kind.
struct Running {
    number: u64,
    resource: ApiResource,
    stop: CancellationToken,
}

/// Watches of several kinds, at most one of each, which open and close while others run. Their events have one queue.
pub(super) struct WatchSet<K, T> {
    watches: Watches,
    running: BTreeMap<K, Running>,
    /// The number of watches that were opened.
    opened: u64,
    watching: FuturesUnordered<BoxFuture<'static, ()>>,
    sender: mpsc::Sender<KindEvent<K, T>>,
    events: mpsc::Receiver<KindEvent<K, T>>,
}

impl<K, T> WatchSet<K, T>
where
    K: Copy + Ord + Send + 'static,
    T: Send + Sync + 'static,
{
    /// Returns a set without watches.
    pub(super) fn new(watches: Watches) -> Self {
        let (sender, events) = mpsc::channel(QUEUE);
        Self {
            watches,
            running: BTreeMap::new(),
            opened: 0,
            watching: FuturesUnordered::new(),
            sender,
            events,
        }
    }

    /// Returns the client of the cluster.
    pub(super) fn client(&self) -> &::kube::Client {
        &self.watches.client
    }

    /// Returns the cluster.
    pub(super) fn cluster(&self) -> &ClusterId {
        &self.watches.cluster
    }

    /// Opens the watch of a kind, in the place of its previous one.
    pub(super) fn open<C>(&mut self, kind: K, target: WatchTarget, convert: C)
    where
        C: FnMut(Object) -> T + Send + Sync + 'static,
    {
        self.close(kind);
        self.opened += 1;
        let number = self.opened;
        let (resource, stop) = (target.resource.clone(), CancellationToken::new());
        let (watching, mut events) = self.watches.open(target, convert);
        let (sender, stopped) = (self.sender.clone(), stop.clone());
        let forwarding = async move {
            while let Some(event) = events.recv().await {
                if sender.send((kind, number, event)).await.is_err() {
                    return;
                }
            }
        };
        self.watching.push(
            async move {
                tokio::select! {
                    () = stopped.cancelled() => {}
                    () = watching => {}
                    () = forwarding => {}
                }
            }
            .boxed(),
        );
        let running = Running { number, resource, stop };
        self.running.insert(kind, running);
    }

    /// Closes the watch of a kind. Returns false if there is none.
    pub(super) fn close(&mut self, kind: K) -> bool {
        let closed = self.running.remove(&kind);
        if let Some(running) = &closed {
            running.stop.cancel();
        }
        closed.is_some()
    }

    /// Returns the kinds with a watch.
    pub(super) fn kinds(&self) -> impl Iterator<Item = K> {
        self.running.keys().copied()
    }

    /// Returns the resource of the watch of a kind.
    pub(super) fn resource(&self, kind: K) -> Option<&ApiResource> {
        self.running.get(&kind).map(|running| &running.resource)
    }

    /// Runs the watches until the next event. It loses no event if it is cancelled.
    pub(super) async fn next(&mut self) -> (K, WatchEvent<T>) {
        loop {
            let event = tokio::select! {
                Some(()) = self.watching.next() => None,
                Some(event) = self.events.recv() => self.current(event),
            };
            if let Some(event) = event {
                return event;
            }
        }
    }

    /// Returns an event that has arrived already.
    pub(super) fn try_next(&mut self) -> Option<(K, WatchEvent<T>)> {
        while let Ok(event) = self.events.try_recv() {
            let event = self.current(event);
            if event.is_some() {
                return event;
            }
        }
        None
    }

    /// Returns the event of an open watch; `None` if its watch was closed in the meantime.
    fn current(&self, (kind, number, event): KindEvent<K, T>) -> Option<(K, WatchEvent<T>)> {
        let is_current = self.running.get(&kind)?.number == number;
        is_current.then_some((kind, event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_namespace_limits_a_watch() {
        let of = |names: &[&str]| WatchedNamespaces::new(names.iter().map(SmolStr::new).collect());
        let all = of(&[]);
        assert!(all.contains("a") && all.target().is_none());
        let one = of(&["a"]);
        assert_eq!(one.target().as_deref(), Some("a"));
        let several = of(&["a", "b"]);
        assert_eq!(several.target(), None);
        assert!(several.contains("b") && !several.contains("c") && several.contains(""));
    }
}
