//! Watches for writers, which live as long as the work that reads them.

use std::future::Future;

use tokio::sync::mpsc;

use crate::{
    base::ClusterId,
    kube::{
        Object,
        health::{WatchHealth, WatchMetrics},
        watch::{WatchEvent, WatchTarget, watch_as},
    },
};

/// Capacity of the event queue.
const QUEUE: usize = 64;

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
