//! Registration of metrics. Each function creates a metric, registers it and returns it. An error means that the name
//! is in use.

use prometheus::{
    Error, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    core::Collector,
};

/// Registers a counter.
pub fn counter(registry: &Registry, name: &str, help: &str) -> Result<IntCounter, Error> {
    register(registry, IntCounter::new(name, help)?)
}

/// Registers a counter with labels.
pub fn counters(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, Error> {
    register(registry, IntCounterVec::new(Opts::new(name, help), labels)?)
}

/// Registers a gauge.
pub fn gauge(registry: &Registry, name: &str, help: &str) -> Result<IntGauge, Error> {
    register(registry, IntGauge::new(name, help)?)
}

/// Registers a gauge with labels.
pub fn gauges(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, Error> {
    register(registry, IntGaugeVec::new(Opts::new(name, help), labels)?)
}

/// Registers a histogram with these buckets.
pub fn histogram(registry: &Registry, name: &str, help: &str, buckets: &[f64]) -> Result<Histogram, Error> {
    let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
    register(registry, Histogram::with_opts(opts)?)
}

/// Registers a histogram with these buckets and labels.
pub fn histograms(
    registry: &Registry,
    name: &str,
    help: &str,
    buckets: &[f64],
    labels: &[&str],
) -> Result<HistogramVec, Error> {
    let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
    register(registry, HistogramVec::new(opts, labels)?)
}

/// Registers a metric of any kind.
pub fn register<C: Collector + Clone + 'static>(registry: &Registry, metric: C) -> Result<C, Error> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}
