//! Validation rules that several kinds share.

use std::collections::BTreeSet;

use prost_types::Duration;

use super::{RegexUsage, field_path::FieldPath};
use crate::{
    api::names::{is_fqdn, is_header_name, is_label, is_wildcard_domain},
    base::cidr,
    proto::istio::{
        networking::v1alpha3::{Percent, StringMatch, string_match::MatchType},
        r#type::v1beta1::{PolicyTargetReference, WorkloadSelector},
    },
};

/// The maximum length in bytes of a label value, of the name part of a label key, and of the name of a subset.
const MAX_LABEL_VALUE: usize = 63;
/// The maximum length in bytes of the part of a label key before the slash.
const MAX_LABEL_PREFIX: usize = 253;
/// The maximum length in bytes of the name of a port, as in the definition of ServiceEntries.
const MAX_PORT_NAME: usize = 256;
/// The maximum length of the path of a Unix socket, in bytes: `sun_path` (unix(7)) ends with a NUL character.
const MAX_UNIX_PATH: usize = 107;
/// The maximum number of namespaces in `exportTo`. Objects are found by each of them, and those of each pair of
/// DestinationRules for a host are compared when the rules are merged.
pub const MAX_EXPORTS: usize = 4_000;
/// The maximum length in bytes of the name and of the value of a header in Envoy's configuration.
const MAX_HEADER_PART: usize = 16_384;

/// Checks a port number: 1 to 65535.
pub fn port(at: &FieldPath<'_>, number: u32) {
    if !(1..=65_535).contains(&number) {
        at.error(format!("{number} is not a port, want 1 to 65535"));
    }
}

/// Checks a duration: at least a millisecond, and on admission whole milliseconds.
pub fn duration(at: &FieldPath<'_>, duration: Option<&Duration>) {
    let Some(duration) = duration else { return };
    if duration.seconds < 0 || duration.nanos < 0 || (duration.seconds == 0 && duration.nanos < 1_000_000) {
        at.error("the duration must be at least 1ms");
    } else {
        at.require_on_admission(duration.nanos % 1_000_000 == 0, "only whole milliseconds are supported");
    }
}

/// Checks on admission a duration that is served as it is: at least a millisecond, and whole milliseconds.
pub fn duration_on_admission(at: &FieldPath<'_>, duration: Option<&Duration>) {
    let Some(duration) = duration else { return };
    let is_short = duration.seconds < 0 || duration.nanos < 0 || (duration.seconds == 0 && duration.nanos < 1_000_000);
    at.require_on_admission(!is_short, "the duration must be at least 1ms");
    at.require_on_admission(duration.nanos % 1_000_000 == 0, "only whole milliseconds are supported");
}

/// Checks a percentage: 0 to 100.
pub fn percent(at: &FieldPath<'_>, percent: Option<&Percent>) {
    if let Some(Percent { value }) = percent
        && !(0.0..=100.0).contains(value)
    {
        at.error(format!("{value} is not a percentage, want 0 to 100"));
    }
}

/// Checks a regular expression for proxies: not empty and within limits.
pub fn regex(at: &FieldPath<'_>, expression: &str) {
    if expression.is_empty() {
        at.error("the regular expression is empty");
    } else {
        at.regex(expression, RegexUsage::Proxy);
    }
}

/// Checks the regular expression of a string match. The caller decides if the match may be empty.
pub fn string_match(at: &FieldPath<'_>, matched: Option<&StringMatch>) {
    if let Some(MatchType::Regex(expression)) = matched.and_then(|matched| matched.match_type.as_ref()) {
        regex(&at.field("regex"), expression);
    }
}

/// Returns true if key and value of a label keep the rules of Kubernetes.
pub fn is_label_pair(key: &str, value: &str) -> bool {
    is_label_key(key) && is_label_text(value)
}

fn is_label_key(key: &str) -> bool {
    let (prefix, name) = key
        .split_once('/')
        .map_or((None, key), |(prefix, name)| (Some(prefix), name));
    // Parity (pkg/config/labels/instance.go): unlike that of a host name, the last part may be a number.
    let is_prefix = |prefix: &str| prefix.len() <= MAX_LABEL_PREFIX && prefix.split('.').all(is_label);
    prefix.is_none_or(is_prefix) && !name.is_empty() && is_label_text(name)
}

/// Checks key and value of a label.
///
/// Parity (pkg/config/labels/instance.go): unlike in Kubernetes, a value may have any length.
pub fn label(at: &FieldPath<'_>, key: &str, value: &str) {
    if !is_label_key(key) {
        at.error(format!("{key:?} is not a label key"));
    }
    if !has_label_characters(value) {
        at.error(format!("{value:?} is not a label value"));
    }
}

fn is_label_text(text: &str) -> bool {
    text.len() <= MAX_LABEL_VALUE && has_label_characters(text)
}

fn has_label_characters(text: &str) -> bool {
    let edge = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    edge(bytes.first())
        && edge(bytes.last())
        && bytes
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}

