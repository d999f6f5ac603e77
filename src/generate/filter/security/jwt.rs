//! RequestAuthentications as a JWT filter. A request without a token passes; a request with a token that no rule
//! accepts is refused.

use std::{collections::BTreeMap, time::Duration};

use super::JWT_FILTER;
use crate::{
    api::fetched_keys::{FetchedKeys, KeySource},
    base::{ObjectKey, url},
    generate::{
        constant::{self, http_filter},
        filter::FilterStack,
        name,
        proxy::ProxyType,
    },
    model::{external_dependencies::KEYS_TIMEOUT, features::RemoteJwks as Fetcher},
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::{DataSource, HttpUri, data_source, http_uri::HttpUpstreamType},
                route::v3::{RouteMatch, route_match::PathSpecifier},
            },
            extensions::filters::{
                http::jwt_authn::v3::{
                    JwtAuthentication, JwtClaimToHeader, JwtHeader, JwtProvider, JwtRequirement, JwtRequirementAndList,
                    JwtRequirementOrList, RemoteJwks, RequirementRule,
                    jwt_provider::{JwksSourceSpecifier, NormalizePayload},
                    jwt_requirement::RequiresType,
                    requirement_rule::RequirementType,
                },
                network::http_connection_manager::v3::HttpFilter,
            },
        },
        istio::security::v1beta1::JwtRule,
    },
};

/// JWK set that accepts no token, for issuers whose keys are unknown: Envoy refuses a listener with an empty key set.
/// The key is a point of P-256 whose private key is unknown: x is the SHA-256 of `istiod: no token of this issuer is
/// valid 3` (the first number that yields a point), y the even one of the two.
const UNFULFILLABLE: &str = concat!(
    r#"{"keys":[{"kty":"EC","crv":"P-256","alg":"ES256","use":"sig","kid":"unavailable","#,
    r#""x":"fgtJuWQhy1MjRv1YEo4ANqhU3svtg4pzPvUPV6hgVbM","y":"aaUIsWGtVHDe8cySM1SG6jLVLifI6mJTEkDQgS9nGk4"}]}"#
);

/// Time for which Envoy keeps keys that it fetched.
const CACHE_DURATION: Duration = Duration::from_mins(5);

/// The maximum size of the fetched keys in a filter: those of all issuers of the root namespace and of another one. A
/// policy may require one key set in thousands of rules, each of which repeats it.
const MAX_KEY_BYTES: usize = 16 << 20;

/// Claims with several values separated by spaces.
const SPACE_DELIMITED: [&str; 2] = ["permission", "scope"];

/// The size that the fetched keys in a filter may still have.
struct KeyBudget(usize);

impl KeyBudget {
    /// Counts a key set. Returns false, and counts nothing, if it has no place.
    fn take(&mut self, keys: &str) -> bool {
        let left = self.0.checked_sub(keys.len());
        self.0 = left.unwrap_or(self.0);
        left.is_some()
    }
}

/// Returns the filter, if there are rules.
pub(crate) fn filter(stack: &FilterStack) -> Option<HttpFilter> {
    let keys = stack.client.security.request_authentication.iter();
    let policies = keys.filter_map(|key| Some((key, stack.ctx.mesh.request_authentications.get(stack.ctx.cx, key)?)));
    let mut rules: Vec<(&ObjectKey, &JwtRule)> = policies
        .flat_map(|(key, policy)| policy.spec.jwt_rules.iter().map(move |rule| (key, rule)))
        .collect();
    if rules.is_empty() {
        return None;
    }
    rules.sort_by(|(_, left), (_, right)| left.issuer.cmp(&right.issuer));
    let mut budget = KeyBudget(MAX_KEY_BYTES);
    let providers: BTreeMap<String, JwtProvider> = rules
        .iter()
        .enumerate()
        .map(|(index, (policy, rule))| (provider_name(index), provider(stack, policy, rule, &mut budget)))
        .collect();
    let everywhere = RouteMatch {
        path_specifier: Some(PathSpecifier::Prefix("/".to_owned())),
        ..Default::default()
    };
    let config = JwtAuthentication {
        providers,
        rules: vec![RequirementRule {
            r#match: Some(everywhere),
            requirement_type: Some(RequirementType::Requires(requirement(rules.len()))),
        }],
        bypass_cors_preflight: true,
        ..Default::default()
    };
    Some(http_filter(JWT_FILTER, Any::pack(&config)))
}

fn provider_name(index: usize) -> String {
    format!("origins-{index}")
}

/// Requires that one provider accepts the token, or that there is none.
fn requirement(providers: usize) -> JwtRequirement {
    let accepted = |index: usize| require(RequiresType::ProviderName(provider_name(index)));
    let accepted_or_missing = |index: usize| any(vec![accepted(index), require(RequiresType::AllowMissing(()))]);
    if providers == 1 {
        return accepted_or_missing(0);
    }
    let none_refuses = require(RequiresType::RequiresAll(JwtRequirementAndList {
        requirements: (0..providers).map(accepted_or_missing).collect(),
    }));
    any((0..providers).map(accepted).chain([none_refuses]).collect())
}

fn require(requires_type: RequiresType) -> JwtRequirement {
    JwtRequirement {
        requires_type: Some(requires_type),
    }
}

fn any(requirements: Vec<JwtRequirement>) -> JwtRequirement {
    require(RequiresType::RequiresAny(JwtRequirementOrList { requirements }))
}

