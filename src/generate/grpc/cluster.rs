//! Clusters of gRPC clients: always EDS, with the settings of a DestinationRule that gRPC supports.

use smol_str::SmolStr;

use super::tls;
use crate::{
    generate::{
        BuildContext, EncodedResource, cluster, constant, name,
        resource::Built,
        traffic_policy::{self, EffectivePolicy},
    },
    model::{
        Service, ServiceKey,
        destination_rule::{self, RuleRef},
        service::MergedPort,
    },
    proto::{
        envoy::config::cluster::v3::{
            CircuitBreakers, Cluster,
            circuit_breakers::Thresholds,
            cluster::{ClusterDiscoveryType, DiscoveryType, EdsClusterConfig, LbPolicy},
        },
        istio::networking::v1alpha3::{
            ConnectionPoolSettings, LoadBalancerSettings,
            client_tls_settings::TlSmode,
            load_balancer_settings::{LbPolicy as Declared, SimpleLb},
        },
    },
};

/// Inputs of one cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ClusterKey {
    /// Service.
    pub(super) service: ServiceKey,
    /// Service port.
    pub(super) port: u32,
    /// Members of the service that the port comes from, if the host has several.
    pub(super) merged: Option<MergedPort>,
    /// Subset, empty for the default cluster.
    pub(super) subset: SmolStr,
    /// DestinationRule, if there is one.
    pub(super) rule: Option<RuleRef>,
}

impl ClusterKey {
    /// Returns the cluster name.
    pub(super) fn name(&self) -> String {
        name::outbound_cluster(self.port, &self.subset, &self.service.hostname)
    }

    pub(super) fn build(&self, ctx: &BuildContext) -> Built {
        let Some((service, _)) = ctx.service_port(&self.service, self.merged, self.port) else {
            return Built::none();
        };
        let rule = self.rule.as_ref();
        let rule = rule.and_then(|found| destination_rule::rule(ctx.cx, ctx.mesh, found));
        let has_subset = rule.as_ref().is_some_and(|rule| rule.subset(&self.subset).is_some());
        if !self.subset.is_empty() && !has_subset {
            return Built::none();
        }
        let mut cluster = self.discovered();
        if self.subset.is_empty() && cluster::has_persistent_sessions(ctx, service) {
            let common = cluster.common_lb_config.get_or_insert_default();
            common.override_host_status = Some(cluster::statuses_of_sessions());
        }
        let policy = rule
            .as_ref()
            .and_then(|rule| traffic_policy::policy_of(rule, self.port, &self.subset));
        if let Some(policy) = policy {
            apply(&mut cluster, policy, ctx, service);
        }
        Built::new(EncodedResource::new(cluster.name.as_str(), &cluster))
    }

    fn discovered(&self) -> Cluster {
        let name = self.name();
        Cluster {
            alt_stat_name: name::delimited_stat(&name),
            cluster_discovery_type: Some(ClusterDiscoveryType::Type(DiscoveryType::Eds as i32)),
            eds_cluster_config: Some(EdsClusterConfig {
                eds_config: Some(constant::plain_ads_source()),
                service_name: name.clone(),
            }),
            name,
            ..Default::default()
        }
    }
}

/// Applies a traffic policy. Mutual TLS is never assumed: only the application knows whether client and server support
/// it.
fn apply(cluster: &mut Cluster, policy: EffectivePolicy, ctx: &BuildContext, service: &Service) {
    if policy.tls.is_some_and(|tls| tls.mode() == TlSmode::IstioMutual) {
        cluster.transport_socket = Some(tls::client_socket(cluster::identities(ctx, service)));
    }
    if let Some(settings) = policy.load_balancer {
        balance(cluster, settings);
    }
    if let Some(settings) = policy.connection_pool {
        cluster.circuit_breakers = circuit_breakers(settings);
    }
}

/// Sets the load balancing policy. gRPC's default is round robin; unsupported policies are omitted.
fn balance(cluster: &mut Cluster, settings: &LoadBalancerSettings) {
    match &settings.lb_policy {
        Some(Declared::ConsistentHash(hash)) => {
            let (policy, config) = cluster::consistent_hash(hash);
            cluster.set_lb_policy(policy);
            cluster.lb_config = config;
        }
        Some(Declared::Simple(simple)) if *simple == SimpleLb::LeastRequest as i32 => {
            cluster.set_lb_policy(LbPolicy::LeastRequest);
        }
        Some(Declared::Simple(_)) | None => {}
    }
}

/// Returns circuit breakers; gRPC limits only requests (gRFC A32).
fn circuit_breakers(settings: &ConnectionPoolSettings) -> Option<CircuitBreakers> {
    let limit = settings.http.as_ref()?.http2_max_requests;
    let limit = u32::try_from(limit).ok().filter(|limit| *limit > 0)?;
    Some(CircuitBreakers {
        thresholds: vec![Thresholds {
            max_requests: Some(limit),
            ..Default::default()
        }],
        ..Default::default()
    })
}