/// Checks the labels of a workload selector.
pub fn selector_labels<'l>(at: &FieldPath<'_>, labels: impl IntoIterator<Item = (&'l String, &'l String)>) {
    for (key, value) in labels {
        if key.is_empty() {
            at.error("the key of a selector is empty");
        } else if key.contains('*') || value.contains('*') {
            at.error(format!("wildcards are not supported in selectors: {key}={value}"));
        }
    }
}

/// Checks the selector of a policy.
pub fn selector(at: &FieldPath<'_>, selector: Option<&WorkloadSelector>) {
    let Some(selector) = selector else { return };
    let at = at.field("selector");
    selector_labels(&at.field("matchLabels"), &selector.match_labels);
    if selector.match_labels.is_empty() {
        at.warning("without labels selects all workloads of the namespace");
    }
}

/// The kinds that policies may target, as (group, kind).
const TARGETS: [(&str, &str); 4] = [
    ("", "Service"),
    ("networking.istio.io", "ServiceEntry"),
    ("gateway.networking.k8s.io", "Gateway"),
    ("gateway.networking.k8s.io", "GatewayClass"),
];

/// Checks that only one of selector, `targetRef` and `targetRefs` is set, and their content.
pub fn attachment(
    at: &FieldPath<'_>,
    workloads: Option<&WorkloadSelector>,
    target: Option<&PolicyTargetReference>,
    targets: &[PolicyTargetReference],
) {
    selector(at, workloads);
    let given = [workloads.is_some(), target.is_some(), !targets.is_empty()];
    at.require_on_admission(
        given.into_iter().filter(|given| *given).count() <= 1,
        "only one of selector, targetRef and targetRefs may be set",
    );
    if let Some(target) = target {
        target_reference(&at.field("targetRef"), target);
    }
    at.each("targetRefs", targets, target_reference);
}

/// Checks a target reference.
pub fn target_reference(at: &FieldPath<'_>, target: &PolicyTargetReference) {
    target_name(at, target);
    if let Some(mistake) = target_mistake(target) {
        at.refuse(mistake);
    }
}

/// Checks a target reference of an EnvoyFilter.
///
/// Parity (pkg/config/validation/envoyfilter/envoyfilter.go): admission does not check these. The
/// CustomResourceDefinition checks their names, and not their kinds.
pub fn filter_target_reference(at: &FieldPath<'_>, target: &PolicyTargetReference) {
    target_name(at, target);
    if let Some(mistake) = target_mistake(target) {
        at.warning(mistake);
    }
}

fn target_name(at: &FieldPath<'_>, target: &PolicyTargetReference) {
    at.field("name").require(!target.name.is_empty(), "is required");
    at.field("namespace")
        .require_on_admission(target.namespace.is_empty(), "must not be set");
}

/// Returns the mistake of a reference to a kind that policies cannot target.
fn target_mistake(target: &PolicyTargetReference) -> Option<String> {
    let group = if target.group == "core" { "" } else { &target.group };
    let is_target = TARGETS.contains(&(group, target.kind.as_str()));
    (!is_target).then(|| format!("{}/{} is not a kind that can be targeted", target.group, target.kind))
}

/// Checks `exportTo` of an object in a namespace: `.`, `*` or namespaces, and `~` (no namespace) if allowed.
pub fn export_to(at: &FieldPath<'_>, entries: &[String], own: &str, nowhere_allowed: bool) {
    at.field("exportTo")
        .require(entries.len() <= MAX_EXPORTS, "has more than 4,000 namespaces");
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    at.each("exportTo", entries, |at, entry| {
        let namespace = if entry == "." { own } else { entry.as_str() };
        let known = match entry.as_str() {
            "." | "*" => true,
            "~" => nowhere_allowed,
            name => is_label(name),
        };
        let is_new = seen.insert(namespace);
        if !known {
            at.error(format!("{entry:?} is not a namespace, want a name, `.` or `*`"));
        } else if !is_new {
            at.refuse(format!("{entry:?} is a duplicate"));
        }
    });
    if entries.len() > 1 && entries.iter().any(|entry| entry == "*" || entry == "~") {
        at.field("exportTo").refuse("`*` and `~` stand for themselves alone");
    }
}

/// Checks that a Unix socket may have a path. Because of one that is empty or too long, Envoy refuses all endpoints or
/// listeners that it is sent with.
fn unix_path_limits(at: &FieldPath<'_>, path: &str) {
    at.require(
        (1..=MAX_UNIX_PATH).contains(&path.len()) && !path.contains('\0'),
        "the path of a unix socket needs 1 to 107 bytes, and no NUL character",
    );
}

/// Checks the path of a Unix socket. Abstract sockets begin with `@`.
pub fn unix_path(at: &FieldPath<'_>, path: &str) {
    unix_path_limits(at, path);
    let is_file = path.starts_with('/') && !path.ends_with('/');
    at.require(
        path.is_empty() || path.starts_with(['/', '@']),
        "the path of a unix socket must be absolute",
    );
    at.require_on_admission(
        is_file || path.starts_with('@') || !path.starts_with('/'),
        "the path of a unix socket names a file",
    );
}

