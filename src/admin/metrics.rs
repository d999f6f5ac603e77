//! Metrics of the push path and of the process, under Istio's names.

mod certificates;
pub(super) mod exposition;
pub(super) mod mesh;
mod notes;
pub(super) mod process;
mod pushes;

use prometheus::{Gauge, Registry};
use serde_json::{Value, json};

pub use self::{
    notes::NoteMetrics,
    pushes::{PushMetrics, delivery_observer},
};
use crate::{metrics, task::Tasks};

/// Release of Istio whose behaviour is served, in `/version` and `istio_build`.
pub const ISTIO_VERSION: &str = "1.30.3";
/// The text of `/version` and `pilot_info`: the release, the version of this build, and its state.
///
/// Parity (pkg/version/version.go).
pub const VERSION: &str = concat!("1.30.3-", env!("CARGO_PKG_VERSION"), "-Clean");

/// Returns the facts of this build, with the members of Istio's.
pub fn build_info() -> Value {
    json!({
        "version": ISTIO_VERSION, "revision": env!("CARGO_PKG_VERSION"), "golang_version": "", "status": "Clean",
        "tag": ISTIO_VERSION,
    })
}

/// Registers the metrics of the process.
pub fn register_process(registry: &Registry, tasks: Tasks) -> Result<Gauge, prometheus::Error> {
    let labels = ["component", "tag"];
    let build = metrics::gauges(registry, "istio_build", "Istio component build info", &labels)?;
    build.with_label_values(&["pilot", ISTIO_VERSION]).set(1);
    let help = "Pilot version and build information.";
    let info = metrics::gauges(registry, "pilot_info", help, &["version"])?;
    info.with_label_values(&[VERSION]).set(1);
    let uptime = Gauge::new("istiod_uptime_seconds", "Current istiod server uptime in seconds")?;
    let uptime = metrics::register(registry, uptime)?;
    registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
    process::ProcessMetrics::register(registry, tasks)?;
    Ok(uptime)
}
