//! Route matches.

use std::collections::BTreeMap;

use crate::{
    api::names::claim_path,
    generate::filter::security::JWT_FILTER,
    model::virtual_service::Semantics,
    proto::{
        envoy::{
            config::route::v3::{
                HeaderMatcher, QueryParameterMatcher, RouteMatch, header_matcher::HeaderMatchSpecifier,
                query_parameter_matcher::QueryParameterMatchSpecifier, route_match::PathSpecifier,
            },
            r#type::matcher::v3::{
                ListMatcher, MetadataMatcher, OrMatcher, RegexMatcher, StringMatcher, ValueMatcher, list_matcher,
                metadata_matcher::{PathSegment, path_segment::Segment},
                string_matcher::MatchPattern,
                value_matcher,
            },
        },
        istio::networking::v1alpha3::{HttpMatchRequest, StringMatch, string_match::MatchType},
    },
};

/// Returns the match of a route; without conditions it matches every path.
pub(crate) fn route_match(declared: Option<&HttpMatchRequest>, semantics: Semantics) -> RouteMatch {
    let uri = declared.and_then(|declared| declared.uri.as_ref());
    let path = uri.and_then(|uri| path(uri, semantics));
    let mut result = RouteMatch {
        path_specifier: Some(path.unwrap_or_else(|| PathSpecifier::Prefix("/".to_owned()))),
        ..Default::default()
    };
    let Some(declared) = declared else {
        return result;
    };
    add_headers(&mut result, &declared.headers, Sense::Present);
    add_headers(&mut result, &declared.without_headers, Sense::Absent);
    result.headers.sort_by(|a, b| a.name.cmp(&b.name));
    result.case_sensitive = Some(!declared.ignore_uri_case);
    let pseudo = [
        (":method", &declared.method),
        (":authority", &declared.authority),
        (":scheme", &declared.scheme),
    ];
    for (name, condition) in pseudo {
        if let Some(condition) = condition {
            result.headers.push(header(name, condition));
        }
    }
    result.query_parameters = declared
        .query_params
        .iter()
        .map(|(name, condition)| query_parameter(name, condition))
        .collect();
    result
}

/// Returns true if the match accepts every request, so that later routes are unreachable.
pub(super) fn is_catch_all(declared: &RouteMatch) -> bool {
    let any_path = match &declared.path_specifier {
        Some(PathSpecifier::Prefix(prefix) | PathSpecifier::PathSeparatedPrefix(prefix)) => prefix == "/",
        Some(PathSpecifier::SafeRegex(regex)) => regex.regex == ".*",
        _ => false,
    };
    any_path
        && declared.headers.is_empty()
        && declared.query_parameters.is_empty()
        && declared.dynamic_metadata.is_empty()
}

/// Returns a string condition in Envoy's form; `None` for an empty condition.
pub(crate) fn string_matcher(condition: &StringMatch) -> Option<StringMatcher> {
    let pattern = match condition.match_type.as_ref()? {
        MatchType::Exact(text) => MatchPattern::Exact(text.clone()),
        MatchType::Prefix(text) => MatchPattern::Prefix(text.clone()),
        MatchType::Regex(text) => MatchPattern::SafeRegex(regex(text)),
    };
    Some(StringMatcher {
        match_pattern: Some(pattern),
        ..Default::default()
    })
}

/// Returns a regular expression.
pub(crate) fn regex(text: &str) -> RegexMatcher {
    RegexMatcher {
        regex: text.to_owned(),
        ..Default::default()
    }
}

fn path(uri: &StringMatch, semantics: Semantics) -> Option<PathSpecifier> {
    Some(match uri.match_type.as_ref()? {
        MatchType::Exact(path) => PathSpecifier::Path(path.clone()),
        MatchType::Prefix(prefix) if semantics != Semantics::Istio => prefix_of_segments(prefix),
        MatchType::Prefix(prefix) => PathSpecifier::Prefix(prefix.clone()),
        MatchType::Regex(text) => PathSpecifier::SafeRegex(regex(text)),
    })
}

