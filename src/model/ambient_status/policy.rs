//! Conditions of AuthorizationPolicies: enforced by ztunnels, or by the waypoints that they refer to.
//!
//! Parity (pilot/pkg/serviceregistry/ambient/{policies,authorization}.go).

use std::collections::BTreeSet;

use super::{Condition, ObjectConditions};
use crate::{
    api::{Config, Meta},
    base::{Labels, Namespace, ObjectKey, SmolStr},
    model::{
        MeshSnapshot,
        ambient::policy::is_dry_run,
        gateway_api::class,
        policy::{Attach, root_namespace},
        waypoint,
    },
    proto::istio::{
        security::v1beta1::{AuthorizationPolicy, Operation, Rule, Source, authorization_policy::Action},
        r#type::v1beta1::PolicyTargetReference,
    },
    table::Cx,
};

/// Type of the condition of policies with references, and the reason for an object that uses its waypoint.
pub(super) const WAYPOINT_ACCEPTED: &str = "WaypointAccepted";
/// Type of the condition of policies without references.
pub(super) const ZTUNNEL_ACCEPTED: &str = "ZtunnelAccepted";
/// Reason of an enforced policy.
const ACCEPTED: &str = "Accepted";
/// Reason for a part of a policy that ztunnels do not enforce.
const UNSUPPORTED: &str = "UnsupportedValue";
/// Reason for a reference that is not allowed.
const INVALID: &str = "Invalid";
/// Reason for a reference to a missing object.
const TARGET_NOT_FOUND: &str = "TargetNotFound";
/// Reason for a reference to a service without a waypoint.
const ANCESTOR_NOT_BOUND: &str = "AncestorNotBound";
/// Keys of conditions that ztunnels know.
const TRANSPORT_KEYS: [&str; 5] = [
    "source.ip",
    "source.namespace",
    "source.principal",
    "destination.ip",
    "destination.port",
];

/// Returns the attributes in a rule that ztunnels do not know: those of HTTP, trust domains, and unknown ones.
pub fn http_attributes(rule: &Rule) -> impl Iterator<Item = &str> {
    let operations = rule.to.iter().filter_map(|to| to.operation.as_ref());
    let sources = rule.from.iter().filter_map(|from| from.source.as_ref());
    let keys = rule.when.iter().map(|condition| condition.key.as_str());
    operations
        .flat_map(of_operation)
        .chain(sources.flat_map(of_source))
        .chain(keys.filter(|key| !TRANSPORT_KEYS.contains(key)))
}

fn of_operation(operation: &Operation) -> impl Iterator<Item = &str> {
    let lists = [
        ("hosts", !operation.hosts.is_empty()),
        ("notHosts", !operation.not_hosts.is_empty()),
        ("methods", !operation.methods.is_empty()),
        ("notMethods", !operation.not_methods.is_empty()),
        ("paths", !operation.paths.is_empty()),
        ("notPaths", !operation.not_paths.is_empty()),
    ];
    lists.into_iter().filter_map(|(name, is_set)| is_set.then_some(name))
}

fn of_source(source: &Source) -> impl Iterator<Item = &str> {
    let lists = [
        ("remoteIpBlocks", !source.remote_ip_blocks.is_empty()),
        ("notRemoteIpBlocks", !source.not_remote_ip_blocks.is_empty()),
        ("requestPrincipals", !source.request_principals.is_empty()),
        ("notRequestPrincipals", !source.not_request_principals.is_empty()),
        ("trustDomains", !source.trust_domains.is_empty()),
        ("notTrustDomains", !source.not_trust_domains.is_empty()),
    ];
    lists.into_iter().filter_map(|(name, is_set)| is_set.then_some(name))
}

/// Returns the conditions of a policy.
pub(super) fn conditions(cx: &Cx, mesh: &MeshSnapshot, policy: &Config<AuthorizationPolicy>) -> ObjectConditions {
    let references = policy.spec.target_refs();
    let (manager, condition_type, mut condition) = if references.is_empty() {
        (
            "istio-ambient-ztunnel-policy",
            ZTUNNEL_ACCEPTED,
            by_ztunnels(mesh, policy),
        )
    } else {
        let root = root_namespace(cx, mesh);
        let results = references
            .iter()
            .map(|target| Reference::new(&policy.meta, target).result(cx, mesh, &root));
        (
            "istio-ambient-waypoint-policy",
            WAYPOINT_ACCEPTED,
            combined(results.collect()),
        )
    };
    condition.observed_generation = policy.meta.generation;
    ObjectConditions {
        manager,
        conditions: vec![(condition_type, Some(condition))],
    }
}

