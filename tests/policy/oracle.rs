//! The meaning of policies, written from their documentation and independent of Envoy: no expressions, no messages. The
//! differential test compares the generated filters with it.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Value, json};

use super::evaluator::{Outcome, Traffic};

/// The namespace of all policies.
pub(super) const NAMESPACE: &str = "foo";

/// The trust domains of the mesh, its own first.
pub(super) const TRUST_DOMAINS: [&str; 2] = ["td1", "old-td"];

/// A policy in compact form.
#[derive(Clone, Debug)]
pub(super) struct Policy {
    pub(super) action: Action,
    /// True if it is only a dry run.
    pub(super) dry_run: bool,
    pub(super) rules: Vec<Rule>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Allow,
    Deny,
    Audit,
    /// Calls the only provider.
    Custom,
}

/// All parts must match; one of the sources and one of the operations is enough.
#[derive(Clone, Debug, Default)]
pub(super) struct Rule {
    pub(super) from: Vec<Vec<Item>>,
    pub(super) to: Vec<Vec<Item>>,
    pub(super) when: Vec<Item>,
}

/// An attribute must have one of the values, if there are any, and none of the excluded values.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) attribute: Attribute,
    pub(super) values: Vec<String>,
    pub(super) not_values: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attribute {
    Principal,
    RequestPrincipal,
    ServiceAccount,
    TrustDomain,
    Namespace,
    RemoteIp,
    Ip,
    Host,
    Method,
    Path,
    Port,
    // Conditions only.
    Header,
    Audience,
    Presenter,
    Claim,
    NestedClaim,
    DestinationIp,
    ServerName,
    Metadata,
}

impl Attribute {
    /// True if only HTTP requests have this attribute.
    fn is_of_requests(self) -> bool {
        use Attribute::{Audience, Claim, Header, Host, Method, NestedClaim, Path, Presenter, RequestPrincipal};
        matches!(
            self,
            RequestPrincipal | Host | Method | Path | Header | Audience | Presenter | Claim | NestedClaim
        )
    }

    /// The field name in a source or operation.
    pub(super) fn field(self) -> Option<(&'static str, &'static str)> {
        Some(match self {
            Self::Principal => ("principals", "notPrincipals"),
            Self::RequestPrincipal => ("requestPrincipals", "notRequestPrincipals"),
            Self::ServiceAccount => ("serviceAccounts", "notServiceAccounts"),
            Self::TrustDomain => ("trustDomains", "notTrustDomains"),
            Self::Namespace => ("namespaces", "notNamespaces"),
            Self::RemoteIp => ("remoteIpBlocks", "notRemoteIpBlocks"),
            Self::Ip => ("ipBlocks", "notIpBlocks"),
            Self::Host => ("hosts", "notHosts"),
            Self::Method => ("methods", "notMethods"),
            Self::Path => ("paths", "notPaths"),
            Self::Port => ("ports", "notPorts"),
            _ => return None,
        })
    }

    /// The key of a condition.
    pub(super) fn key(self) -> Option<&'static str> {
        Some(match self {
            Self::Principal => "source.principal",
            Self::RequestPrincipal => "request.auth.principal",
            Self::ServiceAccount => "source.serviceAccount",
            Self::TrustDomain => "source.trustDomain",
            Self::Namespace => "source.namespace",
            Self::RemoteIp => "remote.ip",
            Self::Ip => "source.ip",
            Self::Port => "destination.port",
            Self::Header => "request.headers[X-Team]",
            Self::Audience => "request.auth.audiences",
            Self::Presenter => "request.auth.presenter",
            Self::Claim => "request.auth.claims[role]",
            Self::NestedClaim => "request.auth.claims[realm][roles]",
            Self::DestinationIp => "destination.ip",
            Self::ServerName => "connection.sni",
            Self::Metadata => "experimental.envoy.filters.test[key]",
            Self::Host | Self::Method | Self::Path => return None,
        })
    }
}

impl Policy {
    /// The Kubernetes object, with a name made from `index`.
    pub(super) fn object(&self, index: usize) -> Value {
        let action = match self.action {
            Action::Allow => "ALLOW",
            Action::Deny => "DENY",
            Action::Audit => "AUDIT",
            Action::Custom => "CUSTOM",
        };
        let fields = |items: &[Item]| {
            let mut object = json!({});
            for item in items {
                let (field, not_field) = item.attribute.field().expect("only conditions have no field");
                object[field] = json!(item.values);
                object[not_field] = json!(item.not_values);
            }
            object
        };
        let rule = |rule: &Rule| {
            let from = rule.from.iter().map(|items| json!({"source": fields(items)}));
            let to = rule.to.iter().map(|items| json!({"operation": fields(items)}));
            let when = rule
                .when
                .iter()
                .map(|item| json!({"key": item.attribute.key(), "values": item.values, "notValues": item.not_values}));
            json!({"from": from.collect::<Vec<_>>(), "to": to.collect::<Vec<_>>(), "when": when.collect::<Vec<_>>()})
        };
        let mut spec = json!({"action": action, "rules": self.rules.iter().map(rule).collect::<Vec<_>>()});
        if self.action == Action::Custom {
            spec["provider"] = json!({"name": "default"});
        }
        let annotations = if self.dry_run {
            json!({"istio.io/dry-run": "true"})
        } else {
            json!({})
        };
        json!({
            "apiVersion": "security.istio.io/v1", "kind": "AuthorizationPolicy",
            "metadata": {"name": format!("p{index}"), "namespace": NAMESPACE, "annotations": annotations},
            "spec": spec,
        })
    }

