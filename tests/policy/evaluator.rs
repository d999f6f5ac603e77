//! A small evaluator of Envoy's RBAC and external authorization filters, written from Envoy's documentation. It panics
//! on any message that it does not support.

use std::{cell::RefCell, collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use istiod::proto::{
    Any,
    envoy::{
        config::{
            core::v3::{CidrRange, TypedExtensionConfig},
            listener::v3::Filter,
            rbac::v3::{Permission, Policy, Principal, Rbac, permission::Rule, principal::Identifier, rbac::Action},
            route::v3::{HeaderMatcher, header_matcher::HeaderMatchSpecifier},
        },
        extensions::{
            filters::{
                http::{ext_authz::v3::ExtAuthz as HttpExtAuthz, rbac::v3::Rbac as HttpRbac},
                network::{
                    ext_authz::v3::ExtAuthz as NetworkExtAuthz,
                    http_connection_manager::v3::{HttpFilter, http_filter},
                    rbac::v3::Rbac as NetworkRbac,
                },
            },
            path::r#match::uri_template::v3::UriTemplateMatchConfig,
        },
        r#type::matcher::v3::{
            MetadataMatcher, PathMatcher, StringMatcher, ValueMatcher, filter_state_matcher, list_matcher,
            metadata_matcher::path_segment::Segment, path_matcher, string_matcher::MatchPattern, value_matcher,
        },
    },
};
use regex::Regex;
use serde_json::Value;

/// The attributes of a connection and of a request on it.
#[derive(Clone, Debug)]
pub(super) struct Traffic {
    /// The identity in the peer's certificate, if it has one.
    pub(super) peer: Option<String>,
    /// The source address of the connection.
    pub(super) direct_ip: IpAddr,
    /// The source address of the request, according to trusted proxies.
    pub(super) remote_ip: IpAddr,
    /// The destination address and port.
    pub(super) destination: (IpAddr, u16),
    /// The SNI.
    pub(super) server_name: String,
    /// Dynamic metadata, by filter.
    pub(super) metadata: BTreeMap<String, Value>,
    /// The request; none for a TCP chain.
    pub(super) request: Option<Request>,
}

/// A request.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) method: String,
    pub(super) host: String,
    /// Including the query.
    pub(super) path: String,
    /// Headers by name in lower case.
    pub(super) headers: BTreeMap<String, String>,
}

/// The decision of a chain's filters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// Denied.
    pub(super) denied: bool,
    /// Marked for logging.
    pub(super) audited: bool,
    /// The clusters of the external authorization services that are called.
    pub(super) asked: Vec<String>,
    /// The result of dry-run DENY policies, if there are any: true if they would deny.
    pub(super) tried_deny: Option<bool>,
    /// The result of dry-run ALLOW policies, if there are any: true if they would deny.
    pub(super) tried_allow: Option<bool>,
}

/// Evaluates the filters of an HTTP chain.
pub(super) fn http(filters: &[HttpFilter], traffic: &Traffic) -> Outcome {
    let mut chain = Chain::new(traffic);
    for filter in filters {
        let Some(http_filter::ConfigType::TypedConfig(config)) = &filter.config_type else {
            continue;
        };
        if let Some(rbac) = unpack::<HttpRbac>(config) {
            let (rules, shadow) = (rbac.rules.as_ref(), rbac.shadow_rules.as_ref());
            chain.rbac(&filter.name, rules, shadow, &rbac.shadow_rules_stat_prefix);
        } else if let Some(check) = unpack::<HttpExtAuthz>(config) {
            chain.check(check.filter_enabled_metadata.as_ref(), &filter.name);
        }
    }
    chain.outcome
}

/// Evaluates the filters of a TCP chain.
pub(super) fn network(filters: &[Filter], traffic: &Traffic) -> Outcome {
    let mut chain = Chain::new(traffic);
    for filter in filters {
        if let Some(rbac) = super::fixture::unpacked::<NetworkRbac>(filter) {
            let (rules, shadow) = (rbac.rules.as_ref(), rbac.shadow_rules.as_ref());
            chain.rbac(&filter.name, rules, shadow, &rbac.shadow_rules_stat_prefix);
        } else if let Some(check) = super::fixture::unpacked::<NetworkExtAuthz>(filter) {
            chain.check(check.filter_enabled_metadata.as_ref(), &filter.name);
        }
    }
    chain.outcome
}

fn unpack<M: prost::Message + prost::Name + Default>(config: &Any) -> Option<M> {
    config.unpack().expect("the generator packs valid messages")
}

/// A chain during evaluation: filters leave metadata for later filters.
struct Chain {
    traffic: Traffic,
    outcome: Outcome,
}

impl Chain {
    fn new(traffic: &Traffic) -> Self {
        Self {
            traffic: traffic.clone(),
            outcome: Outcome::default(),
        }
    }

