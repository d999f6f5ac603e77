//! How Envoy finds the endpoints of a service's clusters.

use super::{load_balancer, rule};
use crate::{
    base::Shared,
    generate::View,
    model::{
        Service,
        destination_rule::DestinationRule,
        service::{Protocol, Registry, Resolution, ServicePort},
    },
    proto::{
        envoy::config::cluster::v3::cluster::DiscoveryType,
        istio::networking::v1alpha3::load_balancer_settings::SimpleLb,
    },
};

/// See the module's text; for the clusters of one port.
pub(super) struct Kinds {
    /// Of the default cluster, with its own policy.
    default: DiscoveryType,
    /// The policy of load balancing is not asked.
    fixed_policy: bool,
    port: u32,
}

impl Kinds {
    pub(super) fn new(
        view: &View,
        service: &Service,
        port: &ServicePort,
        rule: Option<&Shared<DestinationRule>>,
        is_router: bool,
    ) -> Self {
        let kinds = Self {
            default: discovery_type(view, service, is_router),
            fixed_policy: is_redis(view, port),
            port: port.number,
        };
        let default = kinds.with_policy(rule, "");
        Self { default, ..kinds }
    }

    pub(super) fn of(&self, rule: Option<&Shared<DestinationRule>>, subset: &str) -> DiscoveryType {
        if subset.is_empty() {
            self.default
        } else {
            self.with_policy(rule, subset)
        }
    }

    /// Load balancing `PASSTHROUGH` makes any cluster one of original destinations; that of the default cluster shapes
    /// its subsets too.
    fn with_policy(&self, rule: Option<&Shared<DestinationRule>>, subset: &str) -> DiscoveryType {
        let policy = rule.and_then(|rule| rule::policy_of(rule, self.port, subset));
        let simple = load_balancer::simple(policy.as_ref().and_then(|policy| policy.load_balancer.as_ref()));
        if simple == SimpleLb::Passthrough && !self.fixed_policy {
            DiscoveryType::OriginalDst
        } else {
            self.default
        }
    }
}

pub(super) fn is_redis(view: &View, port: &ServicePort) -> bool {
    port.protocol == Protocol::Redis && view.mesh.installation.features.pilot_enable_redis_filter
}

fn discovery_type(view: &View, service: &Service, is_router: bool) -> DiscoveryType {
    let features = &view.mesh.installation.features;
    let eds_for_headless = service.registry == Registry::Kubernetes && features.pilot_enable_eds_for_headless_services;
    match service.resolution {
        Resolution::DnsLb if service.race_first_tcp_connect => DiscoveryType::LogicalDns,
        Resolution::DnsLb => DiscoveryType::StrictDns,
        Resolution::DnsRoundRobinLb => DiscoveryType::LogicalDns,
        Resolution::Passthrough if !is_router && !eds_for_headless => DiscoveryType::OriginalDst,
        // Not a type of its own: such a cluster has an extension for it, and no endpoints.
        Resolution::DynamicDns => DiscoveryType::Static,
        Resolution::ClientSideLb | Resolution::Passthrough | Resolution::Alias => DiscoveryType::Eds,
    }
}
