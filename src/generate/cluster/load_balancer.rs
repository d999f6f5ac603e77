//! Load balancing: the policy, its settings, and locality weights.

use super::builder::ClusterBuilder;
use crate::{
    generate::constant,
    proto::{
        Any,
        envoy::{
            config::{
                cluster::v3::{
                    LoadBalancingPolicy,
                    cluster::{
                        ClusterDiscoveryType, CommonLbConfig, DiscoveryType, LbConfig, LbPolicy, LeastRequestLbConfig,
                        MaglevLbConfig, RingHashLbConfig, RoundRobinLbConfig, SlowStartConfig,
                        common_lb_config::{LocalityConfigSpecifier, LocalityWeightedLbConfig},
                    },
                    load_balancing_policy::Policy,
                },
                core::v3::{RuntimeDouble, TypedExtensionConfig},
            },
            extensions::load_balancing_policies::{
                override_host::v3::{OverrideHost, override_host::OverrideHostSource},
                round_robin::v3::RoundRobin,
            },
            r#type::{
                metadata::v3::{
                    MetadataKey,
                    metadata_key::{PathSegment, path_segment::Segment},
                },
                v3::Percent,
            },
        },
        istio::networking::v1alpha3::{
            LoadBalancerSettings,
            load_balancer_settings::{self as settings, ConsistentHashLb, SimpleLb, consistent_hash_lb::HashAlgorithm},
        },
    },
};

/// Default ring size.
const DEFAULT_RING_SIZE: u64 = 1024;
/// Default percentage of traffic at the start of a warm-up.
const DEFAULT_WARMUP_PERCENT: f64 = 10.0;
/// Runtime key that is never set; Envoy requires a key.
const NO_RUNTIME_KEY: &str = "(";

/// Returns `loadBalancer.simple`, or `UNSPECIFIED` for other kinds of settings.
pub(super) fn simple(settings: Option<&LoadBalancerSettings>) -> SimpleLb {
    match settings.and_then(|settings| settings.lb_policy.as_ref()) {
        Some(settings::LbPolicy::Simple(simple)) => SimpleLb::try_from(*simple).unwrap_or(SimpleLb::Unspecified),
        _ => SimpleLb::Unspecified,
    }
}

/// Enables weights of localities.
pub(super) fn weigh_localities(builder: &mut ClusterBuilder) {
    let common: &mut CommonLbConfig = builder.cluster.common_lb_config.get_or_insert_default();
    common.locality_config_specifier = Some(LocalityConfigSpecifier::LocalityWeightedLbConfig(
        LocalityWeightedLbConfig {},
    ));
}

/// Makes the cluster use the endpoint in the metadata of a request, where an endpoint picker writes it, or else the
/// next one in turn. No other policy applies.
pub(super) fn follow_picker(builder: &mut ClusterBuilder) {
    if builder.is_original_dst() {
        return;
    }
    let in_metadata = |name: &str| MetadataKey {
        key: constant::LOAD_BALANCING.to_owned(),
        path: vec![PathSegment {
            segment: Some(Segment::Key(name.to_owned())),
        }],
    };
    let picked = OverrideHost {
        override_host_sources: vec![OverrideHostSource {
            metadata: Some(in_metadata("x-gateway-destination-endpoint")),
            ..Default::default()
        }],
        selected_host_key: Some(in_metadata("x-gateway-destination-endpoint-served")),
        fallback_policy: Some(policy(
            "envoy.load_balancing_policies.round_robin",
            Any::pack(&RoundRobin::default()),
        )),
    };
    let cluster = &mut builder.cluster;
    // Envoy refuses weights of localities beside the policy.
    let common = cluster.common_lb_config.as_mut();
    if let Some(common) = common.filter(|common| {
        matches!(
            common.locality_config_specifier,
            Some(LocalityConfigSpecifier::LocalityWeightedLbConfig(_))
        )
    }) {
        common.locality_config_specifier = None;
    }
    cluster.set_lb_policy(LbPolicy::ClusterProvided);
    cluster.load_balancing_policy = Some(policy(
        "envoy.load_balancing_policies.override_host",
        Any::pack(&picked),
    ));
}

fn policy(name: &str, config: Any) -> LoadBalancingPolicy {
    LoadBalancingPolicy {
        policies: vec![Policy {
            typed_extension_config: Some(TypedExtensionConfig {
                name: name.to_owned(),
                typed_config: Some(config),
            }),
        }],
    }
}

/// Applies the policy. Original-destination clusters have none. `always_maglev` is for Redis, where the client
/// distributes keys over the servers.
pub(super) fn apply(builder: &mut ClusterBuilder, settings: Option<&LoadBalancerSettings>, always_maglev: bool) {
    if builder.is_original_dst() {
        builder.cluster.set_lb_policy(LbPolicy::ClusterProvided);
        return;
    }
    if always_maglev {
        builder.cluster.set_lb_policy(LbPolicy::Maglev);
        return;
    }
    let slow_start = settings.and_then(slow_start);
    match simple(settings) {
        SimpleLb::Random => builder.cluster.set_lb_policy(LbPolicy::Random),
        SimpleLb::RoundRobin => {
            builder.cluster.set_lb_policy(LbPolicy::RoundRobin);
            builder.cluster.lb_config = slow_start.map(|config| {
                LbConfig::RoundRobinLbConfig(RoundRobinLbConfig {
                    slow_start_config: Some(config),
                })
            });
        }
        SimpleLb::Passthrough => {
            builder.cluster.set_lb_policy(LbPolicy::ClusterProvided);
            let kind = ClusterDiscoveryType::Type(DiscoveryType::OriginalDst as i32);
            builder.cluster.cluster_discovery_type = Some(kind);
            builder.cluster.load_assignment = None;
        }
        SimpleLb::Unspecified | SimpleLb::LeastConn | SimpleLb::LeastRequest => {
            builder.cluster.set_lb_policy(LbPolicy::LeastRequest);
            builder.cluster.lb_config = slow_start.map(|config| {
                LbConfig::LeastRequestLbConfig(LeastRequestLbConfig {
                    slow_start_config: Some(config),
                    ..Default::default()
                })
            });
        }
    }
    if let Some(settings::LbPolicy::ConsistentHash(hash)) = settings.and_then(|settings| settings.lb_policy.as_ref()) {
        let (policy, config) = consistent_hash(hash);
        builder.cluster.set_lb_policy(policy);
        // Parity (pilot/pkg/networking/core/loadbalancer/loadbalancer.go): a policy without a size keeps the settings
        // of a warm-up.
        if config.is_some() {
            builder.cluster.lb_config = config;
        }
    }
}

/// Returns the policy of a consistent hash, with its settings.
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