    /// Returns true if one of the rules applies.
    fn applies(&self, traffic: &Traffic) -> bool {
        self.rules.iter().any(|rule| self.rule_applies(rule, traffic))
    }

    fn rule_applies(&self, rule: &Rule, traffic: &Traffic) -> bool {
        let is_connection = traffic.request.is_none();
        let all = || rule.from.iter().chain(&rule.to).flatten().chain(&rule.when);
        if is_connection && self.action == Action::Allow && all().any(|item| item.attribute.is_of_requests()) {
            // ALLOW: an unknown attribute does not match.
            return false;
        }
        // Other actions: an unknown attribute does not narrow the rule.
        let holds = |item: &Item| (is_connection && item.attribute.is_of_requests()) || item.holds(traffic);
        let one = |alternatives: &[Vec<Item>]| {
            alternatives.is_empty() || alternatives.iter().any(|items| items.iter().all(holds))
        };
        one(&rule.from) && one(&rule.to) && rule.when.iter().all(holds)
    }
}

/// Returns the outcome for some traffic.
pub(super) fn judge(policies: &[Policy], traffic: &Traffic) -> Outcome {
    let of = |action: Action, dry_run: bool| {
        let those = policies
            .iter()
            .filter(move |it| it.action == action && it.dry_run == dry_run);
        let applying = those.clone().any(|policy| policy.applies(traffic));
        (those.count() > 0, applying)
    };
    let (_, denied) = of(Action::Deny, false);
    let (restricted, allowed) = of(Action::Allow, false);
    let (_, audited) = of(Action::Audit, false);
    let (_, asked) = of(Action::Custom, false);
    let tried = |action: Action| {
        let (some, applying) = of(action, true);
        some.then_some(applying)
    };
    let filter = if traffic.request.is_some() {
        "envoy.filters.http.ext_authz"
    } else {
        "envoy.filters.network.ext_authz"
    };
    Outcome {
        denied: denied || (restricted && !allowed),
        audited,
        asked: asked.then(|| filter.to_owned()).into_iter().collect(),
        tried_deny: tried(Action::Deny),
        tried_allow: tried(Action::Allow).map(|allowed| !allowed),
    }
}

/// The parts of an identity.
struct Identity<'p> {
    /// Without its scheme.
    name: &'p str,
    trust_domain: &'p str,
    namespace: &'p str,
    account: &'p str,
}

impl<'p> Identity<'p> {
    fn of(traffic: &'p Traffic) -> Option<Self> {
        let name = traffic.peer.as_ref()?.strip_prefix("spiffe://")?;
        let parts: Vec<&str> = name.split('/').collect();
        match parts[..] {
            [trust_domain, "ns", namespace, "sa", account] => Some(Self {
                name,
                trust_domain,
                namespace,
                account,
            }),
            _ => None,
        }
    }
}

impl Item {
    fn holds(&self, traffic: &Traffic) -> bool {
        let any = |values: &[String]| values.iter().any(|value| has(self.attribute, value, traffic));
        (self.values.is_empty() || any(&self.values)) && !any(&self.not_values)
    }
}

