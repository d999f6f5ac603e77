//! Validation of the security kinds. Errors are violations that admission refuses. A policy that was created without
//! admission still applies, without its invalid parts, as ignoring it would leave workloads unprotected.

use super::{DRY_RUN, common, field_path::FieldPath};
use crate::{
    api::Meta,
    base::url::Url,
    proto::istio::security::v1beta1::{
        AuthorizationPolicy, Condition, JwtRule, Operation, PeerAuthentication, RequestAuthentication, Rule, Source,
        authorization_policy::{Action, ActionDetail},
    },
};

/// Checks an AuthorizationPolicy.
pub fn authorization_policy(at: &FieldPath<'_>, policy: &AuthorizationPolicy, meta: &Meta) {
    common::attachment(
        at,
        policy.selector.as_ref(),
        policy.target_ref.as_ref(),
        &policy.target_refs,
    );
    let action = Action::try_from(policy.action).unwrap_or(Action::Allow);
    let provider = policy.action_detail.as_ref();
    if !matches!(action, Action::Allow | Action::Deny) && meta.annotations.contains_key(DRY_RUN) {
        at.field("action")
            .refuse(format!("a policy with the annotation {DRY_RUN} is ALLOW or DENY"));
    }
    match (action, provider) {
        (Action::Custom, Some(ActionDetail::Provider(provider))) => {
            at.field("provider")
                .field("name")
                .require(!provider.name.is_empty(), "is required");
            at.field("rules")
                .require(!policy.rules.is_empty(), "is required with CUSTOM");
        }
        (Action::Custom, None) => at.field("provider").error("is required with CUSTOM"),
        (_, Some(_)) => at.field("provider").error("is allowed only with CUSTOM"),
        (Action::Deny, None) => at.field("rules").require(
            !policy.rules.is_empty(),
            "is required with DENY; `[{}]` denies everything",
        ),
        (Action::Allow, None) if policy.rules.is_empty() => {
            at.warning("an ALLOW policy without rules denies everything");
        }
        (Action::Allow | Action::Audit, None) => {}
    }
    at.each("rules", &policy.rules, |at, rule| authorization_rule(at, rule, action));
}

fn authorization_rule(at: &FieldPath<'_>, rule: &Rule, action: Action) {
    at.each("from", &rule.from, |at, from| match &from.source {
        Some(source) => self::source(&at.field("source"), source, action),
        None => at.field("source").error("is required"),
    });
    at.each("to", &rule.to, |at, to| match &to.operation {
        Some(operation) => self::operation(&at.field("operation"), operation),
        None => at.field("operation").error("is required"),
    });
    at.each("when", &rule.when, |at, condition| {
        self::condition(at, condition, action);
    });
    if action == Action::Deny && !names_a_connection(rule) {
        at.warning("has no condition on connections, so it denies all of them on TCP ports; hint: name the ports");
    }
}

/// Returns false for rules without any condition that a TCP filter chain can check. Parity with admission: `when` does
/// not count.
fn names_a_connection(rule: &Rule) -> bool {
    let sources = || rule.from.iter().filter_map(|from| from.source.as_ref());
    let operations = || rule.to.iter().filter_map(|to| to.operation.as_ref());
    let of_source = sources().any(|source| {
        let lists = [
            &source.principals,
            &source.not_principals,
            &source.namespaces,
            &source.not_namespaces,
            &source.service_accounts,
            &source.not_service_accounts,
            &source.ip_blocks,
            &source.not_ip_blocks,
            &source.remote_ip_blocks,
            &source.not_remote_ip_blocks,
        ];
        lists.iter().any(|values| !values.is_empty())
    });
    let of_operation = operations().any(|operation| !operation.ports.is_empty() || !operation.not_ports.is_empty());
    match (sources().next(), operations().next()) {
        (_, Some(_)) => of_operation,
        (Some(_), None) => of_source,
        (None, None) => true,
    }
}