/// Returns the match of a prefix that ends with a segment of the path.
///
/// Envoy refuses one with `?` or `#`, which an Ingress may have, and with it all routes of the port. As a text, such a
/// prefix matches nothing, because Envoy removes query and fragment before it matches.
fn prefix_of_segments(prefix: &str) -> PathSpecifier {
    let path = prefix.strip_suffix('/').unwrap_or(prefix);
    if path.len() > 1 && !path.ends_with('/') && !path.contains(['?', '#']) {
        PathSpecifier::PathSeparatedPrefix(path.to_owned())
    } else {
        PathSpecifier::Prefix(prefix.to_owned())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sense {
    Present,
    Absent,
}

fn add_headers(result: &mut RouteMatch, conditions: &BTreeMap<String, StringMatch>, sense: Sense) {
    for (name, condition) in conditions {
        if let Some(claim) = claim_path(name) {
            let mut matcher = claim_matcher(&claim, condition);
            matcher.invert = sense == Sense::Absent;
            result.dynamic_metadata.push(matcher);
        } else {
            let mut matcher = header(name, condition);
            if sense == Sense::Absent {
                matcher.invert_match = true;
                // Envoy refuses this field in a match on presence.
                matcher.treat_missing_header_as_empty = !is_presence(condition);
            }
            result.headers.push(matcher);
        }
    }
}

fn header(name: &str, condition: &StringMatch) -> HeaderMatcher {
    HeaderMatcher {
        name: name.to_owned(),
        header_match_specifier: if is_presence(condition) {
            Some(HeaderMatchSpecifier::PresentMatch(true))
        } else {
            string_matcher(condition).map(HeaderMatchSpecifier::StringMatch)
        },
        ..Default::default()
    }
}

fn query_parameter(name: &str, condition: &StringMatch) -> QueryParameterMatcher {
    QueryParameterMatcher {
        name: name.to_owned(),
        query_parameter_match_specifier: if is_presence(condition) {
            Some(QueryParameterMatchSpecifier::PresentMatch(true))
        } else {
            string_matcher(condition).map(QueryParameterMatchSpecifier::StringMatch)
        },
    }
}

/// Returns true for an empty condition or the regex `*`, which is not valid RE2 but has always meant presence.
fn is_presence(condition: &StringMatch) -> bool {
    match &condition.match_type {
        None => true,
        Some(MatchType::Regex(text)) => text == "*",
        Some(_) => false,
    }
}

/// Matches a claim that is a string or a list of strings.
fn claim_matcher(claim: &[&str], condition: &StringMatch) -> MetadataMatcher {
    let segment = |key: &str| PathSegment {
        segment: Some(Segment::Key(key.to_owned())),
    };
    let value = |pattern: value_matcher::MatchPattern| ValueMatcher {
        match_pattern: Some(pattern),
    };
    let text = value(value_matcher::MatchPattern::StringMatch(
        string_matcher(condition).unwrap_or_default(),
    ));
    let list = value(value_matcher::MatchPattern::ListMatch(Box::new(ListMatcher {
        match_pattern: Some(list_matcher::MatchPattern::OneOf(Box::new(text.clone()))),
    })));
    MetadataMatcher {
        filter: JWT_FILTER.to_owned(),
        path: std::iter::once("payload")
            .chain(claim.iter().copied())
            .map(segment)
            .collect(),
        value: Some(value(value_matcher::MatchPattern::OrMatch(OrMatcher {
            value_matchers: vec![list, text],
        }))),
        invert: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_of_ingresses_are_valid_for_envoy() {
        let matched = |prefix: &str, semantics| {
            let uri = StringMatch {
                match_type: Some(MatchType::Prefix(prefix.to_owned())),
            };
            path(&uri, semantics)
        };
        for (prefix, segments) in [("/a", "/a"), ("/a/", "/a"), ("/a/b", "/a/b")] {
            let separated = PathSpecifier::PathSeparatedPrefix(segments.to_owned());
            assert_eq!(matched(prefix, Semantics::Ingress), Some(separated.clone()));
            assert_eq!(matched(prefix, Semantics::Gateway), Some(separated));
        }
        for prefix in ["/", "//", "/a?b", "/a#b"] {
            let text = PathSpecifier::Prefix(prefix.to_owned());
            assert_eq!(matched(prefix, Semantics::Ingress), Some(text));
        }
        let text = PathSpecifier::Prefix("/a/".to_owned());
        assert_eq!(matched("/a/", Semantics::Istio), Some(text));
    }
}
