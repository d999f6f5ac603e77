//! Outlier detection and its panic threshold.

use super::builder::ClusterBuilder;
use crate::{
    model::{Service, features::Features, service::TrafficDistribution},
    proto::{
        envoy::{config::cluster::v3, r#type::v3::Percent},
        istio::networking::v1alpha3::OutlierDetection,
    },
};

/// Returns true if endpoints that are not ready are sent too; panic routing would reach them.
pub(super) fn sends_unhealthy(service: &Service, features: &Features) -> bool {
    features.pilot_send_unhealthy_endpoints || service.traffic_distribution != TrafficDistribution::Any
}

/// Applies outlier detection. The panic threshold is set even if it is 0, because Envoy's default is 50.
pub(super) fn apply(builder: &mut ClusterBuilder, settings: &OutlierDetection, sends_unhealthy: bool) {
    builder.cluster.outlier_detection = Some(detection(settings));
    if settings.min_health_percent >= 0 {
        let percent = if sends_unhealthy {
            0
        } else {
            settings.min_health_percent
        };
        set_panic_threshold(builder, f64::from(percent));
    }
}

/// Sets the percentage of healthy endpoints below which all endpoints are used.
pub(super) fn set_panic_threshold(builder: &mut ClusterBuilder, percent: f64) {
    if let Some(common) = &mut builder.cluster.common_lb_config {
        common.healthy_panic_threshold = Some(Percent { value: percent });
    }
}

fn detection(settings: &OutlierDetection) -> v3::OutlierDetection {
    let enforcing = |count: u32| if count > 0 { 100 } else { 0 };
    let local_failures = settings.consecutive_local_origin_failures.filter(|count| *count > 0);
    let split = settings.split_external_local_origin_errors;
    v3::OutlierDetection {
        // Success rates are never evaluated.
        enforcing_success_rate: Some(0),
        consecutive_5xx: settings.consecutive_5xx_errors,
        enforcing_consecutive_5xx: settings.consecutive_5xx_errors.map(enforcing),
        consecutive_gateway_failure: settings.consecutive_gateway_errors,
        enforcing_consecutive_gateway_failure: settings.consecutive_gateway_errors.map(enforcing),
        interval: settings.interval,
        base_ejection_time: settings.base_ejection_time,
        max_ejection_percent: u32::try_from(settings.max_ejection_percent)
            .ok()
            .filter(|percent| *percent > 0),
        split_external_local_origin_errors: split,
        consecutive_local_origin_failure: local_failures.filter(|_| split),
        enforcing_consecutive_local_origin_failure: local_failures.filter(|_| split).map(|_| 100),
        enforcing_local_origin_success_rate: split.then_some(0),
        ..Default::default()
    }
}
