//! Delegation: a route of a root VirtualService that refers to the routes of another.
//!
//! A delegate's route is kept only if its matches can be narrower than the root's; fields that it does not set come
//! from the root's route.

use std::collections::{BTreeMap, BTreeSet};

use super::units;
use crate::{
    api::istio::virtual_service::adds_few_headers,
    proto::istio::networking::v1alpha3::{HttpMatchRequest, HttpRoute, StringMatch, string_match::MatchType},
};

/// Returns the delegate's routes as they apply below one route of the root.
pub(super) fn merged<'a>(root: &'a HttpRoute, delegate: &'a [HttpRoute]) -> impl Iterator<Item = HttpRoute> + use<'a> {
    delegate.iter().filter_map(|route| merged_route(root, route))
}

/// The size of a delegate.
#[derive(Clone, Copy)]
pub(super) struct Size {
    /// The number of matches of all routes.
    matches: u64,
    /// The number that the routes count.
    units: u64,
}

impl Size {
    /// Returns the size of a delegate's routes.
    pub(super) fn of(delegate: &[HttpRoute]) -> Self {
        Self {
            matches: delegate.iter().map(matches).sum(),
            units: delegate.iter().map(units::of_http).sum(),
        }
    }

    /// Returns what the routes of [`merged`] count at most, except for rounding: each pair of matches has the size of
    /// both routes.
    pub(super) fn below(self, root: &HttpRoute) -> u64 {
        self.matches * units::of_http(root) + matches(root) * (self.units - self.matches)
    }
}

fn matches(route: &HttpRoute) -> u64 {
    route.r#match.len().max(1) as u64
}

fn merged_route(root: &HttpRoute, delegate: &HttpRoute) -> Option<HttpRoute> {
    let mut route = delegate.clone();
    route.r#match = merged_matches(&root.r#match, &delegate.r#match)?;
    route.name = joined_name(&root.name, &delegate.name);
    inherit(&mut route.rewrite, root.rewrite.as_ref());
    inherit(&mut route.direct_response, root.direct_response.as_ref());
    inherit(&mut route.timeout, root.timeout.as_ref());
    inherit(&mut route.retries, root.retries.as_ref());
    inherit(&mut route.fault, root.fault.as_ref());
    inherit(&mut route.mirror, root.mirror.as_ref());
    inherit(&mut route.mirror_percent, root.mirror_percent.as_ref());
    inherit(&mut route.mirror_percentage, root.mirror_percentage.as_ref());
    inherit(&mut route.cors_policy, root.cors_policy.as_ref());
    inherit(&mut route.headers, root.headers.as_ref());
    if route.mirrors.is_empty() {
        route.mirrors.clone_from(&root.mirrors);
    }
    // The headers of the root and those of the destination may be too many only together.
    adds_few_headers(&route).then_some(route)
}

fn inherit<T: Clone>(own: &mut Option<T>, root: Option<&T>) {
    if own.is_none() {
        *own = root.cloned();
    }
}

fn joined_name(root: &str, delegate: &str) -> String {
    match (root, delegate) {
        (name, "") | ("", name) => name.to_owned(),
        _ => format!("{root}-{delegate}"),
    }
}

/// Combines every match of the delegate with every compatible match of the root; `None` if one is compatible with none.
fn merged_matches(root: &[HttpMatchRequest], delegate: &[HttpMatchRequest]) -> Option<Vec<HttpMatchRequest>> {
    if root.is_empty() || delegate.is_empty() {
        return Some([root, delegate].concat());
    }
    let mut merged = Vec::new();
    for narrow in delegate {
        let before = merged.len();
        let agreeing = root.iter().filter(|wide| agree(wide, narrow));
        merged.extend(agreeing.map(|wide| merged_match(wide, narrow)));
        if merged.len() == before {
            return None;
        }
    }
    Some(merged)
}

fn merged_match(root: &HttpMatchRequest, delegate: &HttpMatchRequest) -> HttpMatchRequest {
    let mut merged = delegate.clone();
    merged.name = joined_name(&root.name, &delegate.name);
    inherit(&mut merged.uri, root.uri.as_ref());
    inherit(&mut merged.scheme, root.scheme.as_ref());
    inherit(&mut merged.method, root.method.as_ref());
    inherit(&mut merged.authority, root.authority.as_ref());
    add_missing(&mut merged.headers, &root.headers);
    add_missing(&mut merged.without_headers, &root.without_headers);
    add_missing(&mut merged.query_params, &root.query_params);
    add_missing(&mut merged.source_labels, &root.source_labels);
    if merged.port == 0 {
        merged.port = root.port;
    }
    if merged.source_namespace.is_empty() {
        merged.source_namespace.clone_from(&root.source_namespace);
    }
    if merged.gateways.is_empty() {
        merged.gateways.clone_from(&root.gateways);
    }
    if merged.stat_prefix.is_empty() {
        merged.stat_prefix.clone_from(&root.stat_prefix);
    }
    merged
}

