//! Translates a rule of an AuthorizationPolicy to an Envoy policy.

use std::borrow::Cow;

use prost::Message;

use super::{
    item::{Attribute, Expression, Item, RuleContext, conjunction},
    permission::{OperationAttribute, is_path_template},
    principal::SourceAttribute,
    trust_domain::MeshTrustDomains,
};
use crate::{
    api::Config,
    proto::{
        envoy::config::rbac::v3::{Permission, Policy, Principal},
        istio::security::v1beta1::{AuthorizationPolicy, Condition, Operation, Rule, Source},
    },
};

type Sources<'r> = Vec<Item<'r, SourceAttribute<'r>>>;
type Operations<'r> = Vec<Item<'r, OperationAttribute<'r>>>;

/// The maximum size of conditions that are repeated in each alternative of a side, in bytes (see [`alternatives`]).
const MAX_REPEATED: usize = 32 << 10;

/// Bytes that a value of a condition costs besides its text.
const VALUE_SIZE: usize = 32;

/// Reason why a rule is skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Skipped {
    /// A condition has an unknown key.
    UnknownKey(String),
    /// The rule cannot be expressed for this traffic, such as HTTP rules in TCP chains.
    NotApplicable,
}

/// Returns true if a policy has paths that need the template matcher.
pub(super) fn has_path_template(policy: &Config<AuthorizationPolicy>) -> bool {
    let operations = policy.spec.rules.iter().flat_map(|rule| &rule.to);
    operations
        .filter_map(|to| to.operation.as_ref())
        .flat_map(|operation| operation.paths.iter().chain(&operation.not_paths))
        .any(|path| is_path_template(path))
}

/// Translates a rule.
pub(crate) fn policy(rule: &Rule, domains: &MeshTrustDomains, context: &RuleContext) -> Result<Policy, Skipped> {
    let (mut of_source, of_operation) = conditions(&rule.when)?;
    let mut sources: Vec<Sources> = rule
        .from
        .iter()
        .map(|from| from.source.as_ref().map(source_items).unwrap_or_default())
        .collect();
    let operations: Vec<Operations> = rule
        .to
        .iter()
        .map(|to| to.operation.as_ref().map(operation_items).unwrap_or_default())
        .collect();
    for items in sources.iter_mut().chain([&mut of_source]) {
        expand(items, domains);
    }
    let size: usize = rule.when.iter().map(size).sum();
    Ok(Policy {
        permissions: alternatives(operations, of_operation, size, context)?,
        principals: alternatives(sources, of_source, size, context)?,
        ..Default::default()
    })
}

/// Returns the approximate size of a condition in an Envoy policy, in bytes.
fn size(condition: &Condition) -> usize {
    condition.encoded_len() + VALUE_SIZE * (condition.values.len() + condition.not_values.len())
}

/// Returns the alternatives of one side, restricted by the rule's conditions, which have this size together.
///
/// Parity (pilot/pkg/security/authz/model/model.go): each alternative contains the conditions. Istio does not bound the
/// size of this product. Beyond the bound, the conditions appear once, beside all alternatives, with the same meaning.
fn alternatives<'r, A: Attribute + Clone>(
    mut alternatives: Vec<Vec<Item<'r, A>>>,
    conditions: Vec<Item<'r, A>>,
    size: usize,
    context: &RuleContext,
) -> Result<Vec<A::Expression>, Skipped> {
    if alternatives.is_empty() {
        alternatives.push(Vec::new());
    }
    let is_repeated = alternatives.len() > 1 && !conditions.is_empty();
    if is_repeated && alternatives.len().saturating_mul(size) > MAX_REPEATED {
        let mut parts = vec![A::Expression::one_of(conjunctions(&alternatives, context)?)];
        parts.extend(conjunctions(&[conditions], context)?);
        return Ok(vec![A::Expression::all(parts)]);
    }
    for items in &mut alternatives {
        items.extend(conditions.iter().cloned());
    }
    conjunctions(&alternatives, context)
}

/// Returns a policy that always matches.
pub(super) fn always() -> Policy {
    Policy {
        permissions: vec![Permission::always()],
        principals: vec![Principal::always()],
        ..Default::default()
    }
}

/// Returns a policy that never matches, for policies without rules.
pub(crate) fn never() -> Policy {
    Policy {
        permissions: vec![Permission::always().negated()],
        principals: vec![Principal::always().negated()],
        ..Default::default()
    }
}

fn conjunctions<A: Attribute>(
    alternatives: &[Vec<Item<A>>],
    context: &RuleContext,
) -> Result<Vec<A::Expression>, Skipped> {
    let conjunctions = alternatives.iter().map(|items| conjunction(items, context));
    conjunctions.collect::<Option<_>>().ok_or(Skipped::NotApplicable)
}

