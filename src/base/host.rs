//! Host names with wildcards: matching, subset and specificity order, as Istio's `host.Name` defines them.

use std::cmp::Ordering;

/// Returns true if the host begins with `*`.
pub fn is_wildcard(host: &str) -> bool {
    host.starts_with('*')
}

/// Returns true if the two hosts have a name in common (either may be a wildcard).
pub fn overlaps(a: &str, b: &str) -> bool {
    match (a.strip_prefix('*'), b.strip_prefix('*')) {
        (Some(a), Some(b)) => a.ends_with(b) || b.ends_with(a),
        (Some(suffix), None) => b.ends_with(suffix),
        (None, Some(suffix)) => a.ends_with(suffix),
        (None, None) => a == b,
    }
}

/// Returns true if `pattern` matches every name that `host` matches.
pub fn subset_of(host: &str, pattern: &str) -> bool {
    match (host.strip_prefix('*'), pattern.strip_prefix('*')) {
        (Some(host), Some(pattern)) => host.len() >= pattern.len() && host.ends_with(pattern),
        (None, Some(pattern)) => host.ends_with(pattern),
        (Some(_), None) => false,
        (None, None) => host == pattern,
    }
}

/// Orders the most specific first: exact names before wildcards, longer before shorter, then alphabetical.
pub fn more_specific(a: &str, b: &str) -> Ordering {
    is_wildcard(a)
        .cmp(&is_wildcard(b))
        .then_with(|| b.len().cmp(&a.len()))
        .then_with(|| a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_match_by_suffix() {
        assert!(overlaps("*.com", "a.example.com"));
        assert!(overlaps("*", "anything"));
        assert!(overlaps("*.example.com", "*.com"));
        assert!(!overlaps("*.example.com", "example.com"));
        assert!(subset_of("a.example.com", "*.example.com"));
        assert!(subset_of("*.a.example.com", "*.example.com"));
        assert!(!subset_of("*.com", "*.example.com"));
        assert!(!subset_of("*.example.com", "a.example.com"));
    }

    #[test]
    fn exact_names_come_before_wildcards() {
        let mut hosts = vec!["*", "*.com", "a.com", "*.a.com", "bb.com"];
        hosts.sort_by(|a, b| more_specific(a, b));
        assert_eq!(hosts, ["bb.com", "a.com", "*.a.com", "*.com", "*"]);
    }
}
