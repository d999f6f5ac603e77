//! RBAC filters of `AUDIT`, `DENY` and `ALLOW` policies, in this order.

use std::collections::BTreeMap;

use prost::Message;
use smol_str::SmolStr;

use super::{
    Excess, HTTP_RBAC, NETWORK_RBAC, NETWORK_STAT_PREFIX, TOO_LARGE, Traffic,
    item::{Leniency, RuleContext},
    rule::{self, Skipped},
    too_large,
    trust_domain::MeshTrustDomains,
};
use crate::{
    api::{Config, istio::DRY_RUN},
    base::{ObjectKey, Shared},
    generate::{
        BuildContext,
        constant::{http_filter, network_filter},
        filter::{FilterStack, PeerSource},
        resource::Note,
    },
    proto::{
        Any,
        envoy::{
            config::{
                listener::v3::Filter,
                rbac::v3::{Policy, Rbac, rbac::Action as EnvoyAction},
            },
            extensions::filters::{
                http::rbac::v3::Rbac as HttpRbac,
                network::{http_connection_manager::v3::HttpFilter, rbac::v3::Rbac as NetworkRbac},
            },
        },
        istio::security::v1beta1::{AuthorizationPolicy, authorization_policy::Action},
    },
};

/// Rules of an RBAC filter, for all traffic.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Rules {
    /// Enforced rules.
    pub(crate) enforced: Option<Rbac>,
    /// Shadow rules, which are only evaluated.
    pub(crate) shadow: Option<Rbac>,
    /// Prefix of the shadow rules' results.
    pub(super) shadow_prefix: &'static str,
}

impl Rules {
    /// Returns the filter of an HTTP chain.
    pub(crate) fn http_filter(self) -> HttpFilter {
        let config = HttpRbac {
            rules: self.enforced,
            shadow_rules: self.shadow,
            shadow_rules_stat_prefix: self.shadow_prefix.to_owned(),
            ..Default::default()
        };
        http_filter(HTTP_RBAC, Any::pack(&config))
    }

    /// Returns the filter of a TCP chain.
    pub(crate) fn network_filter(self) -> Filter {
        let config = NetworkRbac {
            rules: self.enforced,
            shadow_rules: self.shadow,
            shadow_rules_stat_prefix: self.shadow_prefix.to_owned(),
            stat_prefix: NETWORK_STAT_PREFIX.to_owned(),
            ..Default::default()
        };
        network_filter(NETWORK_RBAC, Any::pack(&config))
    }
}

/// Returns the filters of HTTP chains.
pub(crate) fn http_filters(stack: &FilterStack, peer_source: PeerSource) -> Vec<HttpFilter> {
    let rules = rules(stack, Traffic::Http, peer_source).into_iter();
    rules.map(Rules::http_filter).collect()
}

/// Returns HTTP filters with the rules of TCP chains.
pub(super) fn connection_filters(stack: &FilterStack) -> Vec<HttpFilter> {
    let rules = rules(stack, Traffic::Tcp, PeerSource::Tls).into_iter();
    rules.map(Rules::http_filter).collect()
}

/// Returns the filters of TCP chains.
pub(crate) fn network_filters(stack: &FilterStack, peer_source: PeerSource) -> Vec<Filter> {
    let rules = rules(stack, Traffic::Tcp, peer_source).into_iter();
    rules.map(Rules::network_filter).collect()
}

/// RBAC filter of `DENY` policies in proxyless gRPC servers.
const GRPC_DENY: &str = "envoy.filters.http.rbac.DENY";

/// Returns the filters of a listener of a proxyless gRPC server, with notes of what they cannot express. They deny
/// everything if those of all `listeners` would be too large.
///
/// Such servers support only `DENY` and `ALLOW`, without shadow rules. Parity (pilot/pkg/networking/grpcgen/lds.go):
/// dry-run policies are enforced, a policy without rules has no effect, and trust domains have no aliases.
pub fn proxyless_filters(ctx: &BuildContext, policies: &[ObjectKey], listeners: usize) -> (Vec<HttpFilter>, Vec<Note>) {
    let (mut filters, mut notes) = (Vec::new(), Vec::new());
    let rows = policies
        .iter()
        .filter_map(|key| ctx.mesh.authorization_policies.get(ctx.cx, key));
    let rows = rows.filter(|row| matches!(row.spec.action(), Action::Deny | Action::Allow));
    let rows: Vec<_> = rows.collect();
    // Making the filters takes time as well, and each listener makes its own.
    let declared: usize = rows.iter().map(|row| row.spec.encoded_len()).sum();
    if let Some(excess) = Excess::of(declared, listeners) {
        return denied(&rows, &excess);
    }
    let actions = [
        (Action::Deny, EnvoyAction::Deny, GRPC_DENY),
        (Action::Allow, EnvoyAction::Allow, HTTP_RBAC),
    ];
    for (action, envoy_action, name) in actions {
        let mut rules = empty(envoy_action);
        for row in rows.iter().filter(|row| row.spec.action() == action) {
            let key = &row.meta.key;
            let context = RuleContext {
                traffic: Traffic::Http,
                peer_source: PeerSource::Tls,
                namespace: &key.namespace,
                leniency: leniency(envoy_action),
            };
            for (index, rule) in row.spec.rules.iter().enumerate() {
                let name = format!("{}-{}-{index}", key.namespace, key.name);
                let name = unused(&rules.policies, name);
                match rule::policy(rule, &MeshTrustDomains::none(), &context) {
                    Ok(policy) => {
                        rules.policies.insert(name, policy);
                    }
                    // The rule matches nothing.
                    Err(Skipped::NotApplicable) => {
                        rules.policies.insert(name, Policy::default());
                    }
                    Err(Skipped::UnknownKey(condition)) => notes.push(Note {
                        code: "authorization_condition_unknown",
                        detail: SmolStr::from(format!("{name}: {condition}")),
                    }),
                }
            }
        }
        if !rules.policies.is_empty() {
            let config = HttpRbac {
                rules: Some(rules),
                ..Default::default()
            };
            filters.push(http_filter(name, Any::pack(&config)));
        }
    }
    let size: usize = filters.iter().map(Message::encoded_len).sum();
    if let Some(excess) = Excess::of(size, listeners) {
        return denied(&rows, &excess);
    }
    (filters, notes)
}