fn source(at: &FieldPath<'_>, source: &Source, action: Action) {
    let identities = [
        ("principals", &source.principals),
        ("notPrincipals", &source.not_principals),
        ("namespaces", &source.namespaces),
        ("notNamespaces", &source.not_namespaces),
        ("serviceAccounts", &source.service_accounts),
        ("notServiceAccounts", &source.not_service_accounts),
        ("trustDomains", &source.trust_domains),
        ("notTrustDomains", &source.not_trust_domains),
        ("requestPrincipals", &source.request_principals),
        ("notRequestPrincipals", &source.not_request_principals),
    ];
    let ranges = [
        ("ipBlocks", &source.ip_blocks),
        ("notIpBlocks", &source.not_ip_blocks),
        ("remoteIpBlocks", &source.remote_ip_blocks),
        ("notRemoteIpBlocks", &source.not_remote_ip_blocks),
    ];
    let all = identities.iter().chain(&ranges);
    at.require(all.clone().any(|(_, values)| !values.is_empty()), "has no field");
    for (name, values) in all {
        not_empty(&at.field(name), values);
    }
    for (name, values) in ranges {
        at.each(name, values, |at, range| common::address_range(at, range));
    }
    if action == Action::Custom {
        // The filter that asks the provider does not know the identity of the connection.
        for (name, values) in &identities {
            at.field(name)
                .require(values.is_empty(), "cannot be combined with CUSTOM");
        }
    }
    let accounts = !source.service_accounts.is_empty() || !source.not_service_accounts.is_empty();
    let others = identities[..4].iter().any(|(_, values)| !values.is_empty());
    at.require(
        !(accounts && others),
        "serviceAccounts cannot be combined with principals and namespaces",
    );
    service_accounts(&at.field("serviceAccounts"), &source.service_accounts);
    service_accounts(&at.field("notServiceAccounts"), &source.not_service_accounts);
    for (name, domains) in [
        ("trustDomains", &source.trust_domains),
        ("notTrustDomains", &source.not_trust_domains),
    ] {
        at.each(name, domains, |at, domain| {
            star_at_end(at, domain);
            at.require(!domain.contains('/'), "is not a trust domain, there is a slash in it");
        });
    }
}

/// The maximum number of service accounts in a list, and the maximum length of each in bytes.
const MAX_ACCOUNTS: usize = 16;
const MAX_ACCOUNT: usize = 320;

/// Checks `[namespace/]name`, without wildcards.
fn service_accounts(at: &FieldPath<'_>, accounts: &[String]) {
    at.require(accounts.len() <= MAX_ACCOUNTS, "has more than 16 values");
    for (position, account) in accounts.iter().enumerate() {
        let at = at.item(position);
        let parts: Vec<&str> = account.split('/').collect();
        let is_named = account.is_empty() || (parts.len() <= 2 && parts.iter().all(|part| !part.is_empty()));
        at.require(is_named, "want a service account, or namespace/service account");
        at.require(!account.contains('*'), "wildcards are not supported here");
        at.require(account.len() <= MAX_ACCOUNT, "is longer than 320 bytes");
    }
}

/// Checks that there is at most one `*`, at the beginning or the end.
fn star_at_end(at: &FieldPath<'_>, value: &str) {
    let inner = value.strip_prefix('*').or(value.strip_suffix('*')).unwrap_or(value);
    at.require(
        !inner.contains('*'),
        "must have at most one wildcard, at the beginning or the end",
    );
}

fn not_empty(at: &FieldPath<'_>, values: &[String]) {
    at.require(values.iter().all(|value| !value.is_empty()), "a value is empty");
}

fn operation(at: &FieldPath<'_>, operation: &Operation) {
    let all = [
        ("hosts", &operation.hosts),
        ("notHosts", &operation.not_hosts),
        ("ports", &operation.ports),
        ("notPorts", &operation.not_ports),
        ("methods", &operation.methods),
        ("notMethods", &operation.not_methods),
        ("paths", &operation.paths),
        ("notPaths", &operation.not_paths),
    ];
    at.require(all.iter().any(|(_, values)| !values.is_empty()), "has no field");
    for (name, values) in &all {
        not_empty(&at.field(name), values);
    }
    for (name, values) in &all[2..4] {
        at.each(name, values.iter(), |at, text| port(at, text));
    }
    for (name, values) in &all[6..] {
        at.each(name, values.iter(), |at, path| path_template(at, path));
    }
}

