//! Syntax of names: DNS labels, host names, header names, JWT claims, gRPC status codes.

/// The longest DNS label, in bytes.
const MAX_LABEL: usize = 63;
/// The longest host name, in bytes.
const MAX_HOST: usize = 255;
/// The prefix of header names that refer to claims of a validated JWT, in any case.
const CLAIMS: &str = "@request.auth.claims";

/// Returns true for a DNS label (RFC 1123): letters, digits and inner `-`.
///
/// Parity (pkg/config/labels): upper case is allowed.
pub fn is_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    bytes.len() <= MAX_LABEL
        && edge(bytes.first())
        && edge(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
}

/// Returns true for a host name, qualified or short, without wildcard. A trailing dot is allowed.
///
/// Parity (pkg/config/validation/agent/validation.go, `ValidateDNS1123Labels`): the last label is no number, unless a
/// dot follows.
pub fn is_fqdn(text: &str) -> bool {
    if text.is_empty() || text.len() > MAX_HOST {
        return false;
    }
    let qualified = text.strip_suffix('.');
    let labels: Vec<&str> = qualified.unwrap_or(text).split('.').collect();
    let top_is_number = labels
        .last()
        .is_some_and(|label| label.bytes().all(|byte| byte.is_ascii_digit()));
    labels.iter().all(|label| is_label(label)) && (qualified.is_some() || !top_is_number)
}

/// Returns true for a host name whose first label may begin with `*` (`*.a.com`, `*a.com`, `*-a.com`), and for `*`
/// alone.
///
/// Parity (pkg/config/validation/agent/validation.go, `ValidateWildcardDomain`): a single label may consist of digits,
/// and `*.` is every name with a trailing dot.
pub fn is_wildcard_domain(text: &str) -> bool {
    let (first, rest) = text.split_once('.').unwrap_or((text, ""));
    let after = first.strip_prefix("*-").or_else(|| first.strip_prefix('*'));
    let bare = after.unwrap_or(first);
    let is_first = first == "*" || first.len() <= MAX_LABEL && is_label(bare);
    text.len() <= MAX_HOST && is_first && (rest.is_empty() || is_fqdn(rest))
}

/// Returns true for a host name with a `*` that is not its first label (`*a.com`, `*-a.com`). Envoy refuses a listener
/// with such a server name.
pub fn is_partial_wildcard(host: &str) -> bool {
    host.contains('*') && host != "*" && !host.starts_with("*.")
}

/// Returns true for the server name of a cluster at gateways with AUTO_PASSTHROUGH: `outbound_.PORT_.SUBSET_.HOST`.
///
/// Parity (pkg/config/validation/agent/validation.go, ValidateWildcardDomainForVirtualServiceBoundToGateway).
pub fn is_cluster_server_name(text: &str) -> bool {
    let parts: Vec<&str> = text.split('_').collect();
    let ["outbound", port, _, host, ..] = parts.as_slice() else {
        return false;
    };
    text.len() <= MAX_HOST
        && port.contains(|character: char| character.is_ascii_digit())
        && host.contains(|character: char| character.is_ascii_alphabetic())
}

/// Returns true for a header name as Envoy accepts it: a token of RFC 9110, or a pseudo-header such as `:authority`.
pub fn is_header_or_pseudo_header(text: &str) -> bool {
    is_header_name(text.strip_prefix(':').unwrap_or(text))
}

/// Returns true for a header name: a token of RFC 9110.
pub fn is_header_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(is_token)
}

/// Returns true for what admission accepts as a header of a match or CORS policy: a name, or several that commas
/// separate.
///
/// Parity (pkg/config/validation/validation.go, `validHeaderNameRegex`): `+-.` is a range there, and has the comma.
pub fn is_header_list(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte == b',' || is_token(byte))
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Returns the claims of a header name: `@request.auth.claims.group.id` or `@request.auth.claims[group][id]`. `None`
/// for other names, and if a claim is empty, because Envoy refuses empty ones.
pub fn claim_path(name: &str) -> Option<Vec<&str>> {
    let (head, rest) = name.split_at_checked(CLAIMS.len())?;
    if !head.eq_ignore_ascii_case(CLAIMS) {
        return None;
    }
    let claims: Vec<&str> = match rest.strip_prefix('.') {
        Some(dotted) => dotted.split('.').collect(),
        None => rest.strip_prefix('[')?.strip_suffix(']')?.split("][").collect(),
    };
    claims.iter().all(|claim| !claim.is_empty()).then_some(claims)
}

