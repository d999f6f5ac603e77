//! Converts AuthorizationPolicies. Parity (pilot/pkg/serviceregistry/ambient/authorization.go): ztunnels do not know
//! attributes of HTTP. A rule of an ALLOW policy that needs them is omitted; one of a DENY policy applies without them.
//! Both are more restrictive than requested, with one exception: a match that has no other attribute is empty, and
//! ztunnels skip empty matches (src/rbac.rs). A DENY rule with only such matches in its `from`, its `to` or a condition
//! denies nothing.

use ipnet::IpNet;

use super::{presence, string_match};
use crate::{
    api::Config,
    base::{Namespace, ObjectKey, cidr},
    generate::BuildContext,
    model::{
        ambient::policy::{is_dry_run, is_enforced},
        ambient_status::policy::http_attributes,
        policy,
    },
    proto::istio::security::{
        Action, Address, Authorization, Group, Match, Rules, Scope, ServiceAccountMatch, StringMatch,
        string_match::MatchType,
        v1beta1::{
            AuthorizationPolicy, Condition, Operation, Rule, Source, authorization_policy::Action as DeclaredAction,
        },
    },
};

/// Returns the policy of an object; `None` if ztunnels do not enforce it.
pub(super) fn of_object(ctx: &BuildContext, key: &ObjectKey) -> Option<Authorization> {
    let object = ctx.mesh.authorization_policies.get(ctx.cx, key)?;
    if !is_enforced(ctx.mesh, object) {
        return None;
    }
    let spec = &object.spec;
    let action = match spec.action() {
        DeclaredAction::Allow => Action::Allow,
        DeclaredAction::Deny => Action::Deny,
        DeclaredAction::Audit | DeclaredAction::Custom => return None,
    };
    let rules = spec.rules.iter().filter_map(|rule| group(rule, action, &key.namespace));
    Some(Authorization {
        name: key.name.to_string(),
        namespace: key.namespace.to_string(),
        scope: scope(object, &policy::root_namespace(ctx.cx, ctx.mesh)).into(),
        action: action.into(),
        groups: rules.collect(),
        dry_run: is_dry_run(object),
        extensions: Vec::new(),
    })
}

/// Returns the scope of a policy. A selector without labels counts as none: it selects all workloads, as at sidecars,
/// and no workload would list the policy.
fn scope(object: &Config<AuthorizationPolicy>, root: &Namespace) -> Scope {
    match &object.spec.selector {
        Some(selector) if !selector.match_labels.is_empty() => Scope::WorkloadSelector,
        _ if object.meta.namespace() == root => Scope::Global,
        _ => Scope::Namespace,
    }
}

/// Returns the group of a rule: one entry each for `to`, `from` and every condition.
fn group(rule: &Rule, action: Action, namespace: &Namespace) -> Option<Group> {
    if action == Action::Allow && http_attributes(rule).next().is_some() {
        return None;
    }
    let operations = rule.to.iter().map(|to| of_operation(to.operation.as_ref()));
    let sources = rule.from.iter().map(|from| of_source(from.source.as_ref(), namespace));
    let clauses = [operations.collect(), sources.collect()];
    let clauses = clauses.into_iter().filter(|matches: &Vec<Match>| !matches.is_empty());
    let conditions = rule.when.iter().map(|condition| vec![of_condition(condition)]);
    let rules = clauses.chain(conditions).map(|matches| Rules { matches });
    Some(Group { rules: rules.collect() })
}

fn of_operation(operation: Option<&Operation>) -> Match {
    operation.map_or_else(Match::default, |operation| Match {
        destination_ports: ports(&operation.ports),
        not_destination_ports: ports(&operation.not_ports),
        ..Match::default()
    })
}

fn of_source(source: Option<&Source>, namespace: &Namespace) -> Match {
    source.map_or_else(Match::default, |source| Match {
        source_ips: addresses(&source.ip_blocks),
        not_source_ips: addresses(&source.not_ip_blocks),
        namespaces: matches(&source.namespaces),
        not_namespaces: matches(&source.not_namespaces),
        service_accounts: accounts(&source.service_accounts, namespace),
        not_service_accounts: accounts(&source.not_service_accounts, namespace),
        principals: matches(&source.principals),
        not_principals: matches(&source.not_principals),
        ..Match::default()
    })
}

/// Returns the match of a condition. One on an attribute that ztunnels do not know is empty, so it never matches.
fn of_condition(condition: &Condition) -> Match {
    let (values, not_values) = (&condition.values, &condition.not_values);
    let mut found = Match::default();
    match condition.key.as_str() {
        "source.ip" => {
            (found.source_ips, found.not_source_ips) = (addresses(values), addresses(not_values));
        }
        "source.namespace" => {
            (found.namespaces, found.not_namespaces) = (matches(values), matches(not_values));
        }
        "source.principal" => {
            (found.principals, found.not_principals) = (matches(values), matches(not_values));
        }
        "destination.ip" => {
            (found.destination_ips, found.not_destination_ips) = (addresses(values), addresses(not_values));
        }
        "destination.port" => {
            (found.destination_ports, found.not_destination_ports) = (ports(values), ports(not_values));
        }
        _ => {}
    }
    found
}

fn matches(values: &[String]) -> Vec<StringMatch> {
    let matcher = |value: &String| match (value.as_str(), value.strip_prefix('*'), value.strip_suffix('*')) {
        ("*", ..) => presence(),
        (_, Some(suffix), _) => string_match(MatchType::Suffix(suffix.to_owned())),
        (_, _, Some(prefix)) => string_match(MatchType::Prefix(prefix.to_owned())),
        (exact, ..) => string_match(MatchType::Exact(exact.to_owned())),
    };
    values.iter().map(matcher).collect()
}

/// Converts `NAMESPACE/NAME`, or a name in the namespace of the policy.
fn accounts(values: &[String], namespace: &Namespace) -> Vec<ServiceAccountMatch> {
    let account = |value: &String| {
        let (namespace, name) = value.split_once('/').unwrap_or((namespace.as_str(), value));
        ServiceAccountMatch {
            namespace: namespace.to_owned(),
            service_account: name.to_owned(),
        }
    };
    values.iter().map(account).collect()
}

fn ports(values: &[String]) -> Vec<u32> {
    let parsed = values.iter().filter_map(|value| value.parse::<u16>().ok());
    parsed.map(u32::from).collect()
}

fn addresses(values: &[String]) -> Vec<Address> {
    let parsed = values.iter().filter_map(|value| cidr::parse(value));
    let address = |net: IpNet| Address {
        address: match net {
            IpNet::V4(net) => net.addr().octets().to_vec().into(),
            IpNet::V6(net) => net.addr().octets().to_vec().into(),
        },
        length: u32::from(net.prefix_len()),
    };
    parsed.map(address).collect()
}