fn add_missing<T: Clone>(own: &mut BTreeMap<String, T>, root: &BTreeMap<String, T>) {
    for (key, value) in root {
        own.entry(key.clone()).or_insert_with(|| value.clone());
    }
}

/// Returns true if the delegate's match may be narrower than the root's.
fn agree(root: &HttpMatchRequest, delegate: &HttpMatchRequest) -> bool {
    let texts = [
        (&root.uri, &delegate.uri),
        (&root.scheme, &delegate.scheme),
        (&root.method, &delegate.method),
        (&root.authority, &delegate.authority),
    ];
    let maps = [
        (&root.headers, &delegate.headers),
        (&root.without_headers, &delegate.without_headers),
        (&root.query_params, &delegate.query_params),
    ];
    let ports_differ = root.port > 0 && delegate.port > 0 && root.port != delegate.port;
    // A root with a source namespace requires the delegate to name the same one.
    let sources_differ = !root.source_namespace.is_empty() && root.source_namespace != delegate.source_namespace;
    let mut labels = delegate.source_labels.iter();
    let labels_agree = labels.all(|(key, value)| root.source_labels.get(key).is_none_or(|expected| expected == value));
    root.ignore_uri_case == delegate.ignore_uri_case
        && !ports_differ
        && !sources_differ
        && labels_agree
        && gateways_agree(&root.gateways, &delegate.gateways)
        && texts
            .iter()
            .all(|(wide, narrow)| text_agrees(wide.as_ref(), narrow.as_ref()))
        && maps.iter().all(|(wide, narrow)| {
            let mut pairs = narrow.iter();
            pairs.all(|(key, value)| text_agrees(wide.get(key), Some(value)))
        })
}

/// Returns true if the root names all gateways of the delegate, or one of them names none. There may be a hundred
/// thousand in each, so they are not compared name by name. Those of the delegate are sorted, which are usually few.
fn gateways_agree(root: &[String], delegate: &[String]) -> bool {
    if root.is_empty() || delegate.is_empty() {
        return true;
    }
    if root.len() < delegate.len() {
        return false;
    }
    let mut missing: BTreeSet<&String> = delegate.iter().collect();
    for gateway in root {
        missing.remove(gateway);
    }
    missing.is_empty()
}

/// Regular expressions are compatible only with absence; an exact text must be equal; a prefix must be extended.
fn text_agrees(root: Option<&StringMatch>, delegate: Option<&StringMatch>) -> bool {
    let (Some(root), Some(delegate)) = (root, delegate) else {
        return true;
    };
    match (given(root), given(delegate)) {
        (Some(MatchType::Exact(wide)), Some(MatchType::Exact(narrow))) => wide == narrow,
        (Some(MatchType::Prefix(wide)), Some(MatchType::Prefix(narrow) | MatchType::Exact(narrow))) => {
            narrow.starts_with(wide.as_str())
        }
        _ => false,
    }
}

/// An empty text counts as unset.
fn given(text: &StringMatch) -> Option<&MatchType> {
    text.match_type.as_ref().filter(|kind| match kind {
        MatchType::Exact(text) | MatchType::Prefix(text) | MatchType::Regex(text) => !text.is_empty(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r21_gateways_of_a_delegate_are_looked_up_among_those_of_the_root() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
        let agree = |root: &[&str], delegate: &[&str]| gateways_agree(&names(root), &names(delegate));
        assert!(agree(&[], &["a/b"]) && agree(&["a/b"], &[]));
        assert!(agree(&["mesh", "a/b", "a/c"], &["a/c", "mesh"]));
        assert!(!agree(&["mesh", "a/b"], &["mesh", "a/c"]));
        assert!(!agree(&["mesh"], &["mesh", "mesh"]), "equal names count each");
        assert!(agree(&["mesh", "a/b"], &["mesh", "mesh"]));
        let numbered = |numbers: std::ops::Range<usize>| numbers.map(|n| format!("n/{n}")).collect::<Vec<String>>();
        assert!(gateways_agree(&numbered(0..40), &numbered(10..30)));
        assert!(!gateways_agree(&numbered(0..40), &numbered(21..41)));
        // Compared pair by pair, these would take a minute.
        let many: Vec<String> = (0..50_000).map(|number| format!("n/{number}")).collect();
        let reversed: Vec<String> = many.iter().rev().cloned().collect();
        assert!(gateways_agree(&many, &reversed));
    }
}