/// Returns true for the status codes that HTTP defines.
pub fn is_http_status(code: u32) -> bool {
    matches!(code,
        100..=103 | 200..=208 | 226 | 300..=305 | 307 | 308 | 400..=418 | 421..=426 | 428 | 429 | 431 | 451 | 500..=508
        | 510 | 511)
}

/// The names of the gRPC status codes, by number.
const GRPC_STATUS_CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// Returns the number of a gRPC status code.
pub fn grpc_status_code(name: &str) -> Option<u32> {
    let number = GRPC_STATUS_CODES.iter().position(|known| *known == name)?;
    u32::try_from(number).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_label_and_header_names() {
        for good in ["a", "a.b.svc.cluster.local", "A-1.example.com.", "1.a", "a.1."] {
            assert!(is_fqdn(good), "{good}");
        }
        for bad in ["", "a..b", "-a.b", "a_b.c", "10.0.0.1", "a b", ".", "*.a"] {
            assert!(!is_fqdn(bad), "{bad}");
        }
        assert!(is_wildcard_domain("*") && is_wildcard_domain("*.a.com") && is_wildcard_domain("a.com"));
        assert!(is_label("v1") && !is_label("a.b") && !is_label(&"x".repeat(64)));
        assert!(is_header_name("x-a_b") && !is_header_name("a:b") && !is_header_name(""));
        assert!(is_header_list("x-a,x-b") && !is_header_name("x-a,x-b"));
        assert!(!is_header_list("x-a, x-b") && !is_header_list(""));
    }

    #[test]
    fn wildcards_begin_the_first_label() {
        let longest = "x".repeat(MAX_LABEL - 1);
        for good in [
            "*",
            "*.",
            "*a.com",
            "*-a.com",
            "*.a.",
            "*1",
            "*-1",
            "1",
            "1.",
            &format!("*{longest}.a"),
        ] {
            assert!(is_wildcard_domain(good), "{good}");
        }
        for bad in [
            "",
            ".",
            "*..",
            "*-",
            "*--a",
            "-a",
            "**",
            "a.*.com",
            "*.1",
            &format!("*{longest}x.a"),
        ] {
            assert!(!is_wildcard_domain(bad), "{bad}");
        }
    }

    #[test]
    fn wildcards_are_whole_labels_or_partial() {
        assert!(is_partial_wildcard("*a.com") && is_partial_wildcard("*-a.com") && is_partial_wildcard("a_.*.com"));
        assert!(!is_partial_wildcard("*") && !is_partial_wildcard("*.a.com") && !is_partial_wildcard("a.com"));
    }

    #[test]
    fn server_names_of_clusters_have_four_parts() {
        assert!(is_cluster_server_name("outbound_.80_._.a.ns.svc.cluster.local"));
        assert!(is_cluster_server_name("outbound_.80_.v1_.a.com"));
        for other in [
            "outbound_.80_._",
            "inbound_.80_._.a.com",
            "outbound_.x_._.a.com",
            "outbound_.80_._.1",
            "a.com",
        ] {
            assert!(!is_cluster_server_name(other), "{other}");
        }
    }

    #[test]
    fn claims_have_two_forms() {
        assert_eq!(claim_path("@request.auth.claims.a.b"), Some(vec!["a", "b"]));
        assert_eq!(claim_path("@Request.Auth.Claims[a.c][b]"), Some(vec!["a.c", "b"]));
        for other in ["", ".", ".a..b", ".a.", "[]", "[a][]", "[a", "a"] {
            assert_eq!(claim_path(&format!("@request.auth.claims{other}")), None, "{other}");
        }
        assert_eq!(claim_path("x-header"), None);
    }
}
