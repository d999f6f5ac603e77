//! What names may look like: DNS labels, host names, header names.

/// The longest DNS label, in bytes.
const MAX_LABEL: usize = 63;
/// The longest host name, in bytes.
const MAX_HOST: usize = 255;

/// A label by RFC 1123: letters (upper case too, as Istio has it), digits and `-` between them.
pub fn is_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    bytes.len() <= MAX_LABEL
        && edge(bytes.first())
        && edge(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
}

/// A fully qualified or short host name without wildcard; a dot at the end is allowed.
pub fn is_fqdn(text: &str) -> bool {
    if text.is_empty() || text.len() > MAX_HOST {
        return false;
    }
    let labels: Vec<&str> = text.strip_suffix('.').unwrap_or(text).split('.').collect();
    let top_is_number = labels
        .last()
        .is_some_and(|label| label.bytes().all(|byte| byte.is_ascii_digit()));
    labels.iter().all(|label| is_label(label)) && !top_is_number
}

/// A host name whose first label may be `*` or begin with it (`*.a.com`, `*a.com`, `*-a.com`); a lone `*` is one.
pub fn is_wildcard_domain(text: &str) -> bool {
    match text.strip_prefix('*') {
        None => is_fqdn(text),
        Some("") => true,
        Some(rest) => is_fqdn(rest.strip_prefix(['.', '-']).unwrap_or(rest)),
    }
}

/// A header name: a token by RFC 9110.
pub fn is_header_name(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts() {
        for good in ["a", "a.b.svc.cluster.local", "A-1.example.com.", "1.a"] {
            assert!(is_fqdn(good), "{good}");
        }
        for bad in ["", "a..b", "-a.b", "a_b.c", "10.0.0.1", "a b", ".", "*.a"] {
            assert!(!is_fqdn(bad), "{bad}");
        }
        assert!(is_wildcard_domain("*") && is_wildcard_domain("*.a.com") && is_wildcard_domain("a.com"));
        assert!(
            is_wildcard_domain("*a.com")
                && is_wildcard_domain("*-a.com")
                && !is_wildcard_domain("a.*.com")
                && !is_wildcard_domain("*.")
        );
        assert!(is_label("v1") && !is_label("a.b") && !is_label(&"x".repeat(64)));
        assert!(is_header_name("x-a_b") && !is_header_name("a:b") && !is_header_name(""));
    }
}
