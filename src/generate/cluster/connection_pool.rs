//! Connection pools: circuit breakers, timeouts, keepalive, HTTP/2 upgrade.

use super::builder::ClusterBuilder;
use crate::{
    generate::BuildContext,
    model::service::Protocol,
    proto::{
        envoy::{
            config::{
                cluster::v3::{
                    CircuitBreakers, UpstreamConnectionOptions,
                    circuit_breakers::{Thresholds, thresholds},
                },
                core::v3::TcpKeepalive,
            },
            r#type::v3::Percent,
        },
        istio::{
            mesh::v1alpha1::{MeshConfig, mesh_config},
            networking::v1alpha3::{
                ConnectionPoolSettings,
                connection_pool_settings::{
                    HttpSettings, http_settings, tcp_settings::TcpKeepalive as KeepaliveSettings,
                },
                traffic_policy::RetryBudget,
            },
        },
    },
};

/// Default of all limits. Parity (pilot/pkg/networking/core/cluster_traffic_policy.go): Envoy's defaults are too small
/// for pods that start and stop.
const UNLIMITED: u32 = u32::MAX;
/// Default percentage of active requests that may be retries, for budgets without one.
const DEFAULT_BUDGET_PERCENT: f64 = 20.0;
/// Default number of retries that a budget always allows.
const DEFAULT_MIN_RETRY_CONCURRENCY: u32 = 3;

/// Applies the HTTP/2 upgrade of outbound clusters.
pub(super) fn upgrade(
    builder: &mut ClusterBuilder,
    mesh: &MeshConfig,
    settings: &ConnectionPoolSettings,
    protocol: Protocol,
) {
    if wants_http2(mesh, settings.http.as_ref(), protocol) {
        builder.use_http2();
    }
}

fn wants_http2(mesh: &MeshConfig, http: Option<&HttpSettings>, protocol: Protocol) -> bool {
    let policy = http.map_or(http_settings::H2UpgradePolicy::Default, HttpSettings::h2_upgrade_policy);
    match policy {
        _ if http.is_some_and(|http| http.use_client_protocol) => false,
        http_settings::H2UpgradePolicy::Upgrade => true,
        http_settings::H2UpgradePolicy::DoNotUpgrade => false,
        http_settings::H2UpgradePolicy::Default => {
            protocol.is_http() && mesh.h2_upgrade_policy() == mesh_config::H2UpgradePolicy::Upgrade
        }
    }
}

/// Applies all other settings of a connection pool.
pub(super) fn apply(
    builder: &mut ClusterBuilder,
    ctx: &BuildContext,
    settings: &ConnectionPoolSettings,
    retry_budget: Option<&RetryBudget>,
) {
    let mesh = ctx.mesh_config();
    let tcp = settings.tcp.as_ref();
    let connect_timeout = tcp.and_then(|tcp| tcp.connect_timeout).or(mesh.connect_timeout);
    builder.cluster.connect_timeout = connect_timeout;
    let keepalives = [
        mesh.tcp_keepalive.as_ref(),
        tcp.and_then(|tcp| tcp.tcp_keepalive.as_ref()),
    ];
    for keepalive in keepalives.into_iter().flatten() {
        apply_keepalive(builder, keepalive);
    }
    let mut thresholds = thresholds(settings, retry_budget);
    thresholds.track_remaining = !ctx.mesh.installation.features.disable_track_remaining_cb_metrics;
    builder.cluster.circuit_breakers = Some(CircuitBreakers {
        thresholds: vec![thresholds],
        per_host_thresholds: Vec::new(),
    });
    apply_http(builder, settings);
}

fn thresholds(settings: &ConnectionPoolSettings, retry_budget: Option<&RetryBudget>) -> Thresholds {
    let limit = |value: i32| {
        Some(
            u32::try_from(value)
                .ok()
                .filter(|value| *value > 0)
                .unwrap_or(UNLIMITED),
        )
    };
    let http = settings.http.unwrap_or_default();
    Thresholds {
        max_connections: limit(settings.tcp.map_or(0, |tcp| tcp.max_connections)),
        max_pending_requests: limit(http.http1_max_pending_requests),
        max_requests: limit(http.http2_max_requests),
        max_retries: limit(http.max_retries),
        retry_budget: retry_budget.map(|budget| thresholds::RetryBudget {
            budget_percent: Some(Percent {
                value: budget.percent.unwrap_or(DEFAULT_BUDGET_PERCENT),
            }),
            min_retry_concurrency: Some(match budget.min_retry_concurrency {
                0 => DEFAULT_MIN_RETRY_CONCURRENCY,
                count => count,
            }),
            budget_interval: None,
        }),
        ..Default::default()
    }
}

fn apply_keepalive(builder: &mut ClusterBuilder, settings: &KeepaliveSettings) {
    let options: &mut UpstreamConnectionOptions = builder.cluster.upstream_connection_options.get_or_insert_default();
    let keepalive: &mut TcpKeepalive = options.tcp_keepalive.get_or_insert_default();
    if settings.probes > 0 {
        keepalive.keepalive_probes = Some(settings.probes);
    }
    if let Some(time) = settings.time {
        keepalive.keepalive_time = u32::try_from(time.seconds).ok();
    }
    if let Some(interval) = settings.interval {
        keepalive.keepalive_interval = u32::try_from(interval.seconds).ok();
    }
}

fn apply_http(builder: &mut ClusterBuilder, settings: &ConnectionPoolSettings) {
    let http = settings.http.unwrap_or_default();
    let idle_timeout = http.idle_timeout.or(settings.tcp.and_then(|tcp| tcp.idle_timeout));
    let max_duration = settings.tcp.and_then(|tcp| tcp.max_connection_duration);
    let positive = |value: i32| u32::try_from(value).ok().filter(|value| *value > 0);
    let max_requests = positive(http.max_requests_per_connection);
    let max_streams = positive(http.max_concurrent_streams);
    if idle_timeout.is_some() || max_duration.is_some() || max_requests.is_some() || max_streams.is_some() {
        let common = builder.common_http();
        common.idle_timeout = idle_timeout;
        common.max_requests_per_connection = max_requests;
        common.max_connection_duration = max_duration;
        if let (Some(http2), Some(streams)) = (builder.http2(), max_streams) {
            http2.max_concurrent_streams = Some(streams);
        }
    }
    if http.use_client_protocol {
        builder.use_client_protocol();
    }
}
