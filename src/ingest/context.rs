//! Dependencies shared by the sources of all clusters.

use std::sync::Arc;

use super::{diagnostics::Report, kinds::Rules, metrics::EventMetrics};
use crate::{environment::Environment, kube::health::WatchMetrics};

/// Dependencies shared by the watches of all clusters.
pub struct IngestContext {
    /// Tasks and shutdown.
    pub environment: Arc<Environment>,
    /// Which kinds are read, and in which version.
    pub rules: Rules,
    /// Receives each new diagnostic of an object.
    pub report: Report,
    /// Object event counters.
    pub event_metrics: EventMetrics,
    /// Watch counters.
    pub watch_metrics: WatchMetrics,
}

impl IngestContext {
    /// Creates the context and registers the event metrics.
    pub fn new(
        environment: &Arc<Environment>,
        rules: Rules,
        report: Report,
        watch_metrics: WatchMetrics,
    ) -> Result<Self, prometheus::Error> {
        Ok(Self {
            event_metrics: EventMetrics::new(&environment.registry)?,
            watch_metrics,
            environment: environment.clone(),
            rules,
            report,
        })
    }
}
