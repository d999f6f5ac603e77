//! Configuration and services from other places than Kubernetes: other control planes (MCP over xDS), Consul, Eureka,
//! Cloud Foundry and the registry in memory.

mod aggregation;
mod chain;
mod cloud_foundry;
mod consul;
mod eureka;
mod kubernetes;
mod mock;
mod old_surface;
mod raw_grpc;
mod routing;
mod scripted;

use std::process::Command;
use std::time::Duration;

use libtest_mimic::Trial;
use serde_json::json;

use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::{http, project, variable, wait};

/// A time limit that is long enough for a slow machine; successful tests do not reach it.
const TIMEOUT: Duration = Duration::from_mins(1);

pub(crate) fn trials() -> Vec<Trial> {
    [
        chain::trials(),
        kubernetes::trials(),
        consul::trials(),
        eureka::trials(),
        scripted::trials(),
        cloud_foundry::trials(),
        mock::trials(),
        aggregation::trials(),
        old_surface::trials(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A sidecar in the namespace `default`.
fn sidecar() -> Node {
    Node {
        id: "sidecar~127.0.0.1~client.default~default.svc.cluster.local".to_owned(),
        metadata: json!({
            "NAMESPACE": "default",
            "CLUSTER_ID": "Kubernetes",
            "ISTIO_VERSION": "1.30.3",
            "INSTANCE_IPS": "127.0.0.1",
            "INTERCEPTION_MODE": "NONE",
            "LABELS": { "app": "client" },
        }),
    }
}

/// Returns the sum of a metric over the labels that contain this text.
fn metric(daemon: &Daemon, name: &str, label: &str) -> Option<f64> {
    let page = http::get(daemon.monitoring, "istiod", "/metrics").ok()?.body;
    let lines = page
        .lines()
        .filter(|line| line.starts_with(name) && line.contains(label));
    let values: Vec<f64> = lines.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
    (!values.is_empty()).then(|| values.iter().sum())
}

/// Waits until a metric has a value of at least `least`.
fn until_metric(daemon: &Daemon, name: &str, label: &str, least: f64) -> Result<(), String> {
    wait::until(&format!("{name} of {label}"), TIMEOUT, || {
        metric(daemon, name, label).filter(|value| *value >= least).map(drop)
    })
}

/// Waits until a registry is not connected.
fn until_disconnected(daemon: &Daemon, registry: &str) -> Result<(), String> {
    wait::until("a lost connection", TIMEOUT, || {
        metric(daemon, "istiod_registry_connected", registry)
            .filter(|value| *value < 0.5)
            .map(drop)
    })
}

/// Makes a command start the optimised daemon that is measured, if there is one (`REGISTRIES_BIN`).
fn measured(command: &mut Command) {
    if let Some(binary) = variable("REGISTRIES_BIN") {
        let mut other = Command::new(project().join(binary));
        other.env_clear().current_dir(project().join("target"));
        other.args(command.get_args());
        *command = other;
    }
}

/// Returns the number in a variable.
fn count(name: &str, default: usize) -> usize {
    variable(name).and_then(|text| text.parse().ok()).unwrap_or(default)
}
