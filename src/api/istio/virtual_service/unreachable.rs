//! Rules of VirtualServices that earlier rules hide.
//!
//! Parity (pkg/config/validation/validation.go, analyzeUnreachableHTTPRules).

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;

use crate::{
    api::{
        diagnostics::{INEFFECTIVE, UNREACHABLE},
        istio::field_path::FieldPath,
    },
    proto::istio::networking::v1alpha3::{
        HttpMatchRequest, HttpRoute, StringMatch, VirtualService, string_match::MatchType,
    },
};

/// The maximum number of matches with a prefix that are compared with each other.
const MAX_COMPARED: usize = 500;

/// Warns of rules and matches without effect.
pub(super) fn check(at: &FieldPath<'_>, service: &VirtualService) {
    let http: Vec<Vec<_>> = service.http.iter().map(|rule| encoded_http(rule).collect()).collect();
    covered(at, &service.http, &http);
    rules(at, "http", http);
    let tcp = service
        .tcp
        .iter()
        .map(|rule| rule.r#match.iter().map(Message::encode_to_vec).collect());
    rules(at, "tcp", tcp);
    let tls = service
        .tls
        .iter()
        .map(|rule| rule.r#match.iter().map(Message::encode_to_vec).collect());
    rules(at, "tls", tls);
}

/// Returns the matches of a rule without their names, as bytes.
fn encoded_http(rule: &HttpRoute) -> impl Iterator<Item = Vec<u8>> {
    rule.r#match.iter().map(|matched| {
        let unnamed = HttpMatchRequest {
            name: String::new(),
            ..matched.clone()
        };
        unnamed.encode_to_vec()
    })
}

/// Finds rules after one that matches everything, and repeated matches.
fn rules(at: &FieldPath<'_>, protocol: &str, rules: impl IntoIterator<Item = Vec<Vec<u8>>>) {
    let mut known: BTreeMap<Vec<u8>, (usize, usize)> = BTreeMap::new();
    let mut catches_all = None;
    at.each(protocol, rules.into_iter().enumerate(), |at, (rule, matches)| {
        if let Some(earlier) = catches_all {
            let text = format!("is never used: {protocol}[{earlier}] matches everything");
            return at.warning_with_code(UNREACHABLE, text);
        }
        if matches.is_empty() {
            catches_all = Some(rule);
            return;
        }
        let (count, mut repeated) = (matches.len(), 0);
        at.each(
            "match",
            matches.into_iter().enumerate(),
            |at, (place, matched)| match known.get(&matched) {
                Some((rule, place)) => {
                    let text = format!("is never used: it repeats {protocol}[{rule}].match[{place}]");
                    at.warning_with_code(INEFFECTIVE, text);
                    repeated += 1;
                }
                None => {
                    known.insert(matched, (rule, place));
                }
            },
        );
        if repeated == count {
            at.warning_with_code(UNREACHABLE, "is never used: earlier rules have all of its matches");
        }
    });
}

/// A match by the beginning of the path.
struct Prefix<'a> {
    rule: usize,
    place: usize,
    prefix: &'a str,
    matched: &'a HttpMatchRequest,
}

/// Finds matches by longer prefixes than an earlier one has. `encoded` has the matches of the rules as bytes.
fn covered(at: &FieldPath<'_>, rules: &[HttpRoute], encoded: &[Vec<Vec<u8>>]) {
    let mut prefixes: Vec<Prefix<'_>> = Vec::new();
    let mut known: BTreeSet<&[u8]> = BTreeSet::new();
    let before_last = rules.iter().take_while(|rule| !rule.r#match.is_empty());
    for (index, (rule, encoded)) in before_last.zip(encoded).enumerate() {
        for (place, (matched, encoded)) in rule.r#match.iter().zip(encoded).enumerate() {
            let Some(prefix) = prefix(matched).filter(|_| known.insert(encoded)) else {
                continue;
            };
            prefixes.push(Prefix {
                rule: index,
                place,
                prefix,
                matched,
            });
        }
    }
    prefixes.truncate(MAX_COMPARED);
    for (position, earlier) in prefixes.iter().enumerate() {
        for later in &prefixes[position + 1..] {
            let is_longer = later.prefix != earlier.prefix && later.prefix.starts_with(earlier.prefix);
            if is_longer && covers(earlier.matched, later.matched) {
                let list = at.field("http");
                let rule = list.item(later.rule);
                let matches = rule.field("match");
                let (prefix, rule, place) = (earlier.prefix, earlier.rule, earlier.place);
                let text = format!("is never used: the prefix {prefix} of http[{rule}].match[{place}] covers it");
                matches.item(later.place).warning_with_code(INEFFECTIVE, text);
            }
        }
    }
}

fn prefix(matched: &HttpMatchRequest) -> Option<&str> {
    match &matched.uri.as_ref()?.match_type {
        Some(MatchType::Prefix(prefix)) if !prefix.is_empty() => Some(prefix),
        _ => None,
    }
}

/// Returns true if the other conditions of the later match are not known to be weaker than those of the earlier one.
fn covers(earlier: &HttpMatchRequest, later: &HttpMatchRequest) -> bool {
    let maps = [
        (&earlier.headers, &later.headers),
        (&earlier.query_params, &later.query_params),
        (&earlier.without_headers, &later.without_headers),
    ];
    earlier.port == later.port
        && method(earlier).begins_with(method(later))
        && Form::of(earlier.authority.as_ref()).begins_with(Form::of(later.authority.as_ref()))
        && maps.iter().all(|(earlier, later)| {
            let has = |(key, value): (&String, &StringMatch)| {
                let other = later.get(key);
                other.is_some_and(|other| Form::of(Some(value)).begins_with(Form::of(Some(other))))
            };
            earlier.len() == later.len() && earlier.iter().all(has)
        })
}

/// Returns the condition for the method, which is GET without one.
fn method(matched: &HttpMatchRequest) -> Form<'_> {
    match Form::of(matched.method.as_ref()) {
        Form::Other => Form::Exact("GET"),
        form => form,
    }
}

/// A condition for a text.
#[derive(Clone, Copy)]
enum Form<'a> {
    Exact(&'a str),
    Prefix(&'a str),
    /// None, or a regular expression.
    Other,
}

impl<'a> Form<'a> {
    fn of(condition: Option<&'a StringMatch>) -> Self {
        match condition.and_then(|condition| condition.match_type.as_ref()) {
            Some(MatchType::Exact(text)) if !text.is_empty() => Self::Exact(text),
            Some(MatchType::Prefix(text)) if !text.is_empty() => Self::Prefix(text),
            _ => Self::Other,
        }
    }

    /// Returns true if both have one form and this text begins with the other, or the other is none.
    fn begins_with(self, other: Self) -> bool {
        match (self, other) {
            (_, Self::Other) => true,
            (Self::Exact(own), Self::Exact(other)) | (Self::Prefix(own), Self::Prefix(other)) => own.starts_with(other),
            _ => false,
        }
    }
}