/// Checks a port in decimal digits. 0 is allowed, as in Istio, and matches nothing.
fn port(at: &FieldPath<'_>, text: &str) {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    at.require(
        is_number && text.parse::<u16>().is_ok(),
        "is not a port, want 0 to 65535",
    );
}

/// Checks a path template: `{*}` matches one segment, `{**}` any number and must be the last operator.
fn path_template(at: &FieldPath<'_>, path: &str) {
    let is_template = path.contains("{*}") || path.contains("{**}");
    let is_literal = |segment: &str| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~%!$&'()+,;:@=".contains(&byte);
        !segment.is_empty() && segment.bytes().all(allowed)
    };
    let mut ended = false;
    for segment in path.trim_matches('/').split('/') {
        let is_operator = matches!(segment, "{*}" | "{**}");
        if is_operator {
            at.require(!ended, "no operator of a path template may follow {**}");
        } else if segment.contains(['{', '}']) {
            at.error("in a path template {*} and {**} stand alone between slashes");
        } else if is_template {
            at.require(
                is_literal(segment),
                "operators of a path template must be separated by plain segments, in which `*` has no meaning",
            );
        }
        ended |= segment == "{**}";
    }
}

/// Keys of conditions. Those that end in `[` take a name in brackets.
const KEYS: [&str; 15] = [
    "request.headers[",
    "source.ip",
    "remote.ip",
    "source.namespace",
    "source.principal",
    "source.serviceAccount",
    "source.trustDomain",
    "request.auth.principal",
    "request.auth.audiences",
    "request.auth.presenter",
    "request.auth.claims[",
    "destination.ip",
    "destination.port",
    "connection.sni",
    "experimental.envoy.filters.",
];
/// Keys that the filter for CUSTOM policies cannot evaluate.
const NOT_CUSTOM: [&str; 7] = [
    "source.namespace",
    "source.serviceAccount",
    "source.trustDomain",
    "source.principal",
    "request.auth.principal",
    "request.auth.audiences",
    "request.auth.presenter",
];

fn condition(at: &FieldPath<'_>, condition: &Condition, action: Action) {
    let key = condition.key.as_str();
    let fits = |known: &str| {
        if known.ends_with(['[', '.']) {
            key.starts_with(known)
        } else {
            key == known
        }
    };
    if key.is_empty() {
        at.field("key").error("is required");
    } else if !KEYS.iter().any(|known| fits(known)) {
        at.field("key").error(format!("{key:?} is not a key of conditions"));
    } else if action == Action::Custom && (NOT_CUSTOM.contains(&key) || key.starts_with("request.auth.claims[")) {
        at.field("key").error(format!("{key:?} cannot be combined with CUSTOM"));
    }
    if KEYS.iter().any(|known| known.ends_with(['[', '.']) && fits(known)) {
        let name = key.split_once('[').and_then(|(_, name)| name.strip_suffix(']'));
        at.field("key").require(
            name.is_some_and(|name| !name.is_empty()),
            "want a name in brackets, as in a[b]",
        );
    }
    let none = condition.values.is_empty() && condition.not_values.is_empty();
    at.require(!none, "needs values or notValues");
    for (name, values) in [("values", &condition.values), ("notValues", &condition.not_values)] {
        not_empty(&at.field(name), values);
        if key == "source.serviceAccount" {
            service_accounts(&at.field(name), values);
        }
        at.each(name, values, |at, value| match key {
            "source.ip" | "remote.ip" | "destination.ip" => common::address_range(at, value),
            "source.trustDomain" => star_at_end(at, value),
            "destination.port" => port(at, value),
            _ => {}
        });
    }
}

/// Checks a RequestAuthentication.
pub fn request_authentication(at: &FieldPath<'_>, policy: &RequestAuthentication, _meta: &Meta) {
    common::attachment(
        at,
        policy.selector.as_ref(),
        policy.target_ref.as_ref(),
        &policy.target_refs,
    );
    at.each("jwtRules", &policy.jwt_rules, jwt_rule);
}

