//! The policy of a DestinationRule for one port, or for a subset on that port.

use crate::{
    model::{Service, destination_rule::DestinationRule, service::Registry},
    proto::istio::networking::v1alpha3::{TrafficPolicy, traffic_policy::PortTrafficPolicy},
};

/// The policy that holds for a port, and for a subset unless `subset` is empty.
pub fn policy_of(rule: &DestinationRule, port: u32, subset_name: &str) -> Option<TrafficPolicy> {
    let general = rule.spec.traffic_policy.as_ref().map(|policy| for_port(policy, port));
    match rule
        .subset(subset_name)
        .and_then(|subset| subset.traffic_policy.as_ref())
    {
        Some(own) => Some(overlaid(general.unwrap_or_default(), own, port)),
        None => general,
    }
}

fn port_entry(policy: &TrafficPolicy, port: u32) -> Option<&PortTrafficPolicy> {
    let mut entries = policy.port_level_settings.iter();
    entries.find(|entry| entry.port.is_some_and(|selector| selector.number == port))
}

/// Returns the policy for a port. A port-level entry replaces the whole policy: the fields that it does not set take
/// the defaults.
///
/// Note: messages are built and taken apart without `..` here, so that a new field cannot be forgotten.
fn for_port(policy: &TrafficPolicy, port: u32) -> TrafficPolicy {
    match port_entry(policy, port).cloned() {
        Some(entry) => of_port_entry(entry),
        None => TrafficPolicy {
            port_level_settings: Vec::new(),
            ..policy.clone()
        },
    }
}

fn of_port_entry(entry: PortTrafficPolicy) -> TrafficPolicy {
    let PortTrafficPolicy {
        port: _,
        load_balancer,
        connection_pool,
        outlier_detection,
        tls,
    } = entry;
    TrafficPolicy {
        load_balancer,
        connection_pool,
        outlier_detection,
        tls,
        port_level_settings: Vec::new(),
        tunnel: None,
        proxy_protocol: None,
        retry_budget: None,
    }
}

/// Returns the policy of a subset. Its policy overrides that of the rule field by field. Its port-level entry replaces
/// the fields that such an entry has, even where the entry does not set them.
fn overlaid(general: TrafficPolicy, own: &TrafficPolicy, port: u32) -> TrafficPolicy {
    if let Some(entry) = port_entry(own, port).cloned() {
        let of_port = of_port_entry(entry);
        return TrafficPolicy {
            load_balancer: of_port.load_balancer,
            connection_pool: of_port.connection_pool,
            outlier_detection: of_port.outlier_detection,
            tls: of_port.tls,
            tunnel: general.tunnel,
            proxy_protocol: general.proxy_protocol,
            retry_budget: general.retry_budget,
            port_level_settings: general.port_level_settings,
        };
    }
    let own = own.clone();
    TrafficPolicy {
        load_balancer: own.load_balancer.or(general.load_balancer),
        connection_pool: own.connection_pool.or(general.connection_pool),
        outlier_detection: own.outlier_detection.or(general.outlier_detection),
        tls: own.tls.or(general.tls),
        tunnel: own.tunnel.or(general.tunnel),
        proxy_protocol: own.proxy_protocol.or(general.proxy_protocol),
        retry_budget: own.retry_budget.or(general.retry_budget),
        port_level_settings: general.port_level_settings,
    }
}

/// The names of the subsets that have clusters, in order, each once.
pub fn subset_names(rule: &DestinationRule) -> impl Iterator<Item = &str> {
    rule.spec.subsets.iter().map(|subset| subset.name.as_str())
}

/// The name that metadata and telemetry know the service by.
pub fn service_name(service: &Service) -> &str {
    match service.registry {
        Registry::Kubernetes => &service.name,
        Registry::External => &service.key.hostname,
    }
}
