//! Authentication by the client certificate that a gateway verified and forwarded (`x-forwarded-client-cert`).
//!
//! A sender of this header can claim any identity, so it is accepted only from addresses in `TRUSTED_GATEWAY_CIDR`.
//! Parity (security/pkg/server/ca/authenticate/xfcc_authenticator.go): once a range is configured, loopback is trusted
//! too; without any range, no address is.
//!
//! Note: a gateway may also verify certificates of other trust domains. Their namespaces and service accounts are not
//! those of this mesh, so they are refused, as they are without a gateway.

use std::{net::IpAddr, sync::Arc};

use futures::{FutureExt, future::BoxFuture};
use http::HeaderMap;
use ipnet::IpNet;
use smol_str::SmolStr;
use tokio::sync::watch;

use super::{AuthenticationError, Authenticator, Caller, CallerSource, Credentials, TrustDomains};
use crate::base::spiffe;

/// The header.
const HEADER: &str = "x-forwarded-client-cert";
/// The maximum length of the header in bytes. Gateways do not forward whole chains.
const MAX_HEADER: usize = 16 << 10;
/// The maximum number of identities in the header.
const MAX_NAMES: usize = 64;

/// Accepts certificates that trusted gateways forward.
#[derive(Clone, Debug)]
pub struct ForwardedCertificates {
    gateways: Vec<IpNet>,
    domains: watch::Receiver<Arc<TrustDomains>>,
}

impl ForwardedCertificates {
    /// Trusts gateways in these address ranges for identities of these trust domains. Returns `None` without ranges.
    pub fn new(gateways: Vec<IpNet>, domains: watch::Receiver<Arc<TrustDomains>>) -> Option<Self> {
        (!gateways.is_empty()).then_some(Self { gateways, domains })
    }

    fn trusts(&self, address: IpAddr) -> bool {
        // A dual-stack socket reports IPv4 addresses as IPv4-mapped IPv6 addresses.
        let address = address.to_canonical();
        address.is_loopback() || self.gateways.iter().any(|range| range.contains(&address))
    }

    fn caller(&self, credentials: Credentials<'_>) -> Result<Caller, AuthenticationError> {
        let header = header(credentials.headers)?;
        let address = credentials.address.map(|address| address.ip());
        match address {
            Some(address) if self.trusts(address) => {}
            Some(address) => {
                return Err(AuthenticationError::Invalid(format!(
                    "{address} is not a trusted gateway"
                )));
            }
            None => {
                return Err(AuthenticationError::Invalid(format!(
                    "{HEADER} from a connection without a peer address"
                )));
            }
        }
        let identities =
            identities(header).map_err(|error| AuthenticationError::Invalid(format!("{HEADER}: {error}")))?;
        let domains = self.domains.borrow().clone();
        let is_foreign = |name: &&SmolStr| spiffe::trust_domain(name).is_some_and(|domain| !domains.contains(domain));
        if let Some(foreign) = identities.iter().find(is_foreign) {
            return Err(AuthenticationError::Invalid(format!(
                "{HEADER}: {foreign:?} is of another trust domain"
            )));
        }
        Ok(Caller {
            source: CallerSource::Forwarded,
            identities,
            kubernetes: None,
            expires_at: None,
        })
    }
}

impl Authenticator for ForwardedCertificates {
    fn name(&self) -> &'static str {
        "forwarded client certificate"
    }

    fn authenticate<'a>(&'a self, credentials: Credentials<'a>) -> BoxFuture<'a, Result<Caller, AuthenticationError>> {
        std::future::ready(self.caller(credentials)).boxed()
    }
}

fn header(headers: &HeaderMap) -> Result<&str, AuthenticationError> {
    let Some(value) = headers.get(HEADER) else {
        return Err(AuthenticationError::Missing("forwarded client certificate"));
    };
    match value.to_str() {
        Ok("") => Err(AuthenticationError::Missing("forwarded client certificate")),
        Ok(text) if text.len() <= MAX_HEADER => Ok(text),
        Ok(_) => Err(AuthenticationError::Invalid(format!(
            "{HEADER} is longer than {MAX_HEADER} bytes"
        ))),
        Err(_) => Err(AuthenticationError::Invalid(format!("{HEADER} is not ASCII text"))),
    }
}