/// Returns the condition of a policy without references.
fn by_ztunnels(mesh: &MeshSnapshot, policy: &Config<AuthorizationPolicy>) -> Condition {
    let unsupported = |is_enforced, message| Condition::new(is_enforced, UNSUPPORTED, message);
    let logs = mesh.installation.features.ambient_enable_dry_run_authorization_policy;
    if is_dry_run(policy) && !logs {
        let (namespace, name) = (policy.meta.namespace(), policy.meta.name());
        let message = format!(
            "found policy \"{namespace}/{name}\" using dry-run annotation, but support for ambient dry-run \
             authorizationPolicies isn't enabled"
        );
        return unsupported(false, message);
    }
    let action = policy.spec.action();
    if matches!(action, Action::Audit | Action::Custom) {
        let message = format!("ztunnel does not support the {} action", action.as_str_name());
        return unsupported(false, message);
    }
    let attributes: BTreeSet<&str> = policy.spec.rules.iter().flat_map(http_attributes).collect();
    if attributes.is_empty() {
        return Condition::met(ACCEPTED, "attached to ztunnel".to_owned());
    }
    let consequence = if action == Action::Deny {
        "DENY policy with HTTP attributes is enforced without the HTTP rules."
    } else {
        "Within an ALLOW policy, rules matching HTTP attributes are omitted."
    };
    let found = attributes.into_iter().collect::<Vec<_>>().join(", ");
    let message = format!(
        "ztunnel does not support HTTP attributes (found: {found}). In ambient mode you must use a waypoint proxy to \
         enforce HTTP rules. {consequence} This will be more restrictive than requested."
    );
    unsupported(true, message)
}

/// The result of one reference: its text and condition.
type Resolved = (String, Condition);

/// A reference of a policy.
struct Reference<'a> {
    target: &'a PolicyTargetReference,
    namespace: Namespace,
    name: String,
}

impl<'a> Reference<'a> {
    fn new(policy: &Meta, target: &'a PolicyTargetReference) -> Self {
        let namespace = if target.namespace.is_empty() {
            policy.namespace().clone()
        } else {
            Namespace::new(&target.namespace)
        };
        Self {
            target,
            name: format!("{namespace}/{}", target.name),
            namespace,
        }
    }

    fn result(&self, cx: &Cx, mesh: &MeshSnapshot, root: &Namespace) -> Resolved {
        let group = match self.target.group.as_str() {
            "" => "core",
            group => group,
        };
        let text = format!("{}.{group}:{}", self.target.kind, self.name);
        (text, self.condition(cx, mesh, root))
    }

    fn condition(&self, cx: &Cx, mesh: &MeshSnapshot, root: &Namespace) -> Condition {
        let (name, cluster) = (SmolStr::new(&self.target.name), &mesh.installation.cluster);
        let key = ObjectKey::new(cluster, self.namespace.clone(), name.clone());
        match self.target.kind.as_str() {
            "GatewayClass" if self.namespace != *root => {
                let message = format!(
                    "AuthorizationPolicy must be in the root namespace `{root}` when referencing a GatewayClass"
                );
                Condition::unmet(INVALID, message)
            }
            "GatewayClass" => match mesh.gateway_classes.get(cx, &ObjectKey::new(cluster, "", name)) {
                None => unbound(TARGET_NOT_FOUND),
                Some(class) if class.spec.controller_name != class::WAYPOINT => {
                    let message = format!(
                        "GatewayClass must use controller name `{}` for waypoints",
                        class::WAYPOINT
                    );
                    Condition::unmet(INVALID, message)
                }
                Some(class) => bound(class.meta.name()),
            },
            "Gateway" => match mesh.waypoints.get(cx, &key) {
                None => unbound(TARGET_NOT_FOUND),
                Some(_) => bound(&self.name),
            },
            "Service" => {
                let labels = mesh.kube_services.get(cx, &key).map(|service| &*service.meta.labels);
                self.through_service(cx, mesh, labels)
            }
            "ServiceEntry" => {
                let labels = mesh.service_entries.get(cx, &key).map(|entry| &*entry.meta.labels);
                self.through_service(cx, mesh, labels)
            }
            _ => unbound("unknown"),
        }
    }

    /// Returns the condition for a service with these labels; `None` if it does not exist.
    fn through_service(&self, cx: &Cx, mesh: &MeshSnapshot, labels: Option<&Labels>) -> Condition {
        let object = format!("{} {}", self.target.kind, self.name);
        let Some(labels) = labels else {
            return Condition::unmet(TARGET_NOT_FOUND, format!("{object} was not found"));
        };
        match waypoint::for_service(cx, mesh, &mesh.installation.cluster, labels, &self.namespace) {
            Ok(Some(gateway)) => bound(&format!("{}/{}", gateway.namespace, gateway.name)),
            Ok(None) | Err(_) => {
                let message = format!("{object} is not bound to a waypoint");
                Condition::unmet(ANCESTOR_NOT_BOUND, message)
            }
        }
    }
}

fn bound(to: &str) -> Condition {
    Condition::met(ACCEPTED, format!("bound to {to}"))
}

fn unbound(reason: &'static str) -> Condition {
    Condition::unmet(reason, "not bound".to_owned())
}

/// Returns one condition for all references: it is true if one of them is bound.
fn combined(mut results: Vec<Resolved>) -> Condition {
    if results.len() == 1
        && let Some((_, only)) = results.pop()
    {
        return only;
    }
    let is_bound = results.iter().any(|(_, condition)| condition.is_true);
    let rest = results.into_iter().filter(|(_, condition)| !condition.is_true);
    let rest: Vec<String> = rest.map(|(text, _)| text).collect();
    let reason = match (is_bound, rest.is_empty()) {
        (false, _) => INVALID,
        (true, true) => ACCEPTED,
        (true, false) => "PartiallyInvalid",
    };
    let message = if rest.is_empty() {
        String::new()
    } else {
        format!("Invalid targetRefs: {}", rest.join(", "))
    };
    Condition::new(is_bound, reason, message)
}
