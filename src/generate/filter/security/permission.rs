//! Attributes of a request: operations, and destinations in conditions.

use super::{
    Traffic,
    item::{Attribute, Expression, Rendered, RuleContext},
    matcher::{self, Case},
};
use crate::{
    generate::constant::cidr_range,
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::TypedExtensionConfig,
                rbac::v3::{
                    Permission,
                    permission::{Rule, Set},
                },
            },
            extensions::path::r#match::uri_template::v3::UriTemplateMatchConfig,
            r#type::matcher::v3::{PathMatcher, path_matcher},
        },
    },
};

/// Attribute of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OperationAttribute<'r> {
    /// `hosts`.
    Host,
    /// `methods`.
    Method,
    /// `paths`.
    Path,
    /// `ports`, `destination.port`.
    Port,
    /// `destination.ip`.
    DestinationIp,
    /// `connection.sni`.
    ServerName,
    /// `experimental.envoy.filters.*`: metadata of a filter.
    Metadata { filter: &'r str, key: &'r str },
    /// A malformed key.
    Unreadable,
}

fn permission(rule: Rule) -> Permission {
    Permission { rule: Some(rule) }
}

impl Expression for Permission {
    fn all(rules: Vec<Self>) -> Self {
        permission(Rule::AndRules(Set { rules }))
    }

    fn one_of(rules: Vec<Self>) -> Self {
        permission(Rule::OrRules(Set { rules }))
    }

    fn negated(self) -> Self {
        permission(Rule::NotRule(Box::new(self)))
    }

    fn always() -> Self {
        permission(Rule::Any(true))
    }
}

impl Attribute for OperationAttribute<'_> {
    type Expression = Permission;

    fn render(&self, values: &[String], context: &RuleContext) -> Rendered<Permission> {
        match *self {
            // Envoy refuses a listener with an empty name.
            Self::Metadata { key: "", .. } => Rendered::together(None),
            Self::Metadata { filter, key } => {
                let values = values.iter().map(|value| metadata_value(value)).collect();
                let matcher = matcher::metadata(filter, [key], matcher::any_value(values));
                Rendered::together(Some(permission(Rule::Metadata(matcher))))
            }
            Self::Unreadable => Rendered::together(None),
            _ => Rendered::each(values.iter().map(|value| self.rule(value, context).map(permission))),
        }
    }
}

impl OperationAttribute<'_> {
    fn rule(self, value: &str, context: &RuleContext) -> Option<Rule> {
        let is_http = context.traffic == Traffic::Http;
        match self {
            Self::Host if is_http => Some(Rule::Header(matcher::header(":authority", value, Case::Ignored))),
            Self::Method if is_http => Some(Rule::Header(matcher::header(":method", value, Case::Sensitive))),
            Self::Path if is_http => path(value),
            Self::Port => port(value).map(Rule::DestinationPort),
            Self::DestinationIp => cidr_range(value).map(Rule::DestinationIp),
            Self::ServerName => Some(Rule::RequestedServerName(matcher::string(value))),
            Self::Host | Self::Method | Self::Path | Self::Metadata { .. } | Self::Unreadable => None,
        }
    }
}

/// Returns true if a path has template operators.
pub(super) fn is_path_template(path: &str) -> bool {
    path.contains("{*}") || path.contains("{**}")
}

/// Parses a decimal port; leading zeros are ignored.
fn port(value: &str) -> Option<u32> {
    let is_number = value.bytes().all(|byte| byte.is_ascii_digit());
    let port = value.parse::<u16>().ok().filter(|_| is_number)?;
    Some(port.into())
}

fn path(value: &str) -> Option<Rule> {
    if is_path_template(value) {
        return Some(Rule::UriTemplate(TypedExtensionConfig {
            name: "uri-template".to_owned(),
            typed_config: Some(Any::pack(&UriTemplateMatchConfig {
                path_template: template(value)?,
            })),
        }));
    }
    Some(Rule::UrlPath(PathMatcher {
        rule: Some(path_matcher::Rule::Path(matcher::string(value))),
    }))
}

/// Longest template that Envoy accepts, in bytes.
const MAX_TEMPLATE: usize = 256;

/// Returns a path template in Envoy's syntax; `None` if Envoy would refuse it and the whole listener. Admission refuses
/// such paths, but it may have been bypassed.
fn template(value: &str) -> Option<String> {
    let is_literal = |segment: &str| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~%!$&'()+,;:@=".contains(&byte);
        !segment.is_empty() && segment.bytes().all(allowed)
    };
    let segments = value.strip_prefix('/')?;
    let segments = segments.strip_suffix('/').unwrap_or(segments);
    let mut ended = false;
    for segment in segments.split('/') {
        let is_operator = matches!(segment, "{*}" | "{**}");
        if (is_operator && ended) || !(is_operator || is_literal(segment)) {
            return None;
        }
        ended |= segment == "{**}";
    }
    let template = value.replace("{*}", "*").replace("{**}", "**");
    (template.len() <= MAX_TEMPLATE).then_some(template)
}

/// Matches a value; a value in brackets is looked up in a list.
fn metadata_value(value: &str) -> crate::proto::envoy::r#type::matcher::v3::ValueMatcher {
    if value.starts_with('[') && value.ends_with(']') {
        let element = value.trim_matches(['[', ']']);
        matcher::list_with(matcher::value(matcher::string(element)))
    } else {
        matcher::value(matcher::string(value))
    }
}
