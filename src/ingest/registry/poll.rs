//! Registries that are read as a whole, at an interval.

use std::{collections::BTreeMap, time::Duration};

use futures::future::BoxFuture;
use smol_str::SmolStr;
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};

use super::{RegistryRows, Service};
use crate::{
    base::ClusterId,
    ingest::{backoff::Backoff, diagnostics::Report, registry_metrics::OfRegistry, source::Readiness},
    model::change::Batch,
};

/// The longest first delay after a failed request.
const FIRST_DELAY: Duration = Duration::from_secs(1);
/// The longest delay after failed requests, unless the interval is longer.
const LONGEST_DELAY: Duration = Duration::from_secs(30);

/// A client of a registry.
pub(super) trait Client {
    /// The content of the registry.
    type State: PartialEq + Send + Sync;

    /// Reads the present state. `known` is that of the last successful request.
    fn read<'a>(&'a mut self, known: Option<&'a Self::State>) -> BoxFuture<'a, Result<Self::State, Failure>>;

    /// Returns the services of a state.
    fn services(&self, state: &Self::State) -> BTreeMap<SmolStr, Service>;
}

/// A failed request.
pub(super) struct Failure {
    /// The label in metrics.
    pub(super) reason: &'static str,
    /// The error, for the log.
    pub(super) error: String,
}

/// Reads a registry at an interval and sends its changes.
pub(super) struct Poller {
    /// The name of the registry, for the log.
    registry: &'static str,
    interval: Duration,
    rows: RegistryRows,
    metrics: OfRegistry,
    is_synced: watch::Sender<bool>,
}

impl Poller {
    /// Returns the poller of a registry without services.
    pub(super) fn new(
        registry: &'static str,
        interval: Duration,
        cluster: ClusterId,
        metrics: OfRegistry,
        report: Report,
    ) -> Self {
        Self {
            registry,
            interval,
            rows: RegistryRows::new(cluster, metrics.clone(), report),
            metrics,
            is_synced: watch::Sender::new(false),
        }
    }

    /// The first snapshot waits until the registry was read once.
    pub(super) fn readiness(&self) -> Readiness {
        Readiness::synced(&self.is_synced)
    }

    /// Reads until the receiver of changes is closed.
    pub(super) async fn run<C: Client>(mut self, mut client: C, changes: mpsc::Sender<Batch>) {
        let mut backoff = Backoff::new(self.interval.min(FIRST_DELAY), self.interval.max(LONGEST_DELAY));
        let mut known: Option<C::State> = None;
        loop {
            let read = tokio::select! {
                read = client.read(known.as_ref()) => read,
                () = changes.closed() => return,
            };
            let delay = match read {
                Ok(state) => {
                    self.metrics.connected(true);
                    backoff.reset();
                    if known.as_ref() != Some(&state) {
                        let batch = self.rows.replace(client.services(&state));
                        let batch = if known.is_none() { self.rows.all() } else { batch };
                        known = Some(state);
                        if !batch.is_empty() && changes.send(batch).await.is_err() {
                            return;
                        }
                    }
                    self.is_synced.send_replace(true);
                    self.interval
                }
                Err(Failure { reason, error }) => {
                    self.metrics.connected(false);
                    self.metrics.failed(reason, 1);
                    let retry_in = backoff.next();
                    tracing::warn!(
                        registry = self.registry,
                        error,
                        ?retry_in,
                        "failed to read registry, keeping the last state"
                    );
                    retry_in
                }
            };
            tokio::select! {
                () = sleep(delay) => {}
                () = changes.closed() => return,
            }
        }
    }
}
