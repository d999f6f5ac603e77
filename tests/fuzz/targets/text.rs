//! Short texts with their own syntax.

use istiod::{
    api::{names, regex},
    base::{Namespace, SpiffeId, cidr, duration, host, url},
    generate::proxy::{Identity, IstioVersion},
    model::credential,
};

use super::{Target, class_of};

/// A regular expression.
pub(super) const REGEX: Target = Target {
    name: "regex",
    run: regular_expression,
    words: &[
        b"(?:",
        b"(?i)",
        b"{1000}",
        b"{999,}",
        b"\\pL",
        b"\\p{Greek}",
        b"[^",
        b"[[:alpha:]]",
        b"\\Q",
        b"\\E",
        b"\\C",
        b".*",
        b"&&",
        b"~~",
        b"(?P<n>",
        b"\\x{10ffff}",
        b"|",
        b"$",
        b"\\b",
    ],
};

/// Hosts, durations, addresses, URLs, SPIFFE ids, credential names, versions.
pub(super) const NAMES: Target = Target {
    name: "names",
    run: short_texts,
    words: &[
        b"spiffe://",
        b"/ns/",
        b"/sa/",
        b"*.",
        b"kubernetes://",
        b"kubernetes-gateway://",
        b"configmap://",
        b"-cacert",
        b"/64",
        b"[::1]",
        b"::ffff:1.2.3.4",
        b"http://",
        b"https://",
        b"@",
        b"%00",
        b"1h2m3s",
        b"1.5h",
        b"9223372036854775807ns",
        b"9223372036854775808ns",
        b"..",
        b"1.30.3",
        b"sni-",
        b"outbound|80||",
    ],
};

fn regular_expression(bytes: &[u8]) -> u64 {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return 0;
    };
    let _ = regex::check(text);
    match regex::compile(text) {
        Ok(compiled) => u64::from(compiled.is_match(b"1.30.3")),
        Err(error) => class_of(&error.to_string()),
    }
}

fn short_texts(bytes: &[u8]) -> u64 {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return 0;
    };
    let (first, second) = text.split_once('\n').unwrap_or((text, "*.example.com"));
    let mut sort = 0;
    let mut note = |held: bool| sort = (sort << 1) | u64::from(held);
    note(duration::parse(first).is_ok());
    note(cidr::parse(first).is_some());
    note(cidr::is_range(first));
    note(url::Url::parse(first).is_some());
    note(Identity::from_spiffe(first).is_some());
    note(istiod::base::spiffe::trust_domain(first).is_some());
    note(host::overlaps(first, second));
    note(host::subset_of(first, second));
    note(names::is_label(first) && names::is_fqdn(first));
    note(names::is_wildcard_domain(first));
    note(names::is_header_name(first));
    note(credential::is_served(first));
    note(credential::Reference::parse(&credential::resource_name(first), &Namespace::new("a")).is_ok());
    note(IstioVersion::parse(first) == IstioVersion::MAX);
    // Formatting is the inverse of parsing.
    let written = SpiffeId::new("cluster.local", Namespace::new(first), "s".into()).to_string();
    note(written.parse::<SpiffeId>().is_ok());
    assert!(
        host::more_specific(first, second) == host::more_specific(second, first).reverse(),
        "the order of hosts must be consistent"
    );
    sort
}
