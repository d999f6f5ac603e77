//! Rules of HTTPRoutes.

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::{
    Mistake,
    backend::{Backends, has_weight, reason},
    filter,
};
use crate::{
    api::gateway_api::route::{BackendReference, HttpMatch, HttpRule, PathMatch, Retry, Timeouts, ValueMatch},
    base::duration,
    proto::istio::networking::v1alpha3::{
        HttpDirectResponse, HttpMatchRequest, HttpRetry, HttpRoute, HttpRouteDestination, StringMatch,
        string_match::MatchType,
    },
};

/// Failures after which requests are retried, beside statuses.
const RETRY_ON: [&str; 4] = ["connect-failure", "refused-stream", "unavailable", "cancelled"];
/// Retries without a number.
const RETRIES: i64 = 2;

/// A converted rule, with the mistake of its backends.
pub(super) type Converted<T> = (T, Option<Mistake>);

/// Converts a rule, for one of its matches.
///
/// # Errors
/// A mistake because of which the route as a whole does not apply.
pub(super) fn rule(
    backends: &Backends,
    position: usize,
    rule: &HttpRule,
    matched: Option<&HttpMatch>,
) -> Result<Converted<HttpRoute>, Mistake> {
    let mut route = HttpRoute {
        name: name(backends, rule.name.as_ref(), position),
        r#match: matched.map(request).transpose()?.into_iter().collect(),
        ..Default::default()
    };
    let mirrored = apply_filters(backends, rule, &mut route)?;
    route.retries = rule.retry.as_ref().map(|retry| Box::new(retries(retry)));
    if let Some(limits) = &rule.timeouts {
        apply_timeouts(limits, &mut route);
    }
    if route.redirect.is_none() && !has_weight(&rule.backend_refs) {
        let status = if rule.backend_refs.is_empty() { 404 } else { 500 };
        route.direct_response = Some(Box::new(HttpDirectResponse { status, body: None }));
        return Ok((route, mirrored));
    }
    let weighted = destinations(backends, &rule.backend_refs)?;
    route.route = weighted.0;
    Ok((route, Mistake::joined(weighted.1, mirrored)))
}

/// Returns the name of a rule; rules without one are counted.
pub(super) fn name(backends: &Backends, written: Option<&SmolStr>, position: usize) -> String {
    let meta = backends.meta;
    match written {
        Some(name) => name.to_string(),
        None => format!("{}.{}.{position}", meta.namespace(), meta.name()),
    }
}

/// Converts the backends of a rule for requests.
pub(super) fn destinations(
    backends: &Backends,
    references: &[BackendReference],
) -> Result<Converted<Vec<HttpRouteDestination>>, Mistake> {
    let weighted = backends.weighted(references, |backend, destination, weight| {
        let mut headers = None;
        for own in &backend.filters {
            if !filter::apply_headers(own, &mut headers)? {
                return Err(filter::unsupported(own));
            }
        }
        Ok(HttpRouteDestination {
            destination: Some(destination),
            weight,
            headers,
        })
    })?;
    Ok((weighted.backends, weighted.mistake))
}

/// Applies the filters of a rule. Returns the mistake of the last mirror that is left out.
fn apply_filters(backends: &Backends, rule: &HttpRule, route: &mut HttpRoute) -> Result<Option<Mistake>, Mistake> {
    let mut mirrored = None;
    for filter in &rule.filters {
        if filter::apply_headers(filter, &mut route.headers)? {
            continue;
        }
        match filter.filter_type.as_str() {
            "RequestRedirect" => {
                let redirect = filter.request_redirect.as_ref().map(filter::redirect).transpose()?;
                route.redirect = redirect.map(Box::new);
            }
            "URLRewrite" => {
                let rewrite = filter.url_rewrite.as_ref().map(filter::rewrite).transpose()?;
                route.rewrite = rewrite.flatten().map(Box::new);
            }
            "CORS" => route.cors_policy = filter.cors.as_ref().map(|cors| Box::new(filter::cors(cors))),
            "RequestMirror" => {
                let mirror = filter.request_mirror.as_ref();
                match mirror.map(|mirror| filter::mirror(backends, mirror)).transpose() {
                    Ok(mirror) => route.mirrors.extend(mirror),
                    Err(mistake) => mirrored = Some(mistake),
                }
            }
            _ => return Err(filter::unsupported(filter)),
        }
    }
    Ok(mirrored)
}

