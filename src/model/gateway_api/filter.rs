//! Filters of routes.

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::{
    Mistake,
    backend::{Backends, reason},
};
use crate::{
    api::{
        gateway_api::route::{Cors, Filter, Header, HeaderModifier, RequestMirror, RequestRedirect, UrlRewrite},
        istio::{common::is_header_text, format_string},
    },
    base::re2::quoted,
    proto::istio::networking::v1alpha3::{
        CorsPolicy, Headers, HttpMirrorPolicy, HttpRedirect, HttpRewrite, Percent, RegexRewrite, StringMatch,
        cors_policy::UnmatchedPreflights,
        headers::HeaderOperations,
        http_redirect::{RedirectPort, RedirectPortSelection},
        string_match::MatchType,
    },
};

/// Stands for the matched prefix in the path of a redirect.
const PREFIX: &str = "%PREFIX()%";
/// Origins of RFC 6454, for `*`.
const ANY_ORIGIN: &str = r"^[a-zA-Z][a-zA-Z0-9+.-]*://[^/\s?#]+$";

/// Adds a filter for headers to the operations. Returns false for other filters.
pub(super) fn apply_headers(filter: &Filter, headers: &mut Option<Box<Headers>>) -> Result<bool, Mistake> {
    match filter.filter_type.as_str() {
        "RequestHeaderModifier" => {
            if let Some(modifier) = &filter.request_header_modifier {
                headers.get_or_insert_default().request = Some(operations(modifier)?);
            }
            Ok(true)
        }
        "ResponseHeaderModifier" => {
            if let Some(modifier) = &filter.response_header_modifier {
                headers.get_or_insert_default().response = Some(operations(modifier)?);
            }
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// Returns the mistake of a filter that is not supported.
pub(super) fn unsupported(filter: &Filter) -> Mistake {
    let message = format!("unsupported filter type {name:?}", name = filter.filter_type.as_str());
    Mistake::new(reason::INVALID_FILTER, message)
}

fn operations(modifier: &HeaderModifier) -> Result<HeaderOperations, Mistake> {
    let is_allowed = |byte: u8| byte == b'\t' || (byte >= b' ' && byte != 0x7f);
    let mut all = modifier.set.iter().chain(&modifier.add);
    if let Some(header) = all.find(|header| !header.value.bytes().all(is_allowed)) {
        let message = format!(
            "header {name:?} value contains invalid characters",
            name = header.name.as_str()
        );
        return Err(Mistake::new(reason::INVALID_FILTER, message));
    }
    // Envoy would refuse such a name, and with it all routes of the port.
    let is_name = |name: &str| !name.is_empty() && is_header_text(name);
    if let Some(name) = modifier.remove.iter().find(|name| !is_name(name)) {
        let message = format!("header {name:?} cannot be removed, because it is not a name");
        return Err(Mistake::new(reason::INVALID_FILTER, message));
    }
    Ok(HeaderOperations {
        set: by_name(&modifier.set),
        add: by_name(&modifier.add),
        remove: modifier.remove.iter().map(ToString::to_string).collect(),
    })
}

/// Returns the headers by name in lower case; the first of equal names wins.
fn by_name(headers: &[Header]) -> BTreeMap<String, String> {
    let mut named = BTreeMap::new();
    for header in headers {
        let name = header.name.to_lowercase();
        // The host is not a format string. Such a value is literal, as the API specifies.
        let value = if name == "host" {
            header.value.to_string()
        } else {
            format_string::accepted(&header.value).into_owned()
        };
        named.entry(name).or_insert(value);
    }
    named
}

/// Converts a mirror.
pub(super) fn mirror(backends: &Backends, mirror: &RequestMirror) -> Result<HttpMirrorPolicy, Mistake> {
    let (destination, mistake) = backends.destination(&mirror.backend_ref)?;
    if let Some(mistake) = mistake {
        return Err(mistake);
    }
    let fraction = mirror.fraction.as_ref().map(|fraction| {
        let denominator = fraction.denominator.unwrap_or(100);
        100.0 * f64::from(fraction.numerator) / f64::from(denominator)
    });
    let percentage = fraction.or(mirror.percent.map(f64::from));
    Ok(HttpMirrorPolicy {
        destination: Some(destination),
        percentage: percentage.map(|value| Percent { value }),
    })
}

/// Returns a new path, or the mistake of one that Envoy refuses, and with it all routes of the port.
fn new_path(path: Option<&SmolStr>) -> Result<&str, Mistake> {
    let path = path.map_or("", SmolStr::as_str);
    if is_header_text(path) {
        return Ok(path);
    }
    let message = format!("path {path:?} contains invalid characters");
    Err(Mistake::new(reason::INVALID_FILTER, message))
}

/// Converts a redirect.
pub(super) fn redirect(redirect: &RequestRedirect) -> Result<HttpRedirect, Mistake> {
    let uri = match &redirect.path {
        Some(path) if path.modifier_type == "ReplacePrefixMatch" => {
            [PREFIX, new_path(path.replace_prefix_match.as_ref())?].concat()
        }
        Some(path) => new_path(path.replace_full_path.as_ref())?.to_owned(),
        None => String::new(),
    };
    let derived = if redirect.scheme.is_some() {
        RedirectPortSelection::FromProtocolDefault
    } else {
        RedirectPortSelection::FromRequestPort
    };
    let port = redirect.port.map(|port| RedirectPort::Port(port.into()));
    Ok(HttpRedirect {
        uri,
        authority: redirect.hostname.as_deref().unwrap_or_default().to_owned(),
        scheme: redirect.scheme.as_deref().unwrap_or_default().to_owned(),
        redirect_code: redirect.status_code.unwrap_or_default(),
        redirect_port: Some(port.unwrap_or(RedirectPort::DerivePort(derived as i32))),
    })
}

/// Converts a rewrite; `None` if it changes nothing.
pub(super) fn rewrite(rewrite: &UrlRewrite) -> Result<Option<HttpRewrite>, Mistake> {
    let mut converted = HttpRewrite {
        authority: rewrite.hostname.as_deref().unwrap_or_default().to_owned(),
        ..Default::default()
    };
    if let Some(path) = &rewrite.path {
        if path.modifier_type == "ReplacePrefixMatch" {
            let value = new_path(path.replace_prefix_match.as_ref())?;
            let value = value.strip_suffix('/').unwrap_or(value);
            converted.uri = if value.is_empty() { "/" } else { value }.to_owned();
        } else {
            converted.uri_regex_rewrite = Some(RegexRewrite {
                r#match: "/.*".to_owned(),
                rewrite: new_path(path.replace_full_path.as_ref())?.to_owned(),
            });
        }
    }
    let changes = !converted.uri.is_empty() || converted.uri_regex_rewrite.is_some() || !converted.authority.is_empty();
    Ok(changes.then_some(converted))
}

/// Converts a CORS filter.
pub(super) fn cors(cors: &Cors) -> CorsPolicy {
    let strings = |values: &[SmolStr]| values.iter().map(ToString::to_string).collect();
    let origins = cors.allow_origins.iter().filter(|origin| !origin.is_empty());
    CorsPolicy {
        allow_origins: origins.map(|origin| origin_match(origin)).collect(),
        allow_methods: strings(&cors.allow_methods),
        allow_headers: strings(&cors.allow_headers),
        expose_headers: strings(&cors.expose_headers),
        max_age: cors.max_age.filter(|age| *age > 0).map(|age| prost_types::Duration {
            seconds: age.into(),
            nanos: 0,
        }),
        allow_credentials: cors.allow_credentials.filter(|allowed| *allowed),
        unmatched_preflights: UnmatchedPreflights::Ignore as i32,
        ..Default::default()
    }
}

fn origin_match(origin: &str) -> StringMatch {
    let matched = match (origin, origin.strip_suffix('*')) {
        ("*", _) => MatchType::Regex(ANY_ORIGIN.to_owned()),
        (_, Some(prefix)) if !prefix.contains('*') => MatchType::Prefix(prefix.to_owned()),
        _ if !origin.contains('*') => MatchType::Exact(origin.to_owned()),
        _ => MatchType::Regex(format!("^{}$", quoted(origin).replace("\\*", ".*"))),
    };
    StringMatch {
        match_type: Some(matched),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_quoted_as_in_istio() {
        let expected = MatchType::Regex(r"^https://.*\.my-app\.test$".to_owned());
        assert_eq!(origin_match("https://*.my-app.test").match_type, Some(expected));
    }

    #[test]
    fn values_that_are_no_format_strings_are_literal() {
        let header = |name: &str| Header {
            name: name.into(),
            value: "5%".into(),
        };
        let named = by_name(&[header("Host"), header("Rate")]);
        assert_eq!((&*named["host"], &*named["rate"]), ("5%", "5%%"));
    }
}
