//! The `istio.stats` filters, for HTTP and network chains.

use super::{memo::Noted, proxy_view::ListenerClass, stack::FilterStack, telemetry::MetricsConfig};
use crate::{
    generate::proxy::ProxyType,
    proto::{
        Any,
        istio::mesh::v1alpha1::mesh_config::extension_provider::Provider,
        stats::{MetricConfig, PluginConfig, Reporter},
    },
    table::Memoized,
};

/// Name of the filter, and of the extension.
pub const STATS_FILTER: &str = "istio.stats";

impl FilterStack<'_> {
    /// Returns the configurations of the stats filters: one per Prometheus provider of metrics, by provider name.
    pub fn stats_configs(&self) -> Memoized<Noted<Vec<Any>>> {
        let memo = &self.memo().stats;
        #[allow(
            clippy::redundant_closure_for_method_calls,
            reason = "the method itself is of one lifetime only"
        )]
        self.shared(memo, self.key(), |stack| stack.make_stats_configs())
    }

    /// Builds [`Self::stats_configs`].
    fn make_stats_configs(&self) -> Vec<Any> {
        let metrics = self.telemetries.metrics(self.class);
        let prometheus = metrics
            .iter()
            .filter(|config| matches!(config.provider.provider, Some(Provider::Prometheus(_))));
        let configs: Vec<Any> = prometheus
            .map(|config| Any::pack(&self.plugin_config(config)))
            .collect();
        if configs.is_empty() || self.has_extension(STATS_FILTER) {
            configs
        } else {
            Vec::new()
        }
    }

    fn plugin_config(&self, config: &MetricsConfig) -> PluginConfig {
        let waypoint = self.client.proxy_type == ProxyType::Waypoint;
        let mut plugin = PluginConfig {
            disable_host_header_fallback: self.class != ListenerClass::SidecarOutbound,
            tcp_reporting_duration: config.reporting_interval,
            ..Default::default()
        };
        if waypoint {
            plugin.reporter = Reporter::ServerGateway as i32;
        }
        for (name, change) in &config.overrides {
            let mut metric = MetricConfig {
                name: prometheus_name(name).to_owned(),
                drop: change.disabled,
                ..Default::default()
            };
            for (tag, value) in &change.tags {
                match value {
                    Some(value) => _ = metric.dimensions.insert(tag.clone(), value.clone()),
                    None => metric.tags_to_remove.push(tag.clone()),
                }
            }
            plugin.metrics.push(metric);
        }
        plugin
    }
}

/// Returns the Prometheus name of one of Istio's metrics; custom metrics keep their name.
fn prometheus_name(metric: &str) -> &str {
    match metric {
        "REQUEST_COUNT" => "requests_total",
        "REQUEST_DURATION" => "request_duration_milliseconds",
        "REQUEST_SIZE" => "request_bytes",
        "RESPONSE_SIZE" => "response_bytes",
        "TCP_OPENED_CONNECTIONS" => "tcp_connections_opened_total",
        "TCP_CLOSED_CONNECTIONS" => "tcp_connections_closed_total",
        "TCP_SENT_BYTES" => "tcp_sent_bytes_total",
        "TCP_RECEIVED_BYTES" => "tcp_received_bytes_total",
        "GRPC_REQUEST_MESSAGES" => "request_messages_total",
        "GRPC_RESPONSE_MESSAGES" => "response_messages_total",
        custom => custom,
    }
}
