//! The policy of a DestinationRule for one port, or for a subset on that port.

use crate::{
    api::istio::traffic_policy::CommonSettings,
    model::{Service, destination_rule::DestinationRule, service::Registry},
    proto::istio::networking::v1alpha3::{
        ClientTlsSettings, ConnectionPoolSettings, LoadBalancerSettings, OutlierDetection, TrafficPolicy,
        traffic_policy::{PortTrafficPolicy, ProxyProtocol, RetryBudget},
    },
};

/// The settings that hold for a port or subset. They stay in the rule: a rule with thousands of subsets and ports would
/// otherwise be copied for each cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EffectivePolicy<'a> {
    /// Load balancing.
    pub load_balancer: Option<&'a LoadBalancerSettings>,
    /// Connection pool.
    pub connection_pool: Option<&'a ConnectionPoolSettings>,
    /// Outlier detection.
    pub outlier_detection: Option<&'a OutlierDetection>,
    /// TLS towards the servers.
    pub tls: Option<&'a ClientTlsSettings>,
    /// PROXY protocol.
    pub proxy_protocol: Option<&'a ProxyProtocol>,
    /// Retry budget.
    pub retry_budget: Option<&'a RetryBudget>,
}

impl<'a> From<CommonSettings<'a>> for EffectivePolicy<'a> {
    fn from(settings: CommonSettings<'a>) -> Self {
        let CommonSettings {
            load_balancer,
            connection_pool,
            outlier_detection,
            tls,
        } = settings;
        Self {
            load_balancer,
            connection_pool,
            outlier_detection,
            tls,
            proxy_protocol: None,
            retry_budget: None,
        }
    }
}

/// The policies of a rule for one port, from which those of its subsets follow.
#[derive(Clone, Copy)]
pub struct PortPolicies<'a> {
    rule: Option<&'a DestinationRule>,
    port: u32,
    /// Policy without a subset, looked up once for all subsets.
    pub general: Option<EffectivePolicy<'a>>,
}

impl<'a> PortPolicies<'a> {
    /// Returns the policies of a rule, if there is one.
    pub fn of(rule: Option<&'a DestinationRule>, port: u32) -> Self {
        let policy = rule.and_then(|rule| rule.spec.traffic_policy.as_deref());
        Self {
            rule,
            port,
            general: policy.map(|policy| for_port(policy, rule.and_then(|rule| first_entry(rule, None, port)))),
        }
    }

    /// Returns the policy of a subset, or the general one if the name is empty.
    pub fn of_subset(&self, name: &str) -> Option<EffectivePolicy<'a>> {
        let own = self.rule.and_then(|rule| {
            let own = rule.subset(name)?.traffic_policy.as_deref()?;
            let entry = first_entry(rule, Some(name), self.port);
            Some(overlaid(self.general.unwrap_or_default(), own, entry))
        });
        own.or(self.general)
    }
}

/// Returns the policy that holds for a port, and for a subset unless its name is empty.
pub fn policy_of<'a>(rule: &'a DestinationRule, port: u32, subset_name: &str) -> Option<EffectivePolicy<'a>> {
    PortPolicies::of(Some(rule), port).of_subset(subset_name)
}

/// Returns the port-level entry of a subset, or of the rule without one.
fn first_entry<'a>(rule: &'a DestinationRule, subset: Option<&str>, port: u32) -> Option<&'a PortTrafficPolicy> {
    rule.port_settings(subset, port).next()
}

/// Returns the policy for a port with this port-level entry. It replaces the whole policy: the fields that it does not
/// set take the defaults.
fn for_port<'a>(policy: &'a TrafficPolicy, entry: Option<&'a PortTrafficPolicy>) -> EffectivePolicy<'a> {
    entry.map_or_else(|| of_all_ports(policy), of_port_entry)
}

