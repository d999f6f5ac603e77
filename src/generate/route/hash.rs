//! Hash policies: the key of a request for a DestinationRule with a consistent hash.

use crate::{
    model::destination_rule::DestinationRule,
    proto::{
        envoy::config::route::v3::route_action::{
            HashPolicy,
            hash_policy::{ConnectionProperties, Cookie, CookieAttribute, Header, PolicySpecifier, QueryParameter},
        },
        istio::networking::v1alpha3::{
            Destination, LoadBalancerSettings, TrafficPolicy,
            load_balancer_settings::{ConsistentHashLb, LbPolicy, consistent_hash_lb::HashKey},
        },
    },
};

/// Returns the consistent hash of a destination: the first of subset port, subset, port and rule that has one.
pub(crate) fn of_destination<'a>(rule: &'a DestinationRule, destination: &Destination) -> Option<&'a ConsistentHashLb> {
    let port = destination.port.map(|port| port.number);
    let of_port = |policy: Option<&'a TrafficPolicy>| port.and_then(|port| of_port_settings(policy, port));
    let subset = rule.subset(&destination.subset);
    let subset = subset.and_then(|subset| subset.traffic_policy.as_deref());
    let whole = rule.spec.traffic_policy.as_deref();
    of_port(subset)
        .or_else(|| of_policy(subset))
        .or_else(|| of_port(whole))
        .or_else(|| of_policy(whole))
}

/// Returns the consistent hash of a service port: the first of port and rule that has one.
pub(super) fn of_service_port(rule: &DestinationRule, port: u32) -> Option<&ConsistentHashLb> {
    let whole = rule.spec.traffic_policy.as_deref();
    of_port_settings(whole, port).or_else(|| of_policy(whole))
}

fn of_policy(policy: Option<&TrafficPolicy>) -> Option<&ConsistentHashLb> {
    of_load_balancer(policy?.load_balancer.as_deref())
}

/// Only the first entry of a port counts.
fn of_port_settings(policy: Option<&TrafficPolicy>, port: u32) -> Option<&ConsistentHashLb> {
    let mut settings = policy?.port_level_settings.iter();
    let setting = settings.find(|setting| setting.port.is_some_and(|selector| selector.number == port))?;
    of_load_balancer(setting.load_balancer.as_deref())
}

fn of_load_balancer(settings: Option<&LoadBalancerSettings>) -> Option<&ConsistentHashLb> {
    match settings?.lb_policy.as_ref()? {
        LbPolicy::ConsistentHash(hash) => Some(hash),
        LbPolicy::Simple(_) => None,
    }
}

/// Returns the policy of a consistent hash, or `None` if it names no key.
pub(crate) fn policy(hash: &ConsistentHashLb) -> Option<HashPolicy> {
    let specifier = match hash.hash_key.as_ref()? {
        HashKey::HttpHeaderName(name) => PolicySpecifier::Header(Header {
            header_name: name.clone(),
            ..Default::default()
        }),
        HashKey::HttpCookie(cookie) => PolicySpecifier::Cookie(Cookie {
            name: cookie.name.clone(),
            ttl: cookie.ttl,
            path: cookie.path.clone(),
            attributes: cookie
                .attributes
                .iter()
                .map(|attribute| CookieAttribute {
                    name: attribute.name.clone(),
                    value: attribute.value.clone(),
                })
                .collect(),
        }),
        HashKey::UseSourceIp(source_ip) => {
            PolicySpecifier::ConnectionProperties(ConnectionProperties { source_ip: *source_ip })
        }
        HashKey::HttpQueryParameterName(name) => PolicySpecifier::QueryParameter(QueryParameter { name: name.clone() }),
    };
    Some(HashPolicy {
        policy_specifier: Some(specifier),
        ..Default::default()
    })
}
