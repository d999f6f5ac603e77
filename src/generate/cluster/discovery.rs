//! Discovery types of a service's clusters.

use super::{dynamic, load_balancer};
use crate::{
    base::Shared,
    generate::{
        BuildContext,
        name::ClusterMode,
        proxy_view::SocketProxyView,
        traffic_policy::{EffectivePolicy, PortPolicies},
    },
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

/// Discovery types of the clusters of one port.
pub(super) struct DiscoveryTypes {
    /// Type by the service's resolution.
    declared: DiscoveryType,
    /// Final type of the default cluster.
    default: DiscoveryType,
    /// True if the type of the default cluster determines those of its subsets.
    inherited: bool,
    /// True if the load balancing policy is ignored.
    fixed_policy: bool,
}

/// Discovery type of one cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClusterDiscovery {
    /// Initial type, whose fields stay set.
    pub initial: DiscoveryType,
    /// Final type: load balancing `PASSTHROUGH` makes any cluster an original-destination cluster.
    pub resolved: DiscoveryType,
}

impl DiscoveryTypes {
    pub(super) fn new(
        ctx: &BuildContext,
        service: &Service,
        port: &ServicePort,
        mode: ClusterMode,
        client: &SocketProxyView,
        policies: &PortPolicies,
    ) -> Self {
        let declared = discovery_type(ctx, service, mode, client.is_router);
        let fixed_policy = is_redis(ctx, port);
        Self {
            declared,
            default: resolved(declared, policies.general, fixed_policy),
            // Parity (pilot/pkg/networking/core/cluster_waypoint.go): each cluster behind a waypoint has its own type.
            inherited: !mode.is_vip(),
            fixed_policy,
        }
    }

    /// Returns true if endpoints are inline; without endpoints there is no cluster.
    pub(super) fn is_inline(&self) -> bool {
        matches!(self.declared, DiscoveryType::StrictDns | DiscoveryType::LogicalDns)
    }

    /// Returns the type of a subset's cluster, for which the policy holds.
    pub(super) fn of(
        &self,
        rule: Option<&Shared<DestinationRule>>,
        subset: &str,
        policy: Option<EffectivePolicy>,
    ) -> ClusterDiscovery {
        if subset.is_empty() {
            return ClusterDiscovery {
                initial: self.declared,
                resolved: self.default,
            };
        }
        let own = rule.and_then(|rule| rule.own_policy(subset));
        let own = load_balancer::simple(own.and_then(|policy| policy.load_balancer.as_deref()));
        let initial = match own {
            _ if !self.inherited => self.declared,
            SimpleLb::Passthrough => DiscoveryType::OriginalDst,
            _ => self.default,
        };
        ClusterDiscovery {
            initial,
            resolved: resolved(initial, policy, self.fixed_policy),
        }
    }
}

/// Returns the final type of a cluster with this initial type and policy.
fn resolved(initial: DiscoveryType, policy: Option<EffectivePolicy>, fixed_policy: bool) -> DiscoveryType {
    let simple = load_balancer::simple(policy.and_then(|policy| policy.load_balancer));
    if simple == SimpleLb::Passthrough && !fixed_policy {
        DiscoveryType::OriginalDst
    } else {
        initial
    }
}

pub(super) fn is_redis(ctx: &BuildContext, port: &ServicePort) -> bool {
    port.protocol == Protocol::Redis && ctx.mesh.installation.features.pilot_enable_redis_filter
}

/// Returns the type by the service's resolution. `is_router` is true if the proxy does not forward to addresses that
/// the workload selected.
///
/// Parity (pilot/pkg/networking/core/cluster.go): a waypoint counts as one that does.
fn discovery_type(ctx: &BuildContext, service: &Service, mode: ClusterMode, is_router: bool) -> DiscoveryType {
    let features = &ctx.mesh.installation.features;
    let eds_for_headless = service.registry == Registry::Kubernetes && features.pilot_enable_eds_for_headless_services;
    match service.resolution {
        Resolution::DnsLb if service.race_first_tcp_connect => DiscoveryType::LogicalDns,
        Resolution::DnsLb => DiscoveryType::StrictDns,
        Resolution::DnsRoundRobinLb => DiscoveryType::LogicalDns,
        Resolution::Passthrough if !is_router && !eds_for_headless => DiscoveryType::OriginalDst,
        // Not a type of its own: such a cluster uses an extension and has no endpoints.
        Resolution::DynamicDns if dynamic::is_dynamic(service, mode) => DiscoveryType::Static,
        _ => DiscoveryType::Eds,
    }
}