/// Returns the settings outside of port-level entries. `tunnel` is a setting of TCP routes.
fn of_all_ports(policy: &TrafficPolicy) -> EffectivePolicy<'_> {
    EffectivePolicy {
        proxy_protocol: policy.proxy_protocol.as_ref(),
        retry_budget: policy.retry_budget.as_ref(),
        ..EffectivePolicy::from(CommonSettings::from(policy))
    }
}

fn of_port_entry(entry: &PortTrafficPolicy) -> EffectivePolicy<'_> {
    CommonSettings::from(entry).into()
}

/// Returns the policy of a subset. Its policy overrides that of the rule field by field. Its port-level entry replaces
/// the fields that such an entry has, even where the entry does not set them.
fn overlaid<'a>(
    general: EffectivePolicy<'a>,
    own: &'a TrafficPolicy,
    entry: Option<&'a PortTrafficPolicy>,
) -> EffectivePolicy<'a> {
    if let Some(entry) = entry {
        return EffectivePolicy {
            proxy_protocol: general.proxy_protocol,
            retry_budget: general.retry_budget,
            ..of_port_entry(entry)
        };
    }
    let own = of_all_ports(own);
    EffectivePolicy {
        load_balancer: own.load_balancer.or(general.load_balancer),
        connection_pool: own.connection_pool.or(general.connection_pool),
        outlier_detection: own.outlier_detection.or(general.outlier_detection),
        tls: own.tls.or(general.tls),
        proxy_protocol: own.proxy_protocol.or(general.proxy_protocol),
        retry_budget: own.retry_budget.or(general.retry_budget),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> Option<ConnectionPoolSettings> {
        Some(ConnectionPoolSettings::default())
    }

    fn balancer(warmup_seconds: i64) -> Option<Box<LoadBalancerSettings>> {
        Some(Box::new(LoadBalancerSettings {
            warmup_duration_secs: Some(prost_types::Duration {
                seconds: warmup_seconds,
                nanos: 0,
            }),
            ..Default::default()
        }))
    }

    fn entry() -> PortTrafficPolicy {
        PortTrafficPolicy {
            outlier_detection: Some(OutlierDetection::default()),
            ..Default::default()
        }
    }

    #[test]
    fn an_entry_of_the_port_replaces_the_policy() {
        let policy = TrafficPolicy {
            connection_pool: pool(),
            retry_budget: Some(RetryBudget::default()),
            ..Default::default()
        };
        let general = for_port(&policy, None);
        assert_eq!(general.connection_pool, policy.connection_pool.as_ref());
        assert_eq!(general.retry_budget, policy.retry_budget.as_ref());
        assert_eq!(general.outlier_detection, None);
        let entry = entry();
        let of_entry = EffectivePolicy {
            outlier_detection: entry.outlier_detection.as_ref(),
            ..Default::default()
        };
        assert_eq!(for_port(&policy, Some(&entry)), of_entry);
    }

    #[test]
    fn a_subset_overrides_by_field_and_its_entry_all_fields_of_entries() {
        let policy = TrafficPolicy {
            connection_pool: pool(),
            load_balancer: balancer(1),
            retry_budget: Some(RetryBudget::default()),
            ..Default::default()
        };
        let own = TrafficPolicy {
            load_balancer: balancer(2),
            proxy_protocol: Some(ProxyProtocol::default()),
            ..Default::default()
        };
        let general = for_port(&policy, None);
        let by_field = overlaid(general, &own, None);
        assert_eq!(by_field.load_balancer, own.load_balancer.as_deref());
        assert_eq!(by_field.connection_pool, policy.connection_pool.as_ref());
        assert_eq!(by_field.retry_budget, policy.retry_budget.as_ref());
        assert_eq!(by_field.proxy_protocol, own.proxy_protocol.as_ref());
        let entry = entry();
        let of_entry = EffectivePolicy {
            outlier_detection: entry.outlier_detection.as_ref(),
            retry_budget: policy.retry_budget.as_ref(),
            ..Default::default()
        };
        assert_eq!(overlaid(general, &own, Some(&entry)), of_entry);
    }
}