/// Returns true if the attribute has the value.
fn has(attribute: Attribute, value: &str, traffic: &Traffic) -> bool {
    let identity = Identity::of(traffic);
    let claim = |path: &[&str]| {
        let mut found = traffic.metadata.get("envoy.filters.http.jwt_authn")?.get("payload")?;
        for key in path {
            found = found.get(key)?;
        }
        Some(found)
    };
    let has_claim = |path: &[&str]| match claim(path) {
        Some(Value::Array(items)) => items
            .iter()
            .any(|item| item.as_str().is_some_and(|it| covers(value, it))),
        Some(Value::String(text)) => covers(value, text),
        _ => false,
    };
    let request = traffic.request.as_ref();
    match attribute {
        Attribute::Principal => identity.is_some_and(|identity| is_principal(value, &identity)),
        Attribute::ServiceAccount => identity.is_some_and(|identity| {
            let (namespace, account) = value.split_once('/').unwrap_or((NAMESPACE, value));
            identity.namespace == namespace && identity.account == account
        }),
        Attribute::TrustDomain => identity.is_some_and(|identity| {
            covers(value, identity.trust_domain) || (TRUST_DOMAINS.contains(&value) && is_own(identity.trust_domain))
        }),
        Attribute::Namespace => identity.is_some_and(|identity| is_glob_of(value, identity.namespace)),
        Attribute::RequestPrincipal => {
            let text = |name| claim(&[name]).and_then(Value::as_str);
            match (text("iss"), text("sub")) {
                (Some(issuer), Some(subject)) => is_request_principal(value, issuer, subject),
                _ => false,
            }
        }
        Attribute::RemoteIp => in_range(value, traffic.remote_ip),
        Attribute::Ip => in_range(value, traffic.direct_ip),
        Attribute::DestinationIp => in_range(value, traffic.destination.0),
        Attribute::Port => value.parse() == Ok(traffic.destination.1),
        Attribute::ServerName => covers(value, &traffic.server_name),
        Attribute::Host => request.is_some_and(|request| {
            // Host names are case-insensitive.
            covers(&value.to_ascii_lowercase(), &request.host.to_ascii_lowercase())
        }),
        Attribute::Method => request.is_some_and(|request| covers(value, &request.method)),
        Attribute::Path => request.is_some_and(|request| {
            let path = request.path.split('?').next().unwrap_or_default();
            if value.contains('{') {
                is_of_template(value, path)
            } else {
                covers(value, path)
            }
        }),
        Attribute::Header => {
            let header = request.and_then(|request| request.headers.get("x-team"));
            header.is_some_and(|header| covers(value, header) || value == "*")
        }
        Attribute::Audience => has_claim(&["aud"]),
        Attribute::Presenter => has_claim(&["azp"]),
        Attribute::Claim => has_claim(&["role"]),
        Attribute::NestedClaim => has_claim(&["realm", "roles"]),
        Attribute::Metadata => {
            let found = traffic.metadata.get("envoy.filters.test").and_then(|it| it.get("key"));
            match (value.strip_prefix('[').and_then(|it| it.strip_suffix(']')), found) {
                (Some(item), Some(Value::Array(items))) => items
                    .iter()
                    .any(|found| found.as_str().is_some_and(|it| covers(item, it))),
                (None, Some(Value::String(text))) => covers(value, text),
                _ => false,
            }
        }
    }
}

/// `*` matches every non-empty text; a star at one end matches any text there.
fn covers(pattern: &str, text: &str) -> bool {
    if pattern == "*" {
        !text.is_empty()
    } else if let Some(end) = pattern.strip_prefix('*') {
        text.ends_with(end)
    } else if let Some(start_unready) = pattern.strip_suffix('*') {
        text.starts_with(start_unready)
    } else {
        text == pattern
    }
}

/// Namespaces may have stars anywhere.
fn is_glob_of(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start_unready, rest)) => {
            let remains = text.strip_prefix(start_unready);
            remains.is_some_and(|text| (0..=text.len()).any(|taken| is_glob_of(rest, &text[taken..])))
        }
    }
}

fn is_own(trust_domain: &str) -> bool {
    TRUST_DOMAINS.contains(&trust_domain)
}

/// All trust domains of the mesh are aliases, and `cluster.local` stands for each of them.
fn is_principal(value: &str, identity: &Identity) -> bool {
    let (domain, rest) = value.split_once('/').unwrap_or((value, ""));
    let is_whole = rest.split('/').count() == 4;
    let of_mesh = domain == "cluster.local" || (domain != "*" && TRUST_DOMAINS.iter().any(|own| covers(domain, own)));
    if !is_whole || !of_mesh {
        return covers(value, identity.name);
    }
    let own_name = identity.name.split_once('/').map(|(_, rest)| rest).unwrap_or_default();
    let in_mesh = is_own(identity.trust_domain) && covers(rest, own_name);
    in_mesh || (domain.starts_with('*') && covers(value, identity.name))
}

/// `issuer/subject`, split at the last slash; a star belongs to the side on which it is.
fn is_request_principal(value: &str, issuer: &str, subject: &str) -> bool {
    match value.rsplit_once('/') {
        _ if value == "*" => !issuer.is_empty() && !subject.is_empty(),
        Some((of_issuer, of_subject)) if value.starts_with('*') => covers(of_issuer, issuer) && of_subject == subject,
        Some((of_issuer, of_subject)) => of_issuer == issuer && covers(of_subject, subject),
        None if value.starts_with('*') => !issuer.is_empty() && covers(value, subject),
        None if value.ends_with('*') => covers(value, issuer) && !subject.is_empty(),
        None => value == issuer && subject.is_empty(),
    }
}

fn in_range(value: &str, ip: IpAddr) -> bool {
    match value.parse::<IpNet>() {
        Ok(range) => range.contains(&ip),
        Err(_) => value.parse() == Ok(ip),
    }
}

/// `{*}` matches one non-empty segment, `{**}` all remaining ones.
fn is_of_template(template: &str, path: &str) -> bool {
    fn matches(template: &[&str], path: &[&str]) -> bool {
        match (template, path) {
            ([], []) => true,
            (["{**}", rest @ ..], _) => (1..=path.len()).any(|taken| matches(rest, &path[taken..])),
            (["{*}", rest @ ..], [segment, segments @ ..]) => !segment.is_empty() && matches(rest, segments),
            ([literal, rest @ ..], [segment, segments @ ..]) => literal == segment && matches(rest, segments),
            _ => false,
        }
    }
    let template: Vec<&str> = template.split('/').collect();
    let path: Vec<&str> = path.split('/').collect();
    matches(&template, &path)
}
