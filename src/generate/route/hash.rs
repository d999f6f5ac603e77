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
    let of_port = |subset: Option<&str>| port.and_then(|port| of_port_settings(rule, subset, port));
    let name = destination.subset.as_str();
    let subset = rule.subset(name);
    let subset = subset.and_then(|subset| subset.traffic_policy.as_deref());
    of_port(Some(name))
        .or_else(|| of_policy(subset))
        .or_else(|| of_port(None))
        .or_else(|| of_policy(rule.spec.traffic_policy.as_deref()))
}

/// Returns the consistent hash of a service port: the first of port and rule that has one.
pub(super) fn of_service_port(rule: &DestinationRule, port: u32) -> Option<&ConsistentHashLb> {
    of_port_settings(rule, None, port).or_else(|| of_policy(rule.spec.traffic_policy.as_deref()))
}

fn of_policy(policy: Option<&TrafficPolicy>) -> Option<&ConsistentHashLb> {
    of_load_balancer(policy?.load_balancer.as_deref())
}

/// Only the first entry of a port counts.
fn of_port_settings<'a>(rule: &'a DestinationRule, subset: Option<&str>, port: u32) -> Option<&'a ConsistentHashLb> {
    let setting = rule.port_settings(subset, port).next()?;
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
