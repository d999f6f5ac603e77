//! Envoy's matchers for the values of policies, in which a star at one end stands for anything.

use crate::{
    base::cidr,
    proto::envoy::{
        config::{
            core::v3::CidrRange,
            route::v3::{HeaderMatcher, header_matcher::HeaderMatchSpecifier},
        },
        r#type::matcher::v3::{
            ListMatcher, MetadataMatcher, OrMatcher, RegexMatcher, StringMatcher, ValueMatcher, list_matcher,
            metadata_matcher::{PathSegment, path_segment::Segment},
            string_matcher::MatchPattern,
            value_matcher,
        },
    },
};

/// A value of a policy, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern<'v> {
    /// `*`: anything but nothing.
    Present,
    /// `*x`.
    Suffix(&'v str),
    /// `x*`.
    Prefix(&'v str),
    /// No star at an end.
    Exact(&'v str),
}

impl<'v> Pattern<'v> {
    /// Takes a value apart. Of two stars the first one counts.
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

/// A matcher with this pattern, sensitive to case.
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

/// Matches any text that is not empty.
pub(crate) fn present() -> StringMatcher {
    regex(".+")
}

/// The matcher for a value.
pub(crate) fn string(value: &str) -> StringMatcher {
    match Pattern::of(value) {
        Pattern::Present => present(),
        Pattern::Suffix(suffix) => pattern(MatchPattern::Suffix(suffix.to_owned())),
        Pattern::Prefix(prefix) => pattern(MatchPattern::Prefix(prefix.to_owned())),
        Pattern::Exact(text) => pattern(MatchPattern::Exact(text.to_owned())),
    }
}

/// How the case of letters counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Case {
    Sensitive,
    Ignored,
}

/// The matcher for a value of a header.
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

/// An address or a range of them.
pub(crate) fn range(text: &str) -> Option<CidrRange> {
    let range = cidr::parse(text)?;
    Some(CidrRange {
        address_prefix: range.addr().to_string(),
        prefix_len: Some(u32::from(range.prefix_len())),
    })
}

/// A text as a regular expression that matches just that text; the characters are those that RE2 gives a meaning.
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

/// A text as a regular expression in which each star stands for what `any` matches.
pub(crate) fn quote_with_stars(text: &str, any: &str) -> String {
    text.split('*').map(quote).collect::<Vec<_>>().join(any)
}

/// A value that is this text.
pub(crate) fn value(matcher: StringMatcher) -> ValueMatcher {
    value_of(value_matcher::MatchPattern::StringMatch(matcher))
}

fn value_of(pattern: value_matcher::MatchPattern) -> ValueMatcher {
    ValueMatcher {
        match_pattern: Some(pattern),
    }
}

/// A list with such an element.
pub(crate) fn list_with(element: ValueMatcher) -> ValueMatcher {
    value_of(value_matcher::MatchPattern::ListMatch(Box::new(ListMatcher {
        match_pattern: Some(list_matcher::MatchPattern::OneOf(Box::new(element))),
    })))
}

/// One of these; a single one stands for itself.
pub(crate) fn any_value(mut values: Vec<ValueMatcher>) -> ValueMatcher {
    match values.len() {
        1 => values.remove(0),
        _ => value_of(value_matcher::MatchPattern::OrMatch(OrMatcher {
            value_matchers: values,
        })),
    }
}

/// A value at a path inside the metadata of a filter.
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
