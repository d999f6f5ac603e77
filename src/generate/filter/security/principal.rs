//! Attributes of the caller: sources, and requests in conditions.

use super::{
    JWT_FILTER, Traffic,
    item::{Attribute, Expression, Rendered, RuleContext},
    matcher::{self, Case, Pattern},
};
use crate::{
    api::regex,
    base::Namespace,
    generate::{constant::cidr_range, filter::PeerSource},
    proto::envoy::{
        config::rbac::v3::{
            Principal,
            principal::{Authenticated, Identifier, Set},
        },
        r#type::matcher::v3::{
            FilterStateMatcher, StringMatcher, filter_state_matcher::Matcher, string_matcher::MatchPattern,
        },
    },
};

/// Filter state with the peer's identity, set by an HBONE listener.
const TUNNEL_PEER: &str = "io.istio.peer_principal";

/// Attribute of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SourceAttribute<'r> {
    /// `principals`, `source.principal`.
    Principal,
    /// `requestPrincipals`, `request.auth.principal`.
    RequestPrincipal,
    /// `serviceAccounts`, `source.serviceAccount`.
    ServiceAccount,
    /// `trustDomains`, `source.trustDomain`.
    TrustDomain,
    /// `namespaces`, `source.namespace`.
    Namespace,
    /// `remoteIpBlocks`, `remote.ip`.
    RemoteIp,
    /// `ipBlocks`, `source.ip`.
    Ip,
    /// `request.headers[…]`.
    Header(&'r str),
    /// `request.auth.claims[…]`, `request.auth.audiences`, `request.auth.presenter`: a claim inside others.
    Claim(Vec<&'r str>),
    /// A malformed key.
    Unreadable,
}

fn principal(identifier: Identifier) -> Principal {
    Principal {
        identifier: Some(identifier),
    }
}

impl Expression for Principal {
    fn all(ids: Vec<Self>) -> Self {
        principal(Identifier::AndIds(Set { ids }))
    }

    fn one_of(ids: Vec<Self>) -> Self {
        principal(Identifier::OrIds(Set { ids }))
    }

    fn negated(self) -> Self {
        principal(Identifier::NotId(Box::new(self)))
    }

    fn always() -> Self {
        principal(Identifier::Any(true))
    }
}

impl Attribute for SourceAttribute<'_> {
    type Expression = Principal;

    fn render(&self, values: &[String], context: &RuleContext) -> Rendered<Principal> {
        let is_http = context.traffic == Traffic::Http;
        // Envoy refuses a listener with a regular expression above some size. No identity has such a part.
        let of_peer = |matcher: fn(&str, &Namespace) -> StringMatcher| {
            let matchers = values.iter().map(|value| {
                let is_short = value.len() <= regex::MAX_LENGTH;
                is_short.then(|| peer(matcher(value, context.namespace), context))
            });
            Rendered::each(matchers)
        };
        match self {
            Self::Principal => of_peer(|value, _| identity(value)),
            Self::ServiceAccount => of_peer(service_account),
            Self::TrustDomain => of_peer(|value, _| trust_domain(value)),
            Self::Namespace => of_peer(|value, _| namespace(value)),
            Self::RemoteIp => addresses(values, Identifier::RemoteIp),
            Self::Ip => addresses(values, Identifier::DirectRemoteIp),
            // Envoy refuses a listener with such names.
            Self::Header(name) if name.is_empty() || name.contains(['\0', '\r', '\n']) => Rendered::together(None),
            Self::Claim(path) if path.iter().any(|name| name.is_empty()) => Rendered::together(None),
            Self::Header(name) if is_http => Rendered::each(values.iter().map(|value| {
                let header = matcher::header(name, value, Case::Sensitive);
                Some(principal(Identifier::Header(header)))
            })),
            Self::RequestPrincipal if is_http => Rendered::together(Some(request_principals(values))),
            Self::Claim(path) if is_http => Rendered::together(Some(claim_with(path, values))),
            Self::Header(_) | Self::RequestPrincipal | Self::Claim(_) | Self::Unreadable => Rendered::together(None),
        }
    }
}

/// Matches the peer's identity from TLS or from the tunnel.
fn peer(name: StringMatcher, context: &RuleContext) -> Principal {
    principal(match context.peer_source {
        PeerSource::Tunnel => Identifier::FilterState(FilterStateMatcher {
            key: TUNNEL_PEER.to_owned(),
            matcher: Some(Matcher::StringMatch(name)),
        }),
        PeerSource::Tls => Identifier::Authenticated(Authenticated {
            principal_name: Some(name),
        }),
    })
}

