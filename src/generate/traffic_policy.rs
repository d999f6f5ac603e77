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

/// An entry for the port takes the place of the whole policy: what it leaves open has the defaults.
fn for_port(policy: &TrafficPolicy, port: u32) -> TrafficPolicy {
    match port_entry(policy, port) {
        Some(entry) => TrafficPolicy {
            connection_pool: entry.connection_pool,
            load_balancer: entry.load_balancer.clone(),
            outlier_detection: entry.outlier_detection,
            tls: entry.tls.clone(),
            ..Default::default()
        },
        None => TrafficPolicy {
            port_level_settings: Vec::new(),
            ..policy.clone()
        },
    }
}

/// A subset overrides field by field. An entry for the port takes the place of its policy, as with rules, and counts
/// even where it leaves a field open.
fn overlaid(mut policy: TrafficPolicy, own: &TrafficPolicy, port: u32) -> TrafficPolicy {
    if let Some(entry) = port_entry(own, port) {
        policy.connection_pool = entry.connection_pool;
        policy.load_balancer.clone_from(&entry.load_balancer);
        policy.outlier_detection = entry.outlier_detection;
        policy.tls.clone_from(&entry.tls);
        return policy;
    }
    macro_rules! overlay {
        ($($field:ident),*) => { $(if own.$field.is_some() { policy.$field = own.$field.clone(); })* };
    }
    overlay!(
        connection_pool,
        load_balancer,
        outlier_detection,
        tls,
        tunnel,
        proxy_protocol,
        retry_budget
    );
    policy
}

/// The names of the subsets that clusters are made for, in order, each once.
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
