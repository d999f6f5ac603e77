//! Counters of the rounds of deployed Gateways.

use prometheus::{IntCounterVec, Registry};

use crate::metrics;

/// The counters. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    rounds: IntCounterVec,
}

/// The result of a round for one Gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Objects were written.
    Written,
    /// All objects were as they should be.
    Unchanged,
    /// The Gateway, its parameters or the template are invalid.
    Refused,
    /// The API server refused a write, or was not reached.
    Failed,
}

impl Metrics {
    /// Registers the metrics. Fails if a name is in use.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let rounds = metrics::counters(
            registry,
            "istiod_gateway_deployments_total",
            "Rounds of the controller that deploys Gateways, one Gateway each.",
            &["result"],
        )?;
        Ok(Self { rounds })
    }

    pub(super) fn count(&self, outcome: Outcome) {
        let result = match outcome {
            Outcome::Written => "written",
            Outcome::Unchanged => "unchanged",
            Outcome::Refused => "refused",
            Outcome::Failed => "failed",
        };
        self.rounds.with_label_values(&[result]).inc();
    }
}
