//! Changes that may alter a report.

use tokio::sync::watch;

use super::Distribution;

/// The counters of what reports depend on: answers of proxies, pushes, ingestion, and attributed refusals.
pub(super) struct Changes([watch::Receiver<u64>; 4]);

impl Changes {
    /// Follows the changes from now on.
    pub(super) fn of(distribution: &Distribution) -> Self {
        let inputs = &distribution.inputs;
        Self([
            inputs.connections.answers(),
            inputs.tracker.changed(),
            inputs.ingest_status.changed(),
            distribution.attributed.subscribe(),
        ])
    }

    /// Marks all changes until now as seen.
    pub(super) fn mark_seen(&mut self) {
        for receiver in &mut self.0 {
            receiver.borrow_and_update();
        }
    }

    /// Waits for a change that was not seen.
    pub(super) async fn next(&mut self) {
        let [answers, pushes, ingested, attributed] = &mut self.0;
        tokio::select! {
            _ = answers.changed() => {}
            _ = pushes.changed() => {}
            _ = ingested.changed() => {}
            _ = attributed.changed() => {}
        }
    }
}