fn jwt_rule(at: &FieldPath<'_>, rule: &JwtRule) {
    if rule.issuer.is_empty() && rule.jwks_uri.is_empty() {
        at.field("issuer").error("or jwksUri is required");
    }
    not_empty(&at.field("audiences"), &rule.audiences);
    if !rule.jwks_uri.is_empty() {
        let at = at.field("jwksUri");
        let fits = Url::parse(&rule.jwks_uri).is_some_and(|url| matches!(url.scheme.as_str(), "http" | "https"));
        at.require(fits, "want an http or https address");
        if !rule.jwks.is_empty() {
            at.warning("jwks is given too and counts");
        }
    }
    if !rule.jwks.is_empty() {
        jwks(&at.field("jwks"), &rule.jwks);
    }
    at.each("fromHeaders", &rule.from_headers, |at, header| {
        at.field("name").require(!header.name.is_empty(), "is required");
    });
    not_empty(&at.field("fromParams"), &rule.from_params);
    not_empty(&at.field("fromCookies"), &rule.from_cookies);
    if rule.space_delimited_claims.iter().any(String::is_empty) {
        at.field("spaceDelimitedClaims").warning("a value is empty");
    }
    common::duration(&at.field("timeout"), rule.timeout.as_ref());
    at.each("outputClaimToHeaders", &rule.output_claim_to_headers, |at, output| {
        common::header_name(&at.field("header"), &output.header);
        at.field("claim").require(!output.claim.is_empty(), "is required");
    });
}

/// Checks an inline key set. With unreadable keys no token is valid. Warns of private keys, which every reader of the
/// object can see.
fn jwks(at: &FieldPath<'_>, text: &str) {
    let set = serde_json::from_str::<serde_json::Value>(text).unwrap_or_default();
    let Some(keys) = set["keys"].as_array() else {
        let message = "is not a set of keys (`{\"keys\": [...]}`); no token will be valid";
        // Admission accepts a single key.
        if key_mistake(&set).is_none() {
            at.warning(message);
        } else {
            at.error(message);
        }
        return;
    };
    let mut mistakes = keys.iter().map(key_mistake).enumerate();
    if let Some((position, mistake)) = mistakes.find_map(|(position, mistake)| Some((position, mistake?))) {
        at.error(format!("keys[{position}] {mistake}"));
    }
    if keys.iter().any(|key| key.get("d").is_some() || key["kty"] == "oct") {
        at.warning("contains a private key, which everyone with read access to this object now has");
    }
}

/// Returns the mistake in a key: an unknown type, or a member that its type needs (RFC 7518, section 6).
///
/// Parity (pkg/config/validation/validation.go, `validateJwtRule`): admission reads every key of a set. Proxies skip
/// such a key, so tokens that are signed with it are invalid.
fn key_mistake(key: &serde_json::Value) -> Option<String> {
    let needed: &[&str] = match key["kty"].as_str() {
        Some("RSA") => &["n", "e"],
        Some("EC") => &["crv", "x", "y"],
        Some("OKP") => &["crv", "x"],
        Some("oct") => &["k"],
        _ => return Some("has no known type, want kty RSA, EC, OKP or oct".to_owned()),
    };
    let missing = needed.iter().find(|member| !key[**member].is_string())?;
    Some(format!("has no {missing}"))
}

/// The maximum number of ports of a workload with modes of mutual TLS of their own. A sidecar has several filter chains
/// for each.
pub const MAX_MTLS_PORTS: usize = 1_000;

/// Checks a PeerAuthentication. Of too many ports, the others have the mode of the workload, or a stricter one.
pub fn peer_authentication(at: &FieldPath<'_>, policy: &PeerAuthentication, _meta: &Meta) {
    common::selector(at, policy.selector.as_ref());
    let ports = at.field("portLevelMtls");
    let selects = policy
        .selector
        .as_ref()
        .is_some_and(|selector| !selector.match_labels.is_empty());
    ports.require(
        policy.port_level_mtls.is_empty() || selects,
        "needs a selector with labels",
    );
    ports.require(
        policy.port_level_mtls.len() <= MAX_MTLS_PORTS,
        "has more than 1,000 ports",
    );
    for port in policy.port_level_mtls.keys() {
        common::port(&ports, *port);
    }
}
