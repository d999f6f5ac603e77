//! How Envoy finds the endpoints of a service's clusters.

use super::{dynamic, load_balancer};
use crate::{
    base::Shared,
    generate::{BuildContext, name::ClusterMode, proxy_view::SocketProxyView, traffic_policy},
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
    /// What the service calls for.
    declared: DiscoveryType,
    /// The policy of load balancing is not asked.
    fixed_policy: bool,
    port: u32,
}

/// How one cluster is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// What it is begun as; the fields that go with that stay in it.
    pub begun: DiscoveryType,
    /// What it is in the end: load balancing `PASSTHROUGH` makes any cluster one of original destinations.
    pub ended: DiscoveryType,
}

impl Kinds {
    pub(super) fn new(
        ctx: &BuildContext,
        service: &Service,
        port: &ServicePort,
        mode: ClusterMode,
        client: &SocketProxyView,
    ) -> Self {
        Self {
            declared: discovery_type(ctx, service, mode, client.is_router || mode.is_vip()),
            fixed_policy: is_redis(ctx, port),
            port: port.number,
        }
    }

    /// True if the addresses stand in the clusters; without any there are no clusters.
    pub(super) fn inline(&self) -> bool {
        matches!(self.declared, DiscoveryType::StrictDns | DiscoveryType::LogicalDns)
    }

    /// The kind of the cluster of a subset. What the default cluster ends as shapes its subsets.
    pub(super) fn of(&self, rule: Option<&Shared<DestinationRule>>, subset: &str) -> Kind {
        let default = self.ended(self.declared, rule, "");
        if subset.is_empty() {
            return Kind {
                begun: self.declared,
                ended: default,
            };
        }
        let own = rule
            .and_then(|rule| rule.subset(subset))
            .and_then(|subset| subset.traffic_policy.as_ref());
        let own = load_balancer::simple(own.and_then(|policy| policy.load_balancer.as_ref()));
        let begun = match own {
            SimpleLb::Passthrough => DiscoveryType::OriginalDst,
            _ => default,
        };
        Kind {
            begun,
            ended: self.ended(begun, rule, subset),
        }
    }

    fn ended(&self, begun: DiscoveryType, rule: Option<&Shared<DestinationRule>>, subset: &str) -> DiscoveryType {
        let policy = rule.and_then(|rule| traffic_policy::policy_of(rule, self.port, subset));
        let simple = load_balancer::simple(policy.as_ref().and_then(|policy| policy.load_balancer.as_ref()));
        if simple == SimpleLb::Passthrough && !self.fixed_policy {
            DiscoveryType::OriginalDst
        } else {
            begun
        }
    }
}

pub(super) fn is_redis(ctx: &BuildContext, port: &ServicePort) -> bool {
    port.protocol == Protocol::Redis && ctx.mesh.installation.features.pilot_enable_redis_filter
}

/// `terminates`: the client does not pass on connections whose address its workload chose.
fn discovery_type(ctx: &BuildContext, service: &Service, mode: ClusterMode, terminates: bool) -> DiscoveryType {
    let features = &ctx.mesh.installation.features;
    let eds_for_headless = service.registry == Registry::Kubernetes && features.pilot_enable_eds_for_headless_services;
    match service.resolution {
        Resolution::DnsLb if service.race_first_tcp_connect => DiscoveryType::LogicalDns,
        Resolution::DnsLb => DiscoveryType::StrictDns,
        Resolution::DnsRoundRobinLb => DiscoveryType::LogicalDns,
        Resolution::Passthrough if !terminates && !eds_for_headless => DiscoveryType::OriginalDst,
        // Not a type of its own: such a cluster has an extension for it, and no endpoints.
        Resolution::DynamicDns if dynamic::is_dynamic(service, mode) => DiscoveryType::Static,
        _ => DiscoveryType::Eds,
    }
}