/// Returns a name that no policy has: this one, or else a longer one. Names of namespaces and of objects may contain
/// the separator, and a policy must not replace one of the root namespace.
fn unused(policies: &BTreeMap<String, Policy>, mut name: String) -> String {
    while policies.contains_key(&name) {
        name.push('-');
    }
    name
}

/// Returns a filter that denies everything in place of those of policies that are too large, with a note.
fn denied(rows: &[&Shared<Config<AuthorizationPolicy>>], excess: &Excess) -> (Vec<HttpFilter>, Vec<Note>) {
    let mut rules = empty(EnvoyAction::Deny);
    rules.policies.insert("too-large".to_owned(), rule::always());
    let config = HttpRbac {
        rules: Some(rules),
        ..Default::default()
    };
    let note = Note {
        code: TOO_LARGE,
        detail: too_large(rows.iter().map(|row| &***row), excess).into(),
    };
    (vec![http_filter(GRPC_DENY, Any::pack(&config))], vec![note])
}

fn leniency(action: EnvoyAction) -> Leniency {
    match action {
        EnvoyAction::Allow => Leniency::SkipRule,
        EnvoyAction::Deny | EnvoyAction::Log => Leniency::DropItem,
    }
}

fn rules(stack: &FilterStack, traffic: Traffic, peer_source: PeerSource) -> Vec<Rules> {
    let actions = [
        (Action::Audit, EnvoyAction::Log),
        (Action::Deny, EnvoyAction::Deny),
        (Action::Allow, EnvoyAction::Allow),
    ];
    let translation = Translation {
        stack,
        domains: MeshTrustDomains::of(stack.mesh),
        traffic,
        peer_source,
    };
    let of_action = |(action, envoy_action)| {
        let policies = stack.policies_with(action);
        (!policies.is_empty()).then(|| {
            let (enforced, shadow) = translation.rules(&policies, envoy_action, "");
            Rules {
                // Parity (pilot/pkg/security/authz/builder/builder.go): without shadow rules the prefix is that of
                // ALLOW, whatever the action.
                shadow_prefix: match shadow.as_ref().map(Rbac::action) {
                    None | Some(EnvoyAction::Allow) => "istio_dry_run_allow_",
                    Some(EnvoyAction::Deny) => "istio_dry_run_deny_",
                    Some(EnvoyAction::Log) => "",
                },
                enforced,
                shadow,
            }
        })
    };
    actions.into_iter().filter_map(of_action).collect()
}

/// Context of translating policies for a chain.
pub(crate) struct Translation<'a> {
    /// Context of the filters.
    pub(crate) stack: &'a FilterStack<'a>,
    /// Trust domains of the mesh.
    pub(crate) domains: MeshTrustDomains<'a>,
    /// Traffic of the chain.
    pub(crate) traffic: Traffic,
    /// Source of the identity of the peer.
    pub(crate) peer_source: PeerSource,
}

impl Translation<'_> {
    /// Returns the enforced and the dry-run rules of policies, `None` without a policy. `prefix` is that of the rule
    /// names.
    pub(crate) fn rules(
        &self,
        policies: &[&Config<AuthorizationPolicy>],
        action: EnvoyAction,
        prefix: &str,
    ) -> (Option<Rbac>, Option<Rbac>) {
        let (mut enforced, mut shadow) = (None, None);
        for policy in policies {
            let rules = if is_dry_run(policy) { &mut shadow } else { &mut enforced };
            let rules = rules.get_or_insert_with(|| empty(action));
            self.add(rules, policy, prefix);
        }
        (enforced, shadow)
    }

    fn add(&self, rules: &mut Rbac, policy: &Config<AuthorizationPolicy>, prefix: &str) {
        let key = &policy.meta.key;
        let name = |index: usize| {
            let (namespace, name) = (&key.namespace, &key.name);
            format!("{prefix}ns[{namespace}]-policy[{name}]-rule[{index}]")
        };
        let context = RuleContext {
            traffic: self.traffic,
            peer_source: self.peer_source,
            namespace: &key.namespace,
            leniency: leniency(rules.action()),
        };
        if policy.spec.rules.is_empty() {
            rules.policies.insert(name(0), rule::never());
        }
        for (index, rule) in policy.spec.rules.iter().enumerate() {
            match rule::policy(rule, &self.domains, &context) {
                Ok(policy) => {
                    rules.policies.insert(name(index), policy);
                }
                Err(Skipped::UnknownKey(condition)) => {
                    let detail = SmolStr::from(format!("{}: {condition}", name(index)));
                    self.stack.note("authorization_condition_unknown", detail);
                }
                Err(Skipped::NotApplicable) => {}
            }
        }
    }
}

/// Returns the rules of an action without policies.
pub(crate) fn empty(action: EnvoyAction) -> Rbac {
    Rbac {
        action: action.into(),
        ..Default::default()
    }
}

/// Returns true for texts that Go parses as true; any other text enforces the policy.
fn is_dry_run(policy: &Config<AuthorizationPolicy>) -> bool {
    let annotation = policy.meta.annotations.get(DRY_RUN);
    annotation.is_some_and(|value| matches!(value.as_str(), "1" | "t" | "T" | "TRUE" | "true" | "True"))
}
