//! Authorization policies as a ztunnel enforces them.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use istiod::proto::istio::security::string_match::MatchType;
use istiod::proto::istio::security::{
    Action, Address, Authorization, Match, Rules, Scope, ServiceAccountMatch, StringMatch,
};
use istiod::proto::istio::workload::Workload;

use super::addresses::ip;

/// A connection to a pod.
#[derive(Clone, Debug)]
pub(super) struct Connection {
    /// The identity of the client, if it is authenticated.
    pub(super) source: Option<String>,
    pub(super) from: IpAddr,
    pub(super) to: SocketAddr,
}

/// Decides whether policies admit a connection to a workload. `policies` are all known ones with their names. The error
/// is the reason.
pub(super) fn verdict<'p>(
    policies: impl Iterator<Item = (&'p String, &'p Authorization)>,
    workload: &Workload,
    connection: &Connection,
) -> Result<(), String> {
    let applies = |name: &String, policy: &Authorization| match policy.scope() {
        Scope::Global => true,
        Scope::Namespace => policy.namespace == workload.namespace,
        Scope::WorkloadSelector => workload.authorization_policies.contains(name),
    };
    let relevant: Vec<_> = policies
        .filter(|(name, policy)| !policy.dry_run && applies(name, policy))
        .collect();
    let of_action = |action: Action| relevant.iter().filter(move |(_, policy)| policy.action() == action);
    if let Some((name, _)) = of_action(Action::Deny).find(|(_, policy)| matches(policy, connection)) {
        return Err(format!("denied by {name}"));
    }
    let mut allowing = of_action(Action::Allow).peekable();
    if allowing.peek().is_none() || allowing.any(|(_, policy)| matches(policy, connection)) {
        return Ok(());
    }
    Err("not allowed by any policy".to_owned())
}

/// One group of a policy must match, of a group all rules, and of a rule one of its matches.
fn matches(policy: &Authorization, connection: &Connection) -> bool {
    let rule = |rule: &Rules| rule.matches.is_empty() || rule.matches.iter().any(|one| is_met(one, connection));
    policy.groups.iter().any(|group| group.rules.iter().all(rule))
}

/// All clauses of a match must be met. A clause lists alternatives. A match without clauses is skipped, as in ztunnel's
/// src/rbac.rs.
fn is_met(one: &Match, connection: &Connection) -> bool {
    if *one == Match::default() {
        return false;
    }
    let principal = connection.source.as_deref().and_then(|id| id.strip_prefix("spiffe://"));
    let principal = principal.unwrap_or_default();
    let parts: Vec<&str> = principal.split('/').collect();
    let (namespace, account) = match parts.as_slice() {
        [_, "ns", namespace, "sa", account] => (*namespace, *account),
        _ => ("", ""),
    };
    let port = u32::from(connection.to.port());
    let is_account = |wanted: &ServiceAccountMatch| wanted.namespace == namespace && wanted.service_account == account;
    clause(&one.namespaces, &one.not_namespaces, |wanted| text(wanted, namespace))
        && clause(&one.principals, &one.not_principals, |wanted| text(wanted, principal))
        && clause(&one.service_accounts, &one.not_service_accounts, is_account)
        && clause(&one.source_ips, &one.not_source_ips, |wanted| {
            contains(wanted, connection.from)
        })
        && clause(&one.destination_ips, &one.not_destination_ips, |wanted| {
            contains(wanted, connection.to.ip())
        })
        && clause(&one.destination_ports, &one.not_destination_ports, |wanted| {
            *wanted == port
        })
}

fn clause<T>(wanted: &[T], unwanted: &[T], is_it: impl Fn(&T) -> bool) -> bool {
    (wanted.is_empty() || wanted.iter().any(&is_it)) && !unwanted.iter().any(&is_it)
}

fn text(wanted: &StringMatch, value: &str) -> bool {
    // Nothing is known of a client without an identity, so that no value matches.
    if value.is_empty() {
        return false;
    }
    match &wanted.match_type {
        Some(MatchType::Exact(exact)) => value == exact,
        Some(MatchType::Prefix(prefix)) => value.starts_with(prefix),
        Some(MatchType::Suffix(suffix)) => value.ends_with(suffix),
        Some(MatchType::Presence(())) => true,
        None => false,
    }
}

fn contains(range: &Address, address: IpAddr) -> bool {
    let length = u8::try_from(range.length).unwrap_or(u8::MAX);
    let net = ip(&range.address).and_then(|own| IpNet::new(own, length).ok());
    net.is_some_and(|net| net.contains(&address))
}
