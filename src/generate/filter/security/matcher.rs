//! Envoy's matchers for values of policies, where a star at one end matches anything.

use crate::proto::envoy::{
    config::route::v3::{HeaderMatcher, header_matcher::HeaderMatchSpecifier},
    r#type::matcher::v3::{
        ListMatcher, MetadataMatcher, OrMatcher, RegexMatcher, StringMatcher, ValueMatcher, list_matcher,
        metadata_matcher::{PathSegment, path_segment::Segment},
        string_matcher::MatchPattern,
        value_matcher,
    },
};

/// A parsed value of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern<'v> {
    /// `*`: any text except the empty one.
    Present,
    /// `*x`.
    Suffix(&'v str),
    /// `x*`.
    Prefix(&'v str),
    /// No star at an end.
    Exact(&'v str),
}

impl<'v> Pattern<'v> {
    /// Parses a value. The first of two stars counts.
    pub(crate) fn of(value: &'v str) -> Self {
        if value == "*" {
            Self::Present
        } else if let Some(suffix) = value.strip_prefix('*') {
            Self::Suffix(suffix)
        } else if let Some(prefix) = value.strip_suffix('*') {
            Self::Prefix(prefix)
        } else {
            Self::Exact(value)
        }
    }
}

/// Returns a case-sensitive matcher with this pattern.
pub(crate) fn pattern(pattern: MatchPattern) -> StringMatcher {
    StringMatcher {
        match_pattern: Some(pattern),
        ..Default::default()
    }
}

/// Matches the whole text against a regular expression.
pub(crate) fn regex(regex: impl Into<String>) -> StringMatcher {
    pattern(MatchPattern::SafeRegex(RegexMatcher {
        regex: regex.into(),
        ..Default::default()
    }))
}

/// Matches any text except the empty one.
pub(crate) fn present() -> StringMatcher {
    regex(".+")
}

/// Returns the matcher of a value.
pub(crate) fn string(value: &str) -> StringMatcher {
    match Pattern::of(value) {
        Pattern::Present => present(),
        Pattern::Suffix(suffix) => pattern(MatchPattern::Suffix(suffix.to_owned())),
        Pattern::Prefix(prefix) => pattern(MatchPattern::Prefix(prefix.to_owned())),
        Pattern::Exact(text) => pattern(MatchPattern::Exact(text.to_owned())),
    }
}

/// Case sensitivity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Case {
    Sensitive,
    Ignored,
}

/// Returns the matcher of a header value.
pub(crate) fn header(name: &str, value: &str, case: Case) -> HeaderMatcher {
    let specifier = if Pattern::of(value) == Pattern::Present {
        HeaderMatchSpecifier::PresentMatch(true)
    } else {
        HeaderMatchSpecifier::StringMatch(StringMatcher {
            ignore_case: case == Case::Ignored,
            ..string(value)
        })
    };
    HeaderMatcher {
        name: name.to_owned(),
        header_match_specifier: Some(specifier),
        ..Default::default()
    }
}

/// Returns a regular expression that matches exactly this text, with RE2's special characters escaped.
pub(crate) fn quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len());
    for character in text.chars() {
        if r"\.+*?()|[]{}^$".contains(character) {
            quoted.push('\\');
        }
        quoted.push(character);
    }
    quoted
}

/// Returns a regular expression in which each star matches `any`.
pub(super) fn quote_with_stars(text: &str, any: &str) -> String {
    text.split('*').map(quote).collect::<Vec<_>>().join(any)
}

/// Matches a value that is this text.
pub(crate) fn value(matcher: StringMatcher) -> ValueMatcher {
    value_of(value_matcher::MatchPattern::StringMatch(matcher))
}

fn value_of(pattern: value_matcher::MatchPattern) -> ValueMatcher {
    ValueMatcher {
        match_pattern: Some(pattern),
    }
}

/// Matches a list with such an element.
pub(crate) fn list_with(element: ValueMatcher) -> ValueMatcher {
    value_of(value_matcher::MatchPattern::ListMatch(Box::new(ListMatcher {
        match_pattern: Some(list_matcher::MatchPattern::OneOf(Box::new(element))),
    })))
}

/// Matches one of these values; a single one needs no wrapper.
pub(crate) fn any_value(mut values: Vec<ValueMatcher>) -> ValueMatcher {
    match values.len() {
        1 => values.remove(0),
        _ => value_of(value_matcher::MatchPattern::OrMatch(OrMatcher {
            value_matchers: values,
        })),
    }
}

/// Matches a value at a path in the metadata of a filter.
pub(crate) fn metadata<'p>(
    filter: &str,
    path: impl IntoIterator<Item = &'p str>,
    value: ValueMatcher,
) -> MetadataMatcher {
    let segment = |key: &str| PathSegment {
        segment: Some(Segment::Key(key.to_owned())),
    };
    MetadataMatcher {
        filter: filter.to_owned(),
        path: path.into_iter().map(segment).collect(),
        value: Some(value),
        ..Default::default()
    }
}