/// Checks on admission the path of a Unix socket that is served as it is.
pub fn unix_path_on_admission(at: &FieldPath<'_>, path: &str) {
    unix_path_limits(at, path);
    at.require_on_admission(
        path.is_empty() || path.starts_with('@') || path.starts_with('/') && !path.ends_with('/'),
        "is not the absolute path of a unix socket",
    );
}

/// Checks an IP address or an address range.
pub fn address_range(at: &FieldPath<'_>, text: &str) {
    if cidr::parse(text).is_none() {
        at.error(format!("{text:?} is neither an IP address nor an address range"));
    }
}

/// Checks a host name that may begin with `*.`.
pub fn wildcard_domain(at: &FieldPath<'_>, text: &str) {
    if !is_wildcard_domain(text) {
        at.error(format!("{text:?} is not a host name"));
    }
}

/// Checks a host name, which may be short.
pub fn host(at: &FieldPath<'_>, text: &str) {
    if !is_fqdn(text) {
        at.error(format!("{text:?} is not a host name"));
    }
}

/// Checks the name of a header. Admission accepts letters, digits, `-` and `_`.
pub fn header_name(at: &FieldPath<'_>, name: &str) {
    let is_plain = name
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if !is_header_name(name) {
        at.error(format!("{name:?} is not a header name"));
    } else if !is_plain {
        at.refuse(format!(
            "{name:?} has other characters than letters, digits, `-` and `_`"
        ));
    }
}

/// Checks the value of a header. Admission accepts tabs, but no other control characters.
pub fn header_value(at: &FieldPath<'_>, value: &str) {
    at.require(value.len() <= MAX_HEADER_PART, "has more than 16384 bytes");
    header_text(at, value);
    let is_control = |character: char| character.is_ascii_control() && !"\t\0\r\n".contains(character);
    at.require_on_admission(!value.contains(is_control), "has a control character");
}

/// Checks text that becomes a part of a header, such as a path. Envoy refuses every route of a port if one of them has
/// a line break there.
pub fn header_text(at: &FieldPath<'_>, text: &str) {
    at.require(is_header_text(text), "has a line break or a NUL character");
}

/// Returns true for text that Envoy accepts as a part of a header.
pub fn is_header_text(text: &str) -> bool {
    !text.contains(['\0', '\r', '\n'])
}

/// Returns true for text that Envoy accepts as the name or the value of a header to add.
pub fn is_header_part(text: &str) -> bool {
    text.len() <= MAX_HEADER_PART && is_header_text(text)
}

/// Checks the name of a port. Admission accepts the names of Kubernetes.
pub fn port_name(at: &FieldPath<'_>, name: &str) {
    if name.len() > MAX_PORT_NAME {
        at.error("has more than 256 bytes");
    } else if !is_label(name) {
        at.refuse(format!("{name:?} is not a port name, want letters, digits and `-`"));
    }
}

/// Checks the name of a subset. Admission accepts letters, digits and `-`. A `|` would end the name in that of a
/// cluster.
pub fn subset_name(at: &FieldPath<'_>, name: &str) {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if name.is_empty() || name.len() > MAX_LABEL_VALUE || !name.bytes().all(fits) {
        at.error("is not a subset name");
    } else {
        at.require_on_admission(is_label(name), "is not a subset name, want letters, digits and `-`");
    }
}

/// Returns true for the protocols of ports, in any case.
pub fn is_protocol(text: &str) -> bool {
    const KNOWN: [&str; 12] = [
        "GRPC",
        "GRPC-WEB",
        "HTTP",
        "HTTP_PROXY",
        "HTTP2",
        "HTTPS",
        "TCP",
        "TLS",
        "UDP",
        "MONGO",
        "REDIS",
        "MYSQL",
    ];
    KNOWN.iter().any(|known| known.eq_ignore_ascii_case(text))
}

/// Returns true for protocols of plaintext HTTP.
pub fn is_plain_http(protocol: &str) -> bool {
    ["HTTP", "HTTP2", "GRPC", "GRPC-WEB", "HTTP_PROXY"]
        .iter()
        .any(|known| known.eq_ignore_ascii_case(protocol))
}

/// Returns true for protocols on top of TLS.
pub fn is_tls(protocol: &str) -> bool {
    ["HTTPS", "TLS"]
        .iter()
        .any(|known| known.eq_ignore_ascii_case(protocol))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::api::istio::{ErrorPolicy, Validation};

    #[test]
    fn long_lists_of_namespaces_are_checked_in_one_pass() {
        let mut entries: Vec<String> = (0..200_000).map(|number| format!("n{number}")).collect();
        entries.extend([".".to_owned(), "n0".to_owned(), "own".to_owned()]);
        let validation = RefCell::<Validation>::default();
        let at = FieldPath::root("spec", ErrorPolicy::Reject, &validation);
        export_to(&at, &entries, "own", false);
        let found = validation.into_inner();
        let fields: Vec<&str> = found.refusals.iter().map(|found| found.field.as_str()).collect();
        assert_eq!(fields, ["spec.exportTo[200001]", "spec.exportTo[200002]"]);
        // One error says that there are too many.
        let fields: Vec<&str> = found.errors.iter().map(|found| found.field.as_str()).collect();
        assert_eq!(fields, ["spec.exportTo"]);
    }
}