fn source_items(source: &Source) -> Sources<'_> {
    use SourceAttribute as Is;
    [
        Item::new(Is::Principal, &source.principals, &source.not_principals),
        Item::new(
            Is::RequestPrincipal,
            &source.request_principals,
            &source.not_request_principals,
        ),
        Item::new(
            Is::ServiceAccount,
            &source.service_accounts,
            &source.not_service_accounts,
        ),
        Item::new(Is::TrustDomain, &source.trust_domains, &source.not_trust_domains),
        Item::new(Is::Namespace, &source.namespaces, &source.not_namespaces),
        Item::new(Is::RemoteIp, &source.remote_ip_blocks, &source.not_remote_ip_blocks),
        Item::new(Is::Ip, &source.ip_blocks, &source.not_ip_blocks),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn operation_items(operation: &Operation) -> Operations<'_> {
    use OperationAttribute as Is;
    [
        Item::new(Is::Host, &operation.hosts, &operation.not_hosts),
        Item::new(Is::Method, &operation.methods, &operation.not_methods),
        Item::new(Is::Path, &operation.paths, &operation.not_paths),
        Item::new(Is::Port, &operation.ports, &operation.not_ports),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Side of an Envoy policy that a condition belongs to.
enum Side<'r> {
    Source(SourceAttribute<'r>),
    Operation(OperationAttribute<'r>),
}

/// Returns the conditions of each side, in order.
fn conditions(when: &[Condition]) -> Result<(Sources<'_>, Operations<'_>), Skipped> {
    let mut sources = Sources::new();
    let mut operations = Operations::new();
    for condition in when {
        let side = side(&condition.key).ok_or_else(|| Skipped::UnknownKey(condition.key.clone()))?;
        match side {
            Side::Source(attribute) => {
                sources.extend(Item::new(attribute, &condition.values, &condition.not_values));
            }
            Side::Operation(attribute) => {
                operations.extend(Item::new(attribute, &condition.values, &condition.not_values));
            }
        }
    }
    Ok((sources, operations))
}

fn side(key: &str) -> Option<Side<'_>> {
    use OperationAttribute as Asks;
    use SourceAttribute as Is;
    Some(match key {
        "destination.ip" => Side::Operation(Asks::DestinationIp),
        "destination.port" => Side::Operation(Asks::Port),
        "connection.sni" => Side::Operation(Asks::ServerName),
        "source.ip" => Side::Source(Is::Ip),
        "remote.ip" => Side::Source(Is::RemoteIp),
        "source.namespace" => Side::Source(Is::Namespace),
        "source.principal" => Side::Source(Is::Principal),
        "source.serviceAccount" => Side::Source(Is::ServiceAccount),
        "source.trustDomain" => Side::Source(Is::TrustDomain),
        "request.auth.principal" => Side::Source(Is::RequestPrincipal),
        "request.auth.audiences" => Side::Source(Is::Claim(vec!["aud"])),
        "request.auth.presenter" => Side::Source(Is::Claim(vec!["azp"])),
        _ => return bracketed(key),
    })
}

/// Parses keys with a name in brackets.
fn bracketed(key: &str) -> Option<Side<'_>> {
    if let Some(name) = key.strip_prefix("request.headers") {
        let header = in_brackets(name).map_or(SourceAttribute::Unreadable, SourceAttribute::Header);
        return Some(Side::Source(header));
    }
    if let Some(names) = key.strip_prefix("request.auth.claims") {
        let claim = nested(names).map_or(SourceAttribute::Unreadable, SourceAttribute::Claim);
        return Some(Side::Source(claim));
    }
    let name = key.strip_prefix("experimental.")?;
    name.strip_prefix("envoy.filters.")?;
    let metadata = name.split_once('[').map(|(filter, key)| OperationAttribute::Metadata {
        filter,
        key: key.strip_suffix(']').unwrap_or(key),
    });
    Some(Side::Operation(metadata.unwrap_or(OperationAttribute::Unreadable)))
}

fn in_brackets(text: &str) -> Option<&str> {
    text.strip_prefix('[')?.strip_suffix(']')
}

/// Parses `[a][b]`, a claim inside a claim. Unbalanced brackets are part of one name.
fn nested(text: &str) -> Option<Vec<&str>> {
    let whole = in_brackets(text)?;
    let inner = &text[1..text.len() - 1];
    let names: Vec<&str> = inner.split("][").collect();
    let are_paired = names.iter().all(|name| !name.contains(['[', ']']));
    Some(if are_paired { names } else { vec![whole] })
}

/// Adds the mesh's other trust domains to those that are named.
fn expand(items: &mut Sources, domains: &MeshTrustDomains) {
    for item in items {
        let expanded: &dyn Fn(&[String]) -> Vec<String> = match item.attribute {
            SourceAttribute::Principal => &|values| domains.expand_principals(values),
            SourceAttribute::TrustDomain => &|values| domains.expand_domains(values),
            _ => continue,
        };
        item.values = Cow::Owned(expanded(&item.values));
        item.not_values = Cow::Owned(expanded(&item.not_values));
    }
}