/// Matches a principal, which is an identity without its scheme.
fn identity(value: &str) -> StringMatcher {
    match Pattern::of(value) {
        Pattern::Present => matcher::present(),
        Pattern::Suffix(suffix) => matcher::regex(format!("spiffe://.*{}", matcher::quote(suffix))),
        Pattern::Prefix(prefix) => matcher::pattern(MatchPattern::Prefix(format!("spiffe://{prefix}"))),
        Pattern::Exact(name) => matcher::pattern(MatchPattern::Exact(format!("spiffe://{name}"))),
    }
}

/// Matches a namespace; each star matches anything.
fn namespace(value: &str) -> StringMatcher {
    // Parity (pilot/pkg/security/authz/model/generator.go): a star may match beyond the namespace. This is harmless
    // unless the text after it occurs at the end of `/sa/`, after the namespace: `*a` would then match every namespace.
    let last = value.rsplit_once('*').map_or("", |(_, last)| last);
    let any = if !last.is_empty() && "sa".ends_with(last) {
        "[^/]*"
    } else {
        ".*"
    };
    let namespace = matcher::quote_with_stars(value, any);
    matcher::regex(format!(".*/ns/{namespace}/.*"))
}

/// Matches `[namespace/]name`, by default in the namespace of the policy. Identities may have further parts.
fn service_account(value: &str, own: &Namespace) -> StringMatcher {
    let (namespace, account) = value.split_once('/').unwrap_or((own.as_str(), value));
    let (namespace, account) = (matcher::quote(namespace), matcher::quote(account));
    matcher::regex(format!("spiffe://.+/ns/{namespace}/(.+/|)sa/{account}(/.+)?"))
}

fn trust_domain(value: &str) -> StringMatcher {
    if value == "*" {
        matcher::pattern(MatchPattern::Prefix("spiffe://".to_owned()))
    } else if let Some((before, after)) = value.split_once('*') {
        let (before, after) = (matcher::quote(before), matcher::quote(after));
        matcher::regex(format!("spiffe://{before}[^/]*{after}/.*"))
    } else {
        matcher::pattern(MatchPattern::Prefix(format!("spiffe://{value}/")))
    }
}

fn addresses(
    values: &[String],
    identifier: fn(crate::proto::envoy::config::core::v3::CidrRange) -> Identifier,
) -> Rendered<Principal> {
    Rendered::each(values.iter().map(|value| {
        let range = cidr_range(value)?;
        Some(principal(identifier(range)))
    }))
}

/// Matches one of several principals; a single one needs no wrapper.
fn request_principals(values: &[String]) -> Principal {
    let mut all: Vec<Principal> = values.iter().map(|value| request_principal(value)).collect();
    if all.len() == 1 {
        all.remove(0)
    } else {
        Principal::one_of(all)
    }
}

/// Matches `issuer/subject`, split at the last slash because issuers may be URLs.
fn request_principal(value: &str) -> Principal {
    let exact = |text: &str| matcher::pattern(MatchPattern::Exact(text.to_owned()));
    let prefix = |text: &str| match text.strip_suffix('*').unwrap_or(text) {
        "" => matcher::present(),
        text => matcher::pattern(MatchPattern::Prefix(text.to_owned())),
    };
    let parts = value.rsplit_once('/');
    let (issuer, subject) = match (Pattern::of(value), parts) {
        (Pattern::Present, _) => (matcher::present(), matcher::present()),
        (Pattern::Suffix(_), Some((issuer, subject))) => (matcher::string(issuer), exact(subject)),
        (Pattern::Suffix(_), None) => (matcher::present(), matcher::string(value)),
        (Pattern::Prefix(_), Some((issuer, subject))) => (exact(issuer), prefix(subject)),
        (Pattern::Prefix(_), None) => (prefix(value), matcher::present()),
        (Pattern::Exact(_), Some((issuer, subject))) => (exact(issuer), exact(subject)),
        (Pattern::Exact(_), None) => (exact(value), exact("")),
    };
    let claim = |name: &str, text: StringMatcher| {
        let claim = matcher::metadata(JWT_FILTER, ["payload", name], matcher::value(text));
        principal(Identifier::Metadata(claim))
    };
    Principal::all(vec![claim("iss", issuer), claim("sub", subject)])
}

/// Matches a claim that is a string or a list of strings.
fn claim_with(path: &[&str], values: &[String]) -> Principal {
    let texts = values
        .iter()
        .map(|value| matcher::value(matcher::string(value)))
        .collect();
    let text = matcher::any_value(texts);
    let either = matcher::any_value(vec![matcher::list_with(text.clone()), text]);
    let path = std::iter::once("payload").chain(path.iter().copied());
    principal(Identifier::Metadata(matcher::metadata(JWT_FILTER, path, either)))
}