    fn rbac(&mut self, name: &str, rules: Option<&Rbac>, shadow: Option<&Rbac>, prefix: &str) {
        if let Some(rules) = shadow {
            let policy = applying(rules, &self.traffic);
            let refused = refuses(rules.action(), policy.is_some());
            match prefix {
                "istio_dry_run_deny_" => self.outcome.tried_deny = Some(refused),
                "istio_dry_run_allow_" => self.outcome.tried_allow = Some(refused),
                _ => {}
            }
            if let Some(policy) = policy {
                let known = self.traffic.metadata.entry(name.to_owned()).or_default();
                known[format!("{prefix}shadow_effective_policy_id")] = Value::from(policy);
            }
        }
        if let Some(rules) = rules {
            let applies = applying(rules, &self.traffic).is_some();
            self.outcome.audited |= rules.action() == Action::Log && applies;
            self.outcome.denied |= refuses(rules.action(), applies);
        }
    }

    fn check(&mut self, enabled: Option<&MetadataMatcher>, name: &str) {
        if enabled.is_none_or(|matcher| metadata_matches(matcher, &self.traffic)) {
            self.outcome.asked.push(name.to_owned());
        }
    }
}

fn refuses(action: Action, applies: bool) -> bool {
    match action {
        Action::Allow => !applies,
        Action::Deny => applies,
        Action::Log => false,
    }
}

/// Returns the name of the first matching policy.
fn applying<'r>(rules: &'r Rbac, traffic: &Traffic) -> Option<&'r str> {
    let mut policies: Vec<(&String, &Policy)> = rules.policies.iter().collect();
    policies.sort_by_key(|(name, _)| *name);
    let applies = |policy: &Policy| {
        policy.permissions.iter().any(|it| permits(it, traffic)) && policy.principals.iter().any(|it| is(it, traffic))
    };
    let found = policies.into_iter().find(|(_, policy)| applies(policy));
    found.map(|(name, _)| name.as_str())
}

fn permits(permission: &Permission, traffic: &Traffic) -> bool {
    match permission.rule.as_ref().expect("the permission has a rule") {
        Rule::Any(any) => *any,
        Rule::AndRules(set) => set.rules.iter().all(|it| permits(it, traffic)),
        Rule::OrRules(set) => set.rules.iter().any(|it| permits(it, traffic)),
        Rule::NotRule(rule) => !permits(rule, traffic),
        Rule::Header(matcher) => header_matches(matcher, traffic),
        Rule::UrlPath(matcher) => path_matches(matcher, traffic),
        Rule::UriTemplate(extension) => template_matches(extension, traffic),
        Rule::DestinationIp(range) => contains(range, traffic.destination.0),
        Rule::DestinationPort(port) => u32::from(traffic.destination.1) == *port,
        Rule::RequestedServerName(matcher) => text_matches(matcher, &traffic.server_name),
        Rule::Metadata(matcher) => metadata_matches(matcher, traffic),
        other => panic!("unsupported: {other:?}"),
    }
}

fn is(principal: &Principal, traffic: &Traffic) -> bool {
    match principal.identifier.as_ref().expect("the principal has an identifier") {
        Identifier::Any(any) => *any,
        Identifier::AndIds(set) => set.ids.iter().all(|it| is(it, traffic)),
        Identifier::OrIds(set) => set.ids.iter().any(|it| is(it, traffic)),
        Identifier::NotId(id) => !is(id, traffic),
        Identifier::Authenticated(it) => match (&it.principal_name, &traffic.peer) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(matcher), Some(peer)) => text_matches(matcher, peer),
        },
        Identifier::FilterState(it) => {
            assert_eq!(it.key, "io.istio.peer_principal");
            let Some(filter_state_matcher::Matcher::StringMatch(matcher)) = &it.matcher else {
                panic!("unsupported: {it:?}");
            };
            traffic.peer.as_ref().is_some_and(|peer| text_matches(matcher, peer))
        }
        Identifier::DirectRemoteIp(range) => contains(range, traffic.direct_ip),
        Identifier::RemoteIp(range) => contains(range, traffic.remote_ip),
        Identifier::Header(matcher) => header_matches(matcher, traffic),
        Identifier::Metadata(matcher) => metadata_matches(matcher, traffic),
        other => panic!("unsupported: {other:?}"),
    }
}

fn contains(range: &CidrRange, ip: IpAddr) -> bool {
    let prefix = range.address_prefix.parse().expect("the address is valid");
    let length = u8::try_from(range.prefix_len.unwrap_or_default()).expect("the prefix length fits into a byte");
    IpNet::new(prefix, length).expect("the range is valid").contains(&ip)
}

