//! Load balancing: the policy, its settings, and locality weights.

use super::draft::Draft;
use crate::proto::{
    envoy::{
        config::{
            cluster::v3::cluster::{
                ClusterDiscoveryType, CommonLbConfig, DiscoveryType, LbConfig, LbPolicy, LeastRequestLbConfig,
                MaglevLbConfig, RingHashLbConfig, RoundRobinLbConfig, SlowStartConfig,
                common_lb_config::{LocalityConfigSpecifier, LocalityWeightedLbConfig},
            },
            core::v3::RuntimeDouble,
        },
        r#type::v3::Percent,
    },
    istio::networking::v1alpha3::{
        LoadBalancerSettings,
        load_balancer_settings::{self as settings, ConsistentHashLb, SimpleLb, consistent_hash_lb::HashAlgorithm},
    },
};

/// The ring's size where none is given.
const DEFAULT_RING_SIZE: u64 = 1024;
/// The share of traffic that a warming endpoint begins with, where none is given.
const DEFAULT_WARMUP_PERCENT: f64 = 10.0;
/// A runtime key that no runtime has; Envoy wants one.
const NO_RUNTIME_KEY: &str = "(";

/// `loadBalancer.simple`; `UNSPECIFIED` when it is not what the settings say.
pub(super) fn simple(settings: Option<&LoadBalancerSettings>) -> SimpleLb {
    match settings.and_then(|settings| settings.lb_policy.as_ref()) {
        Some(settings::LbPolicy::Simple(simple)) => SimpleLb::try_from(*simple).unwrap_or(SimpleLb::Unspecified),
        _ => SimpleLb::Unspecified,
    }
}

/// Weights of localities count.
pub(super) fn weigh_localities(draft: &mut Draft) {
    let common: &mut CommonLbConfig = draft.cluster.common_lb_config.get_or_insert_default();
    common.locality_config_specifier = Some(LocalityConfigSpecifier::LocalityWeightedLbConfig(
        LocalityWeightedLbConfig {},
    ));
}

/// Applies the policy. Original-destination clusters have none to choose; `always_maglev` is for Redis, whose keys are
/// spread over the servers by the client.
pub(super) fn apply(draft: &mut Draft, settings: Option<&LoadBalancerSettings>, always_maglev: bool) {
    if draft.is_original_dst() {
        draft.cluster.set_lb_policy(LbPolicy::ClusterProvided);
        return;
    }
    if always_maglev {
        draft.cluster.set_lb_policy(LbPolicy::Maglev);
        return;
    }
    let slow_start = settings.and_then(slow_start);
    match simple(settings) {
        SimpleLb::Random => draft.cluster.set_lb_policy(LbPolicy::Random),
        SimpleLb::RoundRobin => {
            draft.cluster.set_lb_policy(LbPolicy::RoundRobin);
            draft.cluster.lb_config = slow_start.map(|config| {
                LbConfig::RoundRobinLbConfig(RoundRobinLbConfig {
                    slow_start_config: Some(config),
                })
            });
        }
        SimpleLb::Passthrough => {
            draft.cluster.set_lb_policy(LbPolicy::ClusterProvided);
            let kind = ClusterDiscoveryType::Type(DiscoveryType::OriginalDst as i32);
            draft.cluster.cluster_discovery_type = Some(kind);
            draft.cluster.load_assignment = None;
        }
        SimpleLb::Unspecified | SimpleLb::LeastConn | SimpleLb::LeastRequest => {
            draft.cluster.set_lb_policy(LbPolicy::LeastRequest);
            draft.cluster.lb_config = slow_start.map(|config| {
                LbConfig::LeastRequestLbConfig(LeastRequestLbConfig {
                    slow_start_config: Some(config),
                    ..Default::default()
                })
            });
        }
    }
    if let Some(settings::LbPolicy::ConsistentHash(hash)) = settings.and_then(|settings| settings.lb_policy.as_ref()) {
        let (policy, config) = consistent_hash(hash);
        draft.cluster.set_lb_policy(policy);
        // Parity: one without a size keeps the settings of a warm-up.
        if config.is_some() {
            draft.cluster.lb_config = config;
        }
    }
}

/// The policy of a consistent hash, with its settings.
pub(in super::super) fn consistent_hash(hash: &ConsistentHashLb) -> (LbPolicy, Option<LbConfig>) {
    let ring = |size: u64| {
        LbConfig::RingHashLbConfig(RingHashLbConfig {
            minimum_ring_size: Some(size),
            ..Default::default()
        })
    };
    match &hash.hash_algorithm {
        Some(HashAlgorithm::Maglev(maglev)) => {
            let config = (maglev.table_size != 0).then_some(LbConfig::MaglevLbConfig(MaglevLbConfig {
                table_size: Some(maglev.table_size),
            }));
            (LbPolicy::Maglev, config)
        }
        Some(HashAlgorithm::RingHash(ring_hash)) => {
            let size = Some(ring_hash.minimum_ring_size).filter(|size| *size != 0);
            (LbPolicy::RingHash, size.map(ring))
        }
        None => {
            let size = match hash.minimum_ring_size {
                0 => DEFAULT_RING_SIZE,
                size => size,
            };
            (LbPolicy::RingHash, Some(ring(size)))
        }
    }
}

fn slow_start(settings: &LoadBalancerSettings) -> Option<SlowStartConfig> {
    if let Some(warmup) = &settings.warmup {
        return Some(SlowStartConfig {
            slow_start_window: warmup.duration,
            aggression: Some(RuntimeDouble {
                default_value: warmup.aggression.unwrap_or(1.0),
                runtime_key: NO_RUNTIME_KEY.to_owned(),
            }),
            min_weight_percent: Some(Percent {
                value: warmup.minimum_percent.unwrap_or(DEFAULT_WARMUP_PERCENT),
            }),
        });
    }
    settings.warmup_duration_secs.map(|window| SlowStartConfig {
        slow_start_window: Some(window),
        ..Default::default()
    })
}
