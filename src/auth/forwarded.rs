//! Callers by what a gateway says of the client certificate that it has verified (`x-forwarded-client-cert`).
//!
//! Whoever may send this header may be anybody, so it counts only from addresses that are configured to
//! (`TRUSTED_GATEWAY_CIDR`). Once some are, as in Istio, those of the host itself count too; without any, none do.

use std::net::IpAddr;

use futures::{FutureExt, future::BoxFuture};
use http::HeaderMap;
use ipnet::IpNet;
use smol_str::SmolStr;

use super::{Authenticator, Caller, CallerSource, Credentials, Refusal};

/// The header.
const HEADER: &str = "x-forwarded-client-cert";
/// The longest header that is looked at, in bytes. Whole chains are never asked for.
const MAX_HEADER: usize = 16 << 10;
/// How many names are taken from it.
const MAX_NAMES: usize = 64;

/// Believes trusted gateways.
#[derive(Clone, Debug)]
pub struct ForwardedCertificates {
    gateways: Vec<IpNet>,
}

impl ForwardedCertificates {
    /// Believes gateways of these addresses. None if there are none.
    pub fn new(gateways: Vec<IpNet>) -> Option<Self> {
        (!gateways.is_empty()).then_some(Self { gateways })
    }

    fn trusts(&self, address: IpAddr) -> bool {
        // A socket for both families shows addresses of IPv4 as mapped ones.
        let address = address.to_canonical();
        address.is_loopback() || self.gateways.iter().any(|range| range.contains(&address))
    }

    fn caller(&self, credentials: Credentials<'_>) -> Result<Caller, Refusal> {
        let header = header(credentials.headers)?;
        let address = credentials.address.map(|address| address.ip());
        match address {
            Some(address) if self.trusts(address) => {}
            Some(address) => return Err(Refusal::Invalid(format!("{address} is no trusted gateway"))),
            None => return Err(Refusal::Invalid(format!("{HEADER} of a gateway without an address"))),
        }
        let identities = identities(header).map_err(|error| Refusal::Invalid(format!("{HEADER}: {error}")))?;
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

    fn authenticate<'a>(&'a self, credentials: Credentials<'a>) -> BoxFuture<'a, Result<Caller, Refusal>> {
        std::future::ready(self.caller(credentials)).boxed()
    }
}

fn header(headers: &HeaderMap) -> Result<&str, Refusal> {
    let Some(value) = headers.get(HEADER) else {
        return Err(Refusal::Absent("forwarded client certificate"));
    };
    match value.to_str() {
        Ok("") => Err(Refusal::Absent("forwarded client certificate")),
        Ok(text) if text.len() <= MAX_HEADER => Ok(text),
        Ok(_) => Err(Refusal::Invalid(format!("{HEADER} is longer than {MAX_HEADER} bytes"))),
        Err(_) => Err(Refusal::Invalid(format!("{HEADER} is no text"))),
    }
}

/// The URIs, DNS names and common names of all elements of the header; never none. The error says what is wrong with it.
pub fn identities(header: &str) -> Result<Vec<SmolStr>, &'static str> {
    let mut found = Vec::new();
    for element in split(header, ',')? {
        let (mut uris, mut names, mut common) = (Vec::new(), Vec::new(), None);
        for pair in split(element, ';')? {
            let (key, value) = pair.split_once('=').ok_or("a pair without =")?;
            let value = unquoted(value.trim())?;
            match key.trim().to_ascii_lowercase().as_str() {
                "uri" => uris.push(value),
                "dns" => names.push(value),
                "subject" => common = common_name(&value),
                "by" | "hash" | "cert" | "chain" => {}
                _ => return Err("an unknown key"),
            }
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
        return Err("it names nobody");
    }
    Ok(found.into_iter().map(SmolStr::from).collect())
}

/// The parts between separators that are outside of quotes.
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
        return Err("a quote that is not closed");
    }
    parts.push(text.get(begin..).unwrap_or_default());
    Ok(parts)
}

/// A value without its quotes and escapes.
fn unquoted(value: &str) -> Result<String, &'static str> {
    let Some(inner) = value.strip_prefix('"') else {
        return if value.contains('"') {
            Err("a quote within a value")
        } else {
            Ok(value.to_owned())
        };
    };
    let inner = inner.strip_suffix('"').ok_or("something follows a quoted value")?;
    let (mut text, mut is_escaped) = (String::with_capacity(inner.len()), false);
    for character in inner.chars() {
        match character {
            '\\' if !is_escaped => is_escaped = true,
            '"' if !is_escaped => return Err("something follows a quoted value"),
            _ => {
                text.push(character);
                is_escaped = false;
            }
        }
    }
    Ok(text)
}

/// `CN` of a subject, written as `CN=a,O=b` or as `/O=b/CN=a`.
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

    fn ask(gateways: &[&str], from: Option<&str>, header: Option<&str>) -> Result<Caller, Refusal> {
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
        ForwardedCertificates::new(gateways)
            .expect("gateways")
            .caller(credentials)
    }

    #[test]
    fn gateways_say_who_calls() {
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
            ForwardedCertificates::new(Vec::new()).is_none(),
            "without ranges nobody is believed, loopback neither"
        );
        for stranger in ["11.1.2.3:99", "[2001:db8::1]:99", "[::ffff:11.1.2.3]:99"] {
            let refused = ask(&["10.0.0.0/8"], Some(stranger), Some(&header));
            assert!(matches!(refused, Err(Refusal::Invalid(_))), "{stranger}: {refused:?}");
        }
        assert!(ask(&["10.0.0.0/8"], None, Some(&header)).is_err());
        for own in ["127.0.0.1:99", "[::1]:99"] {
            assert!(ask(&["10.0.0.0/8"], Some(own), Some(&header)).is_ok(), "{own}");
        }
    }

    #[test]
    fn what_names_nobody_is_refused() {
        assert_eq!(
            ask(&["10.0.0.0/8"], Some("10.0.0.1:9"), None),
            Err(Refusal::Absent("forwarded client certificate"))
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
            assert!(matches!(refused, Err(Refusal::Invalid(_))), "{refused:?}");
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