fn text_matches(matcher: &StringMatcher, text: &str) -> bool {
    let fold = |text: &str| {
        if matcher.ignore_case {
            text.to_ascii_lowercase()
        } else {
            text.to_owned()
        }
    };
    let text = fold(text);
    match matcher.match_pattern.as_ref().expect("the matcher has a pattern") {
        MatchPattern::Exact(exact) => text == fold(exact),
        MatchPattern::Prefix(prefix) => text.starts_with(&fold(prefix)),
        MatchPattern::Suffix(suffix) => text.ends_with(&fold(suffix)),
        MatchPattern::SafeRegex(matcher) => is_whole(&matcher.regex, &text),
        other => panic!("unsupported: {other:?}"),
    }
}

thread_local! {
    /// Cache of compiled expressions: there are few, they are used often, and compiling is slow.
    static COMPILED: RefCell<BTreeMap<String, Regex>> = const { RefCell::new(BTreeMap::new()) };
}

/// Envoy's expressions match the whole text.
fn is_whole(expression: &str, text: &str) -> bool {
    COMPILED.with_borrow_mut(|compiled| {
        if compiled.len() > 1_000 {
            compiled.clear();
        }
        let compile = || Regex::new(&format!("^(?:{expression})$")).expect("the expression is valid");
        compiled
            .entry(expression.to_owned())
            .or_insert_with(compile)
            .is_match(text)
    })
}

fn header_matches(matcher: &HeaderMatcher, traffic: &Traffic) -> bool {
    let Some(request) = &traffic.request else {
        return false;
    };
    let value = match matcher.name.to_ascii_lowercase().as_str() {
        ":method" => Some(&request.method),
        ":authority" => Some(&request.host),
        ":path" => Some(&request.path),
        name => request.headers.get(name),
    };
    match matcher
        .header_match_specifier
        .as_ref()
        .expect("the matcher has a specifier")
    {
        HeaderMatchSpecifier::PresentMatch(present) => value.is_some() == *present,
        HeaderMatchSpecifier::StringMatch(matcher) => value.is_some_and(|value| text_matches(matcher, value)),
        other => panic!("unsupported: {other:?}"),
    }
}

/// Returns the path without query and fragment.
fn path_of(traffic: &Traffic) -> Option<&str> {
    let request = traffic.request.as_ref()?;
    request.path.split(['?', '#']).next()
}

fn path_matches(matcher: &PathMatcher, traffic: &Traffic) -> bool {
    let Some(path_matcher::Rule::Path(matcher)) = &matcher.rule else {
        panic!("unsupported: {matcher:?}");
    };
    path_of(traffic).is_some_and(|path| text_matches(matcher, path))
}

/// `*` matches one segment, `**` all remaining ones, possibly none.
fn template_matches(extension: &TypedExtensionConfig, traffic: &Traffic) -> bool {
    let config = extension
        .typed_config
        .as_ref()
        .and_then(unpack::<UriTemplateMatchConfig>);
    let template = config.expect("the template is valid").path_template;
    let Some(path) = path_of(traffic) else {
        return false;
    };
    let expression: Vec<String> = template
        .split('/')
        .map(|segment| match segment {
            "*" => r"[a-zA-Z0-9-._~%!$&'()+,;:@=]+".to_owned(),
            "**" => r"[a-zA-Z0-9-._~%!$&'()+,;:@=/]*".to_owned(),
            literal => regex::escape(literal),
        })
        .collect();
    is_whole(&expression.join("/"), path)
}

fn metadata_matches(matcher: &MetadataMatcher, traffic: &Traffic) -> bool {
    let mut value = traffic.metadata.get(&matcher.filter).unwrap_or(&Value::Null);
    for segment in &matcher.path {
        let Some(Segment::Key(key)) = &segment.segment else {
            panic!("a path without key");
        };
        value = value.get(key).unwrap_or(&Value::Null);
    }
    value_matches(matcher.value.as_ref().expect("the matcher has a value"), value)
}

fn value_matches(matcher: &ValueMatcher, value: &Value) -> bool {
    match matcher.match_pattern.as_ref().expect("the matcher has a pattern") {
        value_matcher::MatchPattern::StringMatch(matcher) => {
            value.as_str().is_some_and(|text| text_matches(matcher, text))
        }
        value_matcher::MatchPattern::ListMatch(matcher) => {
            let Some(list_matcher::MatchPattern::OneOf(one)) = &matcher.match_pattern else {
                panic!("a list without element");
            };
            let items = value.as_array().into_iter().flatten();
            items.into_iter().any(|item| value_matches(one, item))
        }
        value_matcher::MatchPattern::OrMatch(matcher) => matcher
            .value_matchers
            .iter()
            .any(|matcher| value_matches(matcher, value)),
        other => panic!("unsupported: {other:?}"),
    }
}