/// Returns the URIs, DNS names and common names of all elements of the header; at least one. The error is the reason.
pub fn identities(header: &str) -> Result<Vec<SmolStr>, &'static str> {
    let mut found = Vec::new();
    for element in split(header, ',')? {
        let (mut uris, mut names, mut common) = (Vec::new(), Vec::new(), None);
        for pair in split(element, ';')? {
            let (key, value) = pair.split_once('=').ok_or("a pair has no =")?;
            let value = unquoted(value.trim())?;
            match key.trim().to_ascii_lowercase().as_str() {
                // Envoy writes the key of certificates without a URI, too.
                "uri" if value.is_empty() => {}
                "uri" => uris.push(value),
                "dns" if value.starts_with(spiffe::SCHEME) => return Err("a DNS name is a SPIFFE id"),
                "dns" => names.push(value),
                "subject" => common = common_name(&value),
                "by" | "hash" | "cert" | "chain" => {}
                _ => return Err("unknown key"),
            }
        }
        // The gateway verified the URIs, if anything, against the roots of their trust domain.
        let is_other = |name: &String| name.starts_with(spiffe::SCHEME) && !uris.is_empty() && !uris.contains(name);
        if common.as_ref().is_some_and(is_other) {
            return Err("the common name is a SPIFFE id, but not the URI");
        }
        found.extend(
            uris.into_iter()
                .chain(names)
                .chain(common)
                .filter(|name| !name.is_empty()),
        );
        if found.len() > MAX_NAMES {
            return Err("more than 64 names");
        }
    }
    if found.is_empty() {
        return Err("no identity");
    }
    Ok(found.into_iter().map(SmolStr::from).collect())
}

/// Splits at separators outside quotes.
fn split(text: &str, separator: char) -> Result<Vec<&str>, &'static str> {
    let (mut parts, mut begin) = (Vec::new(), 0);
    let (mut is_quoted, mut is_escaped) = (false, false);
    for (position, character) in text.char_indices() {
        match character {
            _ if is_escaped => is_escaped = false,
            '\\' if is_quoted => is_escaped = true,
            '"' => is_quoted = !is_quoted,
            _ if character == separator && !is_quoted => {
                parts.push(text.get(begin..position).unwrap_or_default());
                begin = position + separator.len_utf8();
            }
            _ => {}
        }
    }
    if is_quoted {
        return Err("unterminated quote");
    }
    parts.push(text.get(begin..).unwrap_or_default());
    Ok(parts)
}

/// Removes the quotes and escapes of a value.
fn unquoted(value: &str) -> Result<String, &'static str> {
    let Some(inner) = value.strip_prefix('"') else {
        return if value.contains('"') {
            Err("quote inside an unquoted value")
        } else {
            Ok(value.to_owned())
        };
    };
    let inner = inner.strip_suffix('"').ok_or("characters follow a quoted value")?;
    let (mut text, mut is_escaped) = (String::with_capacity(inner.len()), false);
    for character in inner.chars() {
        match character {
            '\\' if !is_escaped => is_escaped = true,
            '"' if !is_escaped => return Err("characters follow a quoted value"),
            _ => {
                text.push(character);
                is_escaped = false;
            }
        }
    }
    Ok(text)
}

