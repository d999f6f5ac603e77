//! Metrics of the push path and of the process, under Istio's names.

mod certificates;
pub(super) mod exposition;
pub(super) mod mesh;
mod notes;
pub(super) mod process;
mod pushes;

use prometheus::{Gauge, IntGaugeVec, Opts, Registry, core::Collector};
use serde_json::{Value, json};

pub use self::{
    notes::NoteMetrics,
    pushes::{PushMetrics, delivery_observer},
};
use crate::task::Tasks;

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

/// Registers a metric and returns it.
fn register<C: Collector + Clone + 'static>(registry: &Registry, metric: C) -> Result<C, prometheus::Error> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

/// Registers the metrics of the process.
pub fn register_process(registry: &Registry, tasks: Tasks) -> Result<Gauge, prometheus::Error> {
    let build = IntGaugeVec::new(
        Opts::new("istio_build", "Istio component build info"),
        &["component", "tag"],
    )?;
    build.with_label_values(&["pilot", ISTIO_VERSION]).set(1);
    registry.register(Box::new(build))?;
    let info = IntGaugeVec::new(
        Opts::new("pilot_info", "Pilot version and build information."),
        &["version"],
    )?;
    info.with_label_values(&[VERSION]).set(1);
    registry.register(Box::new(info))?;
    let uptime = Gauge::new("istiod_uptime_seconds", "Current istiod server uptime in seconds")?;
    registry.register(Box::new(uptime.clone()))?;
    registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
    process::ProcessMetrics::register(registry, tasks)?;
    Ok(uptime)
}