fn provider(stack: &FilterStack, policy: &ObjectKey, rule: &JwtRule, budget: &mut KeyBudget) -> JwtProvider {
    let mut space_delimited: Vec<String> = SPACE_DELIMITED.map(str::to_owned).to_vec();
    space_delimited.extend(rule.space_delimited_claims.iter().cloned());
    space_delimited.sort_unstable();
    space_delimited.dedup();
    // Envoy refuses a listener with other names and values. Admission refuses names, but it may have been bypassed.
    let is_value = |value: &str| !value.contains(['\0', '\r', '\n']);
    let is_name = |name: &str| !name.is_empty() && is_value(name);
    let from_headers = rule.from_headers.iter();
    let from_headers = from_headers.filter(|header| is_name(&header.name) && is_value(&header.prefix));
    let from_headers = from_headers.map(|header| JwtHeader {
        name: header.name.clone(),
        value_prefix: header.prefix.clone(),
    });
    let to_headers = rule.output_claim_to_headers.iter();
    let to_headers = to_headers.filter(|output| is_name(&output.header) && !output.claim.is_empty());
    let to_headers = to_headers.map(|output| JwtClaimToHeader {
        header_name: output.header.clone(),
        claim_name: output.claim.clone(),
        ..Default::default()
    });
    JwtProvider {
        issuer: rule.issuer.clone(),
        audiences: rule.audiences.clone(),
        forward: rule.forward_original_token,
        from_headers: from_headers.collect(),
        from_params: rule.from_params.clone(),
        from_cookies: rule.from_cookies.clone(),
        forward_payload_header: Some(rule.output_payload_to_header.clone())
            .filter(|name| is_name(name))
            .unwrap_or_default(),
        payload_in_metadata: "payload".to_owned(),
        normalize_payload_in_metadata: Some(NormalizePayload {
            space_delimited_claims: space_delimited,
        }),
        claim_to_headers: to_headers.collect(),
        // Routes of gateways may depend on claims, which are known only after this filter.
        clear_route_cache: stack.client.proxy_type != ProxyType::Sidecar,
        jwks_source_specifier: Some(keys(stack, policy, rule, budget)),
        ..Default::default()
    }
}

/// Returns the source of an issuer's keys.
fn keys(stack: &FilterStack, policy: &ObjectKey, rule: &JwtRule, budget: &mut KeyBudget) -> JwksSourceSpecifier {
    let fetcher = stack.features().pilot_jwt_enable_remote_jwks;
    if fetcher != Fetcher::Istiod
        && !rule.jwks_uri.is_empty()
        && let Some(remote) = remote_keys(stack, rule, fetcher)
    {
        return JwksSourceSpecifier::RemoteJwks(remote);
    }
    JwksSourceSpecifier::LocalJwks(DataSource {
        specifier: Some(data_source::Specifier::InlineString(inline_keys(
            stack, policy, rule, budget,
        ))),
        ..Default::default()
    })
}

/// Returns the keys in the rule, or the last ones fetched.
fn inline_keys(stack: &FilterStack, policy: &ObjectKey, rule: &JwtRule, budget: &mut KeyBudget) -> String {
    let Some(source) = KeySource::of(rule) else {
        return rule.jwks.clone();
    };
    let mesh = stack.ctx.mesh;
    let key = FetchedKeys::key(&mesh.installation.cluster, &source);
    let fetched = mesh.fetched_keys.get(stack.ctx.cx, &key);
    let code = match fetched.filter(|fetched| !fetched.keys.is_empty()) {
        Some(fetched) if budget.take(&fetched.keys) => return fetched.keys.to_string(),
        Some(_) => "jwks_too_large",
        None => "jwks_unavailable",
    };
    let (namespace, name) = (&policy.namespace, &policy.name);
    stack.note(code, format!("{namespace}/{name}: {source}"));
    UNFULFILLABLE.to_owned()
}

/// Returns keys that Envoy fetches from a service of the mesh.
fn remote_keys(stack: &FilterStack, rule: &JwtRule, fetcher: Fetcher) -> Option<RemoteJwks> {
    let (host, port) = url::authority(&rule.jwks_uri)?;
    let found = match fetcher {
        Fetcher::Envoy => stack.provider_cluster("jwks", host, port),
        // istiod fetches the keys of servers outside the mesh, so a missing service is no failure.
        Fetcher::Hybrid | Fetcher::Istiod => stack.service_cluster(host, port),
    };
    let cluster = match found {
        Some(found) => found.cluster,
        None if fetcher == Fetcher::Envoy => name::outbound_cluster(port, "", host),
        None => return None,
    };
    Some(RemoteJwks {
        http_uri: Some(HttpUri {
            uri: rule.jwks_uri.clone(),
            timeout: Some(fetch_timeout(rule)),
            http_upstream_type: Some(HttpUpstreamType::Cluster(cluster)),
        }),
        cache_duration: Some(constant::duration(CACHE_DURATION)),
        ..Default::default()
    })
}

/// Returns the timeout for fetching keys. One that Envoy refuses is replaced: 136 years and more, and, as admission may
/// have been bypassed, one that is not positive.
fn fetch_timeout(rule: &JwtRule) -> prost_types::Duration {
    let given = rule
        .timeout
        .filter(|given| (0..=i64::from(u32::MAX)).contains(&given.seconds) && (given.seconds, given.nanos) > (0, 0));
    given.unwrap_or_else(|| constant::duration(KEYS_TIMEOUT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r21_a_key_set_is_not_repeated_without_limit() {
        let (keys, mut budget) = ("k".repeat(1 << 20), KeyBudget(MAX_KEY_BYTES));
        assert_eq!((0..4096).filter(|_| budget.take(&keys)).count(), 16);
        assert!(!budget.take("k"), "the budget is used up");
    }
}