/// Returns the `CN` of a subject in the form `CN=a,O=b` or `/O=b/CN=a`.
fn common_name(subject: &str) -> Option<String> {
    let separator = if subject.starts_with('/') { '/' } else { ',' };
    let mut fields = Vec::new();
    let (mut field, mut is_escaped) = (String::new(), false);
    for character in subject.chars() {
        match character {
            '\\' if !is_escaped => is_escaped = true,
            _ if character == separator && !is_escaped => fields.push(std::mem::take(&mut field)),
            _ => {
                field.push(character);
                is_escaped = false;
            }
        }
    }
    fields.push(field);
    fields.iter().find_map(|field| {
        let (key, value) = field.split_once('=')?;
        key.trim().eq_ignore_ascii_case("cn").then(|| value.trim().to_owned())
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    const REVIEWS: &str = "spiffe://cluster.local/ns/default/sa/reviews";

    fn ask(gateways: &[&str], from: Option<&str>, header: Option<&str>) -> Result<Caller, AuthenticationError> {
        let gateways = gateways.iter().map(|range| range.parse().expect("a range")).collect();
        let mut headers = HeaderMap::new();
        if let Some(header) = header {
            headers.insert(HEADER, HeaderValue::from_str(header).expect("a value"));
        }
        let credentials = Credentials {
            address: from.map(|address| address.parse().expect("an address")),
            is_tls: true,
            certificate: None,
            headers: &headers,
        };
        ForwardedCertificates::new(gateways, domains())
            .expect("gateways")
            .caller(credentials)
    }

    fn domains() -> watch::Receiver<Arc<TrustDomains>> {
        let domains = TrustDomains {
            aliases: vec!["c".into()],
            ..TrustDomains::default()
        };
        watch::channel(Arc::new(domains)).1
    }

    #[test]
    fn trusted_gateways_forward_identities() {
        let header = format!("By=x;Hash=abc;Subject=\"CN=reviews,O=a\\\\,b\";URI={REVIEWS};DNS=a.b,URI=spiffe://c/d");
        let caller = ask(&["10.0.0.0/8"], Some("10.1.2.3:99"), Some(&header)).expect("a caller");
        assert_eq!(caller.source, CallerSource::Forwarded);
        assert_eq!(caller.identities, [REVIEWS, "a.b", "reviews", "spiffe://c/d"]);
        let mapped = ask(&["10.0.0.0/8"], Some("[::ffff:10.1.2.3]:99"), Some(&header));
        assert!(mapped.is_ok(), "{mapped:?}");
    }

    #[test]
    fn r11_a_forwarded_certificate_counts_from_configured_addresses_only() {
        let header = format!("URI={REVIEWS}");
        assert!(
            ForwardedCertificates::new(Vec::new(), domains()).is_none(),
            "without ranges no address is trusted, not even loopback"
        );
        for untrusted in ["11.1.2.3:99", "[2001:db8::1]:99", "[::ffff:11.1.2.3]:99"] {
            let refused = ask(&["10.0.0.0/8"], Some(untrusted), Some(&header));
            assert!(
                matches!(refused, Err(AuthenticationError::Invalid(_))),
                "{untrusted}: {refused:?}"
            );
        }
        assert!(ask(&["10.0.0.0/8"], None, Some(&header)).is_err());
        for own in ["127.0.0.1:99", "[::1]:99"] {
            assert!(ask(&["10.0.0.0/8"], Some(own), Some(&header)).is_ok(), "{own}");
        }
    }

    #[test]
    fn identities_of_other_trust_domains_and_kinds_are_rejected() {
        for (header, is_accepted) in [
            ("URI=spiffe://c/ns/default/sa/reviews", true),
            ("URI=spiffe://elsewhere/ns/default/sa/reviews", false),
            ("URI=spiffe://c/d,URI=spiffe://elsewhere/d", false),
            ("Subject=\"CN=spiffe://elsewhere/ns/default/sa/reviews\"", false),
            ("DNS=elsewhere", true),
            ("URI=spiffe://c/d;DNS=spiffe://c/ns/default/sa/a", false),
            ("Subject=\"CN=spiffe://c/ns/default/sa/a\";URI=spiffe://c/d", false),
            ("Subject=\"CN=spiffe://c/d\";URI=spiffe://c/d", true),
            ("Subject=\"CN=spiffe://c/d\";URI=", true),
        ] {
            let asked = ask(&["10.0.0.0/8"], Some("10.0.0.1:9"), Some(header));
            assert_eq!(asked.is_ok(), is_accepted, "{header}: {asked:?}");
        }
    }

    #[test]
    fn invalid_headers_are_rejected() {
        assert_eq!(
            ask(&["10.0.0.0/8"], Some("10.0.0.1:9"), None),
            Err(AuthenticationError::Missing("forwarded client certificate"))
        );
        let long = "a".repeat(MAX_HEADER + 1);
        let many = "URI=a,".repeat(MAX_NAMES + 1);
        for bad in [
            "Hash=a",
            "URI",
            "URI=\"a",
            "URI=\"a\"b",
            "URI=a\"b\"",
            "Evil=a;URI=b",
            ";",
            "URI=",
            &long,
            &many,
        ] {
            let refused = ask(&["10.0.0.0/8"], Some("10.0.0.1:9"), Some(bad));
            assert!(matches!(refused, Err(AuthenticationError::Invalid(_))), "{refused:?}");
        }
    }

    #[test]
    fn subjects_have_two_forms() {
        assert_eq!(common_name("CN=a b,O=c"), Some("a b".into()));
        assert_eq!(common_name("O=x\\,CN=evil,CN=good"), Some("good".into()));
        assert_eq!(common_name("/C=US/O=c/CN=a"), Some("a".into()));
        assert_eq!(common_name("O=c"), None);
    }
}