fn retries(retry: &Retry) -> HttpRetry {
    // A negative number means none.
    let attempts = retry.attempts.unwrap_or(RETRIES).max(0);
    let mut conditions: Vec<String> = Vec::new();
    if attempts > 0 {
        conditions.extend(RETRY_ON.map(str::to_owned));
        conditions.extend(retry.codes.iter().map(ToString::to_string));
    }
    HttpRetry {
        attempts: i32::try_from(attempts).unwrap_or(i32::MAX),
        retry_on: conditions.join(","),
        // Envoy refuses a backoff of zero, and with it all routes of the port.
        backoff: positive(retry.backoff.as_ref()),
        ..Default::default()
    }
}

fn apply_timeouts(limits: &Timeouts, route: &mut HttpRoute) {
    if let Some(request) = positive(limits.request.as_ref()) {
        route.timeout = Some(request);
    }
    if let Some(attempt) = positive(limits.backend_request.as_ref()) {
        match &mut route.retries {
            Some(retries) => retries.per_try_timeout = Some(attempt),
            None => route.timeout = Some(attempt),
        }
    }
}

/// Returns a duration; `None` for one that is zero or malformed.
fn positive(text: Option<&SmolStr>) -> Option<prost_types::Duration> {
    let duration = duration::parse(text?).ok().filter(|duration| !duration.is_zero())?;
    Some(prost_types::Duration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(duration.subsec_nanos()).unwrap_or_default(),
    })
}

fn request(matched: &HttpMatch) -> Result<HttpMatchRequest, Mistake> {
    let method = matched.method.as_ref();
    Ok(HttpMatchRequest {
        uri: Some(path(matched.path.as_ref())?),
        headers: values(&matched.headers, "HeaderMatch")?,
        query_params: values(&matched.query_params, "QueryParams")?,
        method: method.map(|method| string(MatchType::Exact(method.to_string()))),
        ..Default::default()
    })
}

fn path(path: Option<&PathMatch>) -> Result<StringMatch, Mistake> {
    let value = path.and_then(|path| path.value.as_deref()).unwrap_or("/");
    let matched = match path.and_then(|path| path.match_type.as_deref()) {
        None | Some("PathPrefix") if value == "/" => MatchType::Prefix(value.to_owned()),
        None | Some("PathPrefix") => MatchType::Prefix(value.strip_suffix('/').unwrap_or(value).to_owned()),
        Some("Exact") => MatchType::Exact(value.to_owned()),
        Some("RegularExpression") => MatchType::Regex(value.to_owned()),
        Some(other) => return Err(unknown_type(other, "Path match")),
    };
    Ok(string(matched))
}

/// Converts matches of headers or query parameters.
pub(super) fn values(matches: &[ValueMatch], what: &str) -> Result<BTreeMap<String, StringMatch>, Mistake> {
    let converted = matches.iter().map(|declared| {
        let value = declared.value.to_string();
        let matched = match declared.match_type.as_deref() {
            None | Some("Exact") => MatchType::Exact(value),
            Some("RegularExpression") => MatchType::Regex(value),
            Some(other) => return Err(unknown_type(other, what)),
        };
        Ok((declared.name.to_string(), string(matched)))
    });
    converted.collect()
}

/// Returns a match.
pub(super) fn string(matched: MatchType) -> StringMatch {
    StringMatch {
        match_type: Some(matched),
    }
}

/// Returns the mistake of a type that the API does not have.
pub(super) fn unknown_type(found: &str, what: &str) -> Mistake {
    let message = format!("unknown type: {found:?} is not supported {what} type");
    Mistake::new(reason::INVALID_CONFIGURATION, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_are_valid_for_envoy() {
        let converted = |attempts: Option<i64>, backoff: &str| {
            let converted = retries(&Retry {
                codes: vec![503],
                attempts,
                backoff: Some(backoff.into()),
            });
            (converted.attempts, converted.backoff.map(|backoff| backoff.seconds))
        };
        assert_eq!(converted(None, "1s"), (2, Some(1)));
        assert_eq!(converted(Some(3), "0s"), (3, None));
        assert_eq!(converted(Some(-1), "2s"), (0, Some(2)));
        assert_eq!(converted(Some(1 << 40), "no"), (i32::MAX, None));
    }
}
